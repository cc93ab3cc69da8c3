"""The command ``jetstream-queue``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES, combined_policy, permissions
from airflow_provider_jetstream.jetstream.roles.user_policy import authorization

if TYPE_CHECKING:
    from collections.abc import Sequence

_REFUSED = 2
_FORMS = ("nats-server", "nsc")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    :param arguments: the command line without the program's name; by default that of the process
    :return: the exit status: 0 after success, 2 if the arguments can't be used
    """
    options = _parser().parse_args(arguments)
    try:
        print(_permissions(options))
    except JetStreamProviderError as error:
        print(f"jetstream-queue: {error}", file=sys.stderr)
        return _REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jetstream-queue", description="Prepares and inspects JetStream work queues.")
    commands = parser.add_subparsers(dest="command", required=True)
    policy = commands.add_parser(
        "permissions",
        help="print what a role may publish and subscribe to",
        description="Prints the policy of a user that has only the permissions which its role needs for one queue.",
    )
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
    return parser


def _permissions(options: argparse.Namespace) -> str:
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    queue = WorkQueue.load(options.queue)
    # A consumer is for the worker among several roles; alone, another role refuses it.
    consumers = {role: options.consumer for role in options.roles if role == "worker" or "worker" not in options.roles}
    policies = [permissions(queue, role, consumer=consumers.get(role)) for role in options.roles]
    policy = policies[0]
    if options.user or len(policies) > 1:
        policy = combined_policy(options.user or f"{queue.name}-{'-'.join(options.roles)}", *policies)
    if options.form == "nsc":
        return f"# inbox_prefix of the connection: {policy.inbox_prefix}\n{policy.nsc_command(options.account)}"
    return authorization(policy)


if __name__ == "__main__":
    sys.exit(main())
