"""The lease of a queue: the right to change its dead letters, held by one operation at a time.

The lease is the last message on ``audit.<queue>.lease``, and its stream sequence is the *token*. A program takes the
lease by storing that message on condition that the one before it is still the last. It stores every record of what it
does on the same condition, so that the server refuses the records of a holder whose lease somebody else has taken.

Renewals are on a subject of their own: the token stays the same for as long as the lease lasts. Whether a lease has run
out is decided by the times at which the server stored them and by the server's clock; the holder stops earlier, by its
monotonic clock. A late acknowledgement, a reset or a purge has no condition. They are sent only while the lease lasts
for longer than one request may take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.fence import MARGIN, PART, WRONG_LAST_SEQUENCE, Fence, lease_lost
from airflow_provider_jetstream.jetstream.audit.lease_record import (
    LeaseRecord,
    LeaseState,
    lease_body,
    read_lease,
    renewal_body,
)
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import lease_renewal_subject, lease_subject
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    LeaseHeldError,
    LeaseLostError,
    TransientError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection

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

    def use(self, connection: Connection) -> None:
        """Go on over another connection."""
        self._connection = connection

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
    """The lease as somebody sees it who waits for it.

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
