"""The intents of redrives: what is about to be stored for which letters, recorded before it is.

An operation that is cut off leaves letters of which only the intent tells that they may have a new job, or may be
parked. A letter's intent is open until a later record of the audit says what was done to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, repeat
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from airflow_provider_jetstream.jetstream.audit.letter_ranges import letter_range_filter, parse_range
from airflow_provider_jetstream.jetstream.client.message_reader import last_message, read_range
from airflow_provider_jetstream.jetstream.contract import (
    intent_filter,
    intent_subject,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# Sequence, message id and content of a letter, as JSON.
_LETTER_BYTES = 112
_FIXED_BYTES = 1_024

IntentAction = Literal["redriven", "parked"]
# The stream sequence of a letter, the message id of what is stored for it, and the digest of its content; empty where a
# reader knows the content otherwise.
IntendedLetter: TypeAlias = tuple[int, str, str]


class Target(BaseModel):
    """The stream in which an operation is about to store.

    :param created: when it was created, in the server's own text
    :param last: a sequence that it had reached before
    :param archive: the stream with copies of its messages, if there is one
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    stream: str
    created: str
    last: int
    archive: str | None = None


class IntentRecord(BaseModel):
    """What one operation is about to store.

    :param stream: the work queue
    :param created: when it was created, in the server's own text
    :param operation: the operation's id
    :param protocol: the protocol by which the messages are stored
    :param letters: the stream sequence of each letter, with the message id of what is stored for it
    :param contents: the digest of the content of each, in their order; empty for parked letters
    :param open_from: the audit's sequence of the operation's first intent that is still open; this one where absent
    :param begun_at: when the letters' first intent was recorded, where this one only carries it on
    :param why: why the outcome can't be known, where that was found out
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    stream: str
    created: str
    operation: str
    protocol: Literal["copy", "atomic"]
    action: IntentAction
    target: Target
    letters: tuple[tuple[int, str], ...]
    contents: tuple[str, ...] = ()
    open_from: int | None = None
    begun_at: datetime | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class OpenIntent:
    """A letter's intent without a record of its outcome.

    :param sequence: the intent's own sequence in the audit
    :param message_id: the id of what was to be stored
    :param content: the digest of its content; anybody may have used its id
    :param at: when the intent was recorded, by the server's clock
    :param intent: the record
    """

    sequence: int
    message_id: str
    content: str
    at: datetime
    intent: IntentRecord


@dataclass(slots=True)
class IntentLog:
    """Records the intents of one operation.

    :param operation: its id, one token
    """

    connection: Connection
    audit: AuditLog
    operation: str
    # The audit's sequences of the intents that are open, and of those among them that the last batch has recorded.
    _open: set[int] = field(default_factory=set, init=False)
    _batch: list[int] = field(default_factory=list, init=False)

    @property
    def open_since(self) -> int | None:
        """The audit's sequence of its first intent of which a letter's outcome isn't known."""
        return min(self._open, default=None)

    def leave_open(self, sequences: Iterable[int]) -> None:
        """Note that intents of the operation, which another process has recorded, are open."""
        self._open.update(sequences)

    async def begin(
        self,
        protocol: Literal["copy", "atomic"],
        action: IntentAction,
        target: Target,
        letters: Iterable[IntendedLetter],
        *,
        begun_at: datetime | None = None,
        why: str | None = None,
    ) -> None:
        """Record what is about to be stored.

        :param letters: each letter with the message id and the content of what is stored for it
        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit's stream refused it
        :raises TransientError: it isn't known to be stored
        """
        at_once = max(1, (self.connection.max_payload - _FIXED_BYTES) // _LETTER_BYTES)
        remaining = tuple(letters)
        while remaining:
            record = IntentRecord(
                stream=self.audit.queue,
                created=self.audit.created,
                operation=self.operation,
                protocol=protocol,
                action=action,
                target=target,
                letters=tuple((letter, message_id) for letter, message_id, _ in remaining[:at_once]),
                contents=tuple(content for _, _, content in remaining[:at_once]),
                open_from=self.open_since,
                begun_at=begun_at,
                why=why,
            )
            remaining = remaining[at_once:]
            body = record.model_dump_json(exclude_none=True).encode()
            sequence = (await self.audit.store(intent_subject(self.audit.queue, self.operation), body)).sequence
            self._open.add(sequence)
            self._batch.append(sequence)

    def begin_batch(self) -> list[int]:
        """Return the sequences of the intents that are recorded until the next batch begins; they are added to it."""
        self._batch = []
        return self._batch

    def close(self, batch: Iterable[int]) -> None:
        """Note that the outcome of each letter is known whose intent is one of a batch."""
        self._open.difference_update(batch)


def no_audit(queue: str) -> RedriveRequestError:
    """Return the refusal to change letters of a queue that has no audit."""
    return RedriveRequestError(
        f"expected an audit of {queue}, found none: nothing is redriven that isn't recorded before, since a redrive"
        " that is cut off couldn't be told from one that never began; declare audit (the default) and provision the"
        " queue"
    )


async def read_open_intents(
    connection: Connection, audit: AuditLog, since: int, operation: str | None = None
) -> dict[int, list[OpenIntent]]:
    """Return by stream sequence the letters whose outcome isn't recorded, each with its intents.

    :param since: the audit's sequence from which intents may be open
    :param operation: only the intents of this operation
    """
    subject = intent_filter(audit.queue)
    if operation is not None:
        subject = intent_subject(audit.queue, operation)
        message = await last_message(connection, audit.stream, subject)
        if message is None or message.sequence < since or (last := _read_intent(message, audit)) is None:
            return {}
        since = last.open_from or message.sequence
    intents: dict[int, tuple[datetime, IntentRecord]] = {}
    of_operation: dict[str, list[int]] = {}
    async for message in read_range(connection, audit.stream, subject, since):
        if record := _read_intent(message, audit):
            before = of_operation.get(record.operation, [])
            open_from = record.open_from or message.sequence
            # An operation says by its next intent which of those before are closed.
            for sequence in before:
                if sequence < open_from:
                    del intents[sequence]
            of_operation[record.operation] = [sequence for sequence in before if sequence >= open_from]
            of_operation[record.operation].append(message.sequence)
            intents[message.sequence] = (message.stored_at, record)
    recorded = await _last_records(connection, audit, min(intents)) if intents else {}
    opened: dict[int, list[OpenIntent]] = {}
    for sequence, (at, record) in sorted(intents.items()):
        for (letter, message_id), content in zip(record.letters, chain(record.contents, repeat("")), strict=False):
            if recorded.get(letter, 0) < sequence:
                found = OpenIntent(sequence, message_id, content, record.begun_at or at, record)
                opened.setdefault(letter, []).append(found)
    return opened


async def _last_records(connection: Connection, audit: AuditLog, start: int) -> dict[int, int]:
    """Return for each letter that was recorded from a sequence on the audit's sequence of its last record."""
    prefix = letter_audit_subject(audit.queue, 0).removesuffix("0")
    records: dict[int, int] = {}
    async for message in read_range(connection, audit.stream, f"{prefix}*", start):
        if not proves_nothing(message):
            records[int(message.subject.removeprefix(prefix))] = message.sequence
    async for message in read_range(connection, audit.stream, letter_range_filter(audit.queue), start):
        if (found := parse_range(message)) and found.created == audit.created:
            for sequence in found.sequences():
                records[sequence] = max(message.sequence, records.get(sequence, 0))
    return records


def _read_intent(message: StoredMessage, audit: AuditLog) -> IntentRecord | None:
    if proves_nothing(message):
        return None
    try:
        record = IntentRecord.model_validate_json(message.data)
    except ValidationError:
        return None
    return record if record.created == audit.created else None
