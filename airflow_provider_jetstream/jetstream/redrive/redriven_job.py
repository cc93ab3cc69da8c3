"""Builds what a redrive stores, the new jobs of dead letters and parked records, within what the streams take.

A stream that discards its oldest messages drops live jobs, or other letters, for what a redrive stores, and says
nothing. The room is computed from what will be stored, on the stream's state just before: what somebody else stores at
the same moment isn't counted.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow_provider_jetstream.jetstream.client.headers import Headers, is_servers, wire_size
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.streams import next_message
from airflow_provider_jetstream.jetstream.client.wire import encode_subject
from airflow_provider_jetstream.jetstream.client.wire_text import is_encodable, readable_text
from airflow_provider_jetstream.jetstream.contract import (
    JOB_ID,
    MSG_ID,
    REDRIVE_CONSUMER,
    REDRIVE_COUNT,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
    parked_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.record import record_headers
from airflow_provider_jetstream.jetstream.errors import CopyTooLargeError, RedriveError, RedriveRequestError, WireError
from airflow_provider_jetstream.jetstream.publishing.job import (
    body_field,
    header_job_id,
    redrive_message_id,
    stated_job_id,
)
from airflow_provider_jetstream.jetstream.queue.message_size import OPTIONAL_HEADERS
from airflow_provider_jetstream.jetstream.queue.stream_config import (
    StreamRoom,
    eviction_limits,
    per_subject_limit,
    stored_size,
)
from airflow_provider_jetstream.jetstream.redrive.repair import ORIGIN_HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.headers import Pairs
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.redrive.repair import Content


# Why each letter has no room, by its sequence.
NoRoom: TypeAlias = dict[int, str]

_ADVICE = "raise the limit, declare discard new, or redrive all letters in place; original kept"


class CopyRoom:
    """The free room of each stream in which a redrive stores.

    :param config: the configuration on the server of the queue that gets the new jobs
    :param letters_config: the dead letter queue's, if it is known
    """

    def __init__(
        self, connection: Connection, config: Mapping[str, Any], letters_config: Mapping[str, Any] | None
    ) -> None:
        self._connection = connection
        self._config = config
        self._letters_config = letters_config or {}

    async def for_copies(self, jobs: Sequence[RedrivenJob]) -> NoRoom:
        """Return the copies that have no room now; once one hasn't, those after it wait as well.

        :param jobs: the copies in the order in which they are stored
        """
        no_room: NoRoom = {}
        queue = self._config["name"]
        if jobs and eviction_limits(self._config):
            room = StreamRoom.of(await stream_info(self._connection, queue))
            problem = ""
            for job in jobs:
                size = _copy_size(job)
                problem = problem or room.problem(1, size)
                if problem:
                    no_room[job.letter.sequence] = _no_room(queue, job.letter, problem)
                else:
                    room.take(1, size)
        if jobs and (limit := per_subject_limit(self._config)):
            no_room |= await self._beyond_subjects(jobs, limit)
        return no_room

    async def for_parked(self, letters: Sequence[DeadLetter], why: Mapping[int, str]) -> NoRoom:
        """Return the letters that can't be parked now.

        :param why: the reasons with which they are to be parked
        """
        if not letters or not self._letters_config:
            return {}
        name = self._letters_config["name"]
        if self._letters_config["retention"] == "interest":
            problem = (
                f"expected limits or workqueue retention of {name} for a parked letter, found interest: it stores"
                " nothing that no consumer takes; original kept"
            )
            return {letter.sequence: problem for letter in letters}
        if not eviction_limits(self._letters_config):
            return {}
        room = StreamRoom.of(await stream_info(self._connection, name))
        no_room: NoRoom = {}
        for letter in letters:
            size = _parked_size(letter, why[letter.sequence])
            if problem := room.problem(1, size):
                no_room[letter.sequence] = (
                    f"{name} has no room for the parked letter {letter.sequence} ({problem}): it would drop its oldest"
                    " entries for it; raise the limit; original kept"
                )
            else:
                room.take(1, size)
        return no_room

    async def _beyond_subjects(self, jobs: Sequence[RedrivenJob], limit: int) -> NoRoom:
        no_room: NoRoom = {}
        stored: Counter[str] = Counter()
        queue = self._config["name"]
        for subject in dict.fromkeys(job.subject for job in jobs):
            async for name, count in subject_counts(self._connection, queue, subject):
                stored[name] += count
        for job in jobs:
            letter, count = job.letter, stored[job.subject]
            if job.subject != (shown := readable_text(job.subject)):
                # JSON has no such subject, so the server can't be asked for it.
                problem = f"max_msgs_per_subject {limit}, and {shown} isn't UTF-8: its jobs can't be counted"
                no_room[letter.sequence] = _no_room(queue, letter, problem)
            elif count < limit or (count == limit and await self._is_oldest(letter, job.subject)):
                # The next copy of the subject would drop another job.
                stored[job.subject] += 1
            else:
                problem = f"max_msgs_per_subject {limit}, {count} on {job.subject}, 1 needed"
                no_room[letter.sequence] = _no_room(queue, letter, problem)
        return no_room

    async def _is_oldest(self, letter: DeadLetter, subject: str) -> bool:
        """Return whether the job that a copy on a subject would drop is the letter's own original."""
        oldest = await next_message(self._connection, self._config["name"], 1, subject)
        is_stored_there = letter.source == BodySource.QUEUE and letter.death.stream == self._config["name"]
        return is_stored_there and oldest is not None and oldest.sequence == letter.sequence


