"""Small queues for tests: declare one, publish jobs, let them complete or become dead letters, count what is left."""

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, overload

from nats.aio.msg import Msg
from nats.errors import ConnectionReconnectingError

from airflow_provider_jetstream.jetstream import WorkQueue, move_due_jobs, provision
from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.contract import MSG_ID, completion_subject, end_id
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from airflow_provider_jetstream.worker import Worker
from testbed.foreign_programs import pull

_T = TypeVar("_T")

CONSUMER = "worker"
_PAUSE = 0.02
_MANY, _PUBLISHED_AT_ONCE = 50, 200
_SHORT_REPLY = 9


@overload
async def eventually(condition: Callable[[], Awaitable[_T | None]], within: float = 30.0) -> _T: ...


@overload
async def eventually(condition: Callable[[], _T | None], within: float = 30.0) -> _T: ...


async def eventually(condition: Callable[[], Any], within: float = 30.0) -> Any:
    """Wait until a plain or async condition returns something true, and return that; TimeoutError after ``within``."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {value!r} after {within:g} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(_PAUSE)


def small_queue(name: str, *, consumer: Mapping[str, Any] | None = None, **fields: Any) -> WorkQueue:
    """Declare a queue with one consumer, short waits, a dead letter queue and an event stream.

    Its jobs are on ``<name>.jobs.>``; its consumer delivers once with an ack wait of half a second unless ``consumer``
    has other values; ``fields`` are other fields of the queue, or other values for those set here. Its acknowledgements
    aren't sampled, so that the events stream stores only what a test stores.
    """
    single = {"name": CONSUMER, "max_deliver": 1, "ack_wait": "500ms", "sample_freq": "0"}
    return WorkQueue(
        **{
            "name": name,
            "subjects": [f"{name}.jobs.>"],
            "consumers": [single | dict(consumer or {})],
            "dead_letters": f"{name}-dead",
            "events": f"{name}-events",
        }
        | fields
    )


async def make_queue(
    connection: NatsPyConnection,
    name: str,
    *,
    consumer: Mapping[str, Any] | None = None,
    dead: Iterable[str | bytes] = (),
    jobs: Iterable[str | bytes] = (),
    **fields: Any,
) -> WorkQueue:
    """Declare a queue as :func:`small_queue` does, and provision it.

    :param dead: bodies of which it makes dead letters
    :param jobs: bodies that it publishes
    """
    queue = small_queue(name, consumer=consumer, **fields)
    await provision(connection, queue)
    if bodies := [*dead]:
        await make_dead_letters(connection, queue, bodies)
    await publish_jobs(connection, queue, jobs)
    return queue


async def publish_jobs(
    connection: NatsPyConnection,
    queue: WorkQueue,
    bodies: Iterable[str | bytes],
    *,
    kind: str = "plain",
    headers: dict[str, str] | None = None,
) -> list[int]:
    """Publish one job per body on ``<queue>.jobs.<kind>``, and return their stream sequences."""
    jetstream = connection.client.jetstream(timeout=connection.timeout)
    subject = f"{queue.name}.jobs.{kind}"
    encoded = [body.encode() if isinstance(body, str) else body for body in bodies]
    if len(encoded) < _MANY:
        return [(await jetstream.publish(subject, body, headers=headers)).seq for body in encoded]
    sequences: list[int] = []
    # One by one they take most of the time of a test with thousands; together they are stored in the order of the list.
    for start in range(0, len(encoded), _PUBLISHED_AT_ONCE):
        some = encoded[start : start + _PUBLISHED_AT_ONCE]
        answers = await asyncio.gather(*(jetstream.publish(subject, body, headers=headers) for body in some))
        sequences += [answer.seq for answer in answers]
    if sequences != sorted(sequences):
        raise RuntimeError(f"expected jobs to be stored in their order, found {sequences}")
    return sequences


async def pull_jobs(
    connection: NatsPyConnection, queue: WorkQueue, count: int, *, consumer: str = CONSUMER, within: float = 30.0
) -> list[Msg]:
    """Pull ``count`` jobs as a worker does; raises TimeoutError after ``within`` seconds."""
    messages: list[Msg] = []
    deadline = time.monotonic() + within
    while len(messages) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{len(messages)} of {count} jobs arrived within {within:g} s")
        pulled = _pull(connection, queue, count - len(messages), consumer, max(min(left, 0.5), 0.05))
        try:
            messages.extend([message async for message in pulled])
        except ConnectionReconnectingError:
            await asyncio.sleep(0.05)
    return messages


def _pull(
    connection: NatsPyConnection, queue: WorkQueue, batch: int, consumer: str, expires: float
) -> AsyncIterator[Msg]:
    """Yield the messages of one pull request, until the server ends it.

    nats-py's ``fetch`` ends at a time limit of its own: on a loaded machine what arrives after it is lost with its only
    delivery.
    """
    return pull(connection.client, queue.name, consumer, batch=batch, expires=expires)


async def probe(connection: NatsPyConnection, queue: WorkQueue, *, consumer: str = CONSUMER) -> None:
    """Have the server publish due max-deliver advisories; it publishes none while nobody pulls."""
    await probe_consumer(connection, queue.name, consumer)


async def make_dead_letters(
    connection: NatsPyConnection,
    queue: WorkQueue,
    bodies: Iterable[str | bytes],
    *,
    kind: str = "plain",
    headers: dict[str, str] | None = None,
) -> list[int]:
    """Publish jobs to an empty queue and nak each until it is a dead letter; return their stream sequences."""
    sequences = await publish_jobs(connection, queue, bodies, kind=kind, headers=headers)
    await exhaust_deliveries(connection, queue, len(sequences))
    return sequences


@asynccontextmanager
async def unhurried(connection: NatsPyConnection, queue: WorkQueue) -> AsyncIterator[None]:
    """Give workers half a minute for an answer until the block ends: a loaded machine outlasts short ack waits."""
    subject = f"CONSUMER.CREATE.{queue.name}.{CONSUMER}"
    config = (await consumer_info(connection, queue.name, CONSUMER))["config"]
    patient = {name: value for name, value in config.items() if name != "backoff"} | {"ack_wait": 30 * 10**9}
    await connection.api(subject, {"stream_name": queue.name, "config": patient, "action": "update"})
    try:
        yield
    finally:
        await connection.api(subject, {"stream_name": queue.name, "config": config, "action": "update"})


async def exhaust_deliveries(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Nak the ``count`` jobs that wait in a queue until they are dead letters."""
    before = await stored_count(connection, require_dead_letters(queue).name)
    for _ in range(queue.consumer(CONSUMER).max_deliver or 1):
        for message in await pull_jobs(connection, queue, count):
            await message.nak()
    await wait_for_entries(connection, queue, before + count)


