"""Errors of a queue's declaration: what the server would refuse, or accept and then lose jobs."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from airflow_provider_jetstream.jetstream.client.subjects import (
    covered_by_any,
    covers,
    first_overlap,
    overlapping_pairs,
    overlaps,
    subject_problem,
)
from airflow_provider_jetstream.jetstream.contract import (
    MAX_DELIVERIES,
    archive_filter,
    attempt_filter,
    audit_filter,
    completion_filter,
    due_subject,
    schedule_filter,
)
from airflow_provider_jetstream.jetstream.queue.declaration import name_problems
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue.declaration import (
        Archive,
        Attempts,
        Audit,
        Consumer,
        DeadLetterQueue,
        Events,
        Schedules,
        Stream,
    )

# The server's own subjects, and those among them that a stream may capture all the same.
_SERVER_SUBJECTS = {
    "$JS.>": ("$JS.EVENT.>", "JetStream's own API"),
    "$SYS.>": ("$SYS.ACCOUNT.>", "the server's system API"),
}
_MIN_DURATION = 100_000_000


class StreamFields(Protocol):
    """The fields of a stream's declaration that the checks read."""

    kind: ClassVar[str]
    name: str
    subjects: tuple[str, ...]
    discard: Literal["old", "new"] | None
    max_msgs: int | None
    max_bytes: int | None
    max_msgs_per_subject: int | None
    max_msg_size: int | None
    max_age: int | None
    duplicate_window: int | None
    deny_delete: bool | None
    deny_purge: bool | None
    allow_rollup_hdrs: bool | None

    @property
    def fed_by_others(self) -> bool:
        """Whether it may do without subjects, since other streams feed it."""


class QueueFields(StreamFields, Protocol):
    """The fields of a queue's declaration that the checks and the lint read."""

    consumers: tuple[Consumer, ...]
    dead_letters: DeadLetterQueue | None
    events: Events | None
    archive: Archive | None
    audit: Audit | None
    schedules: Schedules | None
    attempts: Attempts | None
    execute_at_header: bool
    advisory_subjects: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""

    def new_archive_limits(self) -> dict[str, int]:
        """Return the limits that a new archive takes over from the queue."""

    def companions(self) -> tuple[Stream, ...]:
        """Return the declared streams around the queue."""


def queue_problems(queue: QueueFields) -> list[str]:
    """Return a sentence for each thing that makes a queue unusable; its consumers are checked by themselves."""
    problems = list(_stream_problems(queue))
    problems += _filter_problems(queue)
    problems += _schedule_problems(queue)
    for stream in queue.companions():
        problems += _stream_problems(stream)
    streams: tuple[StreamFields, ...] = (queue, *queue.companions())
    for one, other in combinations(streams, 2):
        problems += _pair_problems(one, other)
    for companion, subject, harm in (
        (queue.dead_letters, f"{MAX_DELIVERIES}.{queue.name}.*", "dead letters would go unseen"),
        (queue.events, completion_filter(queue.name), "the ends of jobs would not be stored"),
        (queue.archive, archive_filter(queue.name), "no job would have a copy"),
        (queue.audit, audit_filter(queue.name), "what is done to dead letters would not be recorded"),
        (queue.schedules, schedule_filter(queue.name), "no job could be scheduled"),
        (queue.attempts, attempt_filter(queue.name), "nothing would be known of attempts"),
        *((queue.schedules, due_subject(queue.name, subject), "its jobs couldn't be") for subject in queue.subjects),
    ):
        if companion and not covered_by_any(companion.subjects, subject):
            problems.append(
                f"the {companion.kind} {companion.name} doesn't capture {subject}, so {harm}: add that subject"
            )
    if queue.dead_letters and queue.dead_letters.keep and queue.audit is None:
        problems.append("expected an audit beside dead_letters.keep, found none: it records what is discarded")
    if queue.dead_letters:
        problems += [
            f"consumer {consumer.name} retries for ever (max_deliver -1), so the dead letter queue"
            f" {queue.dead_letters.name} would never see a letter of it: set max_deliver, or drop dead_letters"
            for consumer in queue.consumers
            if consumer.max_deliver == -1
        ]
    if queue.execute_at_header:
        problems += [
            f"consumer {consumer.name} delivers each job once (max_deliver 1), and waiting for the time in its header"
            " costs a delivery (execute_at_header): set max_deliver to at least 2; 3, so that a restart of the server"
            " meanwhile costs no attempt"
            for consumer in queue.consumers
            if consumer.max_deliver == 1
        ]
    return problems


