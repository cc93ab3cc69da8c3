"""What the audit stores about the lease of a queue, and what that means now."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from airflow_provider_jetstream.jetstream.client.message_reader import msg_get
from airflow_provider_jetstream.jetstream.contract import lease_renewal_subject, lease_subject

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# How long a lease holds others up that can't be read.
UNREADABLE_SECONDS = 30.0
_MOST_SECONDS = 3600.0
_MOST_CHARACTERS = 200


class LeaseRecord(BaseModel):
    """The message of a lease.

    :param id: the operation's own id, one token
    :param operation: what the holder does, such as ``redrive``
    :param run: the key of the redrive, if it has one
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param why: the reason given for it
    :param seconds: how long the lease lasts after it was taken or renewed
    :param since: when the operation began to hold the lease, where that isn't when this message was stored
    :param open_since: the first sequence of the audit at which an intent may be unfinished; ``None`` where there is
        none before this message
    :param released: whether the operation has ended, so that anybody may take the lease
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    id: str = Field(default_factory=lambda: uuid4().hex)
    operation: str
    run: str | None = None
    who: dict[str, Any] = Field(default_factory=dict)
    why: str | None = None
    seconds: float = Field(gt=0, le=_MOST_SECONDS)
    since: datetime | None = None
    open_since: int | None = None
    released: bool = False

    @field_validator("since")
    @classmethod
    def _in_utc(cls, since: datetime | None) -> datetime | None:
        try:
            return since and since.astimezone(UTC)
        except OverflowError as error:
            raise ValueError(f"expected a time in the years 1 to 9999 in UTC, found {since}") from error

    @property
    def holder(self) -> str:
        """The holder in words: operation, run and task."""
        task = ", ".join(f"{name} {value}" for name, value in self.who.items() if value not in (None, "", -1))
        return (f"{self.operation} {self.run or self.id}" + (f" of {task}" if task else ""))[:_MOST_CHARACTERS]


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The lease of a queue as it is stored.

    :param token: the sequence of its message in the audit
    :param since: when the operation began to hold it, by the server's clock
    :param until: when it runs out unless it is renewed, by the server's clock
    """

    record: LeaseRecord
    token: int
    since: datetime
    until: datetime

    @property
    def open_since(self) -> int | None:
        """The first sequence of the audit at which an intent may be unfinished; ``None`` where all are finished."""
        return self.record.open_since or (None if self.record.released else self.token)

    def __str__(self) -> str:
        """Say who has the lease, since when and until when."""
        return f"{self.record.holder}, since {_utc(self.since)}, until {_utc(self.until)} unless it is renewed"


async def read_lease(connection: Connection, audit: str, queue: str) -> LeaseState | None:
    """Read the lease of a queue, released or not; ``None`` where nobody has ever taken it.

    :param audit: the audit's stream
    :raises NotFoundError: the audit's stream doesn't exist
    """
    message = await msg_get(connection, audit, {"last_by_subj": lease_subject(queue)})
    if message is None:
        return None
    record = _parse(message)
    renewed_at = message.stored_at
    if not record.released:
        renewal = await msg_get(connection, audit, {"last_by_subj": lease_renewal_subject(queue)})
        if renewal and renewal.data == renewal_body(message.sequence):
            renewed_at = max(renewed_at, renewal.stored_at)
    until = renewed_at + timedelta(seconds=record.seconds)
    return LeaseState(record, message.sequence, record.since or message.stored_at, until)


def lease_body(record: LeaseRecord) -> bytes:
    """Encode the message of a lease."""
    return json.dumps(record.model_dump(mode="json", exclude_none=True)).encode()


def renewal_body(token: int) -> bytes:
    """Encode the message by which the holder of a lease renews it."""
    return json.dumps({"token": token}).encode()


def _parse(message: StoredMessage) -> LeaseRecord:
    try:
        return LeaseRecord.model_validate_json(message.data)
    except ValidationError:
        # Of a later version perhaps.
        return LeaseRecord(id="unknown", operation="an operation that isn't understood", seconds=UNREADABLE_SECONDS)


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
