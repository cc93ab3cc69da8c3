"""What redrives record before they do it: their intents, and the letter of each key whose order is kept.

An operation that is cut off leaves letters of which only the intent tells that they may have a new job, or may be
parked. A letter's intent is open until a later record of the audit says what was done to the letter.

The letter of a key that is redriven next is recorded so that whoever comes next, after an interruption too, knows for
which job to wait before the next letter of the key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, repeat
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from airflow_provider_jetstream.jetstream.audit.records import parse_record
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.streams import last_message, read_range
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import (
    intent_filter,
    intent_subject,
    letter_audit_subject,
    ordered_key_subject,
)
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection

# Sequence, message id and content of a letter, as JSON.
_LETTER_BYTES = 112
_FIXED_BYTES = 1_024
# Characters of a key, for people.
_SHOWN_KEY = 200

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
        """The audit's sequence of the first intent with a letter whose outcome isn't known."""
        return min(self._open, default=None)

    def leave_open(self, sequences: Iterable[int]) -> None:
        """Note that intents of the operation, which another process has recorded, are open."""
        self._open.update(sequences)

    async def begin(
        self,
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
        last = parse_record(IntentRecord, message, audit.created)
        if message is None or message.sequence < since or last is None:
            return {}
        since = last.open_from or message.sequence
    intents: dict[int, tuple[datetime, IntentRecord]] = {}
    of_operation: dict[str, list[int]] = {}
    async for message in read_range(connection, audit.stream, subject, since):
        if record := parse_record(IntentRecord, message, audit.created):
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
    return records


class KeyRecord(BaseModel):
    """The letter of a key that was redriven last.

    :param created: when the work queue was created, in the server's own text
    :param key: the key, for people
    :param sequence: the letter's stream sequence
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    stream: str
    created: str
    key: str
    sequence: int


async def read_keys(
    connection: Connection, audit: AuditLog, order_key: str, keys: Sequence[str]
) -> dict[str, KeyRecord]:
    """Read the records of keys; a key without a redriven letter has no record.

    :param order_key: where letters state their key
    """

    async def read(key: str) -> KeyRecord | None:
        message = await last_message(connection, audit.stream, ordered_key_subject(audit.queue, order_key, key))
        return parse_record(KeyRecord, message, audit.created)

    records = await map_concurrently(read, keys)
    return {key: record for key, record in zip(keys, records, strict=True) if record}


async def record_keys(audit: AuditLog, order_key: str, sequences: Mapping[str, int]) -> None:
    """Record by key which letters are about to be redriven.

    :param order_key: where letters state their key
    :raises LeaseLostError: the operation doesn't have its lease any more
    :raises ApiError: the audit's stream refused a record
    :raises TransientError: a record isn't known to be stored
    """

    async def store(key: str) -> None:
        shown = readable_text(key)[:_SHOWN_KEY]
        record = KeyRecord(stream=audit.queue, created=audit.created, key=shown, sequence=sequences[key])
        await audit.store(ordered_key_subject(audit.queue, order_key, key), record.model_dump_json().encode())

    await map_concurrently(store, list(sequences))
