"""Which jobs are stored already: jobs in a manifest, jobs of a try that was cut off, and duplicates.

``duplicate: true`` says only that a message with the job's message id was stored. What is believed of it, and why:

- *The message is stored, or the archive has a copy of it*: it is the job if subject, body and headers are the job's.
- *It was stored before anything of this manifest can have been*: it is somebody else's, unless limits of the events
  stream may have dropped an earlier manifest of the same task: then the job may be the task's own, and done.
- *Nobody else can know the message id*, since this call has made it at random: it is the job.
- *The job has ended*, as a completion, a cancellation or the server's ack metric says of its sequence: it is the job.
- Otherwise it isn't known.

A message is the job if they have these in common: the subject, the id by which the job is known, the task that it
names, its other headers and its body. A message id proves nothing: it is made of names and of the job, so others can
compute it, and whoever may publish to a subject of the queue can use it first. Headers of a trace say which try has
sent a job, so they don't count; nor does the time of a schedule, which a delay gives anew at each try. So a schedule,
the message that is due and the job in the queue have the same content.
"""

from __future__ import annotations

import json
import logging
import re
from array import array
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.advisories import AckMetric, Cancelled, Completion, parse_advisory
from airflow_provider_jetstream.jetstream.archive import ArchiveReader, job_sequence, republished_message
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, read_range
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    DAG_ID,
    JOB_ID,
    MAP_INDEX,
    MSG_ID,
    RUN_ID,
    SCHEDULED_MSG_ID,
    TASK_ID,
    TRACE_PARENT,
    TRACE_STATE,
    archive_filter,
    completion_filter,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, NotFoundError, PermissionDeniedError
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.origin import DIGEST_BYTES, Origin, digest_of, short_digest
from airflow_provider_jetstream.jetstream.publishing.job import BODY_DIGEST_BYTES, stated_job_id
from airflow_provider_jetstream.jetstream.publishing.report import SCHEDULED
from airflow_provider_jetstream.jetstream.publishing.schedules import SCHEDULE, TARGET, TIME_ZONE
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.report import RepeatedJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

CONTENT_BYTES: Final = 16

_INDEX: Final = re.compile(r"-?[0-9]{1,18}")
# The server adds it to a message that is due.
_SCHEDULER: Final = "Nats-Scheduler"
_TASK: Final = (DAG_ID, RUN_ID, TASK_ID, MAP_INDEX)
# The names in lower case of headers that aren't compared as they are.
_NOT_COMPARED: Final = frozenset(
    name.lower()
    for name in (
        *(TRACE_PARENT, TRACE_STATE, "baggage", MSG_ID, SCHEDULED_MSG_ID, JOB_ID, AIRFLOW_TASK, *_TASK),
        *(SCHEDULE, TARGET, TIME_ZONE, _SCHEDULER, "Nats-Schedule-Next"),
    )
)

# The slots of an empty table.
_SMALLEST: Final = 64
_UNKNOWN_BODY = bytes(BODY_DIGEST_BYTES)
# The archive stores a copy a moment after the queue has stored the job.
_ARCHIVE_DELAY = 0.2


class _DigestTable:
    """Fixed-width values by digests, in a third of the memory that a dict takes: 40 MB for a million of 16 bytes."""

    def __init__(self, width: int) -> None:
        self._row_bytes = DIGEST_BYTES + width
        self._rows = bytearray()
        # By the first bytes of a digest: the number of its row, counted from 1; linear probing.
        self._slots = array("I", bytes(4 * _SMALLEST))

    def __len__(self) -> int:
        return len(self._rows) // self._row_bytes

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        for start in range(0, len(self._rows), self._row_bytes):
            row = self._rows[start : start + self._row_bytes]
            yield bytes(row[:DIGEST_BYTES]), bytes(row[DIGEST_BYTES:])

    def position(self, digest: bytes) -> int | None:
        """Return the position of a digest in the order of adding; ``None`` for an unknown digest."""
        row = self._slots[self._slot(digest)]
        return row - 1 if row else None

    def get(self, digest: bytes) -> bytes | None:
        """Return the value of a digest; ``None`` where it is unknown."""
        end = self._slots[self._slot(digest)] * self._row_bytes
        return bytes(self._rows[end - self._row_bytes + DIGEST_BYTES : end]) if end else None

    def set(self, digest: bytes, value: bytes) -> None:
        """Set the value of a digest."""
        slot = self._slot(digest)
        if end := self._slots[slot] * self._row_bytes:
            self._rows[end - self._row_bytes + DIGEST_BYTES : end] = value
            return
        self._rows += digest + value
        self._slots[slot] = count = len(self)
        if 2 * count > len(self._slots):
            self._slots = array("I", bytes(4 * 4 * len(self._slots)))
            for row in range(count):
                start = row * self._row_bytes
                self._slots[self._slot(self._rows[start : start + DIGEST_BYTES])] = row + 1

    def _slot(self, digest: bytes | bytearray) -> int:
        """Return the slot of a digest, or the one that it gets."""
        slots, rows, row_bytes = self._slots, self._rows, self._row_bytes
        mask = len(slots) - 1
        slot = int.from_bytes(digest[:8]) & mask
        while row := slots[slot]:
            start = (row - 1) * row_bytes
            if rows[start : start + DIGEST_BYTES] == digest:
                break
            slot = (slot + 1) & mask
        return slot