async def wait_for_entries(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Probe the consumer until the dead letter queue holds ``count`` entries."""
    letters = require_dead_letters(queue).name

    async def known() -> bool:
        await probe(connection, queue)
        return await stored_count(connection, letters) == count

    await eventually(known)


def stored_nanoseconds(message: Msg) -> int:
    """Return when a delivered job was stored, since 1970, as the subject for its acknowledgement says it."""
    tokens = message.reply.split(".")
    # The longer form has domain and account behind $JS.ACK.
    return int(tokens[7] if len(tokens) == _SHORT_REPLY else tokens[9])


async def store_completion(
    connection: NatsPyConnection, queue: WorkQueue, sequence: int, *, stored_nanoseconds: int = 0, **fields: Any
) -> int:
    """Store the completion event of a job as a worker in any language does, and return its sequence.

    ``fields`` override its values; where ``stored_nanoseconds`` says when the job was stored, a second end of it is a
    duplicate.
    """
    completion = {
        "type": "io.airflow.jetstream.v1.completion",
        "timestamp": "2026-01-01T00:00:00Z",
        "stream": queue.name,
        "consumer": CONSUMER,
        "stream_seq": sequence,
        "deliveries": 1,
    }
    subject, body = completion_subject(queue.name, CONSUMER, sequence), json.dumps(completion | fields).encode()
    headers = {MSG_ID: end_id(queue.name, sequence, stored_nanoseconds)} if stored_nanoseconds else None
    return (await connection.client.jetstream().publish(subject, body, headers=headers)).seq


def completion_body(queue: str, sequence: int, consumer: str = CONSUMER) -> bytes:
    """Return the body of a worker's completion of a job, with its required fields only."""
    place = {"stream": queue, "consumer": consumer, "stream_seq": sequence, "deliveries": 1}
    kind = "io.airflow.jetstream.v1.completion"
    return json.dumps({"type": kind, "timestamp": "2026-11-27T00:00:00Z", **place}).encode()


async def process_all(connection: NatsPyConnection, queue: WorkQueue, within: float = 30.0) -> Counter[str]:
    """Pull and acknowledge every job that the queue still delivers, and count the deliveries of each body."""
    done: Counter[str] = Counter()
    deadline = time.monotonic() + within
    while True:
        info = await consumer_info(connection, queue.name, CONSUMER)
        if not info["num_pending"] and not info["num_ack_pending"]:
            return done
        if time.monotonic() > deadline:
            raise TimeoutError(f"not drained after {within:g} s: {info}")
        # A request for as many jobs as are pending ends with the last of them, not with its time limit.
        pending = info["num_pending"]
        async for message in _pull(connection, queue, min(pending, 100) or 1, CONSUMER, 2.0 if pending else 0.2):
            done[message.data.decode()] += 1
            with suppress(TimeoutError):
                await message.ack_sync()


async def stored_count(connection: NatsPyConnection, stream: str) -> int:
    """Count a stream's messages."""
    return int((await stream_info(connection, stream))["state"]["messages"])


async def until_stored(connection: NatsPyConnection, stream: str, count: int, *, within: float = 30.0) -> None:
    """Wait until a stream stores so many messages."""

    async def is_so() -> bool:
        return await stored_count(connection, stream) == count

    await eventually(is_so, within)


async def completion_count(connection: NatsPyConnection, queue: str) -> int:
    """Count the completions that workers stored of a queue's jobs; its events stream has acknowledgements, too."""
    filtered = {"subjects_filter": f"completed.{queue}.>"}
    info = await connection.api(f"STREAM.INFO.{queue}-events", filtered)
    return sum((info["state"].get("subjects") or {}).values())


@asynccontextmanager
async def running_worker(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """Run a worker in this process until the block ends."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop()
        async with asyncio.timeout(10):
            await task


@asynccontextmanager
async def running_mover(connection: NatsPyConnection, queue: WorkQueue) -> AsyncIterator[asyncio.Task[int]]:
    """Move jobs that are due to a queue until the block ends; the task returns how many were moved."""
    stop = asyncio.Event()
    task = asyncio.create_task(move_due_jobs(connection, queue, stop=stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(15):
            await task