def _copy_size(job: RedrivenJob) -> int:
    return stored_size(job.subject, job.headers, job.content.body)


def take_room(room: StreamRoom, job: RedrivenJob) -> None:
    """Count a copy in a queue's room, and its original as removed.

    :raises RedriveError: the queue would drop a job for it
    """
    letter = job.letter
    size = _copy_size(job)
    if problem := room.problem(1, size):
        raise RedriveError(_no_room(job.stream, letter, problem))
    room.take(1, size)
    if letter.source == BodySource.QUEUE and letter.death.stream == job.stream:
        room.take(-1, -stored_size(letter.subject, Headers(letter.headers), letter.body))


def require_room_for_all(
    snapshot: QueueSnapshot, letters: int, largest: int, dead_letter_queue: str | None = None
) -> None:
    """Refuse a redrive by several processes where copies may not fit: no process knows what the others store.

    :param letters: how many copies there may be
    :param largest: the largest message that the server accepts
    :param dead_letter_queue: the dead letter queue, where letters may be parked
    :raises RedriveRequestError: the queue might drop jobs for the copies, or the dead letter queue entries
    """
    config = snapshot.config
    if limit := per_subject_limit(config):
        raise RedriveRequestError(
            f"expected a queue without max_msgs_per_subject for a bulk redrive, found {limit} on {snapshot.queue}:"
            " copies would drop jobs of their subjects; redrive without Spark"
        )
    rooms = [StreamRoom(config, snapshot.state["messages"], snapshot.state["bytes"])]
    if dead_letter_queue and (info := snapshot.companions.get(dead_letter_queue)):
        rooms.append(StreamRoom.of(info))
    for room in rooms:
        limit = room.config.get("max_msg_size", -1)
        size = limit if 0 < limit < largest else largest
        if problem := room.problem(letters, letters * size):
            raise RedriveRequestError(
                f"expected room for the copies of up to {letters} letters, found otherwise ({problem}):"
                f" {room.config['name']} would drop its oldest messages for them; redrive without Spark, which stores"
                " as many as fit, or raise the limit"
            )


def _no_room(queue: str, letter: DeadLetter, problem: str) -> str:
    return f"{queue} has no room for the copy of {letter.sequence} ({problem}): it would drop live jobs; {_ADVICE}"


def _parked_size(letter: DeadLetter, why: str) -> int:
    death = letter.death
    headers = parked_headers(letter, why)
    return stored_size(parked_subject(death.stream, death.consumer, death.sequence), headers, letter.body)


_NO_HEADERS_SIZE = wire_size(Headers(()))
_DIGEST_BYTES: Final = 12


