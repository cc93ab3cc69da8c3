"""All cancellations of a queue in memory, for those who look often: workers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.cancellation.cancel import events_stream, read_cancellation
from airflow_provider_jetstream.jetstream.client.message_reader import follow, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import cancellation_filter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


class CancellationCache:
    """The cancellations of a queue, kept up to date; see :func:`follow_cancellations`.

    :param keep: how long a cancellation is stored, and remembered; for ever where zero
    """

    def __init__(self, keep: timedelta = timedelta()) -> None:
        self._keep = keep
        self._known: dict[str, Cancellation] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._failure: JetStreamProviderError | None = None

    def get(self, job_id: str, stored_at: datetime) -> Cancellation | None:
        """Tell whether a job is cancelled as far as is known; ask before it is started.

        :param job_id: its id
        :param stored_at: when it was stored, by the server's clock
        :return: its cancellation, if there is one
        """
        found = self._known.get(job_id)
        return found if found and found.covers(stored_at) else None

    async def wait(self, job_id: str, stored_at: datetime) -> Cancellation:
        """Wait until a job is cancelled, for ever if it isn't; await it beside the handler.

        :param job_id: its id
        :param stored_at: when it was stored, by the server's clock
        :return: its cancellation
        :raises JetStreamProviderError: nothing more will be learnt: the connection was closed, or the events are gone
        """
        while (found := self.get(job_id, stored_at)) is None:
            if self._failure:
                raise self._failure
            rung = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(job_id, set())
            waiting.add(rung)
            try:
                await rung
            finally:
                waiting.discard(rung)
                if not waiting:
                    self._waiting.pop(job_id, None)
        return found

    def add(self, cancellation: Cancellation) -> None:
        """Take in a cancellation, and forget those that the server has forgotten.

        :param cancellation: the newest
        """
        # At the end of the order, where the newest are.
        self._known.pop(cancellation.job_id, None)
        self._known[cancellation.job_id] = cancellation
        while self._keep and (oldest := next(iter(self._known.values()))).at < cancellation.at - self._keep:
            del self._known[oldest.job_id]
        self._ring(self._waiting.get(cancellation.job_id, ()))

    def fail(self, error: JetStreamProviderError) -> None:
        """Take in that nothing more will be learnt.

        :param error: why
        """
        self._failure = error
        for waiting in self._waiting.values():
            self._ring(waiting)

    def _ring(self, waiting: Iterable[asyncio.Future[None]]) -> None:
        for rung in waiting:
            if not rung.done():
                rung.set_result(None)


@asynccontextmanager
async def follow_cancellations(connection: Connection, queue: WorkQueue) -> AsyncIterator[CancellationCache]:
    """Know all cancellations of a queue, those to come too, until the block is left.

    :param connection: the server
    :param queue: the queue
    :return: a book that already holds what was stored before
    :raises QueueDeclarationError: the queue declares no events that would take them
    :raises NotFoundError: the events don't exist
    """
    events, subject = events_stream(queue), cancellation_filter(queue.name)
    info = await stream_info(connection, events)
    last = int(info["state"]["last_seq"])
    book = CancellationCache(timedelta(microseconds=info["config"].get("max_age", 0) / 1_000))
    async for message in read_range(connection, events, subject, stop=last):
        _enter(book, message)

    async def go_on() -> None:
        try:
            async for message in follow(connection, events, subject, last + 1):
                _enter(book, message)
        except JetStreamProviderError as error:
            book.fail(error)

    following = asyncio.create_task(go_on())
    try:
        yield book
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


def _enter(book: CancellationCache, message: StoredMessage) -> None:
    if found := read_cancellation(message):
        book.add(found)
