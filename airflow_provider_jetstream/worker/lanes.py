"""Where a worker's jobs come from: its own consumer and those it falls back to, each with all that doing jobs takes."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.cancellation_book import CancellationBook, follow_cancellations
from airflow_provider_jetstream.jetstream.names import cancellation_filter
from airflow_provider_jetstream.jetstream.priority_groups import PINNED, asked_in_group
from airflow_provider_jetstream.jetstream.stored import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.subjects import covered_by_any
from airflow_provider_jetstream.worker.completing import CompletionStore
from airflow_provider_jetstream.worker.delivery_rules import DeliveryRules
from airflow_provider_jetstream.worker.doing import JobDoer
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from airflow_provider_jetstream.worker.giving_up import LetterKeeper
from airflow_provider_jetstream.worker.running import Runner, Supervisor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Sequence

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.declarations import Consumer
    from airflow_provider_jetstream.jetstream.queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.worker.metrics import Metrics

Fallback: TypeAlias = "str | tuple[QueueSource, str]"

# Of so many jobs, each lane that has some gets at least one.
SHARE = 10


@dataclass(frozen=True, slots=True)
class Source:
    """A consumer whose jobs are done.

    :param queue: its work queue
    :param consumer: the consumer
    """

    queue: WorkQueue
    consumer: Consumer

    def __str__(self) -> str:
        return f"{self.queue.name}/{self.consumer.name}"


@dataclass(frozen=True, slots=True)
class Lane:
    """A source that is open.

    :param source: where its jobs come from
    :param doer: does them
    :param asking: what each request for jobs has to say besides
    """

    source: Source
    doer: JobDoer
    asking: dict[str, Any]

    @property
    def asked_on(self) -> str:
        """The subject of requests for jobs."""
        return f"$JS.API.CONSUMER.MSG.NEXT.{self.source.queue.name}.{self.source.consumer.name}"

    @property
    def helps_out(self) -> bool:
        """Whether workers that have the consumer as their own come first."""
        return bool(self.asking.get("priority"))


@dataclass(frozen=True, slots=True)
class Equipment:
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
    running: Callable[[Source], int]


def read_sources(queue: QueueSource, consumer: str, fallbacks: Sequence[Fallback]) -> tuple[Source, ...]:
    """Find what a worker is told to do the jobs of.

    :param queue: its queue
    :param consumer: one of the queue's consumers
    :param fallbacks: further consumers of the queue by name, or of another one as a pair
    :return: the sources, the most urgent one first
    :raises QueueDeclarationError: a declaration can't be used, or has no such consumer
    :raises WorkerSetupError: a consumer is named twice, a queue is declared in two ways, or there are too many
    """
    # Not above: a handler's module imports this package too, in each of its processes, and needs no pydantic.
    from airflow_provider_jetstream.jetstream.queue import WorkQueue

    own = WorkQueue.load(queue)
    sources = [Source(own, own.consumer(consumer))]
    queues = {own.name: own}
    for fallback in fallbacks:
        place, name = (own, fallback) if isinstance(fallback, str) else fallback
        found = WorkQueue.load(place)
        if queues.setdefault(found.name, found) != found:
            raise WorkerSetupError(
                f"expected one declaration of work queue {found.name}, found two that differ: give a fallback in the"
                " worker's own queue by the consumer's name alone, and others with the same declaration"
            )
        source = Source(queues[found.name], found.consumer(name))
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
async def open_lanes(
    connection: Connection, sources: Sequence[Source], equipment: Equipment
) -> AsyncIterator[tuple[Lane, ...]]:
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
        books: dict[str, CancellationBook] = {}
        lanes = []
        for priority, (source, config) in enumerate(zip(sources, configs, strict=True)):
            queue, consumer = source.queue, source.consumer.name
            if queue.name not in books:
                books[queue.name] = await _cancellations(stack, connection, queue)
            rules = DeliveryRules.of(config)
            letters = LetterKeeper(connection, queue, consumer, rules.max_deliver)
            await letters.look()
            supervisor = Supervisor(equipment.runner, equipment.cut_off)
            doer = JobDoer(
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
            lanes.append(Lane(source, doer, asked_in_group(config, priority)))
        yield tuple(lanes)


async def _look(connection: Connection, source: Source) -> dict[str, Any]:
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


async def _cancellations(stack: AsyncExitStack, connection: Connection, queue: WorkQueue) -> CancellationBook:
    if queue.events and covered_by_any(queue.events.subjects, cancellation_filter(queue.name)):
        return await stack.enter_async_context(follow_cancellations(connection, queue))
    return CancellationBook()
