"""The sub-commands ``queues``, ``queue``, ``account`` and ``permissions``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.options import (
    add_queue_argument,
    connection_options,
    is_file,
    load_file,
    opened,
    output_options,
    read_queue,
    stream_name,
)
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES, combined_policy, permissions
from airflow_provider_jetstream.jetstream.roles.user_policy import authorization

if TYPE_CHECKING:
    import argparse

    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.inspection.health import ConsumerHealth, QueueHealth
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.jetstream.provisioning.plan import Plan


_FORMS = ("nats-server", "nsc")
# Of subjects without a consumer: a line each is for people.
_SHOWN_SUBJECTS = 20
_YAML_HEAD = "# Made by jetstream-queue queue import from the stream {name} as it is.\n"


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


def add_queue_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-commands."""
    parents = [connection_options(), output_options()]
    listing = commands.add_parser("queues", parents=parents, help="list the work queues of the server")
    listing.set_defaults(run=_queues)
    group = commands.add_parser("queue", help="show, import, plan, apply or lint one queue")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", parents=parents, help="a queue's consumers and numbers")
    show.set_defaults(run=_show)
    add_queue_argument(show)
    imported = actions.add_parser(
        "import",
        parents=parents,
        help="write the YAML of a stream that exists",
        description="Writes the declaration of a queue that was made by hand; applied, it changes nothing.",
    )
    imported.set_defaults(run=_import)
    imported.add_argument("queue", metavar="STREAM", help="the stream's name")
    imported.add_argument("--out", metavar="FILE", help="write it there rather than to the standard output")
    for name, run, text in (
        ("plan", _plan, "what apply would change; exit code 1 if anything"),
        ("apply", _apply, "create and update the queue's streams and consumers"),
    ):
        action = actions.add_parser(name, parents=parents, help=text)
        action.set_defaults(run=run)
        add_queue_argument(action, only_file=True)
        action.add_argument(
            "--drain",
            action="store_true",
            help="let a change of filters wait until the jobs that would get another consumer are done, park those that"
            " are dead, and remove undeclared consumers that are in the way",
        )
        action.add_argument(
            "--park-dead",
            action="store_true",
            help="park dead letters that a new consumer would run again, since theirs is gone",
        )
    lint = actions.add_parser(
        "lint",
        parents=parents,
        help="warn about what a declaration, or a running queue, risks; exit code 1 if anything",
    )
    lint.set_defaults(run=_lint)
    add_queue_argument(lint, several=True)
    lint.add_argument("--running", action="store_true", help="of a file: look at the queue on the server too")
    account = commands.add_parser(
        "account",
        parents=parents,
        help="which jobs are gone without evidence of their end; exit code 1 if any",
        description="Reads what was stored since the last account. Jobs that it names come back by sequence only.",
    )
    account.set_defaults(run=_account)
    add_queue_argument(account)


