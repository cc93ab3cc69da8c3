"""The lease of a queue: the right to change its dead letters, held by one operation at a time.

The lease is the last message on ``audit.<queue>.lease``, and its stream sequence is the *token*. A program takes the
lease by storing that message on condition that the one before it is still the last. It stores every record of what it
does on the same condition (:class:`Fence`), so that the server refuses the records of a holder whose lease somebody
else has taken.

Renewals are on a subject of their own: the token stays the same for as long as the lease lasts. Whether a lease has run
out is decided by the times at which the server stored them and by the server's clock; the holder stops earlier, by its
monotonic clock. A late acknowledgement, a reset or a purge has no condition. They are sent only while the lease lasts
for longer than one request may take.

Protocol: NATS ADR-22 and the header ``Nats-Expected-Last-Subject-Sequence-Subject`` of nats-server 2.11, by which a
message is stored only while the last message of *another* subject of the stream has an expected sequence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.publish_ack import WRONG_LAST_SEQUENCE, store
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock, stream_info
from airflow_provider_jetstream.jetstream.client.streams import msg_get
from airflow_provider_jetstream.jetstream.contract import lease_renewal_subject, lease_subject
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadlineError,
    LeaseHeldError,
    LeaseLostError,
    TransientError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck

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


# The level of JetStream's API from which on a message may be stored on condition of another subject's last one.
_CONDITION_LEVEL = 1
# For how long the other messages of one operation may keep a clustered stream from storing one of them.
_CONFLICT_PAUSES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.8)

# Parts of the time for which a lease lasts: the longest request, and the time between renewals; and how much earlier
# than its end the holder stops.
PART = 1 / 3
MARGIN = 1 / 6


class Fence:
    """The condition under which an operation may change things and record what it does: it still has the lease.

    :param audit: the audit's stream
    :param token: the sequence of the lease's message
    :ivar conflicts: whether the server has refused a message while it was storing another one of this operation
    """

    def __init__(self, connection: Connection, audit: str, queue: str, token: int) -> None:
        self._connection = connection
        self._audit = audit
        self._queue = queue
        self.token = token
        self.conflicts = False

    async def require(self) -> None:
        """Return once the lease is sure to last for another request; to be called before anything is changed.

        :raises LeaseLostError: somebody else has the lease, or it has run out and can't be renewed
        """
        raise NotImplementedError

    async def headers(self) -> tuple[tuple[str, str], ...]:
        """Return headers with which the audit refuses a message once another operation has the lease.

        Servers older than 2.11 ignore the second header, so the lease is read instead.

        :raises LeaseLostError: somebody else has the lease
        """
        if self._connection.api_level < _CONDITION_LEVEL:
            state = await read_lease(self._connection, self._audit, self._queue)
            if state is None or state.token != self.token:
                raise lease_lost(self._queue, state)
            return ()
        return (
            ("Nats-Expected-Last-Subject-Sequence", str(self.token)),
            ("Nats-Expected-Last-Subject-Sequence-Subject", lease_subject(self._queue)),
        )

    async def store(self, subject: str, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> PubAck:
        """Store a message in the audit while this operation has the lease.

        A clustered stream also refuses a message while it replicates another one with the same condition, as those
        of a batch and a renewal have. So the lease is read before it counts as lost.

        :raises LeaseLostError: somebody else has the lease
        :raises ApiError: the audit refuses messages
        :raises TransientError: it isn't known to be stored
        """
        for pause in _CONFLICT_PAUSES:
            await sleep(pause)
            try:
                return await store(self._connection, subject, body, Headers([*headers, *await self.headers()]))
            except ApiError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
            state = await read_lease(self._connection, self._audit, self._queue)
            if state is None or state.token != self.token:
                raise lease_lost(self._queue, state)
            self.conflicts = True
        raise DeadlineError(
            f"{self._audit} was busy with other records of this operation, and stored none on {subject}"
        )


class SharedLease(Fence):
    """The lease of another process, which renews it while this one works for it: that of Spark's driver, in a task."""

    async def require(self) -> None:
        """Return if the lease is sure to last for another request; the holder may have released it, so it is read."""
        clock = ServerClock.of(await stream_info(self._connection, self._audit))
        state = await read_lease(self._connection, self._audit, self._queue)
        if state is None or state.token != self.token:
            raise lease_lost(self._queue, state)
        left = (state.until - clock.now()).total_seconds() - state.record.seconds * MARGIN
        if left < min(self._connection.timeout, state.record.seconds * PART):
            raise lease_lost(self._queue, state)


