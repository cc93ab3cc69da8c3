"""Many dead letters on a real server, made and counted over a task's kind of connection."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream import provision
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.streams import read_range
from testbed.face import consumer_info, stream_info
from testbed.queues import CONSUMER, small_queue
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import Headers, LetterRecord, StoredMessage
    from testbed.spark_face import BlockingConnection


def make_letters(
    options: Mapping[str, str], name: str, count: int, headers: Headers | None = None, **fields: Any
) -> WorkQueue:
    """Make a queue of so many dead letters; body and sequence of each are its number, from 1 on."""
    consumer = {"max_ack_pending": -1, "filter_subject": f"{name}.jobs.>"} | fields.pop("consumer", {})
    queue = small_queue(name, consumer=consumer, **fields)

    async def make(connection: BlockingConnection) -> None:
        await connection.discover_capabilities([])
        await provision(connection, queue)
        await publish(connection, queue, count, headers)

    run_on_own_connection(options, make)
    exhaust_deliveries(options, queue, count)
    return queue


async def publish(connection: BlockingConnection, queue: WorkQueue, count: int, headers: Headers | None = None) -> None:
    """Publish jobs."""

    async def put(number: int) -> None:
        await store(connection, f"{queue.name}.jobs.plain", str(number).encode(), headers)

    await map_concurrently(put, range(1, count + 1))


def exhaust_deliveries(options: Mapping[str, str], queue: WorkQueue, count: int) -> None:
    """Pull jobs and nak them until each has an entry in the dead letter queue."""

    async def die(connection: BlockingConnection) -> None:
        socket, letters = connection.socket, f"{queue.name}-dead"
        before = (await stream_info(connection, letters))["state"]["messages"]
        # A request that waits for nothing would end with fewer where the consumer has yet to see the last jobs.
        pull = json.dumps({"batch": count, "expires": 30 * 10**9}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{queue.name}.{CONSUMER}"
        socket.send(f"PUB {subject} {socket.inbox}.0 {len(pull)}\r\n".encode() + pull + b"\r\n")
        remaining = count
        while remaining:
            socket.receive(lambda _buffer, _filled: True)
            position = 0
            while frame := socket.next_frame(position):
                position = frame.end
                if not frame.sid:
                    socket.handle_control(frame)
                elif reply := bytes(socket.buffer[frame.offsets[2] : frame.offsets[3]]):
                    socket.send(b"PUB %b 4\r\n-NAK\r\n" % reply)
                    remaining -= 1
            socket.consume(position)
        while (await stream_info(connection, letters))["state"]["messages"] < before + count:
            await probe_consumer(connection, queue.name, CONSUMER)
            await sleep(0.02)

    run_on_own_connection(options, die)


def stored_messages(stream_options: Mapping[str, str], stream: str, subject: str = ">") -> list[StoredMessage]:
    """Read all messages of a stream."""

    async def read(connection: BlockingConnection) -> list[StoredMessage]:
        return [message async for message in read_range(connection, stream, subject)]

    return run_on_own_connection(stream_options, read)


def waiting_jobs(stream_options: Mapping[str, str], queue: WorkQueue) -> Counter[int]:
    """Count the bodies of the jobs that wait for a worker; the queue stores no other job."""

    async def pending(connection: BlockingConnection) -> int:
        return int((await consumer_info(connection, queue.name, CONSUMER))["num_pending"])

    messages = stored_messages(stream_options, queue.name, f"{queue.name}.jobs.>")
    assert run_on_own_connection(stream_options, pending) == len(messages)
    return Counter(int(message.data) for message in messages)


def letter_records(stream_options: Mapping[str, str], queue: WorkQueue) -> list[LetterRecord]:
    """Read the audit's records about letters."""
    name = queue.audit.name if queue.audit else ""

    async def read(connection: BlockingConnection) -> list[LetterRecord]:
        created = (await stream_info(connection, queue.name))["created"]
        return [record async for record in AuditLog(connection, name, queue.name, created).letters()]

    return run_on_own_connection(stream_options, read)
