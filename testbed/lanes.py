"""Queues with two consumers of different urgency, and what tells whether a worker treats them so."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.msg import Msg

from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.worker.consumers import ConsumerRef
from testbed.queues import make_queue, small_queue

HIGH, LOW = "high", "low"


def lanes_queue(name: str, *names: str, replicas: int = 1, **consumer: Any) -> WorkQueue:
    """
    Declare a small queue with a consumer for each kind of job.

    :param name: its name
    :param names: the consumers, each of the jobs of the kind of its name; by default ``high`` and ``low``
    :param replicas: of its streams
    :param consumer: fields of each consumer
    """
    declared = [
        {"name": each, "filter_subject": f"{name}.jobs.{each}", "max_deliver": 3, "ack_wait": "30s"} | consumer
        for each in names or (HIGH, LOW)
    ]
    return small_queue(name, consumers=declared, num_replicas=replicas)


async def make_lanes(connection: Connection, name: str, *, streams: int = 1) -> tuple[ConsumerRef, ConsumerRef]:
    """
    Provision a more and a less urgent consumer.

    :param connection: the server
    :param name: the name of their queue, or how the names of their queues begin
    :param streams: 1 for two consumers of one stream, 2 for two streams with one each
    """
    if streams == 1:
        queue = lanes_queue(name)
        await provision(connection, queue)
        return ConsumerRef(queue, queue.consumer(HIGH)), ConsumerRef(queue, queue.consumer(LOW))
    patient = {"max_deliver": 3, "ack_wait": "30s"}
    queues = [await make_queue(connection, f"{name}-{kind}", consumer=patient) for kind in (HIGH, LOW)]
    high, low = (ConsumerRef(queue, queue.consumers[0]) for queue in queues)
    return high, low


async def in_flight(connection: Connection, *sources: ConsumerRef) -> int:
    """
    Count the jobs that were delivered and not settled.

    :param connection: the server
    :param sources: whose
    """
    infos = [await consumer_info(connection, each.queue.name, each.consumer.name) for each in sources]
    return sum(int(info["num_ack_pending"]) for info in infos)


async def delivered(connection: Connection, source: ConsumerRef) -> int:
    """
    Count all deliveries of a consumer.

    :param connection: the server
    :param source: whose
    """
    info = await consumer_info(connection, source.queue.name, source.consumer.name)
    return int(info["delivered"]["consumer_seq"])


@asynccontextmanager
async def wiretap(connection: Connection, *sources: ConsumerRef) -> AsyncIterator[list[str]]:
    """
    Note the consumers that are asked for jobs, in the order in which they are.

    :param connection: the server
    :param sources: which to listen to
    """
    heard: list[str] = []

    async def note(message: Msg) -> None:
        heard.append(message.subject.rpartition(".")[2])

    subscriptions = [
        await connection.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{each.queue.name}.{each.consumer.name}", cb=note)
        for each in sources
    ]
    await connection.client.flush()
    try:
        yield heard
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()
