"""The permissions of each role for one queue: only what its programs do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from airflow_provider_jetstream.jetstream.audit.redrives import redrive_control_subject
from airflow_provider_jetstream.jetstream.contract import (
    MOVER,
    SAMPLE_STREAM,
    SAMPLE_SUBJECT,
    account_subject,
    attempt_filter,
    audit_filter,
    cancellation_filter,
    consumer_attempt_filter,
    consumer_completion_filter,
    copy_filter,
    manifest_filter,
    parked_filter,
    redrive_consumer,
    schedule_filter,
)
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.queue.server_uptime import UPTIME_CONSUMER
from airflow_provider_jetstream.jetstream.roles.user_policy import Permission, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from airflow_provider_jetstream.jetstream.queue.declaration import DeadLetterQueue
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

Role: TypeAlias = Literal[
    "publisher", "scheduler", "mover", "waiter", "worker", "redriver", "monitor", "spark-reader", "provisioner"
]

ROLES: Final[tuple[Role, ...]] = get_args(Role)

_API = "$JS.API"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def permissions(queue: WorkQueue, role: Role, *, consumer: str | None = None) -> Policy:
    """Return what the programs of a role need for a queue.

    :param queue: the declaration
    :param role: a task that publishes and waits has two roles; :func:`combined_policy` makes one user of them
    :param consumer: whose jobs a worker runs; needed where the queue has several
    :raises ArgumentError: there is no such role or consumer, or the queue lacks what the role reads
    """
    if role not in _LINES:
        raise ArgumentError(f"expected a role of {', '.join(ROLES)}, found {role!r}: name one of them")
    user = f"{queue.name}-{role}"
    if role == "worker":
        consumer = _consumer(queue, consumer)
        user = f"{user}-{consumer}"
        lines = list(_worker(queue, consumer))
    elif consumer is not None:
        raise ArgumentError(f"expected a consumer only for the role worker, found {consumer!r} for {role}: drop it")
    else:
        lines = list(_LINES[role](queue))
    return _policy(user, lines)


def combined_policy(user: str, *policies: Policy) -> Policy:
    """Combine policies into that of one user, which has an inbox prefix of its own.

    :param user: its name
    :param policies: the policies of its roles
    :raises ArgumentError: the name can't be a part of a subject
    """
    if not _NAME.fullmatch(user):
        raise ArgumentError(f"expected a user's name of letters, digits, - and _, found {user!r}: choose another")
    inboxes = {f"{policy.inbox_prefix}.>" for policy in policies}
    lines = [line for policy in policies for line in policy.permissions if line.subject not in inboxes]
    return _policy(user, lines)


def _policy(user: str, lines: list[Permission]) -> Policy:
    prefix = f"_INBOX_{user}"
    first: dict[tuple[str, str], Permission] = {}
    for line in [_sends(f"{_API}.INFO", "connecting"), *lines, _receives(f"{prefix}.>", "answers")]:
        first.setdefault((line.action, line.subject), line)
    return Policy(user, prefix, tuple(first.values()))


def _consumer(queue: WorkQueue, name: str | None) -> str:
    names = [consumer.name for consumer in queue.consumers]
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        raise ArgumentError(f"expected a consumer of {queue.name} ({', '.join(names)}), found {name!r}: name it")
    return name


def _publisher(queue: WorkQueue) -> Iterator[Permission]:
    for subject in queue.subjects:
        yield _sends(subject, "jobs")
    if queue.events:
        events = queue.events.name
        yield _api("STREAM.INFO", queue.name, "the limits of jobs")
        yield _sends(manifest_filter(queue.name), "what the task has published")
        yield _api("STREAM.MSG.GET", events, "what an earlier try has published")
        yield _api("STREAM.PURGE", events, "parts of what the task had published before")
    yield from _search(queue)


def _scheduler(queue: WorkQueue) -> Iterator[Permission]:
    """Yield the permissions to store schedules, which publishers lack: a stream with schedules lets them purge it."""
    if queue.schedules:
        yield _sends(schedule_filter(queue.name), "jobs that the server makes later")
        yield _api("STREAM.INFO", queue.name, "the limits of jobs")
        yield _api("STREAM.MSG.GET", queue.schedules.name, "whether a stored schedule is the same")
        yield _api("CONSUMER.INFO", f"{queue.schedules.name}.{MOVER}", "whether somebody moves jobs that are due")


def _mover(queue: WorkQueue) -> Iterator[Permission]:
    """Yield the permissions to move due jobs, which the role `scheduler` doesn't need."""
    if queue.schedules is None:
        return
    name, purpose = f"{queue.schedules.name}.{MOVER}", "jobs that are due"
    for stream in (queue, queue.schedules):
        yield _api("STREAM.INFO", stream.name, "how far the server remembers what was moved")
    yield _api("CONSUMER.INFO", name, purpose)
    yield _api("CONSUMER.MSG.NEXT", name, purpose)
    yield _sends(f"$JS.ACK.{name}.>", "jobs that are moved")
    for subject in queue.subjects:
        yield _sends(subject, purpose)
    purpose = "schedules that another message hides"
    yield _api("STREAM.MSG.GET", queue.schedules.name, purpose)
    yield _sends(schedule_filter(queue.name), purpose)
    purpose = "whether a job was moved before"
    yield _api("STREAM.MSG.GET", queue.name, purpose)
    for companion in (queue.archive, queue.events):
        if companion:
            yield _api("STREAM.INFO", companion.name, purpose)
            yield _api("STREAM.MSG.GET", companion.name, purpose)
    if queue.events:
        yield _sends(cancellation_filter(queue.name), "cancellations of jobs that were on their way")


