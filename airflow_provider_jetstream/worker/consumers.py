"""The consumers whose jobs a worker runs: its own one and its fallbacks, each with what running its jobs needs."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.cancellation.cache import CancellationCache, follow_cancellations
from airflow_provider_jetstream.jetstream.client.stream_api import (
    consumer_info,
    priority_fields,
    pull_subject,
    stream_info,
)
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import cancellation_filter
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings, refusals
from airflow_provider_jetstream.jetstream.queue.stream_config import outside_filters, stored_subjects
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import log_changes, read_streams, undeclared_changes
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.worker.acknowledgement import RedeliveryPolicy
from airflow_provider_jetstream.worker.attempts import AttemptWriter
from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from airflow_provider_jetstream.worker.executor import JobExecutor, QueueClock
from airflow_provider_jetstream.worker.runners import Runner, Supervisor
from airflow_provider_jetstream.worker.settlement import CompletionWriter, JobSettlement

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.declaration import Consumer
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.worker.in_flight import InFlightJobs
    from airflow_provider_jetstream.worker.metrics import Metrics

log = logging.getLogger("jetstream.worker")

Fallback: TypeAlias = "str | tuple[QueueSource, str]"

# In this number of jobs started in a row, each consumer that always had jobs has at least one.
FAIRNESS_WINDOW = 10


@dataclass(frozen=True, slots=True)
class ConsumerRef:
    """A consumer of a work queue."""

    queue: WorkQueue
    consumer: Consumer

    def __str__(self) -> str:
        return f"{self.queue.name}/{self.consumer.name}"


@dataclass(frozen=True, slots=True)
class BoundConsumer:
    """A consumer with the executor for its jobs.

    ``request_fields`` go into each of its pull requests; ``max_batch`` and ``max_expires`` (in seconds) are the most
    that it accepts in one, ``None`` for no limit.
    """

    ref: ConsumerRef
    executor: JobExecutor
    request_fields: dict[str, Any]
    max_batch: int | None = None
    max_expires: float | None = None

    @property
    def next_subject(self) -> str:
        """The subject of pull requests."""
        return pull_subject(self.ref.queue.name, self.ref.consumer.name, self.executor.connection.api_prefix)

    @property
    def is_fallback(self) -> bool:
        """Whether workers that have it as their own consumer come before this worker."""
        return bool(self.request_fields.get("priority"))


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What all consumers of a worker share.

    ``grace_over`` is done once the worker waits for no more handlers; ``deadline`` is in seconds, ``None`` for none.
    """

    worker: str
    runner: Runner
    grace_over: asyncio.Future[None]
    deadline: float | None
    metrics: Metrics
    jobs: InFlightJobs


def read_consumer_refs(queue: QueueSource, consumer: str, fallbacks: Sequence[Fallback]) -> tuple[ConsumerRef, ...]:
    """Resolve a worker's consumer and its fallbacks, the most urgent one first.

    :raises QueueDeclarationError: a declaration can't be used, or has no such consumer
    :raises WorkerSetupError: a consumer is named twice, a queue is declared in two ways, or there are too many
    """
    # Not above: a handler's module imports this package too, in each of its processes, and needs no pydantic.
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    own = WorkQueue.load(queue)
    refs = [ConsumerRef(own, own.consumer(consumer))]
    queues = {own.name: own}
    for fallback in fallbacks:
        source, name = (own, fallback) if isinstance(fallback, str) else fallback
        declared = WorkQueue.load(source)
        if queues.setdefault(declared.name, declared) != declared:
            raise WorkerSetupError(
                f"expected one declaration of work queue {declared.name}, found two that differ: give a fallback in the"
                " worker's own queue by the consumer's name alone, and others with the same declaration"
            )
        ref = ConsumerRef(queues[declared.name], declared.consumer(name))
        if ref in refs:
            raise WorkerSetupError(
                f"expected each consumer once, found {ref} twice among the worker's own and its fallbacks: drop one"
            )
        refs.append(ref)
    if len(refs) > FAIRNESS_WINDOW:
        raise WorkerSetupError(
            f"expected at most {FAIRNESS_WINDOW - 1} fallbacks, found {len(refs) - 1}: run another worker for the"
            " others"
        )
    return tuple(refs)