def lease_lost(queue: str, state: LeaseState | None) -> LeaseLostError:
    """Return the error of an operation that doesn't have the lease any more.

    :param state: the lease as it is stored now, where that is known
    """
    if state is None:
        now = "it isn't known who has it"
    elif state.record.released:
        now = f"{state.record.holder} has had it meanwhile"
    else:
        now = f"it is with {state}"
    return LeaseLostError(
        f"expected to have the lease of {queue} still, found that it ran out: {now}; nothing more was changed: run it"
        " again, which goes on where this ended"
    )


log = logging.getLogger(__name__)

# How long a lease lasts after it was taken or renewed, and how many times a connection's time limit at least.
LEASE_SECONDS = 30.0
TIME_LIMITS = 3.0
_POLL_SECONDS = 0.5
# After somebody else was faster.
_TAKEN_PAUSE = 0.05


class Lease(Fence):
    """The lease of a queue, as its holder has it; made by :func:`take_lease`.

    :ivar operation: the operation's own id, one token
    :ivar open_since: the first sequence of the audit at which an earlier operation may have left an intent unfinished;
        ``None`` where none has
    """

    def __init__(
        self, connection: Connection, audit: str, queue: str, record: LeaseRecord, token: int, sent_at: float
    ) -> None:
        super().__init__(connection, audit, queue, token)
        self.operation = record.id
        self.open_since = record.open_since
        self._record = record
        self._first_token = token
        self._left_open = False
        self._lock = asyncio.Lock()
        self._valid_until = self._end(sent_at)

    @property
    def renewal_seconds(self) -> float:
        """The time between renewals."""
        return self._record.seconds * PART

    def leave_open(self) -> None:
        """Note that an intent, of this operation or an earlier one, won't be finished when the lease is released."""
        self._left_open = True

    async def require(self) -> None:
        """Return once the lease is sure to last for another request, renewed where needed."""
        if time.monotonic() + min(self._connection.timeout, self.renewal_seconds) < self._valid_until:
            return
        try:
            await self.renew()
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            raise LeaseLostError(
                f"expected to renew the lease of {self._queue}, found: {error}; nothing more was changed: run it again"
            ) from None

    async def renew(self) -> None:
        """Renew the lease; take it once more if it has run out, and nobody has taken it since.

        :raises LeaseLostError: somebody else has it
        :raises ApiError: the audit refuses messages
        :raises TransientError: it isn't known to be renewed
        """
        async with self._lock:
            sent_at = time.monotonic()
            if sent_at < self._valid_until:
                await self.store(lease_renewal_subject(self._queue), renewal_body(self.token))
            if time.monotonic() < self._valid_until:
                self._valid_until = self._end(sent_at)
            else:
                # Somebody may have seen that it ran out and be about to take it: a renewal wouldn't stop them.
                await self._take_again()

    async def _take_again(self) -> None:
        state = await read_lease(self._connection, self._audit, self._queue)
        if state is None or state.record.id != self.operation:
            raise lease_lost(self._queue, state)
        # Another one if this was done before, and the answer was lost.
        self.token = state.token
        update = {"since": state.since, "open_since": self.open_since or self._first_token}
        sent_at, self._record = time.monotonic(), self._record.model_copy(update=update)
        self.token = (await self.store(lease_subject(self._queue), lease_body(self._record))).sequence
        self._valid_until = self._end(sent_at)

    async def keep(self) -> None:
        """Renew the lease again and again until somebody else has it; needs an event loop."""
        pause = self.renewal_seconds
        while True:
            await asyncio.sleep(pause)
            pause = self.renewal_seconds
            try:
                await self.renew()
            except LeaseLostError as error:
                log.warning("%s", error)
                return
            except (ApiError, TransientError) as error:
                log.warning("The lease of %s couldn't be renewed, trying again: %s", self._queue, error)
                pause = min(1.0, pause)

    async def release(self) -> None:
        """Let others take the lease; nothing is raised, since it runs out anyway."""
        open_since = (self.open_since or self._first_token) if self._left_open else None
        record = self._record.model_copy(update={"released": True, "open_since": open_since})
        try:
            await self.store(lease_subject(self._queue), lease_body(record))
        except (ApiError, TransientError) as error:
            log.warning("The lease of %s wasn't released: %s", self._queue, error)

    def _end(self, sent_at: float) -> float:
        return sent_at + self._record.seconds * (1 - MARGIN)