def _search(queue: WorkQueue) -> Iterator[Permission]:
    """Yield the permissions to find the jobs of a try that was cut off, and the message that has the id of a job."""
    purpose = "jobs of a try that was cut off, and what the server calls duplicates"
    if queue.events:
        yield _api("STREAM.INFO", queue.events.name, purpose)
    if queue.archive:
        yield _api("STREAM.INFO", queue.archive.name, purpose)
        yield _api("STREAM.MSG.GET", queue.archive.name, purpose)
    if queue.schedules:
        yield _api("STREAM.INFO", queue.schedules.name, purpose)
        yield _api("STREAM.MSG.GET", queue.schedules.name, purpose)
    yield _api("STREAM.MSG.GET", queue.name, purpose)


def _waiter(queue: WorkQueue) -> Iterator[Permission]:
    if queue.events is None:
        raise ArgumentError(f"expected events of {queue.name}, which waiting reads, found none: declare them")
    streams = {queue.events.name: "ends of jobs"}
    if queue.dead_letters:
        streams[queue.dead_letters.name] = "dead letters"
    if queue.audit:
        streams[queue.audit.name] = "redriven jobs"
    yield _api("STREAM.INFO", queue.name, "whether the queue is still the same")
    yield _api("STREAM.MSG.GET", queue.name, "whether a job is still there")
    yield _api("CONSUMER.LIST", queue.name, "whether jobs can be delivered")
    yield from _probe(queue)
    for stream, what in streams.items():
        yield _api("STREAM.INFO", stream, f"{what}: from where to read")
        yield _api("CONSUMER.CREATE", f"{stream}.*", f"{what}: reading")
        yield _api("CONSUMER.MSG.NEXT", f"{stream}.*", f"{what}: reading")
        yield _api("CONSUMER.DELETE", f"{stream}.*", f"{what}: the end of reading")
    yield _api("STREAM.MSG.GET", queue.events.name, "results of jobs")
    if queue.attempts:
        yield _api("STREAM.MSG.GET", queue.attempts.name, "how far jobs are, and how attempts failed")
    if queue.archive and len(queue.consumers) > 1:
        yield _api("STREAM.INFO", queue.archive.name, "whose a job was that is gone")
        yield _api("STREAM.MSG.GET", queue.archive.name, "whose a job was that is gone")


def _worker(queue: WorkQueue, consumer: str) -> Iterator[Permission]:
    yield _api("STREAM.INFO", queue.name, "the queue's limits")
    yield _api("CONSUMER.INFO", f"{queue.name}.{consumer}", "the consumer's limits")
    yield _api("CONSUMER.MSG.NEXT", f"{queue.name}.{consumer}", "jobs")
    yield _sends(f"$JS.ACK.{queue.name}.{consumer}.>", "the ends of deliveries")
    if queue.events:
        yield _api("STREAM.INFO", queue.events.name, "where completions are stored")
        yield _sends(consumer_completion_filter(queue.name, consumer), "completions")
        yield _receives(cancellation_filter(queue.name), "cancellations")
        yield _api("STREAM.MSG.GET", queue.events.name, "cancellations from before")
    for subject in queue.advisory_subjects:
        yield _sends(subject, "completions that jobs ask for")
    if queue.dead_letters:
        yield _api("STREAM.INFO", queue.dead_letters.name, "where copies of dead letters are stored")
        yield _sends(f"{copy_filter(queue.name).removesuffix('>')}{consumer}.*", "copies of dead letters")
    if queue.attempts:
        yield _api("STREAM.INFO", queue.attempts.name, "where progress and errors of attempts are stored")
        yield _sends(consumer_attempt_filter(queue.name, consumer), "progress and errors of attempts")
    yield _api("STREAM.MSG.GET", queue.name, "whether a job is still stored before its end is sent again")


