"""Jobs whose ends workers of any make report: on the subject that the job names, by the job's id.

A worker that knows nothing of this package publishes ``{"id": …}`` to the ``advisory`` of the job that it has finished.
Anybody may publish there, so a message counts only by subject and id together; hence a task waits for one job of each.

Before a task that waits publishes, it reserves subject and id of each such job, by a message on a subject of its own in
the events stream, which names the task's record, and the job's sequence once that is known. A reservation counts while
that record is open and its job may be stored: who publishes another job of the same id replaces it afterwards.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.publish_ack import WRONG_LAST_SEQUENCE, PubAck, store_each
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_with_position
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import document_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, TransientError
from airflow_provider_jetstream.jetstream.publishing.manifest_record import TaskRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_DIGEST_BYTES: Final = 16
# How often others reserve the same while it is read.
_ATTEMPTS: Final = 5


def reported_job(subject: str, data: bytes) -> str | None:
    """Return the digest of the job that a message on an advisory subject reports; ``None`` where it names none."""
    job_id = _id_of(_json_object(data))
    return None if job_id is None else advised_job_digest(subject, job_id)


def advised_job_digest(subject: str, job_id: str) -> str:
    """Return the digest by which a job of this id is known on its advisory subject: 22 characters."""
    digest = sha256(f"{subject} {job_id}".encode("utf-8", "surrogatepass")).digest()
    return urlsafe_b64encode(digest[:_DIGEST_BYTES]).decode().rstrip("=")


@dataclass(slots=True)
class AdvisedJobs:
    """The jobs of one call that name an advisory subject of their queue, by their digests.

    :param advisory_subjects: the queue's
    :param indexes: the position of each job in the call
    :param names: subject and id of each job, for messages
    """

    advisory_subjects: tuple[str, ...]
    indexes: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    # The digests of ids that the jobs have here, and of ids that several jobs have in their bodies only.
    _named: set[str] = field(default_factory=set)
    _ambiguous: set[str] = field(default_factory=set)

    def note(self, index: int, outgoing: OutgoingJob) -> None:
        """Note a job that names an advisory subject.

        :raises JobError: a job before it has the same id on the same advisory subject
        """
        if outgoing.scheduled:
            return
        job = outgoing.job
        body = job.body if isinstance(job.body, dict) else _json_object(job.body)
        subject, job_id = job.advisory or body.get("advisory"), outgoing.given_id or _id_of(body)
        self._add(index, subject, job_id, is_named=True)
        # A worker of another make knows the body only, and reports what stands there word for word.
        if (named := (body.get("advisory", subject), _id_of(body) or job_id)) != (subject, job_id):
            self._add(index, *named, is_named=False)

    def sequences(self, report: PublishReport) -> dict[str, int]:
        """Return the stream sequence of each job that is stored."""
        stored = {
            digest: report.sequences[index]
            for digest, index in self.indexes.items()
            if index < len(report.sequences) and digest not in self._ambiguous
        }
        return {digest: sequence for digest, sequence in stored.items() if sequence}

    def _add(self, index: int, subject: object, job_id: str | None, *, is_named: bool) -> None:
        if not isinstance(subject, str) or job_id is None or not covered_by_any(self.advisory_subjects, subject):
            return
        digest = advised_job_digest(subject, job_id)
        name = f"id {job_id!r} on advisory subject {subject}"
        first = self.indexes.get(digest, index)
        if first != index and not is_named and digest not in self._named:
            # Their jobs have ids of their own besides.
            self._ambiguous.add(digest)
        elif first != index:
            raise JobError(
                f"jobs {first} and {index} both have {name}, and a message there wouldn't say which of them has ended:"
                " give each its own id or its own subject"
            )
        self.indexes[digest] = first
        self.names[digest] = name
        if is_named:
            self._named.add(digest)


def _json_object(body: object) -> Mapping[str, Any]:
    if not isinstance(body, bytes | str):
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _id_of(body: Mapping[str, Any]) -> str | None:
    """Return the id in a body as text: some publishers write whole numbers.

    Others than whole ones have no text on which all languages agree, and are no ids of jobs elsewhere either.
    """
    value = body.get("id")
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


class _Reservation(BaseModel):
    """A task's reservation of a job's id on an advisory subject; the message's subject has a digest of both.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param key: the key of the task's record
    :param task: the task, for messages
    :param sequence: the job's; 0 where it isn't known to be stored yet
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.reserved"] = "io.airflow.jetstream.v1.reserved"
    stream: str
    created: str
    key: str
    task: str = ""
    sequence: Annotated[int, Field(strict=True, ge=0, lt=2**64)] = 0