def _filter_problems(queue: QueueFields) -> Iterator[str]:
    names = [consumer.name for consumer in queue.consumers]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two consumers are named {name}"
    unfiltered = [consumer.name for consumer in queue.consumers if not consumer.filter_subjects]
    if unfiltered and len(queue.consumers) > 1:
        yield (
            f"consumer {unfiltered[0]} has no filter subject and would get every job: the server refuses other"
            " consumers beside it; give each its own filter (docs/queue-warnings.md#several-unfiltered-consumers)"
        )
    pairs = [(consumer, subject) for consumer in queue.consumers for subject in consumer.filter_subjects]
    for index, (ours, left) in enumerate(pairs):
        for theirs, right in pairs[index + 1 :]:
            if ours is not theirs and overlaps(left, right):
                yield (
                    f"the filters {left} (consumer {ours.name}) and {right} (consumer {theirs.name}) overlap: in a work"
                    " queue every job has one consumer; make them disjoint"
                )


def _schedule_problems(queue: QueueFields) -> Iterator[str]:
    stream = queue.schedules
    if stream is None:
        return
    if stream.discard == "new" or stream.deny_purge or stream.deny_delete:
        yield (
            f'the schedules stream {stream.name} can\'t have discard "new", deny_purge or deny_delete: the server'
            " removes fired schedules, and cancelling removes others; leave these out"
        )
    limits = (stream.max_msgs, stream.max_msgs_per_subject, stream.max_bytes, stream.max_msg_size, stream.max_age)
    if any((limit or -1) > 0 for limit in limits):
        yield (
            f"the schedules stream {stream.name} can't have max_msgs, max_msgs_per_subject, max_bytes, max_msg_size or"
            " max_age, which would drop schedules and jobs that are due: leave these out"
        )


def _stream_problems(stream: StreamFields) -> Iterator[str]:
    yield from name_problems("stream", stream.name)
    yield from _header_problems(stream)
    if not stream.subjects and not stream.fed_by_others:
        yield f"stream {stream.name} has no subjects: name at least one"
    for subject in stream.subjects:
        if problem := subject_problem(subject):
            yield f"subject {subject!r} of stream {stream.name}: {problem}"
    for subject, own in overlapping_pairs(stream.subjects, tuple(_SERVER_SUBJECTS)):
        allowed, what = _SERVER_SUBJECTS[own]
        if not covers(allowed, subject):
            yield f"subject {subject} of stream {stream.name} would capture {what}: narrow it"
    if pair := first_overlap(stream.subjects):
        yield f"the subjects {pair[0]} and {pair[1]} of stream {stream.name} overlap: keep one"
    window, age = stream.duplicate_window, stream.max_age
    if age is not None and 0 < age < _MIN_DURATION:
        yield f"max_age of stream {stream.name}: expected at least 100ms, or -1, found {format_duration(age)}"
    if window is not None and window < _MIN_DURATION:
        yield (
            f"duplicate_window of stream {stream.name}: expected at least 100ms, found {format_duration(window)}; leave"
            " it out for the server's 2 minutes"
        )
    if window and age and window > age > 0:
        yield (
            f"duplicate_window ({format_duration(window)}) of stream {stream.name} is longer than its max_age"
            f" ({format_duration(age)}): the server refuses that; shorten the window"
        )


def _header_problems(stream: StreamFields) -> Iterator[str]:
    if stream.allow_rollup_hdrs:
        yield (
            f"allow_rollup_hdrs of stream {stream.name} would let whoever publishes to it remove all of its messages"
            " with one (Nats-Rollup): leave it out"
        )


def _pair_problems(one: StreamFields, other: StreamFields) -> Iterator[str]:
    if one.name == other.name:
        yield f"the {one.kind} and the {other.kind} are both named {one.name}: each needs its own stream"
    for ours, theirs in overlapping_pairs(one.subjects, other.subjects):
        yield (
            f"subject {theirs} of stream {other.name} overlaps {ours} of {one.name}: the server allows one stream per"
            " subject"
        )
