"""Queues with two consumers of different urgency, and what shows how a worker serves them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from nats.aio.msg import Msg

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue, provision
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from testbed.queues import make_queue, small_queue

HIGH, LOW = "high", "low"


class QueueConsumer(NamedTuple):
    """A consumer, with the queue that declares it."""

    queue: WorkQueue
    consumer: Consumer


def priority_queue(name: str, *names: str, replicas: int = 1, **consumer: Any) -> WorkQueue:
    """Declare a small queue with a consumer per name (``high`` and ``low`` by default) for the jobs of that name."""
    declared = [
        {"name": kind, "filter_subject": f"{name}.jobs.{kind}", "max_deliver": 3, "ack_wait": "30s"} | consumer
        for kind in names or (HIGH, LOW)
    ]
    return small_queue(name, consumers=declared, num_replicas=replicas)


async def make_priority_consumers(
    connection: NatsPyConnection, name: str, *, streams: int = 1
) -> tuple[QueueConsumer, QueueConsumer]:
    """Provision a more and a less urgent consumer: of one stream, or with ``streams=2`` of one stream each."""
    if streams == 1:
        queue = priority_queue(name)
        await provision(connection, queue)
        return QueueConsumer(queue, queue.consumer(HIGH)), QueueConsumer(queue, queue.consumer(LOW))
    fields = {"max_deliver": 3, "ack_wait": "30s"}
    queues = [await make_queue(connection, f"{name}-{kind}", consumer=fields) for kind in (HIGH, LOW)]
    high, low = (QueueConsumer(queue, queue.consumers[0]) for queue in queues)
    return high, low


async def count_in_flight(connection: NatsPyConnection, *refs: QueueConsumer) -> int:
    """Count the jobs of consumers that were delivered and not yet acknowledged."""
    infos = [await consumer_info(connection, ref.queue.name, ref.consumer.name) for ref in refs]
    return sum(int(info["num_ack_pending"]) for info in infos)


async def count_deliveries(connection: NatsPyConnection, ref: QueueConsumer) -> int:
    """Count all deliveries of a consumer."""
    info = await consumer_info(connection, ref.queue.name, ref.consumer.name)
    return int(info["delivered"]["consumer_seq"])


@asynccontextmanager
async def record_pull_requests(connection: NatsPyConnection, *refs: QueueConsumer) -> AsyncIterator[list[str]]:
    """Record the consumer name of each pull request, in the order of the requests."""
    consumers: list[str] = []

    async def note(message: Msg) -> None:
        consumers.append(message.subject.rpartition(".")[2])

    subscriptions = [
        await connection.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{ref.queue.name}.{ref.consumer.name}", cb=note)
        for ref in refs
    ]
    await connection.client.flush()
    try:
        yield consumers
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()
