"""The sub-command ``permissions``: the policy of a role on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.output_options import output_options
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES, combined_policy, permissions
from airflow_provider_jetstream.jetstream.roles.user_policy import authorization

if TYPE_CHECKING:
    import argparse

    from airflow_provider_jetstream.command.output import Output

_FORMS = ("nats-server", "nsc")


def add_permission_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    policy = commands.add_parser(
        "permissions",
        parents=[output_options()],
        help="print what a role may publish and subscribe to",
        description="Prints the policy of a user that has only the permissions which its role needs for one queue.",
    )
    policy.set_defaults(run=_permissions)
    policy.add_argument("--queue", required=True, help="path of the queue's YAML file")
    policy.add_argument(
        "--role",
        required=True,
        action="append",
        choices=ROLES,
        dest="roles",
        help="may be given several times, for one user with several roles",
    )
    policy.add_argument("--consumer", help="whose jobs the worker runs; needed where the queue has several")
    policy.add_argument("--user", help="the user's name; made of queue and roles where absent")
    policy.add_argument("--form", choices=_FORMS, default=_FORMS[0], help="of the configuration, or of a command")
    policy.add_argument("--account", default="ACCOUNT", help="the account's name in the command for nsc")


async def _permissions(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    queue = WorkQueue.load(options.queue)
    # A consumer is for the worker among several roles; alone, another role refuses it.
    consumers = {role: options.consumer for role in options.roles if role == "worker" or "worker" not in options.roles}
    policies = [permissions(queue, role, consumer=consumers.get(role)) for role in options.roles]
    policy = policies[0]
    if options.user or len(policies) > 1:
        policy = combined_policy(options.user or f"{queue.name}-{'-'.join(options.roles)}", *policies)
    text = authorization(policy)
    if options.form == "nsc":
        text = f"# inbox_prefix of the connection: {policy.inbox_prefix}\n{policy.nsc_command(options.account)}"
    if out.as_json:
        subjects = {action: list(policy.subjects(action)) for action in ("publish", "subscribe")}
        out.document({"user": policy.user, "inbox_prefix": policy.inbox_prefix, **subjects, "configuration": text})
    else:
        out.text(text)
    return ExitCode.DONE
