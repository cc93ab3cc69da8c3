"""Where a worker's jobs come from: its own consumer and those it falls back to, each with all that doing jobs takes."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.cancellation.cache import CancellationCache, follow_cancellations
from airflow_provider_jetstream.jetstream.client.pull_request import PINNED, priority_fields
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import cancellation_filter
from airflow_provider_jetstream.worker.completion import CompletionStore
from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from airflow_provider_jetstream.worker.executor import JobExecutor
from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy
from airflow_provider_jetstream.worker.runners import Runner, Supervisor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.declaration import Consumer
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.worker.metrics import Metrics

Fallback: TypeAlias = "str | tuple[QueueSource, str]"

# Of so many jobs, each lane that has some gets at least one.
SHARE = 10


@dataclass(frozen=True, slots=True)
class ConsumerRef:
    """A consumer whose jobs are done.

    :param queue: its work queue
    :param consumer: the consumer
    """

    queue: WorkQueue
    consumer: Consumer

    def __str__(self) -> str:
        return f"{self.queue.name}/{self.consumer.name}"


@dataclass(frozen=True, slots=True)
class BoundConsumer:
    """A source that is open.

    :param source: where its jobs come from
    :param doer: does them
    :param asking: what each request for jobs has to say besides
    """

    source: ConsumerRef
    doer: JobExecutor
    asking: dict[str, Any]

    @property
    def next_subject(self) -> str:
        """The subject of requests for jobs."""
        return f"$JS.API.CONSUMER.MSG.NEXT.{self.source.queue.name}.{self.source.consumer.name}"

    @property
    def is_fallback(self) -> bool:
        """Whether workers that have the consumer as their own come first."""
        return bool(self.asking.get("priority"))


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What all lanes of a worker share.

    :param worker: the worker's name
    :param runner: runs the handler
    :param cut_off: done once no handler is waited for any longer
    :param deadline: seconds for an attempt; ``None`` for any time
    :param metrics: counts
    :param running: counts the jobs in hand that come from a source
    """

    worker: str
    runner: Runner
    cut_off: asyncio.Future[None]
    deadline: float | None
    metrics: Metrics
    running: Callable[[ConsumerRef], int]


def read_consumer_refs(queue: QueueSource, consumer: str, fallbacks: Sequence[Fallback]) -> tuple[ConsumerRef, ...]:
    """Find what a worker is told to do the jobs of.

    :param queue: its queue
    :param consumer: one of the queue's consumers
    :param fallbacks: further consumers of the queue by name, or of another one as a pair
    :return: the sources, the most urgent one first
    :raises QueueDeclarationError: a declaration can't be used, or has no such consumer
    :raises WorkerSetupError: a consumer is named twice, a queue is declared in two ways, or there are too many
    """
    # Not above: a handler's module imports this package too, in each of its processes, and needs no pydantic.
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    own = WorkQueue.load(queue)
    sources = [ConsumerRef(own, own.consumer(consumer))]
    queues = {own.name: own}
    for fallback in fallbacks:
        place, name = (own, fallback) if isinstance(fallback, str) else fallback
        found = WorkQueue.load(place)
        if queues.setdefault(found.name, found) != found:
            raise WorkerSetupError(
                f"expected one declaration of work queue {found.name}, found two that differ: give a fallback in the"
                " worker's own queue by the consumer's name alone, and others with the same declaration"
            )
        source = ConsumerRef(queues[found.name], found.consumer(name))
        if source in sources:
            raise WorkerSetupError(
                f"expected each consumer once, found {source} twice among the worker's own and its fallbacks: drop one"
            )
        sources.append(source)
    if len(sources) > SHARE:
        raise WorkerSetupError(
            f"expected at most {SHARE - 1} fallbacks, found {len(sources) - 1}: run another worker for the others"
        )
    return tuple(sources)


@asynccontextmanager
async def bind_consumers(
    connection: Connection, sources: Sequence[ConsumerRef], equipment: WorkerContext
) -> AsyncIterator[tuple[BoundConsumer, ...]]:
    """Be ready to do jobs until the block is left.

    :param connection: the server
    :param sources: where they come from, the most urgent one first
    :param equipment: what the lanes share
    :return: the lanes
    :raises NotFoundError: a stream, a consumer or a stream of events doesn't exist
    :raises WorkerSetupError: a consumer's jobs are for one pinned client
    """
    configs = [await _look(connection, source) for source in sources]
    async with AsyncExitStack() as stack:
        books: dict[str, CancellationCache] = {}
        lanes = []
        for priority, (source, config) in enumerate(zip(sources, configs, strict=True)):
            queue, consumer = source.queue, source.consumer.name
            if queue.name not in books:
                books[queue.name] = await _cancellations(stack, connection, queue)
            rules = RedeliveryPolicy.of(config)
            letters = DeadLetterWriter(connection, queue, consumer, rules.max_deliver)
            await letters.look()
            supervisor = Supervisor(equipment.runner, equipment.cut_off)
            doer = JobExecutor(
                connection=connection,
                worker=equipment.worker,
                rules=rules,
                supervisor=supervisor,
                letters=letters,
                completions=CompletionStore(connection, queue, consumer, equipment.worker),
                cancellations=books[queue.name],
                metrics=equipment.metrics.lane(
                    queue.name, consumer, partial(equipment.running, source), partial(len, supervisor.abandoned)
                ),
                deadline=equipment.deadline,
            )
            lanes.append(BoundConsumer(source, doer, priority_fields(config, priority)))
        yield tuple(lanes)


async def _look(connection: Connection, source: ConsumerRef) -> dict[str, Any]:
    info = await consumer_info(connection, source.queue.name, source.consumer.name)
    if source.queue.events:
        await stream_info(connection, source.queue.events.name)
    config: dict[str, Any] = info["config"]
    if config.get("priority_policy") == PINNED:
        raise WorkerSetupError(
            f"expected consumer {source} to share its jobs among workers, found the priority policy {PINNED}: the"
            " server would give all jobs to one worker and leave the others idle; set priority_policy to overflow or"
            " prioritized, or do its jobs with a client that keeps pins"
        )
    return config


async def _cancellations(stack: AsyncExitStack, connection: Connection, queue: WorkQueue) -> CancellationCache:
    if queue.events and covered_by_any(queue.events.subjects, cancellation_filter(queue.name)):
        return await stack.enter_async_context(follow_cancellations(connection, queue))
    return CancellationCache()
