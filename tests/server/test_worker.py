from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import get_message, redrive_dead_letters
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.worker import Delivery, RetryLaterError, Worker
from testbed.face import consumer_info, encode_message, last_message, next_message
from testbed.queues import (
    completion_count,
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    running_worker,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

# What of a header isn't UTF-8.
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


class Gate:
    """A handler that records its jobs and waits until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.jobs: list[Delivery] = []
        self.running = 0
        self.max_running = 0

    async def handle(self, job: Delivery) -> None:
        self.jobs.append(job)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await self.open.wait()
        self.running -= 1


def empty(connection: NatsPyConnection, queue: WorkQueue) -> Callable[[], Any]:
    async def is_empty() -> bool:
        return not await stored_count(connection, queue.name)

    return is_empty


def dead(connection: NatsPyConnection, queue: WorkQueue) -> Callable[[], Any]:
    async def is_dead() -> bool:
        return await last_message(connection, f"{queue.name}-dead", f"{MAX_DELIVERIES}.{queue.name}.worker") is not None

    return is_dead


async def completion(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> dict[str, Any]:
    message = await next_message(connection, f"{queue.name}-events", 1, f"completed.{queue.name}.worker.{sequence}")
    assert message is not None
    event: dict[str, Any] = json.loads(message.data)
    return event


async def in_flight(connection: NatsPyConnection, queue: WorkQueue) -> int:
    return int((await consumer_info(connection, queue.name, "worker"))["num_ack_pending"])


@pytest.mark.slow
async def test_a_job_reaches_its_handler_with_everything_that_was_published(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs: list[Delivery] = []
    await publish_jobs(connection, queue, ['{"id": 7}'], kind="a", headers={"Job-Id": "order-7", "Customer": "Ünal"})
    await publish_jobs(connection, queue, ["no JSON"])
    async with running_worker(Worker(queue, "worker", jobs.append, settings)):
        await eventually(empty(connection, queue))
    with_id, without = jobs
    assert with_id.json() == {"id": 7}
    assert (with_id.id, with_id.subject, with_id.body) == ("order-7", f"{name}.jobs.a", b'{"id": 7}')
    assert (with_id.headers, with_id.sequence, with_id.attempt) == ({"Job-Id": "order-7", "Customer": "Ünal"}, 1, 1)
    assert (without.id, without.headers) == ("2", {})
    with pytest.raises(ValueError, match="Expecting value"):
        without.json()


@pytest.mark.slow
async def test_jobs_of_any_form_that_arrive_together_are_each_as_they_are_stored(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    """Bodies that look like frames, subjects and headers of any bytes, with and without headers, small and large."""
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    forged = f"HMSG {name}.jobs.x 4 $JS.ACK.{name}.worker.1.9.9.9.9 12 13\r\nNATS/1.0\r\n\r\nx\r\n".encode()
    bodies = [b"", b"x", b"\r\n", forged, b"MSG a 4 0\r\n\r\n" * 3, bytes(range(256)) * 200, b'{"id": "7"}']
    kinds = [b"plain", b"caf\xe9", "\u00fc".encode(), b"a\x0bb", b"HMSG"]
    blocks = [
        b"",
        b"A: 1",
        b"Nats-Expected-Stream: %b" % name.encode(),
        b"A: 1\r\nA: 2\r\nB: 3",
        b"C: \xff",
        b"D:no space",
    ]
    pick, count = random.Random(1), 400  # noqa: S311
    for _ in range(count):
        subject, body, block = (
            b"%b.jobs.%b" % (name.encode(), pick.choice(kinds)),
            pick.choice(bodies),
            pick.choice(blocks),
        )
        headers = b"NATS/1.0\r\n%b\r\n\r\n" % block if block else b""
        connection.write(encode_message(subject, body, headers))
    await eventually(lambda: _is_stored(connection, queue, count))
    stored = {number: await get_message(connection, queue.name, number) for number in range(1, count + 1)}
    jobs: list[Delivery] = []

    async def handle(job: Delivery) -> None:
        jobs.append(job)

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=100)):
        await eventually(empty(connection, queue))
    assert [job.sequence for job in jobs] == [*range(1, count + 1)]
    for job in jobs:
        message = stored[job.sequence]
        assert message is not None
        firsts = dict(reversed([(key, _NOT_UTF8.sub("\ufffd", value)) for key, value in message.headers]))
        assert (job.subject, job.body, job.headers, job.attempt) == (message.subject, message.data, firsts, 1)
    assert await completion_count(connection, name) == count


async def _is_stored(connection: NatsPyConnection, queue: WorkQueue, count: int) -> bool:
    return await stored_count(connection, queue.name) == count


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_jobs_are_pulled_than_can_be_started(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, concurrency: int
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    await publish_jobs(connection, queue, map(str, range(10)))
    gate = Gate()
    async with running_worker(Worker(queue, "worker", gate.handle, settings, concurrency=concurrency)):
        await eventually(lambda: gate.running == concurrency)
        # Longer than one pull request is open.
        for _ in range(30):
            assert await in_flight(connection, queue) <= concurrency
            await asyncio.sleep(0.05)
        gate.open.set()
        await eventually(empty(connection, queue))
    assert (gate.max_running, len(gate.jobs)) == (concurrency, 10)


@pytest.mark.slow
async def test_plain_functions_run_in_parallel_threads_up_to_the_concurrency(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    # More than the threads that asyncio's own pool has on a small machine.
    slots = 40
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    await publish_jobs(connection, queue, ["alone"])
    barrier = threading.Barrier(slots)

    def handle(job: Delivery) -> str:
        if job.body != b"alone":
            barrier.wait(timeout=8)
        return threading.current_thread().name

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=slots)):
        await eventually(empty(connection, queue))
        await publish_jobs(connection, queue, map(str, range(slots)))
        await eventually(empty(connection, queue))
    names = {(await completion(connection, queue, sequence))["result"] for sequence in range(2, slots + 2)}
    assert len(names) == slots


@pytest.mark.slow
async def test_a_job_starts_at_once_even_where_more_could_be_started(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    started: list[float] = []
    async with running_worker(
        Worker(queue, "worker", lambda _: started.append(time.monotonic()), settings, concurrency=8)
    ):
        for count in range(1, 6):
            published = time.monotonic()
            await publish_jobs(connection, queue, ["a"])
            await eventually(lambda count=count: len(started) == count)  # type: ignore[misc]
            assert started[-1] - published < 0.3


@pytest.mark.slow
async def test_a_job_that_failed_comes_back_after_the_consumers_backoff_and_dies_promptly(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(
        connection, name, consumer={"ack_wait": None, "max_deliver": 3, "backoff": ["300ms", "800ms", "5s"]}
    )
    attempts: list[float] = []

    def fail(_: Delivery) -> None:
        attempts.append(time.monotonic())
        raise ValueError("no such printer")

    async with running_worker(Worker(queue, "worker", fail, settings)):
        await publish_jobs(connection, queue, ["a"])
        await eventually(dead(connection, queue))
        died = time.monotonic()
    first, second, third = attempts
    assert 0.3 <= second - first < 0.7
    assert 0.8 <= third - second < 1.2
    # Earlier than the last backoff.
    assert died - third < 1.5
    assert await completion_count(connection, name) == 0


@pytest.mark.slow
async def test_a_failure_is_tried_again_at_once_where_its_handler_requests_that(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})

    async def fail_twice(job: Delivery) -> int:
        if job.attempt < 3:
            raise RetryLaterError(0, "not yet")
        return job.attempt

    async with running_worker(Worker(queue, "worker", fail_twice, settings)):
        await publish_jobs(connection, queue, ["a"])
        # Sooner than the worker's own spacing of three seconds.
        await eventually(empty(connection, queue), within=2)
    event = await completion(connection, queue, 1)
    assert (event["result"], event["deliveries"]) == (3, 3)


@pytest.mark.slow
async def test_a_completion_is_stored_with_its_worker_its_result_and_a_message_id(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    result = {"size": [1, None], "größe": "é"}
    async with running_worker(Worker(queue, "worker", lambda _: result, settings, name="worker-7")):
        await publish_jobs(connection, queue, ["a"], headers={"Job-Id": "order-1"})
        await eventually(empty(connection, queue))
    event = await completion(connection, queue, 1)
    assert event.pop("timestamp")
    assert event == {
        "id": "order-1",
        "type": "io.airflow.jetstream.v1.completion",
        "stream": name,
        "consumer": "worker",
        "stream_seq": 1,
        "deliveries": 1,
        "job_id": "order-1",
        "worker": "worker-7",
        "result": result,
    }
    message = await get_message(connection, f"{name}-events", 1)
    assert message is not None
    assert (message.header("Nats-Msg-Id") or "").startswith(f"done:{name}:1:")


@pytest.mark.slow
async def test_a_completion_is_also_published_on_the_jobs_advisory_subject(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, advisory_subjects=f"{name}.done")
    reports = await connection.client.subscribe(f"{name}.done")
    async with running_worker(Worker(queue, "worker", lambda _: "printed", settings)):
        await publish_jobs(connection, queue, ["a"], headers={"Job-Advisory": f"{name}.done"})
        report = json.loads((await reports.next_msg(timeout=5)).data)
    assert (report["stream_seq"], report["result"]) == (1, "printed")
    assert report == await completion(connection, queue, 1)


@pytest.mark.slow
async def test_the_trace_context_of_a_job_reaches_its_handler_and_its_completion(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, advisory_subjects=f"{name}.done")
    reports = await connection.client.subscribe(f"{name}.done")
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}
    async with running_worker(Worker(queue, "worker", lambda job: job.traceparent, settings)):
        await publish_jobs(connection, queue, ["a"], headers=trace | {"Job-Advisory": f"{name}.done", "Other": "x"})
        await publish_jobs(connection, queue, ["b"])
        report = await reports.next_msg(timeout=5)
        await eventually(empty(connection, queue))
    assert (await completion(connection, queue, 1))["result"] == trace["traceparent"]
    assert "result" not in await completion(connection, queue, 2)
    stored = await get_message(connection, f"{name}-events", 1)
    assert stored is not None
    assert dict(stored.headers) == trace | {"Nats-Msg-Id": stored.header("Nats-Msg-Id")}
    assert report.headers == trace


@pytest.mark.slow
async def test_an_invalid_advisory_subject_does_not_fail_the_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    async with running_worker(Worker(queue, "worker", lambda _: None, settings, name="w")):
        await publish_jobs(connection, queue, ["a"], headers={"Job-Advisory": "not a subject"})
        await eventually(empty(connection, queue))
    assert (await completion(connection, queue, 1))["deliveries"] == 1
    assert "w doesn't report job 1 to 'not a subject': it contains white space" in caplog.text


async def test_without_events_a_job_is_done_and_no_completion_is_stored(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, events=None)
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        await publish_jobs(connection, queue, ["a"])
        await eventually(empty(connection, queue))
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "message"),
    [(object(), "Unable to serialize unknown type"), ("x" * 2_000_000, "return a reference instead of the data")],
    ids=["no JSON", "too large"],
)
async def test_a_result_that_cannot_be_stored_fails_the_job(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    result: object,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})

    async with running_worker(Worker(queue, "worker", lambda _: result, settings)):
        await publish_jobs(connection, queue, ["a"])
        await eventually(dead(connection, queue), within=3)
    assert message in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("end"), KeyboardInterrupt()], ids=repr)
async def test_a_handler_that_tries_to_end_the_process_fails_only_its_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, error: BaseException
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "30s"})

    def handle(job: Delivery) -> str:
        if job.attempt == 1:
            raise error
        return "done"

    async with running_worker(Worker(queue, "worker", handle, settings)):
        await publish_jobs(connection, queue, ["a"])
        await eventually(empty(connection, queue), within=3)
    assert (await completion(connection, queue, 1))["deliveries"] == 2


@pytest.mark.slow
async def test_a_redriven_job_is_completed_like_any_other(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a"])
    jobs: list[Delivery] = []
    async with running_worker(Worker(queue, "worker", jobs.append, settings)):
        await redrive_dead_letters(connection, queue)
        await eventually(empty(connection, queue))
    assert [(job.sequence, job.attempt, job.headers["Redrive-Count"]) for job in jobs] == [(2, 1, "1")]
