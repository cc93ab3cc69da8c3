"""Warnings about a queue's declaration: settings that work and will cause trouble later.

They concern the practices of work queues and the streams around a queue. ``docs/queue-warnings.md`` has each rule under
its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    DEAD_LETTER_MARK,
    TERMINATED,
    cancellation_filter,
    copy_filter,
    parked_filter,
)
from airflow_provider_jetstream.jetstream.queue.end_evidence import end_evidence_warnings
from airflow_provider_jetstream.jetstream.queue.message_size import size_warnings
from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings
from airflow_provider_jetstream.jetstream.queue.stream_config import outside_filters
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue.checks import QueueFields, StreamFields
    from airflow_provider_jetstream.jetstream.queue.declaration import DeadLetterQueue


# Bytes for the stream, the subject, the sequences and the time, which the server adds to a copy.
_COPY_HEADERS = 1024
_SHORT_ARCHIVE = 86_400 * NANOSECONDS
_UNLIMITED = -1
# The server's defaults.
_DEFAULT_MAX_ACK_PENDING = 1_000


def dead_letter_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    """Yield the warnings of a queue's dead letter queue, or of its absence."""
    if queue.dead_letters is None:
        yield QueueWarning(
            "no-dead-letters", "no dead_letters: jobs that use up their deliveries stay in the queue unseen"
        )
        return
    yield from _dead_letter_queue_warnings(queue.name, queue.dead_letters)


def event_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    """Yield the warnings of a queue's events stream."""
    if queue.events and not covered_by_any(queue.events.subjects, cancellation_filter(queue.name)):
        yield QueueWarning(
            "cancellations-not-captured",
            f"{queue.events.name} doesn't capture {cancellation_filter(queue.name)}: jobs can't be cancelled",
        )


def archive_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    """Yield the warnings of a queue's archive, or of its absence."""
    archive = queue.archive
    if archive is None:
        if queue.dead_letters:
            yield QueueWarning(
                "no-archive",
                "no archive: the body of a job that a worker terminates, or that the server deletes, is lost",
            )
        return
    limits = queue.new_archive_limits()
    age = limits.get("max_age", archive.max_age)
    if age and queue.max_age and 0 < age < queue.max_age:
        yield QueueWarning(
            "archive-max-age",
            f"max_age {format_duration(age)} of {archive.name} is shorter than the queue's"
            f" ({format_duration(queue.max_age)}): a job that waits longer has no copy when it dies",
        )
    elif age and 0 < age < _SHORT_ARCHIVE:
        yield QueueWarning(
            "archive-max-age",
            f"{archive.name} keeps copies for {format_duration(age)}: the body of a terminated job is lost after that,"
            " unless a scan has copied it; declare a longer max_age of the archive",
        )
    if "max_bytes" not in limits and "max_msgs" not in limits and archive.max_bytes is archive.max_msgs is None:
        yield QueueWarning(
            "unbounded-archive",
            f"{archive.name} has no limit of size, since neither it nor the queue declares max_bytes or max_msgs: it"
            f" holds the copies of all jobs{_of_last(age)}, done or not; declare a max_bytes",
        )
    if refuses_when_full(archive):
        yield QueueWarning(
            "archive-discard-new", f"{archive.name} refuses copies once it is full (discard new): later jobs have none"
        )
    if is_limited(archive.max_msg_size) and not _fits_always(queue, archive):
        yield QueueWarning(
            "archive-max-msg-size",
            f"max_msg_size of {archive.name} may refuse copies: each is larger than its job by some hundred bytes of"
            " headers; leave it out",
        )


def _dead_letter_queue_warnings(queue: str, dead_letters: DeadLetterQueue) -> Iterator[QueueWarning]:
    for subject, harm in (
        (f"{TERMINATED}.{queue}.*", "terminated jobs go unseen"),
        (copy_filter(queue), "a dead letter whose job the server removes has no copy there"),
        (parked_filter(queue), "a dead letter can't be parked"),
    ):
        if not covered_by_any(dead_letters.subjects, subject):
            yield QueueWarning("dead-letters-not-captured", f"{dead_letters.name} doesn't capture {subject}: {harm}")
    if refuses_when_full(dead_letters):
        yield QueueWarning(
            "dead-letters-discard-new",
            f"{dead_letters.name} refuses advisories once it is full (discard new): dead letters go unseen",
        )
    if dead_letters.max_age is not None and dead_letters.max_age > 0:
        yield QueueWarning(
            "dead-letters-max-age",
            f"max_age {format_duration(dead_letters.max_age)} of {dead_letters.name} removes dead letters of that age"
            " unseen",
        )
    if str((dead_letters.metadata or {}).get(DEAD_LETTER_MARK)).lower() != "true":
        yield QueueWarning(
            "unmarked-dead-letters",
            f'{dead_letters.name} has no metadata {DEAD_LETTER_MARK}: "true", by which tools find dead letter queues',
        )


def _of_last(age: int | None) -> str:
    return f" of the last {format_duration(age)}" if age and age > 0 else ""


def _fits_always(queue: QueueFields, archive: StreamFields) -> bool:
    job_size, copy_size = queue.max_msg_size or 0, archive.max_msg_size or 0
    return 0 < job_size <= copy_size - _COPY_HEADERS


def refuses_when_full(stream: StreamFields) -> bool:
    """Return whether a stream can become full and then refuses messages."""
    return stream.discard == "new" and is_limited(stream.max_msgs, stream.max_bytes)


def is_limited(*limits: int | None) -> bool:
    """Return whether any of some limits is set."""
    return any(limit is not None and limit > 0 for limit in limits)


def queue_warnings(queue: QueueFields) -> list[QueueWarning]:
    """Return a sentence for each setting that works and will cause trouble later."""
    return [
        *_declared_fields(queue),
        *_filter_warnings(queue),
        *size_warnings(queue),
        *dead_letter_warnings(queue),
        *event_warnings(queue),
        *end_evidence_warnings(queue),
        *archive_warnings(queue),
        *_execute_at_warnings(queue),
    ]


def _declared_fields(queue: QueueFields) -> Iterator[QueueWarning]:
    """Yield what the server's fields that are declared mean; of numbered partitions only for the first."""
    yield from QueueWarning.of(field_findings("queue", {"config": queue.config()}, "lint"))
    for consumer in queue.consumers:
        if consumer.partition in (None, 0):
            yield from QueueWarning.of(field_findings("consumer", {"config": consumer.config()}, "lint"))


def _filter_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    for consumer in queue.consumers:
        for problem in outside_filters(queue.name, consumer.name, consumer.filter_subjects, queue.subjects):
            yield QueueWarning(
                "filter-outside-subjects", f"{problem}, unless the stream has a subject_transform or sources"
            )


def _execute_at_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    for consumer in queue.consumers if queue.execute_at_header else ():
        if consumer.partition in (None, 0):
            limit = consumer.max_ack_pending
            allowed = "no limit" if limit == _UNLIMITED else f"{limit or _DEFAULT_MAX_ACK_PENDING:,}"
            yield QueueWarning(
                "execute-at-ack-pending",
                f"execute_at_header: a job that waits for its time counts as in flight, so consumer {consumer.name}"
                f" delivers nothing else while as many wait as max_ack_pending allows ({allowed})",
            )
