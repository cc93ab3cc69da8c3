"""Storing the new jobs of dead letters once, whoever is killed at whatever point and runs again."""

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

_MARKER_LIFE = "24h"
# The server takes a thousand messages in a batch.
_BATCH_LETTERS = 250
_BATCH_BYTES = 8 * 2**20
# What a batch adds to a job's headers.
_BATCH_ROOM = 150
_WRONG_LAST_SEQUENCE = 10071
_DUPLICATE_IN_BATCH = 10201


@dataclass(frozen=True, slots=True)
class OutgoingJob:
    """The new job of a letter, ready for the wire.

    :param letter: the dead letter
    :param subject: where it goes
    :param content: what goes out
    :param headers: all its headers
    """

    letter: DeadLetter
    subject: str
    content: Content
    headers: Headers


def max_job_size(connection: Connection, *, marked: bool) -> int:
    """Tell how large a new job may be.

    :param connection: the server
    :param marked: whether it is stored together with a marker
    :return: bytes, its headers included
    """
    return connection.max_payload - (_BATCH_ROOM if marked else 0)


def outgoing_job(letter: DeadLetter, content: Content, subject: str | None, limit: int) -> OutgoingJob:
    """Make a letter's new job.

    The server's own headers are left out: an expectation, a time to live or the id of the first publication would make
    the server refuse or swallow it.

    :param letter: the dead letter
    :param content: what goes out
    :param subject: where it goes unless its repair says otherwise; where it was where absent
    :param limit: bytes that the server takes
    :return: the new job, with an id that only this letter has
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
    return OutgoingJob(letter, content.subject or subject or letter.subject, content, headers)


def check_size(letter: DeadLetter, body: bytes, headers: Headers, limit: int) -> None:
    """Refuse what can't be sent; the server would close the connection over it.

    :param letter: the dead letter
    :param body: what goes out for it
    :param headers: its headers
    :param limit: bytes that the server takes
    :raises RedriveError: it can't be sent
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
            " tell its origin: raise the server's max_payload; original kept"
        )


async def store_copies(connection: Connection, jobs: Sequence[OutgoingJob]) -> list[int | JetStreamProviderError]:
    """Store new jobs under ids of their own: a repeat inside the duplicate window is dropped by the server.

    :param connection: the server
    :param jobs: the new jobs, in the order in which they shall be stored
    :return: for each its stream sequence, or why it isn't known to be stored
    """
    messages = [(job.subject, job.content.body) for job in jobs]
    answers = await store_each(connection, messages, [job.headers for job in jobs])
    return [_stored(job, answer) for job, answer in zip(jobs, answers, strict=True)]


async def store_copies_with_markers(
    connection: Connection, jobs: Sequence[OutgoingJob]
) -> list[int | JetStreamProviderError]:
    """Store new jobs, each with a marker that says so, all or nothing: a repeat at any time finds the marker.

    Protocol: atomic batch publishing, NATS ADR-50. Where one of a batch is refused, each goes by itself.

    :param connection: the server
    :param jobs: the new jobs, in the order in which they shall be stored
    :return: for each its stream sequence, or why it isn't known to be stored
    """
    done: list[int | JetStreamProviderError] = []
    for batch in _batches(jobs):
        try:
            last = await _store_batch(connection, batch)
        except (ApiError, TransientError):
            done += [await _copy_with_marker(connection, job) for job in batch]
        else:
            # A batch is stored in a row.
            done += range(last - 2 * (len(batch) - 1), last + 1, 2)
    return done


def _stored(job: OutgoingJob, answer: PubAck | ApiError | TransientError) -> int | JetStreamProviderError:
    """Give where a copy is stored, or why it isn't known to be."""
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


async def _copy_with_marker(connection: Connection, job: OutgoingJob) -> int | JetStreamProviderError:
    letter = job.letter
    try:
        # A look costs much less than a batch that is refused.
        return await _marked(connection, letter) or await _store_batch(connection, [job])
    except ApiError as error:
        return await _explain(connection, job, error)
    except TransientError as error:
        return error


async def _explain(connection: Connection, job: OutgoingJob, error: ApiError) -> int | JetStreamProviderError:
    if error.err_code == _DUPLICATE_IN_BATCH:
        # Stored without a marker, before the queue allowed batches.
        return (await store_copies(connection, [job]))[0]
    refused = RedriveError(_refused(job.letter, error))
    if error.err_code != _WRONG_LAST_SEQUENCE:
        return refused
    try:
        return await _marked(connection, job.letter) or refused
    except TransientError as unknown:
        return unknown


async def _marked(connection: Connection, letter: DeadLetter) -> int | None:
    """Give the new job of a letter that has a marker: a batch is stored in a row."""
    marker = await last_message(connection, letter.death.stream, _marker(letter))
    return marker.sequence + 1 if marker else None


async def _store_batch(connection: Connection, jobs: Sequence[OutgoingJob]) -> int:
    batch, last = uuid4().hex, 2 * len(jobs)
    for place, job in enumerate(jobs):
        claim = [("Nats-Expected-Last-Subject-Sequence", "0"), ("Nats-TTL", _MARKER_LIFE)]
        marked = Headers([*claim, *_batch_headers(batch, 2 * place + 1)])
        await connection.publish(_marker(job.letter), b"", marked)
        headers = Headers([*job.headers.items(), *_batch_headers(batch, 2 * place + 2)])
        if 2 * place + 2 < last:
            await connection.publish(job.subject, job.content.body, headers)
            continue
        commit = Headers([*headers.items(), ("Nats-Batch-Commit", "1")])
        return (await store(connection, job.subject, job.content.body, commit)).sequence
    raise ValueError("expected jobs to store, found none")


def _batch_headers(batch: str, number: int) -> tuple[tuple[str, str], ...]:
    return (("Nats-Batch-Id", batch), ("Nats-Batch-Sequence", str(number)))


def _batches(jobs: Sequence[OutgoingJob]) -> Iterator[list[OutgoingJob]]:
    batch: list[OutgoingJob] = []
    size = 0
    for job in jobs:
        if batch and (len(batch) == _BATCH_LETTERS or size + len(job.content.body) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += len(job.content.body)
    if batch:
        yield batch


def _marker(letter: DeadLetter) -> str:
    return marker_subject(letter.death.stream, letter.sequence)


def _refused(letter: DeadLetter, error: ApiError) -> str:
    return f"{letter.death.stream} refused the copy of {letter.sequence}: {error.description}"


async def store_parked(connection: Connection, letter: DeadLetter, letters: str, why: str) -> int:
    """Store a letter where no scan counts it, with the reason.

    :param connection: the server
    :param letter: the dead letter
    :param letters: the dead letter queue
    :param why: the reason
    :return: its sequence in the dead letter queue
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
        receipt = await store(connection, subject, letter.body, headers)
    except ApiError as error:
        raise RedriveError(f"{letters} refused to park {letter.sequence}: {error.description}") from None
    except UnreachableError:
        raise RedriveError(
            f"expected {letters} to capture {parked_filter(death.stream)}, found that no stream does: add that subject"
            " to be able to park letters"
        ) from None
    if receipt.stream != letters:
        raise RedriveError(f"expected {letters} to keep the parked letter {letter.sequence}, found {receipt.stream}")
    return receipt.sequence
