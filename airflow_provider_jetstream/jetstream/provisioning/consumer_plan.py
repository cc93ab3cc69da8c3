"""The steps for the consumers of a stream: what each is to be, in an order that the server accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers
from airflow_provider_jetstream.jetstream.provisioning.consumer_order import in_accepted_order
from airflow_provider_jetstream.jetstream.provisioning.migration_plan import ConsumerChanges
from airflow_provider_jetstream.jetstream.provisioning.partition_resize import resize_blockers
from airflow_provider_jetstream.jetstream.provisioning.plan import Step, consumer_step
from airflow_provider_jetstream.jetstream.queue.declaration import mover_consumer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.declaration import DeadLetterQueue
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


async def dead_letter_consumer_steps(
    connection: Connection, stream: DeadLetterQueue, existing: Mapping[str, Any] | None
) -> list[Step]:
    """Return the steps for the declared consumers of a dead letter queue.

    :param existing: the server's configuration of the stream, if it has it
    """
    if not stream.consumers:
        return []
    configs = await existing_consumers(connection, stream.name) if existing else {}
    steps = [consumer_step(stream.name, configs.get(consumer.name), consumer.config()) for consumer in stream.consumers]
    # With another retention, consumers share messages.
    return in_accepted_order(steps, configs) if (existing or stream.config())["retention"] == "workqueue" else steps


async def mover_steps(
    connection: Connection, queue: str, stream: str, existing: Mapping[str, Any] | None
) -> list[Step]:
    """Return the step for the consumer by which movers take jobs that are due.

    :param stream: the queue's stream of schedules
    :param existing: the server's configuration of the stream, if it has it
    """
    configs = await existing_consumers(connection, stream) if existing else {}
    declared = mover_consumer(queue)
    return [consumer_step(stream, configs.get(declared.name), declared.config())]


async def work_queue_consumer_steps(
    connection: Connection,
    queue: WorkQueue,
    declared: Mapping[str, dict[str, Any]],
    configs: Mapping[str, dict[str, Any]],
    stored: tuple[str, ...],
    *,
    migrate: bool,
) -> list[Step]:
    """Return the steps for the consumers of a work queue, and for undeclared ones that are in the way.

    :param declared: the declared configurations by name
    :param configs: the server's configurations by name
    :param stored: the subjects that the stream stores
    :param migrate: whether consumers may hand jobs over to others
    """
    changes = ConsumerChanges(connection, queue, declared, configs)
    existing = changes.existing
    migrations = await changes.migrations()
    has_partitions = any(consumer.partition is not None for consumer in queue.consumers)
    resized = await resize_blockers(connection, queue, existing) if has_partitions and existing else {}
    declared_steps: list[Step] = []
    undeclared_steps: list[Step] = []
    for name, config in declared.items():
        step = consumer_step(queue.name, existing.get(name), config, resized.get(name), stored)
        step = replace(step, blocked=(*step.blocked, *[reason async for reason in changes.lost_jobs(name)]))
        if migration := migrations.pop(name, None):
            step = await changes.migration_step(name, migration, step, migrate=migrate)
        declared_steps.append(step)
    for name, config in existing.items():
        if migration := migrations.get(name):
            undeclared_steps.append(await changes.migration_step(name, migration, None, migrate=migrate))
        elif name not in declared and (blocker := resized.get(name)):
            undeclared_steps.append(Step("consumer", f"{queue.name}/{name}", "keep", dict(config), (), (blocker,)))
    return in_accepted_order([*declared_steps, *undeclared_steps], configs)


async def existing_consumers(connection: Connection, stream: str) -> dict[str, dict[str, Any]]:
    """Return the server's configurations of a stream's consumers by name."""
    # Older servers leave the name out of the configuration of a consumer that was created with a durable name only.
    consumers = (await list_consumers(connection, stream)).items()
    return {name: {"name": name, **info["config"]} for name, info in consumers}
