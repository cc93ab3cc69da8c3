"""Small queues for tests: declare one, fill it, let its jobs end well or die, and count honestly what is left."""

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, overload

from nats.aio.msg import Msg

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer as pump_consumer
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.contract import completion_subject
from airflow_provider_jetstream.jetstream.dead_letters.scan import require_dead_letters
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.worker import Worker

_T = TypeVar("_T")

CONSUMER = "worker"
_PAUSE = 0.02


@overload
async def eventually(condition: Callable[[], Awaitable[_T]], within: float = 10.0) -> _T: ...


@overload
async def eventually(condition: Callable[[], _T], within: float = 10.0) -> _T: ...


async def eventually(condition: Callable[[], Any], within: float = 10.0) -> Any:
    """
    Wait until a condition holds, and return what it gave.

    :param condition: a plain or async function; anything true ends the wait
    :param within: seconds after which the wait fails
    """
    deadline = time.monotonic() + within
    while True:
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {value!r} after {within:g} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(_PAUSE)


def small_queue(name: str, *, consumer: Mapping[str, Any] | None = None, **fields: Any) -> WorkQueue:
    """
    Declare a queue with one consumer, short waits, a dead letter queue and events.

    :param name: its name; its jobs are on ``<name>.jobs.>``
    :param consumer: fields of its consumer other than one delivery and an ack wait of half a second
    :param fields: other fields of the queue, or other values of those named above
    """
    return WorkQueue(
        **{
            "name": name,
            "subjects": [f"{name}.jobs.>"],
            "consumers": [{"name": CONSUMER, "max_deliver": 1, "ack_wait": "500ms"} | dict(consumer or {})],
            "dead_letters": f"{name}-dead",
            "events": f"{name}-events",
        }
        | fields
    )


async def make_queue(
    connection: Connection, name: str, *, consumer: Mapping[str, Any] | None = None, **fields: Any
) -> WorkQueue:
    """
    Declare a small queue and provision it.

    :param connection: the server
    :param name: its name
    :param consumer: see :func:`small_queue`
    :param fields: see :func:`small_queue`
    """
    queue = small_queue(name, consumer=consumer, **fields)
    await provision(connection, queue)
    return queue


async def put(
    connection: Connection,
    queue: WorkQueue,
    bodies: Iterable[str],
    *,
    kind: str = "plain",
    headers: dict[str, str] | None = None,
) -> list[int]:
    """
    Publish jobs and return their stream sequences.

    :param connection: the server
    :param queue: the queue
    :param bodies: one job each
    :param kind: the end of their subject
    :param headers: headers of each
    """
    jetstream = connection.client.jetstream(timeout=connection.timeout)
    subject = f"{queue.name}.jobs.{kind}"
    return [(await jetstream.publish(subject, body.encode(), headers=headers)).seq for body in bodies]


async def take(
    connection: Connection, queue: WorkQueue, count: int, *, consumer: str = CONSUMER, within: float = 5.0
) -> list[Msg]:
    """
    Pull so many jobs, as a worker does.

    :param connection: the server
    :param queue: the queue
    :param count: how many
    :param consumer: the consumer to pull from
    :param within: seconds until the test fails
    """
    messages: list[Msg] = []
    pull = await connection.client.jetstream().pull_subscribe_bind(consumer, stream=queue.name)
    deadline = time.monotonic() + within
    try:
        while len(messages) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{len(messages)} of {count} jobs came within {within:g} s")
            with suppress(TimeoutError):
                messages += await pull.fetch(count - len(messages), timeout=min(left, 0.5))
    finally:
        await pull.unsubscribe()
    return messages


async def pump(connection: Connection, queue: WorkQueue, *, consumer: str = CONSUMER) -> None:
    """
    Have the server look at jobs that used up their deliveries; it says nothing about them while nobody pulls.

    :param connection: the server
    :param queue: the queue
    :param consumer: the consumer that delivered them
    """
    await pump_consumer(connection, queue.name, consumer)


async def let_die(
    connection: Connection,
    queue: WorkQueue,
    bodies: Iterable[str],
    *,
    kind: str = "plain",
    headers: dict[str, str] | None = None,
) -> list[int]:
    """
    Publish jobs and hand each back until it is a dead letter; return their stream sequences.

    :param connection: the server
    :param queue: a queue without other jobs
    :param bodies: one job each
    :param kind: the end of their subject
    :param headers: headers of each
    """
    sequences = await put(connection, queue, bodies, kind=kind, headers=headers)
    await use_up(connection, queue, len(sequences))
    return sequences


async def use_up(connection: Connection, queue: WorkQueue, count: int) -> None:
    """
    Hand so many waiting jobs back until they are dead letters.

    :param connection: the server
    :param queue: a queue with just these jobs waiting
    :param count: how many
    """
    before = await stored_count(connection, require_dead_letters(queue).name)
    for _ in range(queue.consumer(CONSUMER).max_deliver or 1):
        for message in await take(connection, queue, count):
            await message.nak()
    await tell_deaths(connection, queue, before + count)


async def tell_deaths(connection: Connection, queue: WorkQueue, count: int) -> None:
    """
    Have the server tell of deaths until the dead letter queue holds so many entries.

    :param connection: the server
    :param queue: the queue
    :param count: how many
    """
    letters = require_dead_letters(queue).name

    async def known() -> bool:
        await pump(connection, queue)
        return await stored_count(connection, letters) == count

    await eventually(known)


async def complete(connection: Connection, queue: WorkQueue, sequence: int, **fields: Any) -> None:
    """
    Store the completion of a job, as a worker in any language does.

    :param connection: the server
    :param queue: the queue
    :param sequence: the job's stream sequence
    :param fields: other values of the completion
    """
    completion = {
        "type": "io.airflow.jetstream.v1.completion",
        "timestamp": "2026-01-01T00:00:00Z",
        "stream": queue.name,
        "consumer": CONSUMER,
        "stream_seq": sequence,
        "deliveries": 1,
    }
    subject = completion_subject(queue.name, CONSUMER, sequence)
    await connection.client.jetstream().publish(subject, json.dumps(completion | fields).encode())


async def drain(connection: Connection, queue: WorkQueue, within: float = 10.0) -> Counter[str]:
    """
    Do every job that the queue still hands out, and count how often each body came.

    :param connection: the server
    :param queue: the queue
    :param within: seconds until the test fails
    """
    done: Counter[str] = Counter()
    deadline = time.monotonic() + within
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
    try:
        while True:
            info = await consumer_info(connection, queue.name, CONSUMER)
            if not info["num_pending"] and not info["num_ack_pending"]:
                return done
            if time.monotonic() > deadline:
                raise TimeoutError(f"not drained after {within:g} s: {info}")
            with suppress(TimeoutError):
                for message in await pull.fetch(100, timeout=0.2):
                    done[message.data.decode()] += 1
                    await message.ack_sync()
    finally:
        await pull.unsubscribe()


async def stored_count(connection: Connection, stream: str) -> int:
    """
    Count a stream's messages.

    :param connection: the server
    :param stream: the stream
    """
    return int((await stream_info(connection, stream))["state"]["messages"])


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """
    Run a worker in this process, and stop it at the end.

    :param worker: the worker
    """
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop()
        async with asyncio.timeout(10):
            await task
