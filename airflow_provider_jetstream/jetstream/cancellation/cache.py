"""All cancellations of a queue in memory, for workers, which check for each job."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.cancellation.cancel import read_cancellation
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import follow, read_range
from airflow_provider_jetstream.jetstream.contract import cancellation_filter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.queue.work_queue import events_stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


class CancellationCache:
    """The cancellations of a queue; :func:`follow_cancellations` updates it.

    :param max_age: how long a cancellation is stored, and held here; without end where zero
    """

    def __init__(self, max_age: timedelta = timedelta()) -> None:
        self._max_age = max_age
        # By key: ids, and sequences.
        self._cancellations: dict[str | int, Cancellation] = {}
        self._waiters: dict[str | int, set[asyncio.Future[None]]] = {}
        self._failure: JetStreamProviderError | None = None
        self._reports: list[Callable[[Cancellation], None]] = []

    def has(self, job_id: str, sequence: int) -> bool:
        """Return whether any job of an id or of a sequence is cancelled."""
        return job_id in self._cancellations or sequence in self._cancellations

    def report_to(self, on_cancellation: Callable[[Cancellation], None]) -> None:
        """Call a function with each cancellation that arrives from now on."""
        self._reports.append(on_cancellation)

    def get(self, job_id: str, stored_at: datetime, sequence: int = 0) -> Cancellation | None:
        """Return the cancellation of a job, if there is one.

        :param stored_at: when the job was stored, by the server's clock
        :param sequence: its stream sequence; where absent, cancellations of its id count only
        """
        found = (self._cancellations.get(sequence), self._cancellations.get(job_id))
        return next((one for one in found if one and one.covers(stored_at)), None)

    async def wait(self, job_id: str, stored_at: datetime, sequence: int = 0) -> Cancellation:
        """Wait until a job is cancelled, without end if it isn't; awaited beside the handler.

        :param stored_at: when the job was stored, by the server's clock
        :param sequence: its stream sequence; where absent, cancellations of its id count only
        :raises JetStreamProviderError: no more cancellations arrive: the connection was closed, or the events are gone
        """
        keys: tuple[str | int, ...] = (job_id, sequence)
        while (cancellation := self.get(job_id, stored_at, sequence)) is None:
            if self._failure:
                raise self._failure
            changed = asyncio.get_running_loop().create_future()
            for key in keys:
                self._waiters.setdefault(key, set()).add(changed)
            try:
                await changed
            finally:
                for key in keys:
                    self._waiters[key].discard(changed)
                    if not self._waiters[key]:
                        del self._waiters[key]
        return cancellation

    def add(self, cancellation: Cancellation) -> None:
        """Add the newest cancellation, and remove cancellations that the server has removed."""
        # Inserted anew, since the dictionary is in the order of time.
        self._cancellations.pop(cancellation.key, None)
        self._cancellations[cancellation.key] = cancellation
        oldest_kept = cancellation.at - self._max_age
        while self._max_age and (oldest := next(iter(self._cancellations.values()))).at < oldest_kept:
            del self._cancellations[oldest.key]
        self._wake(self._waiters.get(cancellation.key, ()))
        for on_cancellation in self._reports:
            on_cancellation(cancellation)

    def fail(self, error: JetStreamProviderError) -> None:
        """End every wait with an error, since no more cancellations arrive."""
        self._failure = error
        for waiters in self._waiters.values():
            self._wake(waiters)

    def _wake(self, waiters: Iterable[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


@asynccontextmanager
async def follow_cancellations(connection: Connection, queue: WorkQueue) -> AsyncIterator[CancellationCache]:
    """Fill a cache with the stored cancellations of a queue, and update it until the block ends.

    :raises QueueDeclarationError: the queue declares no events that capture cancellations
    :raises NotFoundError: the events don't exist
    """
    events, subject = events_stream(queue), cancellation_filter(queue.name)
    info = await stream_info(connection, events)
    last = int(info["state"]["last_seq"])
    cache = CancellationCache(timedelta(microseconds=info["config"].get("max_age", 0) / 1_000))
    async for message in read_range(connection, events, subject, stop=last):
        _add(cache, message)

    async def follow_events() -> None:
        try:
            async for message in follow(connection, events, subject, last + 1):
                _add(cache, message)
        except JetStreamProviderError as error:
            cache.fail(error)

    follower = asyncio.create_task(follow_events())
    try:
        yield cache
    finally:
        follower.cancel()
        with suppress(asyncio.CancelledError):
            await follower


def _add(cache: CancellationCache, message: StoredMessage) -> None:
    if cancellation := read_cancellation(message):
        cache.add(cancellation)
