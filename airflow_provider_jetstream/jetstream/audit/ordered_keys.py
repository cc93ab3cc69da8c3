"""Which letter of each key was redriven last, where a redrive keeps the order of the letters of a key.

It is recorded before the letter is redriven, so that whoever comes next, after an interruption too, knows for which job
to wait before the next letter of the key.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import last_message
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import ordered_key_subject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection

_SHOWN = 200


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
    """Read the records of keys; a key of which no letter was redriven has none.

    :param order_key: where letters state their key
    """

    async def read(key: str) -> KeyRecord | None:
        message = await last_message(connection, audit.stream, ordered_key_subject(audit.queue, order_key, key))
        if message is None:
            return None
        try:
            record = KeyRecord.model_validate_json(message.data)
        except ValidationError:
            return None
        return record if record.created == audit.created else None

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
        shown = readable_text(key)[:_SHOWN]
        record = KeyRecord(stream=audit.queue, created=audit.created, key=shown, sequence=sequences[key])
        await audit.store(ordered_key_subject(audit.queue, order_key, key), record.model_dump_json().encode())

    await map_concurrently(store, list(sequences))