@asynccontextmanager
async def bind_consumers(
    connection: Connection, refs: Sequence[ConsumerRef], context: WorkerContext
) -> AsyncIterator[tuple[BoundConsumer, ...]]:
    """Check the consumers on the server, and create the executors of their jobs.

    :raises NotFoundError: a work queue, a consumer or an event stream doesn't exist
    :raises WorkerSetupError: a field of a queue or a consumer on the server is refused
    """
    streams = {name: await stream_info(connection, name) for name in dict.fromkeys(ref.queue.name for ref in refs)}
    configs = [await _consumer_config(connection, ref, streams[ref.queue.name]) for ref in refs]
    clocks = {ref.queue.name: QueueClock(connection, ref.queue.name) for ref in refs}
    captured = {ref.queue.name: await _captured_advisories(connection, ref.queue) for ref in refs}
    async with AsyncExitStack() as stack:
        cancellations: dict[str, CancellationCache] = {}
        consumers = []
        for priority, (ref, config) in enumerate(zip(refs, configs, strict=True)):
            queue, consumer = ref.queue, ref.consumer.name
            if queue.name not in cancellations:
                cancellations[queue.name] = await _open_cancellations(stack, connection, queue)
                cancellations[queue.name].report_to(context.jobs.supervise)
            redelivery = RedeliveryPolicy.of(config)
            dead_letters = DeadLetterWriter(connection, queue, consumer, redelivery.max_deliver, context.worker)
            await dead_letters.inspect_target()
            attempts = AttemptWriter(connection, queue, consumer, context.worker)
            await attempts.open()
            supervisor = Supervisor(context.runner, context.grace_over)
            settlement = JobSettlement(
                connection,
                context.worker,
                CompletionWriter(connection, queue, consumer, context.worker, captured[queue.name]),
                context.jobs,
                context.metrics.for_consumer(
                    queue.name,
                    consumer,
                    partial(context.jobs.count, queue.name, consumer),
                    partial(len, supervisor.abandoned),
                ),
            )
            executor = JobExecutor(
                connection=connection,
                redelivery=redelivery,
                supervisor=supervisor,
                dead_letters=dead_letters,
                settlement=await stack.enter_async_context(settlement),
                cancellations=cancellations[queue.name],
                deadline=context.deadline,
                execute_at_header=queue.execute_at_header,
                clock=clocks[queue.name],
                attempts=attempts,
            )
            consumers.append(
                BoundConsumer(
                    ref,
                    executor,
                    priority_fields(config, priority),
                    max_batch=config.get("max_batch") or None,
                    max_expires=config.get("max_expires", 0) / NANOSECONDS or None,
                )
            )
        yield tuple(consumers)


async def _consumer_config(connection: Connection, ref: ConsumerRef, stream: Mapping[str, Any]) -> dict[str, Any]:
    """Return a consumer's configuration on the server, and log what its fields, and its queue's, do to jobs."""
    queue, consumer = ref.queue.name, ref.consumer.name
    info = await consumer_info(connection, queue, consumer)
    config: dict[str, Any] = info["config"]
    found = (
        *field_findings("queue", stream, "worker"),
        *field_findings("consumer", info, "worker", name=consumer, queue=queue),
    )
    if refused := refusals(found):
        raise WorkerSetupError("; ".join(refused))
    outside = outside_filters(queue, consumer, filter_subjects(config), stored_subjects(stream["config"]))
    for text in dict.fromkeys((*map(str, found), *outside)):
        log.warning("%s", text)
    # The companions that a worker may read.
    companions = [companion.name for companion in (ref.queue.events, ref.queue.dead_letters) if companion]
    streams = {queue: stream, **await read_streams(connection, companions)}
    log_changes(queue, undeclared_changes(ref.queue, streams, {consumer: info}))
    return config


async def _captured_advisories(connection: Connection, queue: WorkQueue) -> tuple[str, ...]:
    """Return the queue's advisory subjects that its events stream captures, so that no other stream does.

    :raises NotFoundError: the events stream doesn't exist
    """
    if queue.events is None:
        return ()
    subjects = (await stream_info(connection, queue.events.name))["config"].get("subjects") or []
    captured = tuple(subject for subject in queue.advisory_subjects if covered_by_any(subjects, subject))
    if missing := sorted(set(queue.advisory_subjects) - set(captured)):
        log.warning(
            "jobs of %s aren't reported on %s, which %s doesn't capture: provision the queue, and start workers again",
            queue.name,
            ", ".join(missing),
            queue.events.name,
        )
    return captured


async def _open_cancellations(stack: AsyncExitStack, connection: Connection, queue: WorkQueue) -> CancellationCache:
    if queue.events and covered_by_any(queue.events.subjects, cancellation_filter(queue.name)):
        return await stack.enter_async_context(follow_cancellations(connection, queue))
    return CancellationCache()