def _stored_value(value: bytes) -> tuple[bytes, int]:
    """Return body digest and sequence."""
    return value[:BODY_DIGEST_BYTES], int.from_bytes(value[BODY_DIGEST_BYTES:])


class StoredJobs:
    """The jobs of a task that are known to be stored.

    :ivar salts: what makes other message ids of jobs whose own ids somebody else had taken
    :ivar of_any_task: whether other tasks publish the same jobs, as with an idempotency key
    :ivar task_key: the key in the task's jobs; ``None`` where other jobs have it too
    """

    def __init__(self) -> None:
        self.salts: Sequence[str] = ()
        self.of_any_task = False
        self.task_key: str | None = None
        # By the digests of message ids: body digest and sequence of the jobs in the task's manifest; those asked for.
        self._own = _DigestTable(BODY_DIGEST_BYTES + 8)
        self._named = bytearray()
        # What a search has found. By the digests of message id and content: the sequence, whoever has published it.
        self._found = _DigestTable(8)
        # Those of the message ids; and by those of jobs that have ended, the sequence.
        self._message_ids = _DigestTable(0)
        self._ended = _DigestTable(8)
        # By the digests of message ids, body digest and sequence of those that name the task, in another list too.
        self._named_task = _DigestTable(BODY_DIGEST_BYTES + 8)
        # With an idempotency key, the same by the digests of message id and stated id: no message names the key.
        self._same_id = _DigestTable(BODY_DIGEST_BYTES + 8)
        self._listed: set[bytes] = set()
        self._unverified: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._own)

    @property
    def is_empty(self) -> bool:
        """Whether no job is known to be stored."""
        return not (len(self._own) or len(self._message_ids) or len(self._ended) or self._unverified)

    def add(self, digest: bytes, body_digest: bytes, sequence: int) -> bool:
        """Add a job of the task's manifest, and return whether it is new."""
        is_new = self._own.position(digest) is None
        self._own.set(digest, body_digest[:BODY_DIGEST_BYTES] + sequence.to_bytes(8))
        self._unverified.pop(digest, None)
        return is_new

    def add_unverified(self, digest: bytes, sequence: int) -> None:
        """Add a job whose message id is taken by a message that may or may not be the job."""
        if self._own.position(digest) is None:
            self._unverified[digest] = sequence

    def add_message(self, message: StoredMessage, sequence: int) -> None:
        """Add a message that is stored, whoever has published it; the sequence of a schedule is marked."""
        digest = digest_of(message.header(SCHEDULED_MSG_ID) or message.header(MSG_ID) or "")
        if digest is None:
            return
        value = sha256(message.data).digest()[:BODY_DIGEST_BYTES] + sequence.to_bytes(8)
        content = content_of_message(message, of_any_task=self.of_any_task)
        self._found.set(_both(digest, content), sequence.to_bytes(8))
        self._message_ids.set(digest, b"")
        if self.of_any_task and (stated := stated_job_id(message.headers, message.data)):
            self._same_id.set(_both(digest, stated.encode()), value)
        if self.task_key and message.header(AIRFLOW_TASK) == self.task_key:
            self._named_task.set(digest, value)

    def add_ended(self, message_id: str, sequence: int) -> None:
        """Add a job that has ended, by its message id; a message that is stored counts in its place."""
        if digest := digest_of(message_id):
            self._ended.set(digest, sequence.to_bytes(8))

    def check(self, index: int, job: OutgoingJob) -> None:
        """Refuse a job whose given id is stored with another body.

        :raises JobError: it is
        """
        if job.given_id is None or self.is_empty:
            return
        known = self._value_of(job) or self._named_as(job)
        if known is None:
            return
        body_digest, sequence = known
        found = job.body_digest
        if body_digest not in (_UNKNOWN_BODY, found):
            raise JobError(
                f"job {index} has the id {job.given_id!r}, under which this task has stored another body (sequence"
                f" {sequence & ~SCHEDULED}: the SHA-256 of its body begins with {body_digest.hex()}, that of this one"
                f" with {found.hex()}): expected the same job when a task is tried again; give the changed job another"
                " id, or clear the task once its jobs have ended, which publishes all of them anew"
            )

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job, which is listed; ``None`` where it isn't known to be stored.

        :raises JobError: its given id is stored with another body
        """
        if self.is_empty:
            return None
        self.check(index, job)
        if len(self._message_ids) or len(self._ended):
            self._listed.update(self._digests(job))
        if (digest := digest_of(job.message_id)) and (position := self._own.position(digest)) is not None:
            self._mark(position)
        known = self._value_of(job)
        return known[1] if known else None

    def unverified(self, job: OutgoingJob) -> int | None:
        """Return the sequence of the message that may or may not be a job; ``None`` without one."""
        digest = digest_of(job.message_id) if self._unverified else None
        return self._unverified.get(digest) if digest else None

    def forget_unverified(self) -> None:
        """Send jobs whose storing isn't known once more: a person has cleared the task."""
        self._unverified.clear()

    def not_listed(self) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield message id, body digest and sequence of the task's messages that the list doesn't have."""
        for digest, value in self._named_task:
            if digest not in self._listed and self._own.position(digest) is None:
                yield digest, *_stored_value(value)

    @property
    def are_named(self) -> bool:
        """Whether each message says whether it is one of these jobs."""
        return self.task_key is not None and not self.of_any_task

    @property
    def may_have_others(self) -> bool:
        """Whether a search found a possible job of the task that isn't listed, so that a retry searches again."""
        if self.are_named:
            return next(self.not_listed(), None) is not None
        found = (digest for table in (self._message_ids, self._ended) for digest, _ in table)
        return any(digest not in self._listed and self._own.position(digest) is None for digest in found)

    def is_recorded(self, job: OutgoingJob) -> bool:
        """Return whether a job is in the task's manifest."""
        digest = digest_of(job.message_id) if len(self._own) else None
        return digest is not None and self._own.position(digest) is not None

    def extra(self) -> array[int]:
        """Return the sequences of jobs of the task that :meth:`sequence_of` wasn't called for, without schedules."""
        self._mark()
        unnamed = (
            _stored_value(value)[1] for (_, value), named in zip(self._own, self._named, strict=False) if not named
        )
        return array("Q", (sequence for sequence in unnamed if sequence < SCHEDULED))

    def _mark(self, position: int | None = None) -> None:
        self._named.extend(bytes(max(0, len(self._own) - len(self._named))))
        if position is not None:
            self._named[position] = 1

    def _value_of(self, job: OutgoingJob) -> tuple[bytes, int] | None:
        """Return body digest and sequence of a job that is stored."""
        digest = digest_of(job.message_id)
        if digest and (value := self._own.get(digest)):
            return _stored_value(value)
        if len(self._found):
            content = content_of_job(job, of_any_task=self.of_any_task)
            for each in self._digests(job):
                if value := self._found.get(_both(each, content)):
                    return job.body_digest, int.from_bytes(value)
        if digest and self._message_ids.get(digest) is None and (value := self._ended.get(digest)):
            return _UNKNOWN_BODY, int.from_bytes(value)
        return None

    def _digests(self, job: OutgoingJob) -> Iterator[bytes]:
        """Yield the message ids that a job may be stored under."""
        for message_id in (job.message_id, *(salted_id(salt, job.message_id) for salt in self.salts)):
            if digest := digest_of(message_id):
                yield digest

    def _named_as(self, job: OutgoingJob) -> tuple[bytes, int] | None:
        """Return body digest and sequence of what the task, or the key, seems to have stored under a given id."""
        table, digests = self._named_task, self._digests(job)
        if self.of_any_task:
            stated = (stated_job_id(job.headers.items(), job.body or b"") or "").encode()
            table, digests = self._same_id, (_both(digest, stated) for digest in digests)
        return next(map(_stored_value, filter(None, map(table.get, digests))), None)


