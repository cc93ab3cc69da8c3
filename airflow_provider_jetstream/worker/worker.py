"""The worker: it pulls no more jobs than it can start, and stops without losing or repeating a running job.

One delivery is the subject of :mod:`.executor`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.jetstream.errors import UnreachableError
from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.worker.consumers import WorkerContext, bind_consumers, read_consumer_refs
from airflow_provider_jetstream.worker.errors import WorkerSetupError, WorkerStuckError
from airflow_provider_jetstream.worker.fetching import Fetcher, open_fetcher
from airflow_provider_jetstream.worker.handler import inspect_batch_handler, inspect_handler
from airflow_provider_jetstream.worker.in_flight import InFlightJobs
from airflow_provider_jetstream.worker.metrics import Metrics, NoMetrics, PrometheusMetrics
from airflow_provider_jetstream.worker.runners import create_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource
    from airflow_provider_jetstream.worker.bounded_run import BoundedRun
    from airflow_provider_jetstream.worker.consumers import BoundConsumer, Fallback

log = logging.getLogger("jetstream.worker")

DEADLINE = 3_600.0
PRIORITIES = ("fair", "strict")

_MIN_ABANDONED_LIMIT = 10


class Worker:
    """Runs a handler for the jobs of one consumer, or of several in order of urgency, until it is stopped.

    :param queue: the queue's declaration, its dict, or the path of its YAML file
    :param consumer: the name of one of the queue's consumers; it must exist on the server
    :param handler: takes a :class:`Delivery`, or a pydantic model if its first parameter is annotated with one; a plain
        function runs in a thread. Its return value is stored with the completion, a :class:`GiveUpError` makes the job
        a dead letter at once, a :class:`RetryLaterError` sets the delay of the next delivery, and any other exception
        leads to the next delivery after the consumer's backoff
    :param fallbacks: the consumers whose jobs run when the own consumer has none, the most urgent first: names of
        consumers of the same queue, or pairs of another queue and the name of its consumer. All share the handler and
        every setting below
    :param priorities: ``fair`` starts at least one job in ten of each consumer that has any; ``strict`` starts none of
        a consumer while one named before it has any
    :param concurrency: how many jobs run at a time
    :param name: identifies the worker in logs and completions
    :param grace: seconds for running jobs to finish after :meth:`stop`
    :param deadline: seconds per attempt, ``None`` for no limit; a job's own ``Job-Deadline`` may be shorter. Until then
        the worker signals that the job is in progress, whatever the consumer's ack wait
    :param processes: run the handler in processes, one for each job at a time
    :param batch: the handler takes a list of up to so many deliveries, and returns a list with one outcome for each, in
        their order: its result, or the error with which it fails, such as ``GiveUpError("…")``; ``None`` for all of
        them where none has a result. What it raises is the outcome of every job. ``concurrency`` counts calls, and a
        call starts with the jobs that are there
    :param metrics_port: the port on which to serve Prometheus metrics; ``None`` to serve none
    :param metrics_address: on which address; all where absent
    :raises QueueDeclarationError: the declaration can't be used, or has no such consumer
    :raises WorkerSetupError: the handler takes something else, or can't run in processes; or a consumer is named twice
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own
        self,
        queue: QueueSource,
        consumer: str,
        handler: Callable[..., Any],
        settings: ConnectionSettings,
        *,
        fallbacks: Sequence[Fallback] = (),
        priorities: Literal["fair", "strict"] = "fair",
        concurrency: int = 1,
        name: str | None = None,
        grace: timedelta | float | str = 30.0,
        deadline: timedelta | float | str | None = DEADLINE,
        processes: bool = False,
        batch: int | None = None,
        metrics_port: int | None = None,
        metrics_address: str = "0.0.0.0",  # noqa: S104
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"expected a concurrency of at least 1, found {concurrency}")
        deadline_seconds = None if deadline is None else parse_seconds(deadline)
        if deadline_seconds == 0:
            raise ValueError(f"expected a deadline of more than 0 seconds, found {deadline}")
        if priorities not in PRIORITIES:
            raise ValueError(f"expected priorities of {' or '.join(PRIORITIES)}, found {priorities!r}")
        if batch is not None and batch < 1:
            raise ValueError(f"expected a batch of at least 1 job, found {batch}")
        if batch is not None and processes:
            raise WorkerSetupError("expected a batch handler outside of processes, found processes: drop one of both")
        self.consumer_refs = read_consumer_refs(queue, consumer, fallbacks)
        self.name = name or f"{socket.gethostname()}-{consumer}"
        self._runner = create_runner(
            inspect_handler(handler) if batch is None else inspect_batch_handler(handler), processes=processes
        )
        self._batch = batch
        self._settings = settings
        self._has_strict_priorities = priorities == "strict"
        self._concurrency = concurrency
        self._grace = parse_seconds(grace)
        self._deadline = deadline_seconds
        self._metrics_port = metrics_port
        self._metrics_address = metrics_address
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()

    def stop(self) -> None:
        """Start no more jobs; :meth:`run` returns when the running ones are done, or the grace time is over."""
        self._stopping.set()
        self._wake.set()

    async def run(self, bounds: BoundedRun | None = None) -> None:
        """Run jobs until :meth:`stop`, or until a run with bounds has done enough.

        A job that is still running at the end of the grace time is nak'ed, unless its handler goes on in a thread: that
        job is delivered again after the consumer's ack wait.

        :param bounds: when the run ends by itself; of a worker with one consumer
        :raises DeadlineError: the server was away for too long, where the run has bounds
        :raises NotFoundError: a work queue, a consumer or an event stream doesn't exist
        :raises WorkerSetupError: metrics can't be served, or a field of a queue or a consumer on the server is refused
        :raises WorkerStuckError: too many handlers run past their deadline in threads; start another process
        :raises JetStreamProviderError: the first connection failed
        """
        from airflow_provider_jetstream.jetstream.client.connect import connect

        if bounds is not None and len(self.consumer_refs) > 1:
            raise WorkerSetupError("expected one consumer in a run with bounds, found fallbacks: leave them out")
        grace_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        jobs = InFlightJobs(self.name, self._concurrency, self._stopping, self._batch, bounds)
        abandoned_limit = max(self._concurrency, _MIN_ABANDONED_LIMIT)
        abandoned = 0
        try:
            async with connect(self._settings) as connection:
                metrics = self._metrics()
                context = WorkerContext(self.name, self._runner, grace_over, self._deadline, metrics, jobs)
                try:
                    async with bind_consumers(connection, self.consumer_refs, context) as consumers:
                        log.info("%s takes jobs of %s", self.name, ", then of ".join(map(str, self.consumer_refs)))
                        async with open_fetcher(
                            connection, consumers, jobs, self._wake, strict=self._has_strict_priorities
                        ) as fetcher:
                            jobs.is_stuck = lambda: _abandoned(consumers) > abandoned_limit
                            await self._pull(connection, fetcher, jobs)
                            abandoned = _abandoned(consumers)
                        await jobs.nak_not_started(connection)
                        await jobs.finish(self._grace, grace_over)
                finally:
                    metrics.close()
        finally:
            jobs.sweep.close()
            self._runner.close()
        if abandoned > abandoned_limit:
            raise WorkerStuckError(
                f"expected at most {abandoned_limit} handlers to go on past their deadline, found {abandoned}: only the"
                " exit of the process ends them; give handlers time limits of their own, or run them in processes"
            )
        log.info("%s stopped", self.name)

    def _metrics(self) -> Metrics:
        if self._metrics_port is None:
            return NoMetrics()
        metrics = PrometheusMetrics(self._metrics_port, self.name, self._metrics_address)
        log.info("%s serves metrics on port %d under /metrics", self.name, metrics.port)
        return metrics

    async def _pull(self, connection: Connection, fetcher: Fetcher, jobs: InFlightJobs) -> None:
        while not self._stopping.is_set() and not jobs.is_stuck():
            if connection.is_closed:
                raise connection.close_reason or UnreachableError(
                    "the connection was closed and won't come back by itself: start again"
                )
            if jobs.denial:
                raise jobs.denial
            await fetcher.fetch()
            if jobs.has_not_started:
                await fetcher.drain()
                await jobs.nak_not_started(connection)
            if await self._is_over(connection, fetcher, jobs):
                break
        await fetcher.drain()

    async def _is_over(self, connection: Connection, fetcher: Fetcher, jobs: InFlightJobs) -> bool:
        if (bounds := jobs.bounds) is None:
            return False
        ref = self.consumer_refs[0]
        await bounds.check(connection, ref.queue.name, ref.consumer.name, is_busy=jobs.is_busy)
        if bounds.is_over:
            # Requests that are still open may deliver messages.
            await fetcher.drain()
        return bounds.is_over


def _abandoned(consumers: Sequence[BoundConsumer]) -> int:
    return sum(len(consumer.executor.supervisor.abandoned) for consumer in consumers)
