"""The condition under which an operation may change dead letters and record what it does: it still has the lease.

Protocol: NATS ADR-22 and the header ``Nats-Expected-Last-Subject-Sequence-Subject`` of nats-server 2.11, by which a
message is stored only while the last message of *another* subject of the stream has an expected sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.lease_record import LeaseState, read_lease
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import lease_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, DeadlineError, LeaseLostError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck

# The level of JetStream's API from which on a message may be stored on condition of another subject's last one.
_CONDITION_LEVEL = 1
WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
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
        """Return headers by which the audit stores a message only while this operation has the lease.

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