def salted_id(salt: str, message_id: str) -> str:
    """Return the message id of a job whose own id somebody else has taken."""
    return short_digest(salt, message_id)


def _both(digest: bytes, content: bytes) -> bytes:
    return sha256(digest + content).digest()[: len(digest)]


async def find_stored_jobs(
    connection: Connection, queue: WorkQueue, stored: StoredJobs, *, queue_from: int, events_from: int
) -> None:
    """Search the queue and its companions for jobs, and add them to the known ones.

    :param stored: gets jobs of other publishers, too: a job counts only where the message is the job
    :param queue_from: the first sequence of the queue that counts
    :param events_from: the first sequence of the events stream that counts
    """
    # In the order in which a job moves, so that none is missed.
    if queue.schedules:
        async for schedule in _read(connection, queue.schedules.name, ">", 1):
            stored.add_message(schedule, schedule.sequence | SCHEDULED)
    info = await stream_info(connection, queue.name) if queue.archive else None
    if info and (archive := await ArchiveReader.open(connection, queue, info)):
        start = await archive.first_copy_from(queue_from)
        async for copy in _read(connection, archive.stream, archive_filter(queue.name), start):
            if (sequence := job_sequence(copy)) >= queue_from:
                stored.add_message(republished_message(copy), sequence)
    async for job in _read(connection, queue.name, ">", queue_from):
        stored.add_message(job, job.sequence)
    if queue.events:
        async for message in _read(connection, queue.events.name, completion_filter(queue.name), events_from):
            event = event_of(message, queue.name)
            if isinstance(event, Completion | Cancelled) and event.job_id and event.stream_seq >= queue_from:
                # Only a message id counts: an id that the user set may be another publisher's too.
                stored.add_ended(event.job_id, event.stream_seq)