class Reservations:
    """The reservations of one task.

    :param created: when the queue's stream was created, in the server's own text
    :param origin: the task, whose record is open
    """

    def __init__(self, connection: Connection, queue: WorkQueue, created: str, origin: Origin) -> None:
        self._connection = connection
        self._queue = queue.name
        self._events = str(queue.events.name if queue.events else "")
        task = f"{origin.dag_id}/{origin.run_id}/{origin.task_id}"
        self._own = _Reservation(stream=self._queue, created=created, key=origin.manifest_key, task=task)
        # By digests, the sequences of the task's own reservations in the events stream.
        self._stored: dict[str, int] = {}

    async def reserve(self, jobs: AdvisedJobs) -> None:
        """Reserve subjects and ids of jobs that are about to be published.

        :raises JobError: another task waits for a job with one of them
        """
        taken = await self._store(dict.fromkeys(jobs.indexes, (0, 0)))
        others = await map_concurrently(self._take_over, taken)
        for digest, other in zip(taken, others, strict=True):
            if other is None:
                continue
            await map_concurrently(self._release, list(self._stored))
            where = f"sequence {other.sequence}" if other.sequence else "not known to be stored yet"
            raise JobError(
                f"job {jobs.indexes[digest]} has {jobs.names[digest]}, as has a job of {self._queue} ({where}) that"
                f" {other.task or 'another task'} awaits, and a message there wouldn't say which of them has ended:"
                " give it another id or subject, or publish once the other has ended; if that task was killed and won't"
                f" run again, purge {self._subject(digest)} from {self._events}, which ends its reservation"
            )

    async def record(self, sequences: Mapping[str, int]) -> None:
        """Record the stream sequences of the reserved jobs, by their digests."""
        known = sequences.keys() & self._stored.keys()
        await self._store({digest: (sequences[digest], self._stored[digest]) for digest in known})

    def _subject(self, digest: str) -> str:
        return document_subject(self._queue, digest, "reserved")

    async def _store(self, jobs: Mapping[str, tuple[int, int]]) -> list[str]:
        """Store reservations of jobs, each behind its subject's last message; return those that others have taken.

        :param jobs: by their digests, the sequences of jobs and of those messages
        """
        bodies = [self._own.model_copy(update={"sequence": sequence}) for sequence, _ in jobs.values()]
        messages = [
            (self._subject(digest), body.model_dump_json().encode()) for digest, body in zip(jobs, bodies, strict=True)
        ]
        headers = [
            {"Nats-Expected-Stream": self._events, "Nats-Expected-Last-Subject-Sequence": str(after)}
            for _, after in jobs.values()
        ]
        taken: list[str] = []
        for digest, ack in zip(jobs, await store_each(self._connection, messages, headers), strict=True):
            if isinstance(ack, PubAck):
                self._stored[digest] = ack.sequence
            elif isinstance(ack, TransientError) or ack.err_code not in WRONG_LAST_SEQUENCE:
                raise ack
            else:
                taken.append(digest)
        return taken

    async def _take_over(self, digest: str) -> _Reservation | None:
        """Reserve what has a reservation; return that one instead where it is another task's, and counts."""
        for _ in range(_ATTEMPTS):
            message, position = await last_with_position(self._connection, self._events, self._subject(digest))
            other = _parse(message)
            if other and (other.key, other.created) == (self._own.key, self._own.created):
                # An earlier try's.
                self._stored[digest] = position
                return None
            if other and await self._counts(other):
                return other
            if not await self._store({digest: (0, position)}):
                return None
        raise TransientError(
            f"others store messages on {self._subject(digest)} all the time: see who does, and try again"
        )

    async def _counts(self, other: _Reservation) -> bool:
        if (other.stream, other.created) != (self._own.stream, self._own.created):
            return False
        if other.sequence and await get_message(self._connection, self._queue, other.sequence) is None:
            # It has ended, and only the other jobs of its task haven't.
            return False
        record = await TaskRecord(self._connection, self._queue, self._events, other.key).read()
        return record is not None and not record.record.closed and record.record.created == other.created

    async def _release(self, digest: str) -> None:
        # Where the stream denies purges, a reservation counts as long as the task's record is open.
        with suppress(ApiError):
            await self._connection.api(f"STREAM.PURGE.{self._events}", {"filter": self._subject(digest)})


def _parse(message: StoredMessage | None) -> _Reservation | None:
    try:
        return _Reservation.model_validate_json(message.data) if message else None
    except ValidationError:
        return None