def _scan(queue: WorkQueue) -> Iterator[Permission]:
    """Yield the permissions to read dead letters."""
    if queue.dead_letters is None:
        raise ArgumentError(f"expected dead letters of {queue.name}, which the role reads, found none: declare them")
    yield _api("STREAM.LIST", None, "the queue's streams")
    yield _api("STREAM.INFO", queue.name, "the queue's numbers")
    yield _api("CONSUMER.LIST", queue.name, "the consumers' numbers")
    yield _api("STREAM.MSG.GET", queue.name, "jobs that are dead letters")
    if queue.dead_letters.retention != "limits":
        yield _api("CONSUMER.LIST", queue.dead_letters.name, "handlers of dead letters")
    # One that captures the server's advisories only isn't listed with the queue's other streams.
    yield _api("STREAM.INFO", queue.dead_letters.name, "the dead letter queue's numbers")
    yield from _probe(queue)
    yield from _uptime(queue)


def _probe(queue: WorkQueue) -> Iterator[Permission]:
    """Yield the permissions to probe consumers: the server publishes due advisories when somebody pulls."""
    for consumer in queue.consumers:
        yield _api("CONSUMER.MSG.NEXT", f"{queue.name}.{consumer.name}", "advisories that are due")


def _uptime(queue: WorkQueue) -> Iterator[Permission]:
    if queue.audit:
        name = f"{queue.audit.name}.{UPTIME_CONSUMER}"
        yield _api("CONSUMER.INFO", name, "since when the server is up")
        yield _api("CONSUMER.CREATE", name, "since when the server is up, after it was restarted")


def _reads(queue: WorkQueue) -> Iterator[Permission]:
    for stream, what in _companions(queue):
        yield _api("STREAM.MSG.GET", stream, what)


def _bulk_reads(queue: WorkQueue) -> Iterator[Permission]:
    for stream, what in ((queue.name, "jobs"), *_companions(queue)):
        yield _api("DIRECT.GET", stream, f"{what}, many at once")


def _companions(queue: WorkQueue) -> Iterator[tuple[str, str]]:
    named = ((queue.dead_letters, "entries"), (queue.events, "ends of jobs"), (queue.archive, "bodies"))
    for stream, what in (*named, (queue.audit, "what was done to letters")):
        if stream:
            yield stream.name, what


def _monitor(queue: WorkQueue) -> Iterator[Permission]:
    yield from _scan(queue)
    yield from _reads(queue)
    yield from _bulk_reads(queue)
    if queue.attempts:
        yield _api("STREAM.MSG.GET", queue.attempts.name, "how far jobs are, and how attempts failed")
    if queue.audit:
        yield _api("STREAM.INFO", queue.audit.name, "the redrives of the queue")
        yield _sends(redrive_control_subject(queue.name, "*"), "pausing, resuming and aborting redrives")
        yield _sends(account_subject(queue.name), "the accounts that people ask for")
    for stream in (queue.events, queue.archive):
        if stream:
            yield _api("STREAM.INFO", stream.name, "how far an account reads")
    if queue.schedules:
        yield _api("CONSUMER.INFO", f"{queue.schedules.name}.{MOVER}", "whether somebody moves jobs that are due")
        yield _api("STREAM.MSG.GET", queue.schedules.name, "since when jobs are due")
    for request in ("STREAM.INFO", "STREAM.CREATE", "STREAM.MSG.GET", "DIRECT.GET"):
        yield _api(request, SAMPLE_STREAM, "the history of all queues")
    yield _sends(SAMPLE_SUBJECT, "the history of all queues")


def _redriver(queue: WorkQueue) -> Iterator[Permission]:
    yield from _scan(queue)
    yield from _reads(queue)
    yield from _bulk_reads(queue)
    for stream in queue.companions():
        if stream is not queue.attempts:
            yield _api("STREAM.INFO", stream.name, "whether the queue's streams are there")
    yield _sends(audit_filter(queue.name), "the lease, intents and records")
    for subject in queue.subjects:
        yield _sends(subject, "redriven jobs")
    if queue.attempts:
        yield _api("STREAM.MSG.GET", queue.attempts.name, "whether a job waits for its next delivery")
        yield _sends(attempt_filter(queue.name), "who asked that a job be retried or given up")
    for consumer in queue.consumers:
        name = f"{queue.name}.{consumer.name}"
        yield _sends(f"$JS.ACK.{name}.>", "the end of the dead job")
        for request in ("INFO", "PAUSE", "RESET"):
            yield _api(f"CONSUMER.{request}", name, "requeueing in place")
    yield from _removes_without_consumer(queue)
    if queue.dead_letters:
        yield _api("STREAM.MSG.DELETE", queue.dead_letters.name, "entries of redriven letters")
        yield _api("STREAM.PURGE", queue.dead_letters.name, "many entries of redriven letters at once")
        yield from _claims(queue.name, queue.dead_letters)
    yield _sends(parked_filter(queue.name), "parked letters")
    yield _sends(copy_filter(queue.name), "copies of bodies, before they are gone")
    if queue.events:
        yield _sends(manifest_filter(queue.name), "which task's jobs were redriven")
        yield _api("STREAM.PURGE", queue.events.name, "parts of what the task had published before")


