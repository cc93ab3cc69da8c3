"""The audit: what was done with each dead letter, by whom, when and why; and the progress of each redrive.

The audit is also the checkpoint of a redrive: one that was cut off reads in it which copies are already stored, and
which letters an earlier try of the same task redrove.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError

from airflow_provider_jetstream.jetstream.audit.fence import WRONG_LAST_SEQUENCE
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import last_message, read_range
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, store, store_each
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import MSG_ID, letter_audit_subject, run_audit_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, LeaseLostError, NotFoundError, TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from airflow_provider_jetstream.jetstream.audit.fence import Fence
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

Action = Literal["redriven", "requeued", "parked", "handled"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    stream: str
    created: str


class LetterRecord(_Record):
    """One action on one dead letter.

    :param sequence: the job's stream sequence; with ``stream`` and ``created`` the letter's identity
    :param action: ``redriven`` as a new job, ``requeued`` in place, ``parked``, or found to be ``handled`` by a handler
        of the dead letter queue
    :param new_sequence: the new job's stream sequence, or the sequence of the parked letter in the dead letter queue
    :param new_stream: the new job's stream, where it isn't the letter's own
    :param copy_of: the letter of this queue of which the job was a copy, if it was one
    :param subject: the new job's subject
    :param consumer: the consumer that delivered the job, if any did
    :param left_out: headers for which the new job had no room
    :param redrives: how often the job has been redriven now
    :param reason: why the job was dead
    :param died_at: when it died
    :param fingerprint: the fingerprint of its death
    :param why: the reason given for the redrive
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param run: the key of the redrive
    :param changes: what a transform changed
    """

    sequence: int
    action: Action
    new_sequence: int | None = None
    new_stream: str | None = None
    copy_of: int | None = None
    subject: str
    consumer: str | None = None
    left_out: dict[str, str] | None = None
    redrives: int = 0
    reason: str
    died_at: datetime | None = None
    fingerprint: str
    why: str | None = None
    who: dict[str, Any] = Field(default_factory=dict)
    run: str | None = None
    changes: dict[str, Any] | None = None

    @property
    def in_place(self) -> bool:
        """Whether the stored job itself is delivered again, rather than a copy."""
        return self.action == "requeued"

    @property
    def leaves_job(self) -> bool:
        """Whether the stored job stays, so that it may have died once more since."""
        return self.action in ("requeued", "handled")


class RunRecord(_Record):
    """The progress of one redrive.

    :param run: its key
    :param from_sequence: the first sequence of the audit that may hold one of its letters
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param why: the reason given for it
    :param report: counts so far
    :param finished: whether the redrive is complete
    """

    run: str
    from_sequence: int
    who: dict[str, Any] = Field(default_factory=dict)
    why: str | None = None
    report: dict[str, Any] = Field(default_factory=dict)
    finished: bool = False


_Model = TypeVar("_Model", bound=_Record)


class AuditLog:
    """The audit of one queue.

    :param stream: the audit's stream
    :param queue: the work queue
    :param created: when the work queue was created, in the server's own text
    :param fence: the lease without which nothing is stored, for an operation that changes dead letters
    """

    def __init__(
        self, connection: Connection, stream: str, queue: str, created: str, fence: Fence | None = None
    ) -> None:
        self._connection = connection
        self.stream = stream
        self.queue = queue
        self.created = created
        self.fence = fence

    @classmethod
    async def open(cls, connection: Connection, queue: WorkQueue, created: str) -> AuditLog | None:
        """Open the audit of a queue; ``None`` where the queue declares none, or its stream doesn't exist (yet).

        :param created: when the work queue's stream was created, in the server's own text
        """
        if queue.audit is None:
            return None
        try:
            await stream_info(connection, queue.audit.name)
        except NotFoundError:
            return None
        return cls(connection, queue.audit.name, queue.name, created)

    @classmethod
    def from_snapshot(cls, connection: Connection, queue: WorkQueue, snapshot: QueueSnapshot) -> AuditLog | None:
        """Open the audit without a request; ``None`` where the queue had none when the snapshot was taken."""
        if queue.audit is None or queue.audit.name not in snapshot.companions:
            return None
        return cls(connection, queue.audit.name, queue.name, snapshot.created)

    def fenced(self, fence: Fence) -> AuditLog:
        """Return the same audit for the holder of a lease: it stores records only while the lease is the holder's."""
        return AuditLog(self._connection, self.stream, self.queue, self.created, fence)

    async def require_lease(self) -> None:
        """Return once the operation is sure to have its lease for another request, or needs none.

        To be called before each step that changes something.

        :raises LeaseLostError: it doesn't have the lease any more
        """
        if self.fence:
            await self.fence.require()

    async def last_record(self, sequence: int) -> LetterRecord | None:
        """Read the last action on a job.

        :param sequence: the job's stream sequence
        """
        message = await last_message(self._connection, self.stream, letter_audit_subject(self.queue, sequence))
        record = _read(LetterRecord, message)
        return record if record and record.created == self.created else None

    async def history(self, sequence: int) -> AsyncGenerator[LetterRecord, None]:
        """Read all actions on a job, oldest first.

        :param sequence: the job's stream sequence
        """
        subject = letter_audit_subject(self.queue, sequence)
        async for message in read_range(self._connection, self.stream, subject):
            record = _read(LetterRecord, message)
            if record and record.created == self.created:
                yield record

    async def write(self, records: Sequence[LetterRecord]) -> list[ApiError | TransientError | None]:
        """Store records; return for each ``None``, or why it isn't known to be stored.

        :raises LeaseLostError: the operation doesn't have its lease any more; not all of them are stored
        """
        if not records:
            return []
        messages = [(letter_audit_subject(self.queue, record.sequence), _encode(record)) for record in records]
        condition = await self._condition()
        headers = [Headers([(MSG_ID, self._message_id(record)), *condition]) for record in records]
        if self.fence and self.fence.conflicts:
            return [
                await self._write_one(self.fence, *message, record)
                for message, record in zip(messages, records, strict=True)
            ]
        answers = await store_each(self._connection, messages, headers)
        errors = [None if isinstance(answer, PubAck) else answer for answer in answers]
        for index, error in enumerate(errors):
            if self.fence and _is_wrong_sequence(error):
                errors[index] = await self._write_one(self.fence, *messages[index], records[index])
        return errors

    async def _write_one(
        self, fence: Fence, subject: str, body: bytes, record: LetterRecord
    ) -> ApiError | TransientError | None:
        try:
            await fence.store(subject, body, ((MSG_ID, self._message_id(record)),))
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            return error
        return None

    async def store(self, subject: str, body: bytes, message_id: str | None = None) -> PubAck:
        """Store any other message of the operation.

        :param subject: a subject of the audit
        :param message_id: an id under which it is stored once
        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        named = ((MSG_ID, message_id),) if message_id else ()
        if self.fence:
            return await self.fence.store(subject, body, named)
        return await store(self._connection, subject, body, Headers(named))

    async def _condition(self) -> tuple[tuple[str, str], ...]:
        return await self.fence.headers() if self.fence else ()

    def _message_id(self, record: LetterRecord) -> str:
        """Return an id that concurrent redrives of the same letter share, so that the action is stored once."""
        # A job that was requeued keeps its sequence: only the time of its death tells one requeue from the next.
        result = record.died_at if record.leaves_job else record.new_sequence
        place = f"{record.new_stream}:{result}" if record.new_stream else result or record.at
        return f"audit:{self.created}:{record.sequence}:{record.action}:{place}"

    async def begin_run(self, run: str, who: dict[str, Any], why: str | None) -> RunRecord:
        """Begin a redrive, or continue one of the same key that was cut off.

        :param run: the redrive's key; where a redrive of this key is finished, another one begins
        """
        message = await last_message(self._connection, self.stream, run_audit_subject(self.queue, run))
        record = _read(RunRecord, message)
        if record and record.created == self.created and not record.finished:
            return record
        last = (await stream_info(self._connection, self.stream))["state"]["last_seq"]
        record = RunRecord(stream=self.queue, created=self.created, run=run, from_sequence=last + 1, who=who, why=why)
        await self.record_progress(record)
        return record

    async def record_progress(self, record: RunRecord) -> None:
        """Store the progress of a redrive.

        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        await self.store(run_audit_subject(self.queue, record.run), _encode(record))

    async def finish_run(self, run: str) -> None:
        """Record that a redrive which was left open is finished.

        :param run: the redrive's key
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        message = await last_message(self._connection, self.stream, run_audit_subject(self.queue, run))
        record = _read(RunRecord, message)
        if record and record.created == self.created and not record.finished:
            await self.record_progress(record.model_copy(update={"finished": True}))

    async def letters_of_run(self, record: RunRecord) -> AsyncGenerator[LetterRecord, None]:
        """Read in order what a redrive did before it was cut off."""
        subject = letter_audit_subject(self.queue, 0).removesuffix("0") + "*"
        async for message in read_range(self._connection, self.stream, subject, record.from_sequence):
            letter = _read(LetterRecord, message)
            if letter and letter.run == record.run and letter.created == self.created:
                yield letter


def _is_wrong_sequence(error: ApiError | TransientError | None) -> bool:
    return isinstance(error, ApiError) and error.err_code in WRONG_LAST_SEQUENCE


def _encode(record: _Record) -> bytes:
    """Encode a record; what isn't UTF-8 in it, as in a header that was left out, is replaced."""
    try:
        return record.model_dump_json(exclude_none=True).encode()
    except PydanticSerializationError:
        values = record.model_dump(mode="json", exclude_none=True)
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def _read(model: type[_Model], message: StoredMessage | None) -> _Model | None:
    if message is None:
        return None
    try:
        record = model.model_validate_json(message.data)
    except ValidationError:
        return None
    # Advisories have the server's time; records are compared with them.
    return record.model_copy(update={"at": message.stored_at})
