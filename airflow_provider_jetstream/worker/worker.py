"""The worker: pull no more than there are free slots, and stop without losing or repeating what is in hand.

What becomes of a single job is in :mod:`.doing`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import UnreachableError
from airflow_provider_jetstream.worker.consumers import WorkerContext, bind_consumers, read_consumer_refs
from airflow_provider_jetstream.worker.errors import WorkerStuckError
from airflow_provider_jetstream.worker.handler import inspect_handler
from airflow_provider_jetstream.worker.in_flight import InFlightJobs
from airflow_provider_jetstream.worker.metrics import Metrics, NoMetrics, PrometheusMetrics
from airflow_provider_jetstream.worker.runners import create_runner
from airflow_provider_jetstream.worker.scheduler import Fetcher, open_fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource
    from airflow_provider_jetstream.worker.consumers import BoundConsumer, Fallback

log = logging.getLogger("jetstream.worker")

DEADLINE = 3_600.0

_FEWEST_ABANDONED = 10


class Worker:
    """Runs a handler for the jobs of one consumer, or of several in order of urgency, until it is stopped.

    :param queue: the queue's declaration, its dict, or the path of its YAML file
    :param consumer: the name of one of the queue's consumers; it has to exist on the server
    :param handler: takes a :class:`Delivery`, or a pydantic model if its first parameter is annotated with one; a plain
        function runs in a thread. What it returns is stored with the completion, a :class:`GiveUpError` makes the job a
        dead letter at once, a :class:`RetryLaterError` says when to try again, and any other exception hands the job
        back for its next delivery
    :param settings: the connection
    :param fallbacks: whose jobs are taken when the consumer has none, the most urgent first: names of consumers of the
        same queue, or pairs of another queue and the name of its consumer. All share the handler and everything below
    :param concurrency: jobs at a time
    :param name: tells workers apart in logs and completions
    :param grace: seconds for running jobs to finish after :meth:`stop`
    :param deadline: seconds that one attempt may take, ``None`` for any time; a job's own ``Job-Deadline`` may be
        shorter. Until then the worker tells the server that the job is in progress, whatever the consumer's ack wait
    :param processes: run the handler in processes of its own, one for each job at a time
    :param metrics_port: where to serve numbers for Prometheus; ``None`` for nowhere
    :raises QueueDeclarationError: the declaration can't be used, or has no such consumer
    :raises WorkerSetupError: the handler takes something else, or can't run in processes; or a fallback is one already
    """

    def __init__(
        self,
        queue: QueueSource,
        consumer: str,
        handler: Callable[..., Any],
        settings: ConnectionSettings,
        *,
        fallbacks: Sequence[Fallback] = (),
        concurrency: int = 1,
        name: str | None = None,
        grace: float = 30.0,
        deadline: float | None = DEADLINE,
        processes: bool = False,
        metrics_port: int | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"expected a concurrency of at least 1, found {concurrency}")
        if deadline is not None and deadline <= 0:
            raise ValueError(f"expected a deadline of more than 0 seconds, found {deadline:g}")
        self.consumer_refs = read_consumer_refs(queue, consumer, fallbacks)
        self.name = name or f"{socket.gethostname()}-{consumer}"
        self._runner = create_runner(inspect_handler(handler), processes=processes)
        self._settings = settings
        self._concurrency = concurrency
        self._grace = grace
        self._deadline = deadline
        self._metrics_port = metrics_port
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()

    def stop(self) -> None:
        """Take no more jobs; :meth:`run` returns when the running ones are done, or the grace time is over."""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Work until :meth:`stop`.

        What the grace time cuts off is handed back, except where its handler goes on in a thread: that is delivered
        again after the consumer's ack wait.

        :raises NotFoundError: a stream, a consumer or a stream of events doesn't exist
        :raises WorkerSetupError: numbers can't be served, or a consumer's jobs are for one pinned client
        :raises WorkerStuckError: too many handlers went on past their deadline in threads; start another process
        :raises JetStreamProviderError: the first connection failed
        """
        from airflow_provider_jetstream.jetstream.client.connection import connect

        cut_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        slots = InFlightJobs(self.name, self._concurrency, self._stopping)
        most_abandoned = max(self._concurrency, _FEWEST_ABANDONED)
        abandoned = 0
        try:
            async with connect(self._settings) as connection:
                metrics = self._metrics()
                equipment = WorkerContext(self.name, self._runner, cut_off, self._deadline, metrics, slots.count)
                try:
                    async with bind_consumers(connection, self.consumer_refs, equipment) as lanes:
                        log.info("%s takes jobs of %s", self.name, ", then of ".join(map(str, self.consumer_refs)))
                        async with open_fetcher(connection, lanes, slots.start, self._wake) as intake:
                            await self._pull(connection, intake, slots, lambda: _abandoned(lanes) > most_abandoned)
                            abandoned = _abandoned(lanes)
                        await slots.nak_not_started(connection)
                        await slots.finish(self._grace, cut_off)
                finally:
                    metrics.close()
        finally:
            self._runner.close()
        if abandoned > most_abandoned:
            raise WorkerStuckError(
                f"expected at most {most_abandoned} handlers to go on past their deadline, found {abandoned}: only a"
                " new process is rid of them; give handlers time limits of their own, or run them in processes"
            )
        log.info("%s stopped", self.name)

    def _metrics(self) -> Metrics:
        if self._metrics_port is None:
            return NoMetrics()
        served = PrometheusMetrics(self._metrics_port, self.name)
        log.info("%s serves numbers on port %d under /metrics", self.name, served.port)
        return served

    async def _pull(
        self, connection: Connection, intake: Fetcher, slots: InFlightJobs, stuck: Callable[[], bool]
    ) -> None:
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set() and not stuck():
                if connection.client.is_closed:
                    raise UnreachableError("the connection was closed and won't come back by itself: start again")
                if slots.free:
                    await intake.fetch(slots.free)
                    await slots.nak_not_started(connection)
                else:
                    await asyncio.wait([stopped, *slots.tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()


def _abandoned(lanes: Sequence[BoundConsumer]) -> int:
    return sum(len(lane.executor.supervisor.abandoned) for lane in lanes)
