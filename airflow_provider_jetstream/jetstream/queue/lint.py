"""Warnings about a queue's declaration: settings that work and will cause trouble later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TERMINATED, cancellation_filter, copy_filter, parked_filter
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue.checks import QueueFields, StreamFields

_LONG_ACK_WAIT = 15 * 60 * NANOSECONDS
# Bytes for the stream, the subject, the sequences and the time, which the server adds to a copy.
_COPY_HEADERS = 1024


def queue_warnings(queue: QueueFields) -> list[str]:
    """Return a sentence for each setting that works and will cause trouble later."""
    warnings: list[str] = []
    if queue.discard != "new" and _limited(queue.max_msgs, queue.max_bytes, queue.max_msgs_per_subject):
        warnings.append(
            'discard "old" with a limit drops the oldest waiting jobs silently when the queue is full: use'
            ' discard "new", which refuses new jobs instead'
        )
    if queue.max_age is not None and queue.max_age > 0:
        warnings.append(
            f"max_age {format_duration(queue.max_age)} removes waiting jobs and dead letters of that age without an"
            " advisory"
        )
    if queue.dead_letters is None:
        warnings.append("no dead_letters: jobs that use up their deliveries stay in the queue unseen")
    else:
        warnings += _dead_letter_warnings(queue.name, queue.dead_letters)
    if queue.events and not covered_by_any(queue.events.subjects, cancellation_filter(queue.name)):
        warnings.append(
            f"{queue.events.name} doesn't capture {cancellation_filter(queue.name)}: jobs can't be cancelled"
        )
    if queue.archive:
        warnings += _archive_warnings(queue, queue.archive)
    elif queue.dead_letters:
        warnings.append("no archive: the body of a job that a worker terminates, or that the server deletes, is lost")
    if queue.atomic_redrive:
        warnings.append(
            "atomic_redrive leaves a marker in the queue for a day for each redriven letter: markers count towards"
            " max_msgs and max_bytes"
        )
    if queue.schedules and queue.dead_letters:
        warnings.append(
            "schedules: the server purges the subject of one that has fired, and in clusters servers have been seen to"
            " lose dead letters over purges of other subjects; "
            + ("their bodies are in the archive" if queue.archive else "declare an archive, which keeps their bodies")
        )
    warnings += [
        f"consumer {consumer.name}: an ack_wait of {format_duration(consumer.ack_wait)} delays the redelivery of"
        " a crashed worker's jobs by that time; use a shorter one and let workers report progress"
        for consumer in queue.consumers
        if consumer.ack_wait is not None and consumer.ack_wait > _LONG_ACK_WAIT
    ]
    warnings += [
        f"consumer {consumer.name} retries for ever (max_deliver -1): a poison job is run again and again"
        for consumer in queue.consumers
        if consumer.max_deliver == -1
    ]
    return warnings


def _dead_letter_warnings(queue: str, dead_letters: StreamFields) -> Iterator[str]:
    for subject, harm in (
        (f"{TERMINATED}.{queue}.*", "terminated jobs go unseen"),
        (copy_filter(queue), "a dead letter whose job the server removes has no copy there"),
        (parked_filter(queue), "a dead letter can't be parked"),
    ):
        if not covered_by_any(dead_letters.subjects, subject):
            yield f"{dead_letters.name} doesn't capture {subject}: {harm}"
    if _refuses_when_full(dead_letters):
        yield f"{dead_letters.name} refuses advisories once it is full (discard new): dead letters go unseen"
    if dead_letters.max_age is not None and dead_letters.max_age > 0:
        age = format_duration(dead_letters.max_age)
        yield f"max_age {age} of {dead_letters.name} removes dead letters of that age unseen"


def _archive_warnings(queue: QueueFields, archive: StreamFields) -> Iterator[str]:
    if archive.max_age and queue.max_age and 0 < archive.max_age < queue.max_age:
        yield (
            f"max_age {format_duration(archive.max_age)} of {archive.name} is shorter than the queue's"
            f" ({format_duration(queue.max_age)}): a job that waits longer has no copy when it dies"
        )
    if _refuses_when_full(archive):
        yield f"{archive.name} refuses copies once it is full (discard new): later jobs have none"
    if _limited(archive.max_msg_size) and not _fits_always(queue, archive):
        yield (
            f"max_msg_size of {archive.name} may refuse copies: each is larger than its job by some hundred bytes of"
            " headers; leave it out"
        )
    if queue.allow_rollup_hdrs:
        yield f"allow_rollup_hdrs: a job published with Nats-Rollup has no copy in {archive.name}, which refuses it"


def _fits_always(queue: QueueFields, archive: StreamFields) -> bool:
    job_size, copy_size = queue.max_msg_size or 0, archive.max_msg_size or 0
    return 0 < job_size <= copy_size - _COPY_HEADERS


def _refuses_when_full(stream: StreamFields) -> bool:
    return stream.discard == "new" and _limited(stream.max_msgs, stream.max_bytes)


def _limited(*limits: int | None) -> bool:
    return any(limit is not None and limit > 0 for limit in limits)