async def take_lease(
    connection: Connection,
    audit: str,
    queue: str,
    record: LeaseRecord,
    wait: float,
    stopped: Callable[[], bool] = lambda: False,
) -> Lease:
    """Take the lease of a queue, as soon as nobody else holds it.

    :param audit: the audit's stream
    :param record: the operation that takes it
    :param wait: seconds to wait for it at most
    :param stopped: called a few times a second; once it returns true, the lease isn't waited for any longer
    :raises LeaseHeldError: somebody else holds it still
    :raises NotFoundError: the audit's stream doesn't exist
    :raises ApiError: the audit refuses messages
    :raises TransientError: no answer in time
    """
    began = time.monotonic()
    observed = _ObservedLease(connection, audit, queue)
    while True:
        if await observed.is_free():
            if lease := await _try_to_take(connection, audit, queue, record, observed.state):
                return lease
            await sleep(_TAKEN_PAUSE)
        elif time.monotonic() - began >= wait or stopped():
            raise LeaseHeldError(
                f"expected to take the lease of {queue}, found it held by {observed.state}, after {wait:g} seconds: run"
                " it again later, or wait longer with lease_timeout; the lease of a process that was killed runs out by"
                " itself"
            )
        else:
            await sleep(max(0.0, min(_POLL_SECONDS, began + wait - time.monotonic())))


class _ObservedLease:
    """The lease as a waiting operation has observed it.

    :ivar state: the lease as it was last read
    """

    def __init__(self, connection: Connection, audit: str, queue: str) -> None:
        self._connection = connection
        self._audit = audit
        self._queue = queue
        self._unchanged_since = time.monotonic()
        self.state: LeaseState | None = None

    async def is_free(self) -> bool:
        """Read the lease, and return whether nobody holds it."""
        state = await read_lease(self._connection, self._audit, self._queue)
        if state is None or state.record.released:
            self.state = state
            return True
        # The time is read first: a renewal that is stored later than that is seen.
        clock = ServerClock.of(await stream_info(self._connection, self._audit))
        before, self.state = self.state, await read_lease(self._connection, self._audit, self._queue)
        if self.state != before:
            self._unchanged_since = time.monotonic()
        if self.state is None or self.state.record.released or clock.answered_at >= self.state.until:
            return True
        # Where the server's clock was set back, only this tells that the lease isn't renewed any more.
        return time.monotonic() - self._unchanged_since > self.state.record.seconds


async def _try_to_take(
    connection: Connection, audit: str, queue: str, record: LeaseRecord, before: LeaseState | None
) -> Lease | None:
    record = record.model_copy(update={"open_since": before.open_since if before else None})
    condition = Headers([("Nats-Expected-Last-Subject-Sequence", str(before.token if before else 0))])
    sent_at = time.monotonic()
    try:
        ack = await store(connection, lease_subject(queue), lease_body(record), condition)
    except ApiError as error:
        if error.err_code in WRONG_LAST_SEQUENCE:
            return None
        raise
    except TransientError:
        state = await read_lease(connection, audit, queue)
        if state is None or state.record.id != record.id:
            raise
        return Lease(connection, audit, queue, record, state.token, sent_at)
    if ack.stream != audit:
        raise UnreachableError(f"expected {audit} to store {lease_subject(queue)}, found that {ack.stream} does")
    return Lease(connection, audit, queue, record, ack.sequence, sent_at)


@asynccontextmanager
async def renewed(lease: Lease) -> AsyncIterator[None]:
    """Renew a lease until the block ends, then release it; needs an event loop."""
    renewal = asyncio.create_task(lease.keep())
    try:
        yield
    except BaseException:
        lease.leave_open()
        raise
    finally:
        renewal.cancel()
        await asyncio.wait([renewal])
        await lease.release()


def lease_seconds(connection: Connection) -> float:
    """Return how long a lease that is taken over a connection lasts."""
    return max(LEASE_SECONDS, TIME_LIMITS * connection.timeout)
