"""Jobs of somebody who may publish jobs and nothing else: nothing in them harms a worker, its server or other jobs."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, get_message, take_cursor, wait
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.dead_letters import publish_raw
from testbed.face import next_message, stated_job_id
from testbed.nats_server import NatsServer
from testbed.queues import completion_count, eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

_CONSUMER = {"max_deliver": 5, "ack_wait": "30s"}


def empty(connection: NatsPyConnection, queue: WorkQueue) -> Callable[[], Any]:
    async def is_empty() -> bool:
        return not await stored_count(connection, queue.name)

    return is_empty


async def completion(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> dict[str, Any]:
    message = await next_message(connection, f"{queue.name}-events", 1, f"completed.{queue.name}.worker.{sequence}")
    assert message is not None
    event: dict[str, Any] = json.loads(message.data)
    return event


@pytest.mark.slow
@pytest.mark.parametrize("declared", [(), ("advisory.>",)], ids=["undeclared", "declared"])
async def test_a_job_does_not_choose_where_its_worker_publishes(name: str, declared: tuple[str, ...]) -> None:
    # The newest server refuses the body of these requests; older ones take any, so make test-servers runs this too.
    with NatsServer() as server:
        settings = connection_settings({"servers": (server.url,), "timeout": 5})
        async with connect(settings) as connection:
            queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=declared)
            received = await connection.client.subscribe(f"{name}-other.>")
            inbox = await connection.client.subscribe("_INBOX.somebody")
            held = asyncio.Event()
            targets = [
                f"$JS.API.STREAM.PURGE.{name}",
                f"$JS.API.STREAM.DELETE.{name}-dead",
                f"$JS.API.CONSUMER.DELETE.{name}.worker",
                "_INBOX.somebody",
                f"{name}-other.a",
                f"{name}.jobs.again",
                f"completed.{name}.worker.99",
                "advisory.*",
            ]
            bodies = [json.dumps({"id": str(index), "advisory": target}) for index, target in enumerate(targets)]
            await publish_jobs(connection, queue, bodies)
            await publish_jobs(connection, queue, ["innocent"] * 20)

            async def handle(job: Delivery) -> None:
                if job.body == b"innocent":
                    await held.wait()

            async with running_worker(Worker(queue, "worker", handle, settings, concurrency=4)):

                async def only_the_innocent_are_left() -> bool:
                    return await stored_count(connection, name) == 20

                await eventually(only_the_innocent_are_left, within=30)
                assert await completion_count(connection, name) == len(targets)
                held.set()
                await eventually(empty(connection, queue), within=30)
            await connection.client.flush()
            assert (received.pending_msgs, inbox.pending_msgs) == (0, 0)


async def test_an_advisory_subject_that_the_events_do_not_capture_is_not_used(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=(f"{name}-a.>",))
    # Another program has taken the subject for a stream of its own.
    config = (await connection.api(f"STREAM.INFO.{name}-events"))["config"]
    config["subjects"].remove(f"{name}-a.>")
    await connection.api(f"STREAM.UPDATE.{name}-events", config)
    await connection.api(f"STREAM.CREATE.{name}-other", {"name": f"{name}-other", "subjects": [f"{name}-a.>"]})
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        await publish_jobs(connection, queue, [json.dumps({"id": "1", "advisory": f"{name}-a.1"})])
        await eventually(empty(connection, queue), within=30)
    assert await stored_count(connection, f"{name}-other") == 0
    assert f"aren't reported on {name}-a.>, which {name}-events doesn't capture" in caplog.text


async def test_no_job_disturbs_the_next_ones_or_ends_the_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=(f"{name}-a.>",))
    long = f"{name}-a." + "x" * 3_000
    # The server stores headers of at most 64 KiB.
    blocks = [
        f"Job-Advisory: {long}{'y' * 3_000}".encode(),
        f"Job-Advisory: {name}-a.\udcff\x0b".encode("utf-8", "surrogateescape"),
        b"Job-Deadline: " + b"9" * 12_000 + b"!",
        b"Job-Deadline: " + b"1s" * 30_000,
        b"Job-Deadline: 99999999999w",
        b"Job-Expires: " + b"9" * 60_000,
        b"Job-Id: a\n2026-01-01 00:00:00 INFO job ended worker=w job_id=forged",
        b"traceparent: " + b"0" * 60_000,
        b"tracestate: a\x1b[2K\xff",
        b"Nats-Msg-Id: \xff",
        b"A: b\r\n" + b" c\r\n" * 15_000,
        b"a: b\r\n" * 10_000,
        b"Redrive-Count: " + b"9" * 10_000,
    ]
    bodies = [
        b'{"id": "\\ud800"}',
        b'{"id": "a\\n2026-01-01 00:00:00 INFO job ended", "advisory": "\\udfff"}',
        b'{"id": ' + b"[" * 100_000,
        b'{"id": ' + b"9" * 100_000 + b"}",
        b'{"id": NaN, "advisory": [1]}',
        json.dumps({"id": "1", "advisory": long}).encode(),
    ]
    subjects = ["\x0b", "a\x0cb", "\x1c\x1d", "\udcff\x85", "\0", "x" * 3_000]
    before = connection.reconnects
    plain = f"{name}.jobs.plain"
    for block in blocks:
        await publish_raw(nats, plain, block, b"hostile")
    for body in bodies:
        await publish_raw(nats, plain, b"A: 1", body)
    for part in subjects:
        await publish_raw(nats, f"{name}.jobs.{part}", b"A: 1", b"hostile")
    await publish_jobs(connection, queue, ["innocent"] * 3)
    attempts: list[tuple[bytes, int]] = []
    longest, began = 0.0, time.monotonic()

    async def handle(job: Delivery) -> Any:
        attempts.append((job.body, job.attempt))
        return job.json() if job.body.startswith(b'{"id": "') else job.subject

    async def measure() -> None:
        nonlocal longest
        while True:
            woken = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - woken)

    watch = asyncio.create_task(measure())
    async with running_worker(Worker(queue, "worker", handle, settings, name="w")):
        await eventually(empty(connection, queue), within=60)
    watch.cancel()
    assert attempts.count((b"innocent", 1)) == 3
    # An id that can't be shown doesn't keep a job from being done, and no job was done twice.
    assert len(attempts) == len(blocks) + len(bodies) + len(subjects) + 3, time.monotonic() - began
    assert {attempt for _, attempt in attempts} == {1}
    assert connection.reconnects == before
    assert (await completion(connection, queue, len(blocks) + 1))["result"] == {"id": "\ufffd"}
    # A pattern whose time grows with the square of the length takes minutes.
    assert longest < 10.0


@pytest.mark.slow
async def test_a_worker_reads_the_id_that_everybody_else_reads(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_CONSUMER)
    blocks = [
        b"Job-Id: one\r\nJob-Id: two",
        b"A: b\r\n Job-Id: forged\r\nJob-Id: one",
        b": x\r\nno colon\r\nJob-Id: one",
    ]
    for block in blocks:
        await publish_raw(nats, f"{name}.jobs.plain", block, b"{}")
    stored = [await get_message(connection, name, sequence) for sequence in (1, 2, 3)]
    jobs: list[Delivery] = []
    async with running_worker(Worker(queue, "worker", jobs.append, settings)):
        await eventually(empty(connection, queue), within=30)
    assert [job.id for job in jobs] == ["one"] * 3
    assert [message and stated_job_id(message.headers, message.data) for message in stored] == ["one"] * 3


@pytest.mark.slow
async def test_subjects_on_the_events_do_not_end_the_connection_of_whoever_waits(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=(f"{name}-a.>",))
    cursor = await take_cursor(connection, queue)
    (sequence,) = await publish_jobs(connection, queue, ["a"])
    waiting = asyncio.create_task(wait(connection, cursor, [sequence]))
    for part in ("\x0b", "\x0c1", "\udcff", "x" * 3_000):
        await publish_raw(nats, f"{name}-a.{part}", b"A: 1", b'{"id": "1"}')
    for body in (b"[" * 100_000, b'{"id": 1e999}', b'{"id": ' + b"9" * 90_000 + b"}", b"\xff", b""):
        await publish_raw(nats, f"completed.{name}.worker.{sequence}", b"A: 1", body)
        await publish_raw(nats, f"{name}-a.x", b"A: 1", body)
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        report = await asyncio.wait_for(waiting, 60)
    assert report.completed == {sequence}


async def test_what_would_end_the_connection_is_refused_before_it_is_sent(connection: NatsPyConnection) -> None:
    with pytest.raises(ConnectionError, match="nothing was sent"):
        await connection.publish("x" * 4_000, b"")
    with pytest.raises(ConnectionError, match="nothing was sent"):
        await connection.publish("x", b"", {"A": "b" * connection.max_payload})
    await connection.api("INFO")
    assert connection.is_connected