async def _queues(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues

    async with opened(options, out) as connection:
        overviews = await inspect_all_queues(connection)
    if out.as_json:
        out.document([_overview_json(overview) for overview in overviews])
    else:
        headings = ("QUEUE", "PENDING", "IN FLIGHT", "DEAD", "ENTRIES", "CONSUMERS", "WORKERS PULL")
        out.table(headings, [_overview_row(overview) for overview in overviews])
    for overview in overviews:
        if overview.problem:
            out.note(f"warning: {overview.name}: {overview.problem}")
        elif overview.uncounted:
            out.note(f"warning: {overview.uncounted}")
        elif overview.without_entry:
            out.note(f"warning: {overview.without_entry}")
        if overview.due and overview.due.problem:
            out.note(f"warning: {overview.due.problem}")
    is_incomplete = any(overview.problem or overview.uncounted for overview in overviews)
    return ExitCode.FINDINGS if is_incomplete else ExitCode.DONE


def _overview_row(overview: QueueOverview) -> tuple[object, ...]:
    health, letters = overview.health, overview.dead_letter_queue
    entries = letters["state"]["messages"] if letters else "no dead letter queue"
    if health is None:
        return (overview.name, "?", "?", "?", entries, "?", "?")
    dead = overview.left_over.dead if overview.left_over else "?"
    pulls = sum(consumer.pulls for consumer in health.consumers.values())
    return (overview.name, health.pending, health.in_flight, dead, entries, len(health.consumers), pulls)


def _overview_json(overview: QueueOverview) -> dict[str, Any]:
    letters = overview.dead_letter_queue
    return {
        "queue": overview.name,
        "stored": overview.state["messages"],
        **(_health_json(overview.health) if overview.health else {}),
        "dead": overview.left_over.dead if overview.left_over else None,
        "undeliverable": sum(overview.left_over.undeliverable.values()) if overview.left_over else None,
        "dead_letter_queue": letters["config"]["name"] if letters else None,
        "entries": letters["state"]["messages"] if letters else None,
        "problem": str(overview.problem or overview.uncounted) or None,
    }


def _health_json(health: QueueHealth) -> dict[str, Any]:
    return {
        "pending": health.pending,
        "in_flight": health.in_flight,
        "redelivered": health.redelivered,
        "oldest": health.oldest.isoformat() if health.oldest else None,
        "consumers": [_consumer_json(consumer) for consumer in health.consumers.values()],
    }


def _consumer_json(consumer: ConsumerHealth) -> dict[str, Any]:
    return {
        "consumer": consumer.name,
        "filters": list(consumer.filters),
        "pending": consumer.pending,
        "in_flight": consumer.in_flight,
        "redelivered": consumer.redelivered,
        "pulls": consumer.pulls,
        "paused": consumer.paused,
    }


async def _show(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
    from airflow_provider_jetstream.jetstream.inspection.health import count_left_over, inspect_consumers
    from airflow_provider_jetstream.jetstream.publishing.schedules import find_schedules, inspect_due_jobs
    from airflow_provider_jetstream.jetstream.queue.discovery import check_work_queue

    name = stream_name(options.queue)
    async with opened(options, out) as connection:
        info = await stream_info(connection, name)
        check_work_queue(info["config"])
        health = await inspect_consumers(connection, info)
        schedules = await find_schedules(connection, name)
        left_over = await count_left_over(connection, health, schedules)
        due = await inspect_due_jobs(connection, name, schedules) if schedules else None
    if out.as_json:
        out.document(
            {
                "queue": name,
                "stored": health.stored,
                **_health_json(health),
                "dead": left_over.dead,
                "undeliverable": dict(left_over.undeliverable),
                "warning": left_over.warning or None,
                "schedules": left_over.schedules,
                "due": due.count if due else 0,
                "is_moved": due.is_moved if due else None,
            }
        )
        return ExitCode.DONE
    oldest = f", the oldest of {health.oldest:%Y-%m-%d %H:%M:%S} UTC" if health.oldest else ""
    out.text(f"{name}: {health.stored} stored{oldest}")
    out.text(f"{health.pending} pending, {health.in_flight} in flight, {left_over.dead} dead and stored")
    if left_over.schedules:
        out.text(f"{left_over.schedules} scheduled")
    if due and due.problem:
        out.note(f"warning: {due.problem}")
    rows = [
        (item.name, " ".join(item.filters), item.pending, item.in_flight, item.pulls, "yes" if item.paused else "")
        for item in health.consumers.values()
    ]
    out.table(("CONSUMER", "FILTERS", "PENDING", "IN FLIGHT", "WORKERS PULL", "PAUSED"), rows)
    subjects = list(left_over.undeliverable.items())
    for subject, count in subjects[:_SHOWN_SUBJECTS]:
        out.text(f"{count} jobs on {subject} match no consumer")
    if others := subjects[_SHOWN_SUBJECTS:]:
        jobs = sum(count for _, count in others)
        out.text(f"{jobs} jobs on {len(others)} other subjects match no consumer (--json lists all)")
    if left_over.warning:
        out.note(f"warning: {left_over.warning}")
    return ExitCode.DONE


async def _import(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.provisioning.apply import plan
    from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue

    if is_file(options.queue):
        raise ArgumentError(f"expected a stream's name, found {options.queue!r}: import makes the file of a stream")
    async with opened(options, out) as connection:
        queue = await discover_queue(connection, stream_name(options.queue))
        changes = (await plan(connection, queue)).changes
    text = _YAML_HEAD.format(name=queue.name) + queue.to_yaml()
    if options.out:
        _write(options.out, text)
    if out.as_json:
        out.document({"queue": queue.name, "yaml": text, "changes": [str(step) for step in changes]})
    elif not options.out:
        out.source(text)
    for step in changes:
        out.note(f"warning: applied, this would change the server: {step}")
    for warning in queue.warnings():
        out.note(f"warning: {warning}")
    return ExitCode.FINDINGS if changes else ExitCode.DONE


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"expected a file to write, found {path!r}: {error.strerror}") from None


async def _plan(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.provisioning.apply import plan

    queue = load_file(options.queue)
    async with opened(options, out) as connection:
        steps = await plan(connection, queue, drain=options.drain, park_dead=options.park_dead)
    _print_plan(queue.name, steps, out, applied=False)
    return ExitCode.FINDINGS if steps.changes or steps.blocked else ExitCode.DONE


async def _apply(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.provisioning.apply import provision

    queue = load_file(options.queue)
    async with opened(options, out) as connection:
        steps = await provision(connection, queue, drain=options.drain, park_dead=options.park_dead)
    _print_plan(queue.name, steps, out, applied=True)
    return ExitCode.DONE


def _print_plan(queue: str, plan: Plan, out: Output, *, applied: bool) -> None:
    if out.as_json:
        steps = [
            {
                "kind": step.kind,
                "name": step.name,
                "action": step.action,
                "differences": [str(difference) for difference in step.differences],
                "blocked": list(step.blocked),
                "drain": str(step.drain) if step.drain else None,
                "parking": str(step.parking) if step.parking else None,
                "notes": list(step.notes),
            }
            for step in plan.steps
        ]
        counts = {"changes": len(plan.changes), "parked": list(plan.parked)}
        out.document({"queue": queue, "applied": applied, **counts, "steps": steps})
        return
    out.text(str(plan))
    if not plan.changes:
        out.text("nothing to change")


async def _lint(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.inspection.running_lint import running_warnings

    warnings = []
    for source in options.queue:
        if is_file(source) and not options.running:
            warnings += [(source, warning) for warning in load_file(source).warnings()]
            continue
        async with opened(options, out) as connection:
            queue = await read_queue(connection, source)
            found = [*queue.warnings(), *await running_warnings(connection, queue)]
            warnings += [(source, warning) for warning in found]
    if out.as_json:
        out.document([{"queue": source, "name": warning.name, "text": str(warning)} for source, warning in warnings])
    else:
        for source, warning in warnings:
            out.text(f"{f'{source}: ' if len(options.queue) > 1 else ''}{warning.name}: {warning}")
        if not warnings:
            out.text("nothing found")
    return ExitCode.FINDINGS if warnings else ExitCode.DONE


async def _account(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.jetstream.dead_letters.account import account_for_jobs

    async with opened(options, out) as connection:
        account = await account_for_jobs(connection, await read_queue(connection, options.queue))
    if out.as_json:
        out.document(account.as_json())
    else:
        out.text(str(account))
        for why in account.why_unknown:
            out.text(f"not known: {why}")
    if account.unaccounted:
        out.note(
            "Find out what became of the unaccounted jobs; bring back those that weren't done with"
            f" jetstream-queue redrive start {account.queue} --sequence N"
        )
    return ExitCode.FINDINGS if account.unaccounted else ExitCode.DONE