def content_of_copy(subject: str, headers: Iterable[tuple[str, str]], body: bytes) -> str:
    """Return the digest of a new job, or of a stored message that may be one: 16 letters."""
    # Readers leave white space around a value out.
    own = sorted([name, value.strip()] for name, value in headers if not is_servers(name))
    # Of a subject that isn't UTF-8, a reader may see only a part.
    head = json.dumps([subject if subject.isascii() else "", own])
    return urlsafe_b64encode(sha256(head.encode() + b"\n" + body).digest()[:_DIGEST_BYTES]).decode()


@dataclass(frozen=True, slots=True)
class RedrivenJob:
    """The new job of a letter, ready to be stored.

    :param subject: the new job's subject
    :param content: its body and own headers
    :param headers: all its headers
    :param stream: the stream that is to store it
    :param left_out: the headers for which there was no room
    :param after: without an archive, a job of a higher sequence under its message id counts as itself where that job is
        gone
    :param begun: the contents of new jobs that earlier redrives may have stored for the letter
    """

    letter: DeadLetter
    subject: str
    content: Content
    headers: Headers
    stream: str
    left_out: Pairs = ()
    after: int = 0
    begun: frozenset[str] = frozenset()

    @property
    def own_content(self) -> str:
        """The digest of what is stored."""
        return content_of_copy(self.subject, self.headers.items(), self.content.body)

    def with_id(self, message_id: str) -> RedrivenJob:
        """Return the job with another message id."""
        if self.headers[MSG_ID] == message_id:
            return self
        pairs = (pair if pair[0] != MSG_ID else (MSG_ID, message_id) for pair in self.headers.items())
        return replace(self, headers=Headers(pairs))


@dataclass(frozen=True, slots=True)
class CopyLimit:
    """The largest new job in bytes, its headers included.

    :param stream: the stream that is to store it
    :param what: the limit's name, for messages
    """

    stream: str
    what: str
    size: int

    @classmethod
    def of(cls, connection: Connection, config: Mapping[str, Any]) -> CopyLimit:
        """Return the limit of a redrive.

        :param config: the configuration on the server of the queue that gets the new jobs
        """
        largest, what = connection.max_payload, "the server's max_payload"
        if 0 < (max_msg_size := config.get("max_msg_size") or -1) < largest:
            largest, what = max_msg_size, f"max_msg_size of {config['name']}"
        return cls(config["name"], what, largest)


def redriven_job(letter: DeadLetter, content: Content, subject: str | None, limit: CopyLimit) -> RedrivenJob:
    """Build a letter's new job, with an id that only this letter has.

    The server's own headers are left out: an expectation, a time to live or the id of the first publication would make
    the server refuse or drop the job. Headers that name the letter are left out where they have no room.

    :param content: body and headers of the new job
    :param subject: its subject unless its repair names one; the letter's own where absent
    :param limit: the largest size
    :raises CopyTooLargeError: it is too large
    :raises RedriveError: it can't be sent
    """
    headers = _headers(letter, content)
    size = _size(letter, content.body, headers)
    target = content.subject or subject or letter.subject
    if letter.foreign_subject and not (content.subject or subject):
        raise RedriveError(
            f"expected a subject that consumer {letter.death.consumer} takes, found {target}: a worker of one consumer"
            " can't make a job of another one; give the redrive the subject that is right; original kept"
        )
    check_subject(letter, target)
    try:
        encode_subject(target)
    except WireError as error:
        raise RedriveError(f"{error}: give the redrive a subject; original kept") from None
    if (left := _without_optional(headers, size - limit.size)) is not None:
        kept = left.items()
        left_out = () if left is headers else tuple(pair for pair in headers.items() if pair not in kept)
        return RedrivenJob(letter, target, content, left, limit.stream, left_out)
    least = size - sum(_line_size(pair) for pair in headers.items() if pair[0] in OPTIONAL_HEADERS)
    raise CopyTooLargeError(
        f"expected a copy of at most {limit.size} bytes ({limit.what}), found"
        f" {least} for job {letter.sequence}, {len(content.body)} of them its body: raise that limit, repair the body,"
        " or redrive all letters in place; original kept"
    )