async def _read(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    # A stream that doesn't exist holds none of the task's jobs.
    with suppress(NotFoundError):
        async for message in read_range(connection, stream, subject, start):
            yield message


def is_stored(
    repeated: RepeatedJob,
    message: StoredMessage | None,
    ended: Collection[int],
    *,
    first: int = 0,
    of_any_task: bool = False,
    is_secret: bool = False,
) -> bool | None:
    """Return whether the message that has a job's message id is the job; ``None`` where that can't be known.

    :param message: as it is stored, or as the archive has it; ``None`` where it is gone
    :param ended: the sequences of jobs that have ended
    :param first: the first sequence that a job of this publication may have; 0 where that isn't known
    :param of_any_task: whether other tasks publish the same jobs, as with an idempotency key
    :param is_secret: whether message ids of jobs without given ids are random
    """
    job = repeated.job
    if message is not None:
        if job.job.delay is None and job.headers.get(SCHEDULE) != message.header(SCHEDULE):
            return False
        return content_of_job(job, of_any_task=of_any_task) == content_of_message(message, of_any_task=of_any_task)
    # Sequences of schedules are of another stream; one that is gone has fired, or was cancelled.
    if not job.scheduled and repeated.sequence < first:
        return False
    is_done = not job.scheduled and repeated.sequence in ended
    return True if is_done or (is_secret and job.given_id is None) else None


async def read_messages(
    connection: Connection, queue: WorkQueue | None, created: str | None, repeated: Sequence[RepeatedJob | PubAck]
) -> list[StoredMessage | None]:
    """Read the messages that have the message ids of jobs, where stream or archive have them.

    :param created: when the queue's stream was created, where that is known
    """
    denied: set[str] = set()

    async def stored(job: RepeatedJob | PubAck) -> StoredMessage | None:
        with _unless_denied(denied):
            return await get_message(connection, job.stream, job.sequence)
        return None

    messages = await map_concurrently(stored, repeated)
    if queue is not None and queue.archive is not None and created is not None:
        with _unless_denied(denied):
            for pause in (0.0, _ARCHIVE_DELAY) if None in messages else ():
                await sleep(pause)
                archive = await ArchiveReader.open(connection, queue, await stream_info(connection, queue.name))
                for place, job in enumerate(repeated):
                    if archive and messages[place] is None and job.stream == queue.name:
                        messages[place] = await archive.find(job.sequence)
                if archive is None or None not in messages:
                    break
    for error in sorted(denied):
        log.info("What has the message ids of jobs can't be read: %s", error)
    return messages


async def may_have_dropped(connection: Connection, events: str, queue: Mapping[str, Any]) -> bool:
    """Return whether limits of the events stream may have dropped the manifest of jobs whose ids the queue knows.

    :param queue: the queue's STREAM.INFO
    """
    try:
        info = await stream_info(connection, events)
    except (NotFoundError, PermissionDeniedError, ApiError):
        return True
    config, state = info["config"], info["state"]
    drops = config.get("discard") != "new" and any(config.get(limit, -1) > 0 for limit in ("max_msgs", "max_bytes"))
    if not drops or state["first_seq"] <= 1:
        return False
    window = timedelta(microseconds=queue["config"]["duplicate_window"] / 1_000)
    return datetime.fromisoformat(info["ts"]) - datetime.fromisoformat(state["first_ts"]) < window


async def ended_jobs(
    connection: Connection, queue: WorkQueue | None, created: str | None, sequences: set[int], events_from: int
) -> set[int]:
    """Return which of some jobs have ended well, as the events stream says.

    :param created: when the queue's stream was created: events about an earlier stream of its name don't count
    :param events_from: the first sequence of the events stream that counts
    """
    ended: set[int] = set()
    if queue is None or queue.events is None or created is None or not sequences:
        return ended
    since = datetime.fromisoformat(created)
    denied: set[str] = set()
    with _unless_denied(denied):
        for subject in (completion_filter(queue.name), ack_metric_filter(queue.name)):
            async for message in read_range(connection, queue.events.name, subject, events_from):
                event = parse_advisory(message.data) if message.stored_at >= since else None
                if isinstance(event, AckMetric) and not event.is_of_server(queue.name, connection.domain):
                    continue
                if isinstance(event, Completion | Cancelled | AckMetric) and event.stream == queue.name:
                    ended |= {event.stream_seq} & sequences
    for error in denied:
        log.info("Which jobs have ended can't be read: %s", error)
    return ended


@contextmanager
def _unless_denied(denied: set[str]) -> Iterator[None]:
    """Go on after the block where the user may not read something, or its stream is gone: then it isn't known.

    :param denied: the texts of the denials are added to it
    """
    try:
        yield
    except PermissionDeniedError as error:
        denied.add(str(error))
    except (NotFoundError, ApiError):
        pass


def content_of_job(job: OutgoingJob, *, of_any_task: bool = False) -> bytes:
    """Return the digest of what tells a job from others.

    :param of_any_task: whether another task may have published it, as with an idempotency key
    """
    return _content(job.subject, tuple(job.headers.items()), job.body or b"", of_any_task=of_any_task)


def content_of_message(message: StoredMessage, *, of_any_task: bool = False) -> bytes:
    """Return for a stored message what :func:`content_of_job` returns for the job that it is."""
    return _content(message.subject, message.headers, message.data, of_any_task=of_any_task)


def named_identity(headers: Iterable[tuple[str, str]], body: bytes) -> tuple[str | None, str | None]:
    """Return the id by which a job is known, and the key of the task that it names."""
    pairs = tuple(headers)
    return stated_job_id(pairs, body), _task_key(pairs)


def _content(subject: str, headers: tuple[tuple[str, str], ...], body: bytes, *, of_any_task: bool) -> bytes:
    job_id, task = named_identity(headers, body)
    # The server adds to a schedule that it replaces another one on its subject.
    added = ("Nats-Rollup", "sub") if first(headers, SCHEDULE) else None
    compared = (pair for pair in headers if pair[0].lower() not in _NOT_COMPARED and pair != added)
    # Readers leave white space around a value out.
    others = sorted([name, value.strip()] for name, value in compared)
    target = first(headers, TARGET) or (subject if first(headers, _SCHEDULER) else None)
    # Behind "due" and the name of the queue.
    own_subject = subject if target is None else target.split(".", 2)[-1]
    fields = [own_subject, job_id, None if of_any_task else task, others]
    return sha256(json.dumps(fields).encode() + b"\n" + body).digest()[:CONTENT_BYTES]


def _task_key(headers: tuple[tuple[str, str], ...]) -> str | None:
    if (key := first(headers, AIRFLOW_TASK)) is not None or (dag_id := first(headers, DAG_ID)) is None:
        return key
    run_id, task_id, index = (first(headers, name) or "" for name in _TASK[1:])
    return Origin(dag_id, run_id, task_id, int(index)).key if _INDEX.fullmatch(index) else None
