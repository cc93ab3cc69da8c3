"""The policy of a user: what it may publish and subscribe to, as nats-server's configuration and as nsc's commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from airflow_provider_jetstream.jetstream.client.subjects import covers, subject_problem
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Iterator

Action: TypeAlias = Literal["publish", "subscribe"]

_API: Final = "$JS.API"

_ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
_NSC_OPTIONS: Final = {"publish": "pub", "subscribe": "sub"}


@dataclass(frozen=True, slots=True)
class Permission(TaskReport):
    """One line of a policy.

    :param action: ``publish`` or ``subscribe``
    :param subject: a subject or a filter
    :param purpose: what it is needed for
    """

    action: Action
    subject: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Policy(TaskReport):
    """What one user may do; the server refuses everything else.

    :param user: a name for the user
    :param inbox_prefix: to be set as ``inbox_prefix`` in the user's connection: answers arrive below it
    :param permissions: in the order in which they are printed
    """

    user: str
    inbox_prefix: str
    permissions: tuple[Permission, ...]

    def subjects(self, action: Action) -> tuple[str, ...]:
        """Return what the user may publish, or subscribe to."""
        return tuple(permission.subject for permission in self.permissions if permission.action == action)

    def without(self, permission: Permission) -> Policy:
        """Return the policy without one of its lines."""
        return Policy(self.user, self.inbox_prefix, tuple(line for line in self.permissions if line != permission))

    def server_config(self) -> str:
        """Return an entry of ``users`` in nats-server's configuration; the password comes from the environment."""
        lines = [f"# inbox_prefix of the connection: {self.inbox_prefix}", "{"]
        lines += [f"  user: {_quoted(self.user)}", f"  password: ${self.password_variable}", "  permissions: {"]
        for action in _ACTIONS:
            if not self.subjects(action):
                # An empty list of what is allowed allows everything.
                lines.append(f'    {action}: {{ deny: ">" }}')
                continue
            chosen = [permission for permission in self.permissions if permission.action == action]
            width = max((len(_quoted(permission.subject)) for permission in chosen), default=0)
            lines.append(f"    {action}: {{ allow: [")
            lines += [f"      {_quoted(line.subject):{width}}  # {line.purpose}" for line in chosen]
            lines.append("    ] }")
        return "\n".join([*lines, "  }", "}"])

    def nsc_command(self, account: str = "ACCOUNT") -> str:
        """Return the command that adds the user to an account.

        :param account: the account's name
        """
        parts = [f"nsc add user --account {shlex.quote(account)} --name {shlex.quote(self.user)}"]
        for action in _ACTIONS:
            option = _NSC_OPTIONS[action]
            allowed = [f"--allow-{option} {shlex.quote(subject)}" for subject in self.subjects(action)]
            parts += allowed or [f"--deny-{option} '>'"]
        return " \\\n  ".join(parts)

    def exports(self) -> tuple[str, ...]:
        """Return the entries of ``exports`` by which the queue's account lets another account do the same.

        The answers to some requests are many messages, which a service gives as a stream. Whoever imports them may send
        what the policy allows, and nothing else.
        """
        return tuple(f"{{ service: {_quoted(subject)}, response_type: stream }}" for subject in self._services())

    def imports(self, account: str, api_prefix: str) -> tuple[str, ...]:
        """Return the entries of ``imports`` of another account.

        :param account: the queue's account
        :param api_prefix: where the queue's JetStream API is to be in the other account, which may have a JetStream of
            its own; the ``api_prefix`` of its connections
        :raises ArgumentError: the prefix is no subject, or that of an account's own JetStream
        """
        if api_prefix == _API or (problem := subject_problem(api_prefix, wildcards=False)):
            found = f"found {api_prefix!r}" + ("" if api_prefix == _API else f": {problem}")
            raise ArgumentError(f"expected a prefix of the API of {account} such as 'shop.api', {found}")
        return tuple(
            f"{{ service: {{ account: {account}, subject: {_quoted(subject)} }}{_renamed(subject, api_prefix)} }}"
            for subject in self._services()
        )

    def _services(self) -> Iterator[str]:
        """Yield the subjects of requests; the server refuses an account that imports one twice."""
        subjects = dict.fromkeys(self.subjects("publish"))
        for subject in subjects:
            if not any(covers(other, subject) for other in subjects if other != subject):
                yield subject

    @property
    def password_variable(self) -> str:
        """The environment variable of the server from which the configuration takes the password."""
        letters = (character if character.isascii() and character.isalnum() else "_" for character in self.user)
        return f"NATS_{''.join(letters).upper()}_PASSWORD"


def authorization(*policies: Policy) -> str:
    """Return the block of nats-server's configuration with these users."""
    users = "\n".join(policy.server_config() for policy in policies)
    indented = "\n".join(f"    {line}" if line else line for line in users.splitlines())
    return f"authorization {{\n  users: [\n{indented}\n  ]\n}}"


def _renamed(subject: str, api_prefix: str) -> str:
    return f", to: {_quoted(api_prefix + subject.removeprefix(_API))}" if subject.startswith(f"{_API}.") else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
