"""Jobs whose ends workers of any make report: on the subject that the job names, by the job's id.

A worker that knows nothing of this package publishes ``{"id": …}`` to the ``advisory`` of the job that it has finished.
Anybody may publish there, so a message counts only by subject and id together; hence a task waits for one job of each.

Which awaited jobs those are is stored as the task's reservation beside its record, so that a triggerer, which has only
the task's key, can find each job by subject and id. It holds digests of these, and the jobs' sequences once they are
stored; where they are many, the others are a document, to whose parts it refers. While a task waits, its reservation
keeps other tasks from waiting for a job of the same id on the same subject. It is removed once the record is closed.
"""

from __future__ import annotations

import json
import logging
from base64 import urlsafe_b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import document_subject, manifest_filter
from airflow_provider_jetstream.jetstream.documents import DocumentName, DocumentParts, DocumentWriter, read_parts
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, NotFoundError
from airflow_provider_jetstream.jetstream.publishing.job_reader import read_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.batch import Batch
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

_DIGEST_BYTES = 16
# The kind in the subject of reservations.
_KIND = "reserved"
# A digest, a sequence of up to 20 digits and the punctuation.
_ROW_BYTES = 50
# The other fields of a reservation, its headers, and what the server adds to a message.
_RESERVE = 2048


def reported_job(subject: str, data: bytes) -> str | None:
    """Return the digest of the job that a message on an advisory subject reports; ``None`` where it names none."""
    job_id = _id_of(_json_object(data))
    return None if job_id is None else advised_job_digest(subject, job_id)


def advised_job_digest(subject: str, job_id: str) -> str:
    """Return the digest by which a job of this id is known on its advisory subject.

    :return: 22 characters, however long subject and id are
    """
    digest = sha256(f"{subject} {job_id}".encode("utf-8", "surrogatepass")).digest()
    return urlsafe_b64encode(digest[:_DIGEST_BYTES]).decode().rstrip("=")


@dataclass(slots=True)
class AdvisedJobs:
    """The jobs of one call that name an advisory subject of their queue, by their digests.

    :param advisory_subjects: the queue's
    :param indexes: the position of each job among those of the call
    :param names: subject and id of each job, for messages
    """

    advisory_subjects: tuple[str, ...]
    indexes: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    # Those of the ids that the jobs have here, and those that several jobs have in their bodies only.
    _named: set[str] = field(default_factory=set)
    _ambiguous: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, queue: WorkQueue | None) -> AdvisedJobs:
        """Return an empty collection for a queue."""
        return cls(queue.advisory_subjects if queue else ())

    def note(self, index: int, outgoing: OutgoingJob) -> None:
        """Note a job that names an advisory subject.

        :raises JobError: a job before it has the same id on the same advisory subject
        """
        if not outgoing.scheduled:
            self._note(index, outgoing)

    def sequences(self, report: PublishReport) -> dict[str, int]:
        """Return the stream sequence of each job that is stored."""
        stored = {
            digest: report.sequences[index]
            for digest, index in self.indexes.items()
            if index < len(report.sequences) and digest not in self._ambiguous
        }
        return {digest: sequence for digest, sequence in stored.items() if sequence}

    def _note(self, index: int, outgoing: OutgoingJob) -> None:
        job = outgoing.job
        body = job.body if isinstance(job.body, dict) else _json_object(job.body)
        subject, job_id = job.advisory or body.get("advisory"), outgoing.given_id or _id_of(body)
        self._add(index, subject, job_id, is_named=True)
        # A worker of another make knows the body only, and reports what stands there word for word.
        if (named := (body.get("advisory", subject), _id_of(body) or job_id)) != (subject, job_id):
            self._add(index, *named, is_named=False)

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


_Sequence = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
_ROWS: TypeAdapter[list[tuple[str, _Sequence]]] = TypeAdapter(list[tuple[str, _Sequence]])


