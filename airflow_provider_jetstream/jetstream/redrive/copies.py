"""Stores the new jobs of dead letters, each exactly once even if the redrive is killed at any point and run again.

A new job is known by its message id and its content. The id is made of the letter, so that a redrive that was cut off
uses it again; any publisher can compute it and use it first. So the content counts: the subject, the headers but for
the server's, and the body.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.archive import ArchiveReader, job_sequence, republished_message
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, store_each, store_once
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, read_range
from airflow_provider_jetstream.jetstream.contract import MSG_ID, parked_filter, parked_subject
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    RedriveError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.redrive.redriven_job import (
    check_size,
    check_subject,
    content_of_copy,
    parked_headers,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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


@dataclass(slots=True)
class CopySearch:
    """The new jobs of some letters, by message id and content.

    :param now: the time of the target's server
    :param duplicate_window: how long the target's server drops a message of an id that it has stored
    :param found: the messages that were found
    :param complete: whether every message that could be one of them was seen
    """

    now: datetime | None = None
    duplicate_window: timedelta = timedelta()
    found: dict[tuple[str, str], StoredMessage] = field(default_factory=dict)
    complete: bool = False

    @property
    def ids(self) -> set[str]:
        """The message ids of what was found."""
        return {message_id for message_id, _ in self.found}


async def find_copies(
    connection: Connection, target: Target, copies: Mapping[str, Collection[str]], until: datetime
) -> CopySearch:
    """Look for new jobs in the stream that was to store them.

    :param target: the stream, and what it had stored before
    :param copies: by message id the contents, any of which it may be stored with
    :param until: no copy was stored later than this
    """
    search = CopySearch()
    try:
        info = await stream_info(connection, target.stream)
    except NotFoundError:
        return search
    if info["created"] != target.created:
        return search
    search.now = datetime.fromisoformat(info["ts"])
    search.duplicate_window = timedelta(microseconds=info["config"].get("duplicate_window", 0) / 1_000)
    following, bounds = target.last + 1, array("Q")
    async for message in read_range(connection, target.stream, ">", following, info["state"]["last_seq"]):
        bounds.extend((following, message.sequence) if message.sequence > following else ())
        following = message.sequence + 1
        if message.stored_at > until:
            break
        _note(search.found, message, copies)
    else:
        end = info["state"]["last_seq"] + 1
        bounds.extend((following, end) if end > following else ())
    missing = SequenceRanges(bounds)
    unseen = missing.count
    for pause in (0.0, _ARCHIVE_DELAY):
        if search.ids == copies.keys() or not unseen:
            break
        await sleep(pause)
        # A message that left the stream while it was read is in the archive.
        archived, unseen = await _search_archive(connection, target, info, missing, copies, until)
        search.found |= archived
    search.complete = search.ids == copies.keys() or not unseen
    return search


async def _search_archive(
    connection: Connection,
    target: Target,
    stored: Mapping[str, Any],
    missing: SequenceRanges,
    copies: Mapping[str, Collection[str]],
    until: datetime,
) -> tuple[dict[tuple[str, str], StoredMessage], int]:
    """Return the new jobs that only the archive has, and how many missing jobs it hasn't.

    :param stored: the STREAM.INFO of the target
    :param missing: the sequences that the target no longer stores
    """
    found: dict[tuple[str, str], StoredMessage] = {}
    if target.archive is None:
        return found, missing.count
    try:
        info = await stream_info(connection, target.archive)
    except NotFoundError:
        return found, missing.count
    archive = ArchiveReader.from_info(connection, info, stored)
    seen = array("Q")
    start = await archive.first_copy_from(target.last + 1)
    async for copy in read_range(connection, archive.stream, ">", start, archive.last):
        if not (sequence := job_sequence(copy)) or sequence not in missing:
            continue
        if seen and sequence <= seen[-1]:
            # A loss of power took jobs from the stream, which has given their sequences to others.
            seen = seen[: bisect_left(seen, sequence)]
            found = {key: message for key, message in found.items() if message.sequence < sequence}
        message = republished_message(copy)
        if message.time and message.stored_at > until:
            # Those after it are none of the copies.
            missing &= SequenceRanges.between(1, sequence - 1)
            break
        seen.append(sequence)
        _note(found, message, copies)
    return found, missing.count - len(seen)


def _note(
    found: dict[tuple[str, str], StoredMessage], message: StoredMessage, copies: Mapping[str, Collection[str]]
) -> None:
    message_id = message.header(MSG_ID)
    if message_id is not None and (contents := copies.get(message_id)) is not None:
        content = content_of_copy(message.subject, message.headers, message.data)
        if content in contents:
            found.setdefault((message_id, content), message)
