"""Stores the new jobs of dead letters, each exactly once even if the redrive is killed at any point and run again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, store_each
from airflow_provider_jetstream.jetstream.client.store_once import store_once
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import (
    parked_filter,
    parked_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    RedriveError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.redrive.copy_content import content_of_copy
from airflow_provider_jetstream.jetstream.redrive.redriven_job import (
    check_size,
    check_subject,
    parked_headers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.intent import Target
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.redrive.redriven_job import RedrivenJob

# The archive stores a copy a moment after the stream has stored the message.
_ARCHIVE_DELAY = 0.2


@dataclass(frozen=True, slots=True)
class IdTaken:
    """Says that a new job isn't stored, since the server has dropped it for another message under its message id.

    :param sequence: of that message
    """

    sequence: int


# A stream sequence, or why the new job isn't stored or isn't known to be.
Answer: TypeAlias = "int | IdTaken | JetStreamProviderError"


async def store_jobs(connection: Connection, jobs: Sequence[RedrivenJob], target: Target) -> list[Answer]:
    """Store new jobs; a repeat within the duplicate window is dropped by the server.

    :param jobs: the new jobs in the order in which they are stored
    :param target: the stream that is to store them, and its archive
    """
    messages = [(job.subject, job.content.body) for job in jobs]
    answers = await store_each(connection, messages, [job.headers for job in jobs])
    stored: list[Answer] = []
    for job, answer in zip(jobs, answers, strict=True):
        if isinstance(answer, PubAck) and answer.duplicate:
            stored.append(await _checked(connection, job, answer, target))
        else:
            stored.append(_stored_sequence(job, answer))
    return stored


async def _checked(connection: Connection, job: RedrivenJob, answer: PubAck, target: Target) -> Answer:
    """Return the stream sequence of a copy whose id was stored before, if that is the copy.

    The id of a copy is no secret: a publisher may have stored another job under it, which must not replace this one;
    and a worker may have done that job. The intent of a letter of which that isn't known stays open.
    """
    stored = _stored_sequence(job, answer)
    if isinstance(stored, JetStreamProviderError):
        return stored
    try:
        message = await get_message(connection, job.stream, stored) or await _archived(connection, target, stored)
    except JetStreamProviderError as error:
        return error
    if message is None and target.archive is None and stored > job.after:
        return stored
    if message is None:
        return UnreachableError(
            f"whether job {stored} of {job.stream} was the copy of {job.letter.sequence} isn't known, since it isn't"
            " stored any more, and no archive has it: original kept"
        )
    content = content_of_copy(message.subject, message.headers, message.data)
    return stored if content in {job.own_content, *job.begun} else IdTaken(stored)


async def _archived(connection: Connection, target: Target, sequence: int) -> StoredMessage | None:
    """Return a job that its stream doesn't store any more, as the archive has it."""
    for pause in (0.0, _ARCHIVE_DELAY) if target.archive else ():
        await sleep(pause)
        info = await stream_info(connection, str(target.archive))
        archive = ArchiveReader.from_info(connection, info, await stream_info(connection, target.stream))
        if message := await archive.find(sequence):
            return message
    return None


def _stored_sequence(job: RedrivenJob, answer: PubAck | ApiError | TransientError) -> int | JetStreamProviderError:
    """Return the stream sequence of a copy, or why it isn't known to be stored."""
    letter = job.letter
    if isinstance(answer, ApiError):
        return RedriveError(_refused(job, answer))
    if isinstance(answer, TransientError):
        return answer
    if answer.stream != job.stream:
        return RedriveError(
            f"expected {job.stream} to store the copy of {letter.sequence}, found an answer of"
            f" {answer.stream}: original kept"
        )
    if answer.sequence == letter.sequence and job.stream == letter.death.stream:
        return RedriveError(f"the server took the copy for the original (sequence {letter.sequence})")
    return answer.sequence


def _refused(job: RedrivenJob, error: ApiError) -> str:
    return f"{job.stream} refused the copy of {job.letter.sequence}: {error.description}"


async def store_parked(connection: Connection, letter: DeadLetter, dead_letter_queue: str, why: str) -> int:
    """Store a letter in the dead letter queue as parked, and return its sequence there.

    :param why: the reason
    :raises RedriveError: it isn't stored
    :raises TransientError: it isn't known to be stored
    """
    death = letter.death
    headers = parked_headers(letter, why)
    check_subject(letter, letter.subject)
    check_size(letter, letter.body, headers, connection.max_payload)
    try:
        subject = parked_subject(death.stream, death.consumer, letter.sequence)
        ack = await store_once(connection, subject, letter.body, headers, partial(is_record_of, letter))
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


def is_record_of(letter: DeadLetter, stored: StoredMessage) -> bool:
    """Return whether a message of the dead letter queue is the parked record of a letter."""
    record = read_record(stored, letter.death.stream)
    if record is None or record.parked is None or record.death.created != letter.death.created:
        return False
    job = record.job
    same = (job.sequence, job.subject, job.data) == (letter.sequence, letter.subject, letter.body)
    return same and sorted(job.headers) == sorted(letter.headers)
