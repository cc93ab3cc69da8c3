"""The jobs that a worker runs at the moment, bounded by its concurrency, from all of its consumers."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
from airflow_provider_jetstream.worker.acknowledgement import nak

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.consumers import BoundConsumer, ConsumerRef

log = logging.getLogger("jetstream.worker")

_SETTLE_TIMEOUT = 5.0


class InFlightJobs:
    """Runs up to ``concurrency`` jobs at a time, and starts none once ``stopping`` is set.

    :ivar denial: that the worker may not settle its jobs, so that each would only use up its deliveries
    """

    def __init__(self, worker: str, concurrency: int, stopping: asyncio.Event) -> None:
        self._worker = worker
        self._concurrency = concurrency
        self._stopping = stopping
        self._running: dict[asyncio.Task[None], ConsumerRef] = {}
        self._not_started: list[Msg] = []
        self.denial: PermissionDeniedError | None = None

    @property
    def free(self) -> int:
        """How many more jobs can be started."""
        return max(0, self._concurrency - len(self._running))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the running jobs."""
        return list(self._running)

    def count(self, ref: ConsumerRef) -> int:
        """Count a consumer's running jobs; may be called from any thread."""
        return sum(running is ref for running in list(self._running.values()))

    def start(self, consumer: BoundConsumer, message: Msg) -> None:
        """Start a job, or put it aside for :meth:`nak_not_started` where the worker is full or stopping."""
        # A pull request that was delayed with the connection may deliver more jobs than the worker can start by then.
        is_full = self._stopping.is_set() or not self.free
        # A nak of the last delivery would make a dead letter of a job that was never started.
        if is_full and not consumer.executor.redelivery.is_last(message.metadata.num_delivered):
            self._not_started.append(message)
            return
        task = asyncio.create_task(consumer.executor.execute(message))
        self._running[task] = consumer.ref
        task.add_done_callback(self._on_done)

    async def nak_not_started(self, connection: Connection) -> None:
        """Nak the jobs that weren't started; called while no pull request is open, which would fetch them again."""
        while self._not_started:
            message = self._not_started.pop()
            await nak(connection, message)
            log.info("%s hands job %d back without starting it", self._worker, message.metadata.sequence.stream)

    async def finish(self, grace: float, grace_over: asyncio.Future[None]) -> None:
        """Wait ``grace`` seconds for the running jobs, then resolve ``grace_over`` and cancel what is left."""
        if not self._running:
            return
        log.info("%s finishes %d running jobs", self._worker, len(self._running))
        _, unfinished = await asyncio.wait(self.tasks, timeout=grace)
        if not unfinished:
            return
        grace_over.set_result(None)
        _, unsettled = await asyncio.wait(unfinished, timeout=_SETTLE_TIMEOUT)
        for task in unsettled:
            task.cancel()
        await asyncio.gather(*unsettled, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled():
            # The executor has logged the exception.
            error = task.exception()
            if isinstance(error, PermissionDeniedError):
                self.denial = error
