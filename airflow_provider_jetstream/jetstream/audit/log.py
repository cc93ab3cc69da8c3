"""The audit: what became of each dead letter, who did it, when and why; and how far each redrive is.

It is more than a record. A redrive that was cut off reads in it which copies are stored already, and which letters an
earlier try of the same task brought back.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import last_message, read_range
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, store, store_each
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import MSG_ID, letter_audit_subject, run_audit_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

Action = Literal["redriven", "requeued", "parked"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    stream: str
    created: str


class LetterRecord(_Record):
    """What was done with one dead letter.

    :param sequence: the job's stream sequence; with ``stream`` and ``created`` the letter's identity
    :param action: ``redriven`` as a new job, ``requeued`` in its place, or ``parked``
    :param new_sequence: the new job's stream sequence, or that of the parked letter in the dead letter queue
    :param subject: where it went
    :param redrives: how often it has been redriven now
    :param reason: why it had died
    :param died_at: when
    :param fingerprint: of its death
    :param why: the reason given for the redrive
    :param who: the Airflow task, as its identifying fields, or whatever the caller says
    :param run: the redrive that did it
    :param changes: what a transform changed
    """

    sequence: int
    action: Action
    new_sequence: int | None = None
    subject: str
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
        """Whether the job itself was made alive again."""
        return self.action == "requeued"


class RunRecord(_Record):
    """How far a redrive is.

    :param run: its key
    :param from_sequence: the first sequence of the audit that may hold a letter of it
    :param who: the Airflow task, as its identifying fields, or whatever the caller says
    :param why: the reason given for it
    :param report: counts so far
    :param finished: whether it is over
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

    :param connection: the server
    :param stream: the audit's stream
    :param queue: the work queue
    :param created: when the work queue was created, in the server's own text
    """

    def __init__(self, connection: Connection, stream: str, queue: str, created: str) -> None:
        self._connection = connection
        self.stream = stream
        self.queue = queue
        self.created = created

    @classmethod
    async def open(cls, connection: Connection, queue: WorkQueue, created: str) -> AuditLog | None:
        """Look whether a queue has an audit.

        :param connection: the server
        :param queue: the work queue
        :param created: when its stream was created, in the server's own text
        :return: the audit; ``None`` where the queue declares none, or it doesn't exist (yet)
        """
        if queue.audit is None:
            return None
        try:
            await stream_info(connection, queue.audit.name)
        except NotFoundError:
            return None
        return cls(connection, queue.audit.name, queue.name, created)

    async def last_record(self, sequence: int) -> LetterRecord | None:
        """Tell what was last done with a letter.

        :param sequence: the job's stream sequence
        :return: the record, if anything was done
        """
        message = await last_message(self._connection, self.stream, letter_audit_subject(self.queue, sequence))
        record = _read(LetterRecord, message)
        return record if record and record.created == self.created else None

    async def history(self, sequence: int) -> AsyncGenerator[LetterRecord, None]:
        """Give all that was done with a letter.

        :param sequence: the job's stream sequence
        :return: the records, oldest first
        """
        subject = letter_audit_subject(self.queue, sequence)
        async for message in read_range(self._connection, self.stream, subject):
            record = _read(LetterRecord, message)
            if record and record.created == self.created:
                yield record

    async def write(self, records: Sequence[LetterRecord]) -> list[ApiError | TransientError | None]:
        """Record what was done with letters.

        :param records: the records
        :return: for each, where it isn't known to be stored, why: the audit's stream refused it, or didn't answer
        """
        messages = [
            (letter_audit_subject(self.queue, each.sequence), each.model_dump_json(exclude_none=True).encode())
            for each in records
        ]
        ids = [Headers([(MSG_ID, self._once(each))]) for each in records]
        answers = await store_each(self._connection, messages, ids)
        return [None if isinstance(each, PubAck) else each for each in answers]

    def _once(self, record: LetterRecord) -> str:
        """Give the id of a record: redrives side by side do the same to a letter, and it is recorded once."""
        # One that was requeued keeps its sequence, so that only the time of its death tells one time from the next.
        result = record.died_at if record.in_place else record.new_sequence
        return f"audit:{self.created}:{record.sequence}:{record.action}:{result or record.at}"

    async def begin_run(self, run: str, who: dict[str, Any], why: str | None) -> RunRecord:
        """Begin a redrive, or go on with one that was cut off.

        :param run: its key; where a redrive of this key is over, another one begins
        :param who: who does it
        :param why: the reason given for it
        :return: its record; ``from_sequence`` is where its letters begin
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
        """Record how far a redrive is.

        :param record: its record
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        subject = run_audit_subject(self.queue, record.run)
        await store(self._connection, subject, record.model_dump_json(exclude_none=True).encode())

    async def finish_run(self, run: str) -> None:
        """Record that a redrive is over which was kept open.

        :param run: its key
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        message = await last_message(self._connection, self.stream, run_audit_subject(self.queue, run))
        record = _read(RunRecord, message)
        if record and record.created == self.created and not record.finished:
            await self.record_progress(record.model_copy(update={"finished": True}))

    async def letters_of_run(self, record: RunRecord) -> AsyncGenerator[LetterRecord, None]:
        """Give what a redrive did before it was cut off.

        :param record: its record
        :return: its letters, in the order in which they were done
        """
        letters = letter_audit_subject(self.queue, 0).removesuffix("0") + "*"
        async for message in read_range(self._connection, self.stream, letters, record.from_sequence):
            letter = _read(LetterRecord, message)
            if letter and letter.run == record.run and letter.created == self.created:
                yield letter


def _read(model: type[_Model], message: StoredMessage | None) -> _Model | None:
    if message is None:
        return None
    try:
        record = model.model_validate_json(message.data)
    except ValidationError:
        return None
    # The server's clock is the one that advisories go by.
    return record.model_copy(update={"at": message.stored_at})
