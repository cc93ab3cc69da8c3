"""Stores the new jobs of dead letters, each exactly once even if the redrive is killed at any point and run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.headers import Headers, wire_size
from airflow_provider_jetstream.jetstream.client.message_reader import last_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store, store_each
from airflow_provider_jetstream.jetstream.contract import (
    MSG_ID,
    REDRIVE_CONSUMER,
    REDRIVE_COUNT,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
    marker_subject,
    parked_filter,
    parked_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.record import record_headers
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    RedriveError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.redrive.repair import ORIGIN_HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.redrive.repair import Content

_MARKER_TTL = "24h"
# The server accepts a thousand messages in a batch.
_BATCH_LETTERS = 250
_BATCH_BYTES = 8 * 2**20
# The bytes that a batch adds to a job's headers.
_BATCH_HEADERS_SIZE = 150
_WRONG_LAST_SEQUENCE = 10071
_DUPLICATE_IN_BATCH = 10201


@dataclass(frozen=True, slots=True)
class RedrivenJob:
    """The new job of a letter, ready to be stored.

    :param subject: the new job's subject
    :param content: its body and own headers
    :param headers: all its headers
    """

    letter: DeadLetter
    subject: str
    content: Content
    headers: Headers


def max_job_size(connection: Connection, *, marked: bool) -> int:
    """Return the largest size of a new job in bytes, its headers included.

    :param marked: whether it is stored together with a marker
    """
    return connection.max_payload - (_BATCH_HEADERS_SIZE if marked else 0)


def redriven_job(letter: DeadLetter, content: Content, subject: str | None, limit: int) -> RedrivenJob:
    """Build a letter's new job, with an id that only this letter has.

    The server's own headers are left out: an expectation, a time to live or the id of the first publication would make
    the server refuse or drop the job.

    :param content: body and headers of the new job
    :param subject: its subject unless its repair names one; the letter's own where absent
    :param limit: the largest size in bytes
    :raises RedriveError: it can't be sent
    """
    death = letter.death
    added = {
        REDRIVE_COUNT: str(letter.redrives + 1),
        REDRIVE_STREAM: death.stream,
        REDRIVE_SEQUENCE: str(death.sequence),
        REDRIVE_CONSUMER: death.consumer or "",
        MSG_ID: f"redrive:{death.stream}:{death.sequence}:{letter.time}",
    }
    headers = Headers([*(pair for pair in content.headers if pair[0] not in ORIGIN_HEADERS), *added.items()])
    check_size(letter, content.body, headers, limit)
    return RedrivenJob(letter, content.subject or subject or letter.subject, content, headers)


def check_size(letter: DeadLetter, body: bytes, headers: Headers, limit: int) -> None:
    """Refuse what can't be sent: the server would close the connection.

    :param limit: the largest size in bytes
    :raises RedriveError: body and headers can't be sent
    """
    try:
        size = len(body) + wire_size(headers)
    except UnicodeEncodeError:
        raise RedriveError(
            f"expected headers in UTF-8, found others on job {letter.sequence}: it can't be copied unchanged; original"
            " kept"
        ) from None
    if size > limit:
        raise RedriveError(
            f"expected a copy of at most {limit} bytes, found {size} for job {letter.sequence} with the headers that"
            " name its origin: raise the server's max_payload; original kept"
        )


async def store_copies(connection: Connection, jobs: Sequence[RedrivenJob]) -> list[int | JetStreamProviderError]:
    """Store new jobs; a repeat within the duplicate window is dropped by the server.

    :param jobs: the new jobs in the order in which they are stored
    :return: for each its stream sequence, or why it isn't known to be stored
    """
    messages = [(job.subject, job.content.body) for job in jobs]
    answers = await store_each(connection, messages, [job.headers for job in jobs])
    return [_stored_sequence(job, answer) for job, answer in zip(jobs, answers, strict=True)]


async def store_copies_with_markers(
    connection: Connection, jobs: Sequence[RedrivenJob]
) -> list[int | JetStreamProviderError]:
    """Store new jobs, each together with a marker, all or nothing: a repeat at any time finds the marker.

    Protocol: atomic batch publishing, NATS ADR-50. Where the server refuses a batch, each job is stored by itself.

    :param jobs: the new jobs in the order in which they are stored
    :return: for each its stream sequence, or why it isn't known to be stored
    """
    stored: list[int | JetStreamProviderError] = []
    for batch in _batches(jobs):
        try:
            last = await _store_batch(connection, batch)
        except (ApiError, TransientError):
            stored += [await _store_with_marker(connection, job) for job in batch]
        else:
            # The server stores a batch in consecutive sequences.
            stored += range(last - 2 * (len(batch) - 1), last + 1, 2)
    return stored


def _stored_sequence(job: RedrivenJob, answer: PubAck | ApiError | TransientError) -> int | JetStreamProviderError:
    """Return the stream sequence of a copy, or why it isn't known to be stored."""
    letter = job.letter
    if isinstance(answer, ApiError):
        return RedriveError(_refused(letter, answer))
    if isinstance(answer, TransientError):
        return answer
    if answer.stream != letter.death.stream:
        return RedriveError(
            f"expected {letter.death.stream} to store the copy of {letter.sequence}, found an answer of"
            f" {answer.stream}: original kept"
        )
    if answer.sequence == letter.sequence:
        return RedriveError(f"the server took the copy for the original (sequence {letter.sequence})")
    return answer.sequence


