"""The audit: what was done with each dead letter, by whom, when and why; and the progress of each redrive.

The audit is also the checkpoint of a redrive: one that was cut off reads in it which copies are already stored, and
which letters an earlier try of the same task redrove.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.audit.records import (
    LetterRecord,
    RunRecord,
    encode_record,
    parse_record,
)
from airflow_provider_jetstream.jetstream.client.headers import Headers, Pairs
from airflow_provider_jetstream.jetstream.client.publish_ack import (
    WRONG_LAST_SEQUENCE,
    PubAck,
    confirmed_once,
    store,
    store_each,
    with_another_id,
)
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import last_message, read_range
from airflow_provider_jetstream.jetstream.contract import (
    MSG_ID,
    letter_audit_subject,
    run_audit_subject,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, LeaseLostError, NotFoundError, TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from airflow_provider_jetstream.jetstream.audit.lease import Fence
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# The fields of a record that its message id stands for.
_ACTION = ("stream", "created", "action", "new_sequence", "new_stream")
# Subject, body and headers.
_Message: TypeAlias = tuple[str, bytes, Pairs]


class AuditLog:
    """The audit of one queue.

    :param stream: the audit's stream
    :param queue: the work queue
    :param created: when the work queue was created, in the server's own text
    :param fence: the lease without which nothing is stored, for an operation that changes dead letters
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        queue: str,
        created: str,
        fence: Fence | None = None,
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

    def unfenced(self) -> AuditLog:
        """Return the same audit for a program that changes no letters."""
        return AuditLog(self._connection, self.stream, self.queue, self.created)

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
        return self.record_of(
            await last_message(self._connection, self.stream, letter_audit_subject(self.queue, sequence))
        )

    def record_of(self, message: StoredMessage | None) -> LetterRecord | None:
        """Parse the last action on a job, of the message that records it."""
        return parse_record(LetterRecord, message, self.created)

    async def history(self, sequence: int) -> AsyncGenerator[LetterRecord, None]:
        """Read all actions on a job, oldest first.

        :param sequence: the job's stream sequence
        """
        first: dict[str, LetterRecord] = {}
        async for message in read_range(self._connection, self.stream, letter_audit_subject(self.queue, sequence)):
            if record := parse_record(LetterRecord, message, self.created):
                first.setdefault(self._message_id(record), record)
        for record in first.values():
            yield record

    async def letters(self, start: int = 1) -> AsyncGenerator[LetterRecord, None]:
        """Read what was done to letters, in order, each action once.

        :param start: the first sequence of the audit
        """
        # Their hashes take a tenth of the memory.
        actions: set[int] = set()
        subjects = f"{letter_audit_subject(self.queue, 0)[:-1]}*"
        async for message in read_range(self._connection, self.stream, subjects, start):
            record = parse_record(LetterRecord, message, self.created)
            if record and (action := hash(self._message_id(record))) not in actions:
                actions.add(action)
                yield record

    async def write(self, records: Sequence[LetterRecord]) -> list[ApiError | TransientError | None]:
        """Store records in joined writes; return for each ``None``, or why it isn't known to be stored.

        :raises LeaseLostError: the operation doesn't have its lease any more; not all of them are stored
        """
        return await self._store_each(
            [
                (
                    letter_audit_subject(self.queue, record.sequence),
                    encode_record(record),
                    ((MSG_ID, self._message_id(record)),),
                )
                for record in records
            ]
        )

    async def _store_each(self, messages: Sequence[_Message]) -> list[ApiError | TransientError | None]:
        if not messages:
            return []
        condition = await self._condition()
        fence = self.fence
        if fence and fence.conflicts:
            return [await self._store_alone(fence, message) for message in messages]
        headers = [Headers([*named, *condition]) for _, _, named in messages]
        answers = await store_each(self._connection, [message[:2] for message in messages], headers)
        errors = [None if isinstance(answer, PubAck) else answer for answer in answers]
        for index, answer in enumerate(answers):
            if fence and not isinstance(answer, PubAck) and _is_wrong_sequence(answer):
                errors[index] = await self._store_alone(fence, messages[index])
            elif isinstance(answer, PubAck) and answer.duplicate:
                errors[index] = await self._store_alone(fence, messages[index], answer)
        return errors

    async def _store_alone(
        self, fence: Fence | None, message: _Message, ack: PubAck | None = None
    ) -> ApiError | TransientError | None:
        """Store a message by itself, and again where another one was stored under its id.

        :param ack: the PubAck of the message, where it was sent already
        """
        subject, body, named = message

        async def send(headers: Headers) -> PubAck:
            return await self.store(subject, body, headers.items())

        headers = Headers(named)
        try:
            ack = ack or await send(headers)
            last = await last_message(self._connection, self.stream, subject) if ack.duplicate else None
            if last and last.sequence > ack.sequence:
                # A loss of power has undone the action, and not its record, after which others came.
                await send(with_another_id(headers))
                return None
            await confirmed_once(self._connection, ack, subject, headers, partial(_is_same_action, body), send)
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            return error
        return None

    async def store(self, subject: str, body: bytes, headers: Pairs = ()) -> PubAck:
        """Store any other message of the operation.

        :param subject: a subject of the audit
        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        if self.fence:
            return await self.fence.store(subject, body, headers)
        return await store(self._connection, subject, body, Headers(headers))

    async def _condition(self) -> tuple[tuple[str, str], ...]:
        return await self.fence.headers() if self.fence else ()

    def _message_id(self, record: LetterRecord) -> str:
        """Return an id that concurrent redrives of the same letter share, so that the action is stored once."""
        # A job that was requeued keeps its sequence: only the time of its death tells one requeue from the next.
        result: object = record.died_at if record.leaves_job else record.new_sequence
        if record.kept:
            # A letter that was brought back may be discarded once more.
            result = record.kept.redrive
        place = f"{record.new_stream}:{result}" if record.new_stream else result
        return f"audit:{self.created}:{record.sequence}:{record.action}:{place}"

    async def begin_run(self, run: str, who: dict[str, Any], why: str | None, redrive: str | None = None) -> RunRecord:
        """Begin a redrive, or continue one of the same key that was cut off.

        :param run: the redrive's key; where a redrive of this key is finished, another one begins
        :param redrive: the id of one that begins
        """
        if record := await self.open_run(run):
            return record
        last = (await stream_info(self._connection, self.stream))["state"]["last_seq"]
        named = {"run": run, "from_sequence": last + 1, "who": who, "why": why, "redrive": redrive}
        record = RunRecord(stream=self.queue, created=self.created, **named)
        await self.record_progress(record)
        return record

    async def open_run(self, run: str) -> RunRecord | None:
        """Return the record of a redrive that isn't complete; ``None`` where there is none.

        :param run: its key
        """
        message = await last_message(self._connection, self.stream, run_audit_subject(self.queue, run))
        record = parse_record(RunRecord, message)
        return record if record and record.created == self.created and not record.finished else None

    async def record_progress(self, record: RunRecord) -> None:
        """Store the progress of a redrive.

        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        await self.store(run_audit_subject(self.queue, record.run), encode_record(record))

    async def finish_run(self, run: str) -> None:
        """Record that a redrive which was left open is finished.

        :param run: the redrive's key
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        if record := await self.open_run(run):
            await self.record_progress(record.model_copy(update={"finished": True}))

    async def letters_of_run(self, run: str, start: int) -> AsyncGenerator[LetterRecord, None]:
        """Read in order what a redrive did.

        :param run: its key
        :param start: the first sequence of the audit that may hold one of its letters
        """
        async for letter in self.letters(start):
            if letter.run == run:
                yield letter


def _is_same_action(body: bytes, stored: StoredMessage) -> bool:
    """Return whether a stored record is about the action of another one on the same subject."""
    try:
        found, wanted = json.loads(stored.data), json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(found.get(name) == wanted.get(name) for name in _ACTION)


def _is_wrong_sequence(error: ApiError | TransientError | None) -> bool:
    return isinstance(error, ApiError) and error.err_code in WRONG_LAST_SEQUENCE
