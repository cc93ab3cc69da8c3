"""The jobs that a worker has in hand, no more than it has slots, whichever lane they come from."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from airflow_provider_jetstream.worker.acknowledgement import nak

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.consumers import BoundConsumer, ConsumerRef

log = logging.getLogger("jetstream.worker")

_CUT_OFF_SECONDS = 5.0


class InFlightJobs:
    """Runs so many jobs at a time.

    :param worker: the worker's name
    :param size: how many
    :param stopping: set once no more are to be started
    """

    def __init__(self, worker: str, size: int, stopping: asyncio.Event) -> None:
        self._worker = worker
        self._size = size
        self._stopping = stopping
        self._running: dict[asyncio.Task[None], ConsumerRef] = {}
        self._untaken: list[Msg] = []

    @property
    def free(self) -> int:
        """How many more jobs there is room for."""
        return max(0, self._size - len(self._running))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is running."""
        return list(self._running)

    def count(self, source: ConsumerRef) -> int:
        """Count the jobs in hand that come from a source; any thread may ask.

        :param source: the source
        :return: how many there are
        """
        return sum(each is source for each in list(self._running.values()))

    def take(self, lane: BoundConsumer, message: Msg) -> None:
        """Start a job, or put it aside where there is no room.

        :param lane: where it comes from
        :param message: the job as it was pulled
        """
        # A request that was held up with the connection may bring more than there is room for.
        no_room = self._stopping.is_set() or not self.free
        # Handing back the last delivery of a job that nobody started would kill it.
        if no_room and not lane.doer.rules.is_last(message.metadata.num_delivered):
            self._untaken.append(message)
            return
        task = asyncio.create_task(lane.doer.execute(message))
        self._running[task] = lane.source
        task.add_done_callback(self._finished)

    async def return_untaken(self, connection: Connection) -> None:
        """Hand back what wasn't started, once no request is open that would only bring it here again.

        :param connection: the server
        """
        while self._untaken:
            message = self._untaken.pop()
            await nak(connection, message)
            log.info("%s hands job %d back without starting it", self._worker, message.metadata.sequence.stream)

    async def finish(self, grace: float, cut_off: asyncio.Future[None]) -> None:
        """Wait for what is running.

        :param grace: seconds until it is cut off
        :param cut_off: is done from then on
        """
        if not self._running:
            return
        log.info("%s finishes %d running jobs", self._worker, len(self._running))
        _, unfinished = await asyncio.wait(self.tasks, timeout=grace)
        if not unfinished:
            return
        cut_off.set_result(None)
        _, unsettled = await asyncio.wait(unfinished, timeout=_CUT_OFF_SECONDS)
        for task in unsettled:
            task.cancel()
        await asyncio.gather(*unsettled, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled():
            # It was logged with the end of the job.
            task.exception()