async def _store_with_marker(connection: Connection, job: RedrivenJob) -> int | JetStreamProviderError:
    letter = job.letter
    try:
        # Reading the marker costs much less than a batch that the server refuses.
        return await _marked_copy(connection, letter) or await _store_batch(connection, [job])
    except ApiError as error:
        return await _explain(connection, job, error)
    except TransientError as error:
        return error


async def _explain(connection: Connection, job: RedrivenJob, error: ApiError) -> int | JetStreamProviderError:
    if error.err_code == _DUPLICATE_IN_BATCH:
        # Stored without a marker, before the queue allowed batches.
        return (await store_copies(connection, [job]))[0]
    refused = RedriveError(_refused(job.letter, error))
    if error.err_code != _WRONG_LAST_SEQUENCE:
        return refused
    try:
        return await _marked_copy(connection, job.letter) or refused
    except TransientError as unknown:
        return unknown


async def _marked_copy(connection: Connection, letter: DeadLetter) -> int | None:
    """Return the sequence of a letter's new job if it has a marker: the server stores the job right behind it."""
    marker = await last_message(connection, letter.death.stream, _letter_marker(letter))
    return marker.sequence + 1 if marker else None


async def _store_batch(connection: Connection, jobs: Sequence[RedrivenJob]) -> int:
    batch, last = uuid4().hex, 2 * len(jobs)
    for position, job in enumerate(jobs):
        expectations = [("Nats-Expected-Last-Subject-Sequence", "0"), ("Nats-TTL", _MARKER_TTL)]
        marked = Headers([*expectations, *_batch_headers(batch, 2 * position + 1)])
        await connection.publish(_letter_marker(job.letter), b"", marked)
        headers = Headers([*job.headers.items(), *_batch_headers(batch, 2 * position + 2)])
        if 2 * position + 2 < last:
            await connection.publish(job.subject, job.content.body, headers)
            continue
        commit = Headers([*headers.items(), ("Nats-Batch-Commit", "1")])
        return (await store(connection, job.subject, job.content.body, commit)).sequence
    raise ValueError("expected jobs to store, found none")


def _batch_headers(batch: str, number: int) -> tuple[tuple[str, str], ...]:
    return (("Nats-Batch-Id", batch), ("Nats-Batch-Sequence", str(number)))


def _batches(jobs: Sequence[RedrivenJob]) -> Iterator[list[RedrivenJob]]:
    batch: list[RedrivenJob] = []
    size = 0
    for job in jobs:
        if batch and (len(batch) == _BATCH_LETTERS or size + len(job.content.body) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += len(job.content.body)
    if batch:
        yield batch


def _letter_marker(letter: DeadLetter) -> str:
    return marker_subject(letter.death.stream, letter.sequence)


def _refused(letter: DeadLetter, error: ApiError) -> str:
    return f"{letter.death.stream} refused the copy of {letter.sequence}: {error.description}"


async def store_parked(connection: Connection, letter: DeadLetter, dead_letter_queue: str, why: str) -> int:
    """Store a letter in the dead letter queue as parked, and return its sequence there.

    :param why: the reason
    :raises RedriveError: it isn't stored
    :raises TransientError: it isn't known to be stored
    """
    death = letter.death
    headers = record_headers(
        death, subject=letter.subject, time=letter.time, headers=letter.headers, writer="park", parked=why
    )
    check_size(letter, letter.body, headers, connection.max_payload)
    try:
        subject = parked_subject(death.stream, death.consumer, death.sequence)
        ack = await store(connection, subject, letter.body, headers)
    except ApiError as error:
        raise RedriveError(f"{dead_letter_queue} refused to park {letter.sequence}: {error.description}") from None
    except UnreachableError:
        raise RedriveError(
            f"expected {dead_letter_queue} to capture {parked_filter(death.stream)}, found that no stream does: add"
            " that subject to be able to park letters"
        ) from None
    if ack.stream != dead_letter_queue:
        raise RedriveError(
            f"expected {dead_letter_queue} to store the parked letter {letter.sequence}, found {ack.stream}"
        )
    return ack.sequence