def _removes_without_consumer(queue: WorkQueue) -> Iterator[Permission]:
    """Yield the permissions to remove dead jobs whose consumer is gone."""
    purpose = "dead jobs whose consumer is gone"
    if not queue.deny_delete:
        yield _api("STREAM.MSG.DELETE", queue.name, purpose)
        return
    name = f"{queue.name}.{redrive_consumer(queue.name)}"
    for request in ("CREATE", "INFO", "MSG.NEXT", "DELETE"):
        yield _api(f"CONSUMER.{request}", name, purpose)
    yield _sends(f"$JS.ACK.{name}.>", purpose)


def _claims(queue: str, letters: DeadLetterQueue) -> Iterator[Permission]:
    """Yield the permissions to take entries off a dead letter queue that has handlers."""
    if letters.retention != "limits":
        yield _api("CONSUMER.MSG.NEXT", f"{letters.name}.*", "entries that handlers would get")
        yield _sends(f"$JS.ACK.{letters.name}.>", "the ends of entries")
        yield _api("CONSUMER.INFO", f"{letters.name}.*", "how far handlers are")
        yield _api("CONSUMER.CREATE", f"{letters.name}.{redrive_consumer(queue)}", "entries without a handler")


def _spark_reader(queue: WorkQueue) -> Iterator[Permission]:
    yield from _scan(queue)
    if queue.archive:
        yield _api("STREAM.INFO", queue.archive.name, "bodies of jobs that are gone")
    yield from _reads(queue)
    # Single copies are read from an archive.
    archive = queue.archive.name if queue.archive else ""
    yield from (line for line in _bulk_reads(queue) if not line.subject.endswith(f".DIRECT.GET.{archive}"))


def _provisioner(queue: WorkQueue) -> Iterator[Permission]:
    for stream in (*queue.companions(), queue):
        yield _api("STREAM.INFO", stream.name, "what differs")
        yield _api("STREAM.CREATE", stream.name, "the stream")
        yield _api("STREAM.UPDATE", stream.name, "changes of the stream")
    yield _api("STREAM.NAMES", None, "streams with the same subjects")
    yield _api("CONSUMER.LIST", queue.name, "what differs")
    for consumer in queue.consumers:
        yield _api("CONSUMER.CREATE", f"{queue.name}.{consumer.name}", "the consumer and its changes")
    if queue.dead_letters and queue.dead_letters.consumers:
        yield _api("CONSUMER.LIST", queue.dead_letters.name, "what differs in handlers")
        for handler in queue.dead_letters.consumers:
            name = f"{queue.dead_letters.name}.{handler.name}"
            yield _api("CONSUMER.CREATE", name, "the handler's consumer and its changes")
    if queue.schedules:
        yield _api("CONSUMER.LIST", queue.schedules.name, "what differs in the movers' consumer")
        yield _api("CONSUMER.CREATE", f"{queue.schedules.name}.{MOVER}", "the movers' consumer and its changes")
        yield _api("STREAM.MSG.GET", queue.schedules.name, "jobs that are scheduled or due")
    yield from _uptime(queue)
    if queue.events:
        yield _api("STREAM.MSG.GET", queue.events.name, "what was provisioned before")
    if queue.dead_letters:
        # Whether a consumer that is created would run dead letters again.
        yield from _scan(queue)
        yield from _reads(queue)
        yield from _bulk_reads(queue)
    yield _api("STREAM.LIST", None, "the stream of the queue's schedules")


_LINES: Final[dict[str, Callable[[WorkQueue], Iterator[Permission]]]] = {
    "publisher": _publisher,
    "scheduler": _scheduler,
    "mover": _mover,
    "waiter": _waiter,
    "worker": lambda queue: _worker(queue, _consumer(queue, None)),
    "redriver": _redriver,
    "monitor": _monitor,
    "spark-reader": _spark_reader,
    "provisioner": _provisioner,
}


def _api(request: str, stream: str | None, purpose: str) -> Permission:
    return _sends(f"{_API}.{request}.{stream}" if stream else f"{_API}.{request}", purpose)


def _sends(subject: str, purpose: str) -> Permission:
    return Permission("publish", subject, purpose)


def _receives(subject: str, purpose: str) -> Permission:
    return Permission("subscribe", subject, purpose)