def _headers(letter: DeadLetter, content: Content) -> Headers:
    death, redrives = letter.death, letter.redrives + 1
    sequence, consumer = str(death.sequence), death.consumer or ""
    first_id = _first_id(letter, content)
    message_id = redrive_message_id(death.stream, death.sequence, letter.time, redrives)
    added = (
        (REDRIVE_COUNT, str(redrives)),
        (REDRIVE_STREAM, death.stream),
        (REDRIVE_SEQUENCE, sequence),
        (REDRIVE_CONSUMER, consumer),
        *first_id,
        (MSG_ID, message_id),
    )
    names = ORIGIN_HEADERS.union(name for name, _ in added)
    return Headers([*(pair for pair in content.headers if pair[0] not in names), *added])


def _first_id(letter: DeadLetter, content: Content) -> Pairs:
    """Return the `Job-Id` header that gives a new job the original's id, where nothing else in it does."""
    own = stated_job_id(letter.headers, letter.body)
    if own is None or header_job_id(letter.headers) or header_job_id(content.headers):
        return ()
    # Text of a body may have what no header can.
    fits = own.isprintable() and own == own.strip()
    return ((JOB_ID, own),) if fits and own != body_field(content.body, "id") else ()


def _without_optional(headers: Headers, excess: int) -> Headers | None:
    """Return headers without as many optional ones as are too much; ``None`` where leaving out all isn't enough."""
    if excess <= 0:
        return headers
    left = list(headers.items())
    for name in OPTIONAL_HEADERS:
        if excess <= 0:
            break
        excess -= sum(_line_size(pair) for pair in left if pair[0] == name)
        left = [pair for pair in left if pair[0] != name]
    return Headers(left) if excess <= 0 else None


def _line_size(pair: tuple[str, str]) -> int:
    return wire_size(Headers([pair])) - _NO_HEADERS_SIZE


def failure_text(letter: DeadLetter, error: Exception) -> str:
    """Return why a letter can't be redriven, and where what it was to be redriven with stands.

    Of a job that is gone its record may be all that is left, and any worker of the consumer may have written that.
    """
    if letter.source != BodySource.COPY:
        return str(error)
    numbers = ", ".join(map(str, letter.entries))
    return (
        f"{error}; the job is gone, and its subject (header Dead-Letter-Subject), headers and body are those that its"
        f" record states, one of the messages {numbers} of the dead letter queue: repair what the record has wrong"
    )


def check_subject(letter: DeadLetter, subject: str) -> None:
    """Refuse a subject of which some bytes aren't known.

    :raises RedriveError: the subject can't be sent
    """
    if not is_encodable(subject):
        raise RedriveError(
            f"expected the exact subject of job {letter.sequence}, found {readable_text(subject)}: its bytes that"
            " aren't UTF-8 are shown by direct gets and by the archive only: set allow_direct on the queue (nats-server"
            " 2.11 or newer), give the redrive a subject, or redrive all letters in place; original kept"
        )


def check_size(letter: DeadLetter, body: bytes, headers: Headers, limit: int) -> None:
    """Refuse what can't be sent: the server would close the connection.

    :param limit: the largest size in bytes
    :raises RedriveError: body and headers can't be sent
    """
    if (size := _size(letter, body, headers)) > limit:
        raise RedriveError(
            f"expected a copy of at most {limit} bytes, found {size} for job {letter.sequence} with the headers that"
            " describe its death: raise the server's max_payload; original kept"
        )


def _size(letter: DeadLetter, body: bytes, headers: Headers) -> int:
    try:
        return len(body) + wire_size(headers)
    except UnicodeEncodeError:
        raise RedriveError(
            f"expected headers that can be sent, found characters that no bytes stand for on job {letter.sequence}: it"
            " can't be copied unchanged; repair its headers; original kept"
        ) from None


def parked_headers(letter: DeadLetter, why: str) -> Headers:
    """Build the headers of a letter's parked record.

    :param why: the reason
    """
    return record_headers(
        letter.death,
        subject=letter.subject,
        time=letter.time,
        headers=letter.headers,
        writer="park",
        parked=why,
        origin=letter.origin,
    )