class Reservation(BaseModel):
    """The awaited jobs of a task.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param task: the publishing task, for messages
    :param jobs: stream sequences by the jobs' digests; 0 for a job that isn't known to be stored yet
    :param parts: references to the parts of the document that has the others
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.reserved"] = "io.airflow.jetstream.v1.reserved"
    stream: str
    created: str
    task: str = ""
    jobs: dict[str, _Sequence]
    parts: DocumentParts = []


class Reservations:
    """The reservation of one task.

    :param key: the task's key, one token
    :param origin: the task, for messages
    """

    def __init__(self, connection: Connection, queue: WorkQueue, key: str, origin: Origin | None = None) -> None:
        self._connection = connection
        self._queue = queue.name
        self._events = str(queue.events.name if queue.events else "")
        limit = connection.max_payload
        if queue.events and (queue.events.max_msg_size or 0) > 0:
            limit = min(limit, queue.events.max_msg_size or limit)
        self._rows = max(1, (limit - _RESERVE) // _ROW_BYTES)
        self._key = key
        self._subject = document_subject(self._queue, key, _KIND)
        self._task = f"{origin.dag_id}/{origin.run_id}/{origin.task_id}" if origin else ""
        self._created = ""

    async def reserve(self, jobs: AdvisedJobs, prepared: PreparedJobs, created: str) -> PreparedJobs | list[Batch]:
        """Reserve the subjects and ids of jobs that are about to be published, and return all of the jobs.

        Stored first and compared afterwards: of two tasks that reserve the same at once, the one whose reservation has
        the higher sequence sees the other's.

        :param jobs: collects the advised ones among ``prepared``
        :param created: when the queue's stream was created, in the server's own text
        :raises JobError: another task waits for a job with one of them
        """
        if not jobs.advisory_subjects:
            return prepared
        batches = await read_all(prepared)
        if not jobs.indexes:
            return batches
        self._created = created
        known = await read_advised_jobs(self._connection, self._events, self._queue, self._key, self._created)
        reserved_at = await self._store({digest: known.get(digest, 0) for digest in jobs.indexes})
        wanted = {digest for digest in jobs.indexes if not known.get(digest)}
        if conflict := await self._conflict(wanted, reserved_at):
            digest, sequence, reservation, subject = conflict
            await self.remove()
            where = f"sequence {sequence}" if sequence else "not known to be stored yet"
            raise JobError(
                f"job {jobs.indexes[digest]} has {jobs.names[digest]}, as has a job of {self._queue} ({where}) that"
                f" {reservation.task or 'another task'} awaits, and a message there wouldn't say which of them has"
                " ended: give it another id or subject, or publish once the other has ended; if that task was killed"
                f" and won't run again, purge {subject} from {self._events}, which ends its reservation"
            )
        return batches

    async def record(self, sequences: Mapping[str, int]) -> None:
        """Record the stream sequences of the reserved jobs, by their digests."""
        if self._created:
            await self._store(sequences)
            # Its parts expire: who has read the reservation before may still read them.
            await self._purge(self._subject, {"keep": 1})

    async def remove(self) -> None:
        """Remove the reservation, if there is one."""
        (message,) = await _last_messages(self._connection, self._events, [self._subject])
        if reservation := _parse(message):
            await self._purge(self._subject, {})
            if reservation.parts:
                await self._purge(_name(self._events, self._queue, self._key, "").subject, {})

    async def _purge(self, subject: str, limits: Mapping[str, int]) -> None:
        # A stream that denies purges keeps its reservations: they count only as long as their jobs are stored.
        with suppress(ApiError):
            await self._connection.api(f"STREAM.PURGE.{self._events}", {"filter": subject, **limits})

    async def _store(self, jobs: Mapping[str, int]) -> int:
        """Store the reservation, and return its sequence."""
        rows = list(jobs.items())
        writer = DocumentWriter(self._connection, _name(self._events, self._queue, self._key, self._created))
        await writer.add(rows[self._rows :])
        reservation = Reservation(
            stream=self._queue,
            created=self._created,
            task=self._task,
            jobs=dict(rows[: self._rows]),
            parts=await writer.finish(),
        )
        headers = {"Nats-Expected-Stream": self._events}
        return (await store(self._connection, self._subject, reservation.model_dump_json().encode(), headers)).sequence

    async def _conflict(self, wanted: set[str], reserved_at: int) -> tuple[str, int, Reservation, str] | None:
        for message in await _last_messages(self._connection, self._events, await self._others()):
            reservation = _parse(message)
            if message is None or reservation is None or reservation.created != self._created:
                continue
            key = message.subject.rpartition(".")[2].removesuffix(f"-{_KIND}")
            jobs = await _all_jobs(self._connection, self._events, self._queue, key, reservation)
            for digest in wanted & jobs.keys():
                sequence = jobs[digest]
                if sequence and await get_message(self._connection, self._queue, sequence) is None:
                    # It has ended, and only the other jobs of its task haven't.
                    continue
                if not any(jobs.values()) and message.sequence > reserved_at:
                    # It was reserved later, and its task sees this one.
                    continue
                return digest, sequence, reservation, message.subject
        return None

    async def _others(self) -> list[str]:
        """Return the subjects of the reservations of other tasks."""
        stored = subject_counts(self._connection, self._events, manifest_filter(self._queue))
        return [subject async for subject, _ in stored if subject.endswith(f"-{_KIND}") and subject != self._subject]


async def read_advised_jobs(connection: Connection, events: str, queue: str, key: str, created: str) -> dict[str, int]:
    """Return the awaited jobs of a task that end by a message on an advisory subject: sequences by their digests.

    :param created: when the queue's stream was created, in the server's own text; other reservations don't count
    """
    (message,) = await _last_messages(connection, events, [document_subject(queue, key, _KIND)])
    reservation = _parse(message)
    if reservation is None or reservation.created != created or reservation.stream != queue:
        return {}
    jobs = await _all_jobs(connection, events, queue, key, reservation)
    return {digest: sequence for digest, sequence in jobs.items() if sequence}


async def _all_jobs(
    connection: Connection, events: str, queue: str, key: str, reservation: Reservation
) -> dict[str, int]:
    jobs = dict(reservation.jobs)
    async for rows in read_parts(connection, _name(events, queue, key, reservation.created), reservation.parts, _ROWS):
        if rows is None:
            log.warning(
                "%s doesn't store all of %s any more: ends of its jobs on advisory subjects aren't recognised",
                *(events, document_subject(queue, key, _KIND)),
            )
        jobs.update(rows or ())
    return jobs


def _name(events: str, queue: str, key: str, created: str) -> DocumentName:
    return DocumentName(events, queue, "advised", key, created)


async def _last_messages(connection: Connection, stream: str, subjects: Iterable[str]) -> list[StoredMessage | None]:
    async def read(subject: str) -> StoredMessage | None:
        try:
            return await last_message(connection, stream, subject)
        except NotFoundError:
            return None

    return await map_concurrently(read, subjects)


def _parse(message: StoredMessage | None) -> Reservation | None:
    try:
        return Reservation.model_validate_json(message.data) if message else None
    except ValidationError:
        return None
