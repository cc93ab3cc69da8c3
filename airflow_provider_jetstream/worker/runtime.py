"""The worker: pull no more than there are free slots, and stop without losing or repeating what is in hand.

What becomes of a single job is in :mod:`.doing`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.cancellation_book import CancellationBook, follow_cancellations
from airflow_provider_jetstream.jetstream.connection import Connection, ConnectionSettings, connect
from airflow_provider_jetstream.jetstream.errors import UnreachableError, WorkerStuckError
from airflow_provider_jetstream.jetstream.names import cancellation_filter
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.jetstream.stored import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.subjects import covered_by_any
from airflow_provider_jetstream.worker.calling import read_handler
from airflow_provider_jetstream.worker.completing import CompletionStore
from airflow_provider_jetstream.worker.delivery_rules import DeliveryRules
from airflow_provider_jetstream.worker.doing import JobDoer
from airflow_provider_jetstream.worker.giving_up import LetterKeeper
from airflow_provider_jetstream.worker.metrics import Metrics, NoMetrics, PrometheusMetrics
from airflow_provider_jetstream.worker.pulling import Puller
from airflow_provider_jetstream.worker.running import Supervisor, runner_of
from airflow_provider_jetstream.worker.settling import hand_back

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from nats.aio.msg import Msg

log = logging.getLogger("jetstream.worker")

DEADLINE = 3_600.0

_FEWEST_ABANDONED = 10
_CUT_OFF_SECONDS = 5.0


class Worker:
    """Runs a handler for the jobs of one consumer until it is stopped.

    :param queue: the queue's declaration, its dict, or the path of its YAML file
    :param consumer: the name of one of the queue's consumers; it has to exist on the server
    :param handler: takes a :class:`Delivery`, or a pydantic model if its first parameter is annotated with one; a plain
        function runs in a thread. What it returns is stored with the completion, a :class:`GiveUpError` makes the job a
        dead letter at once, a :class:`RetryLaterError` says when to try again, and any other exception hands the job
        back for its next delivery
    :param settings: the connection
    :param concurrency: jobs at a time
    :param name: tells workers apart in logs and completions
    :param grace: seconds for running jobs to finish after :meth:`stop`
    :param deadline: seconds that one attempt may take, ``None`` for any time; a job's own ``Job-Deadline`` may be
        shorter. Until then the worker tells the server that the job is in progress, whatever the consumer's ack wait
    :param processes: run the handler in processes of its own, one for each job at a time
    :param metrics_port: where to serve numbers for Prometheus; ``None`` for nowhere
    :raises QueueDeclarationError: the declaration can't be used, or has no such consumer
    :raises WorkerSetupError: the handler takes something else, or can't run in processes
    """

    def __init__(
        self,
        queue: WorkQueue | dict[str, Any] | str,
        consumer: str,
        handler: Callable[..., Any],
        settings: ConnectionSettings,
        *,
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
        self.queue = WorkQueue.load(queue)
        self.consumer = self.queue.consumer(consumer)
        self.name = name or f"{socket.gethostname()}-{consumer}"
        self._runner = runner_of(read_handler(handler), processes=processes)
        self._settings = settings
        self._concurrency = concurrency
        self._grace = grace
        self._deadline = deadline
        self._metrics_port = metrics_port
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._untaken: list[Msg] = []

    def stop(self) -> None:
        """Take no more jobs; :meth:`run` returns when the running ones are done, or the grace time is over."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until :meth:`stop`.

        What the grace time cuts off is handed back, except where its handler goes on in a thread: that is delivered
        again after the consumer's ack wait.

        :raises NotFoundError: the stream, the consumer or the stream of events doesn't exist
        :raises WorkerSetupError: numbers can't be served
        :raises WorkerStuckError: too many handlers went on past their deadline in threads; start another process
        :raises JetStreamProviderError: the first connection failed
        """
        cut_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        supervisor = Supervisor(self._runner, cut_off)
        most_abandoned = max(self._concurrency, _FEWEST_ABANDONED)
        abandoned = 0
        try:
            async with connect(self._settings) as connection:
                rules = await self._look(connection)
                letters = LetterKeeper(connection, self.queue, self.consumer.name, rules.max_deliver)
                await letters.look()
                metrics = self._metrics(supervisor)
                completions = CompletionStore(connection, self.queue, self.consumer.name, self.name)
                try:
                    async with self._cancellations(connection) as cancellations:
                        doer = JobDoer(
                            connection=connection,
                            worker=self.name,
                            rules=rules,
                            supervisor=supervisor,
                            letters=letters,
                            completions=completions,
                            cancellations=cancellations,
                            metrics=metrics,
                            deadline=self._deadline,
                        )
                        log.info("%s takes jobs of %s/%s", self.name, self.queue.name, self.consumer.name)
                        take = partial(self._take, doer)
                        async with Puller(connection, self.queue.name, self.consumer.name, take) as puller:
                            await self._pull(connection, puller, lambda: len(supervisor.abandoned) > most_abandoned)
                            abandoned = len(supervisor.abandoned)
                        await self._return_untaken(connection)
                        await self._finish(cut_off)
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

    async def _look(self, connection: Connection) -> DeliveryRules:
        info = await consumer_info(connection, self.queue.name, self.consumer.name)
        if self.queue.events:
            await stream_info(connection, self.queue.events.name)
        return DeliveryRules.of(info["config"])

    def _cancellations(self, connection: Connection) -> AbstractAsyncContextManager[CancellationBook]:
        events = self.queue.events
        if events and covered_by_any(events.subjects, cancellation_filter(self.queue.name)):
            return follow_cancellations(connection, self.queue)
        return nullcontext(CancellationBook())

    def _metrics(self, supervisor: Supervisor) -> Metrics:
        if self._metrics_port is None:
            return NoMetrics()
        labels = {"stream": self.queue.name, "consumer": self.consumer.name, "worker": self.name}
        served = PrometheusMetrics(
            self._metrics_port, labels, lambda: len(self._running), lambda: len(supervisor.abandoned)
        )
        log.info("%s serves numbers on port %d under /metrics", self.name, served.port)
        return served

    async def _pull(self, connection: Connection, puller: Puller, stuck: Callable[[], bool]) -> None:
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            while not stopped.done() and not stuck():
                if connection.client.is_closed:
                    raise UnreachableError("the connection was closed and won't come back by itself: start again")
                if free := max(0, self._concurrency - len(self._running)):
                    await puller.pull(free)
                    await self._return_untaken(connection)
                else:
                    await asyncio.wait([stopped, *self._running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def _take(self, doer: JobDoer, message: Msg) -> None:
        # A request that was held up with the connection may bring more than there is room for.
        no_room = self._stopping.is_set() or len(self._running) >= self._concurrency
        # Handing back the last delivery of a job that nobody started would kill it.
        if no_room and not doer.rules.is_last(message.metadata.num_delivered):
            self._untaken.append(message)
            return
        task = asyncio.create_task(doer.do(message))
        self._running.add(task)
        task.add_done_callback(self._finished)

    async def _return_untaken(self, connection: Connection) -> None:
        """Hand back what wasn't started, once no request is open that would only bring it here again."""
        while self._untaken:
            message = self._untaken.pop()
            await hand_back(connection, message)
            log.info("%s hands job %d back without starting it", self.name, message.metadata.sequence.stream)

    async def _finish(self, cut_off: asyncio.Future[None]) -> None:
        if not self._running:
            return
        log.info("%s finishes %d running jobs", self.name, len(self._running))
        _, unfinished = await asyncio.wait(self._running, timeout=self._grace)
        if not unfinished:
            return
        cut_off.set_result(None)
        _, unsettled = await asyncio.wait(unfinished, timeout=_CUT_OFF_SECONDS)
        for task in unsettled:
            task.cancel()
        await asyncio.gather(*unsettled, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # It was logged with the end of the job.
            task.exception()
