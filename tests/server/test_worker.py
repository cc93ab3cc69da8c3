"""A worker runs each job and stores how it ended."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from test_raw_messages import encode_message

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    cancel,
    get_message,
    provision,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, completion_filter
from airflow_provider_jetstream.jetstream.errors import UnreachableError
from airflow_provider_jetstream.worker import Delivery, RetryLaterError, Worker
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.face import consumer_info, last_message
from testbed.queues import (
    completion_count,
    eventually,
    make_queue,
    publish_jobs,
    running_worker,
    stored_count,
    until_stored,
)
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

# What of a header isn't UTF-8.
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


def dead(connection: NatsPyConnection, queue: WorkQueue) -> Callable[[], Any]:
    async def is_dead() -> bool:
        return await last_message(connection, f"{queue.name}-dead", f"{MAX_DELIVERIES}.{queue.name}.worker") is not None

    return is_dead


async def completion(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> dict[str, Any]:
    message = await last_message(connection, f"{queue.name}-events", f"completed.{queue.name}.worker.{sequence}")
    assert message is not None
    event: dict[str, Any] = json.loads(message.data)
    return event


@pytest.mark.slow
async def test_a_job_reaches_its_handler_with_everything_that_was_published(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs: list[Delivery] = []
    await publish_jobs(connection, queue, ['{"id": 7}'], kind="a", headers={"Job-Id": "order-7", "Customer": "Ünal"})
    await publish_jobs(connection, queue, ["no JSON"])
    async with running_worker(Worker(queue, "worker", jobs.append, settings)):
        await until_stored(connection, queue.name, 0)
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
    await until_stored(connection, queue.name, count)
    stored = {number: await get_message(connection, queue.name, number) for number in range(1, count + 1)}
    jobs: list[Delivery] = []

    async def handle(job: Delivery) -> None:
        jobs.append(job)

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=100)):
        await until_stored(connection, queue.name, 0)
    assert [job.sequence for job in jobs] == [*range(1, count + 1)]
    for job in jobs:
        message = stored[job.sequence]
        assert message is not None
        firsts = dict(reversed([(key, _NOT_UTF8.sub("\ufffd", value)) for key, value in message.headers]))
        assert (job.subject, job.body, job.headers, job.attempt) == (message.subject, message.data, firsts, 1)
    assert await completion_count(connection, name) == count


@pytest.mark.slow
async def test_plain_functions_run_in_parallel_threads_up_to_the_concurrency(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    # More than the threads that asyncio's own pool has on a small machine.
    slots = 40
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs=["alone"])
    barrier = threading.Barrier(slots)

    def handle(job: Delivery) -> str:
        if job.body != b"alone":
            barrier.wait(timeout=8)
        return threading.current_thread().name

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=slots)):
        await until_stored(connection, queue.name, 0)
        await publish_jobs(connection, queue, map(str, range(slots)))
        await until_stored(connection, queue.name, 0)
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
        await until_stored(connection, queue.name, 0, within=2)
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
        await until_stored(connection, queue.name, 0)
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
        await until_stored(connection, queue.name, 0)
    assert (await completion(connection, queue, 1))["result"] == trace["traceparent"]
    assert "result" not in await completion(connection, queue, 2)
    stored = await get_message(connection, f"{name}-events", 1)
    assert stored is not None
    assert dict(stored.headers) == trace | {"Nats-Msg-Id": stored.header("Nats-Msg-Id")}
    assert report.headers == trace


async def test_without_events_a_job_is_done_and_no_completion_is_stored(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, events=None)
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        await publish_jobs(connection, queue, ["a"])
        await until_stored(connection, queue.name, 0)
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
        await until_stored(connection, queue.name, 0, within=3)
    assert (await completion(connection, queue, 1))["deliveries"] == 2


# When a failed job comes back: after its backoff and a little more, or after the delay that its handler requests.


BACKOFF: dict[str, Any] = {"ack_wait": None, "backoff": ["200ms", "1s", "3s"]}


class FailingHandler:
    """A handler that always fails and records the times of its calls."""

    def __init__(self, *errors: Exception) -> None:
        self.calls: list[float] = []
        self._errors = errors

    async def fail(self, job: Delivery) -> None:
        self.calls.append(time.monotonic())
        raise self._errors[min(job.attempt, len(self._errors)) - 1]

    @property
    def waits(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.calls, self.calls[1:], strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("consumer", "delays"),
    [
        # Longer than the backoff, shorter than it, and exactly what the server would take for no delay.
        ({"max_deliver": 4} | BACKOFF, ("500ms", 0.3, timedelta(milliseconds=2_800))),
        ({"ack_wait": "30s", "max_deliver": 3}, ("600ms", 0.2)),
        ({"max_deliver": 2} | BACKOFF, (0,)),
    ],
    ids=["backoff", "none", "at once"],
)
async def test_a_job_comes_back_after_the_delay_that_its_handler_requests(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    consumer: dict[str, Any],
    delays: tuple[Any, ...],
) -> None:
    if delays == (0,):
        # Longer than the job is awaited.
        consumer = consumer | {"backoff": ["2m", "2m"]}
    queue = await make_queue(connection, name, consumer=consumer)
    handler = FailingHandler(*(RetryLaterError(delay, "busy") for delay in delays))
    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", handler.fail, settings)):
        await eventually(lambda: len(handler.calls) == len(delays) + 1)
    for waited, error in zip(handler.waits, (RetryLaterError(delay) for delay in delays), strict=True):
        assert error.seconds <= waited


@pytest.mark.slow
async def test_jobs_that_failed_together_do_not_come_back_together_nor_before_their_backoff(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(
        connection, name, consumer={"ack_wait": None, "backoff": ["100ms", "1500ms"], "max_deliver": 3}
    )
    calls: dict[int, list[float]] = {}

    async def fail(job: Delivery) -> None:
        calls.setdefault(job.sequence, []).append(time.monotonic())
        raise ValueError("no paper")

    await publish_jobs(connection, queue, map(str, range(20)))
    async with running_worker(Worker(queue, "worker", fail, settings, concurrency=20)):
        await eventually(lambda: sum(map(len, calls.values())) == 60)
    waits = sorted(times[2] - times[1] for times in calls.values())
    assert waits[0] >= 1.5
    assert waits[-1] < 1.5 * 1.2 + 0.4
    assert waits[-1] - waits[0] > 0.1


async def test_retry_later_on_the_last_attempt_makes_a_dead_letter_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    handler = FailingHandler(RetryLaterError("1h", "busy"))
    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", handler.fail, settings)):
        await until_stored(connection, f"{name}-dead", 2, within=4)
    assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] == 0


@pytest.mark.slow
async def test_attempts_of_a_consumer_without_backoff_do_not_burn_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    # The consumer of the images document, whose own worker takes its ack wait between two attempts.
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    handler = FailingHandler(ValueError("no such image"))
    await publish_jobs(connection, queue, ["{}"])
    async with running_worker(Worker(queue, "worker", handler.fail, settings)):
        await eventually(lambda: len(handler.calls) == 3)
    for waited, least in zip(handler.waits, [1, 2], strict=True):
        assert least <= waited < least * 1.2 + 0.4


# Jobs that are cancelled before they start and while they run.


@pytest.mark.slow
async def test_a_job_that_was_done_when_it_was_cancelled_is_completed_and_a_later_one_of_its_id_is_new(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    done: list[int] = []

    def handle(job: Delivery) -> None:
        done.append(job.sequence)

    async with running_worker(Worker(queue, "worker", handle, settings)):
        await publish_jobs(connection, queue, ["a"], headers={"Job-Id": "one"})
        await wait(connection, cursor, [1])
        await cancel(connection, queue, "one")
        await publish_jobs(connection, queue, ["b"], headers={"Job-Id": "one"})
        report = await wait(connection, cursor, [1, 2])
    assert done == [1, 2]
    assert (report.completed, set(report.cancelled)) == ({1, 2}, set())


async def is_empty(connection: NatsPyConnection, name: str) -> bool:
    return not await stored_count(connection, name)


# Jobs whose handlers are done: confirmed in the background, in order, and never without a bound.


LONG = {"ack_wait": "30s", "max_deliver": 3}


@pytest.mark.slow
async def test_a_slot_is_free_while_its_last_job_is_not_confirmed_and_two_jobs_a_slot_at_most_are_not(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    running, most, handled = 0, 0, list[int]()

    async def handle(job: Delivery) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        handled.append(job.sequence)
        running -= 1

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=3)):
        await eventually(lambda: _waiting(connection, name))
        # Nothing confirms a completion until the stream is back.
        await connection.api(f"STREAM.DELETE.{name}-events")
        await publish_jobs(connection, queue, map(str, range(20)))
        await eventually(lambda: len(handled) == 6, within=30)
        for _ in range(10):
            assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] == 6
            assert len(handled) == 6
            await asyncio.sleep(0.05)
        await provision(connection, queue)
        await until_stored(connection, name, 0, within=40)
    assert Counter(handled) == dict.fromkeys(range(1, 21), 1)
    assert most == 3
    assert await completion_count(connection, name) == 20


@pytest.mark.slow
async def test_each_job_is_acknowledged_once_and_only_after_its_completion(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    sent: list[tuple[str, int]] = []

    # What one connection sends reaches a subscription of another one in its order.
    async def observe(message: Msg) -> None:
        if name not in message.subject:
            return
        if message.subject.startswith("completed."):
            sent.append(("completed", int(message.subject.split(".")[-1])))
        elif message.subject.startswith("$JS.ACK.") and message.data == b"+ACK":
            assert message.reply
            sent.append(("acknowledged", int(message.subject.split(".")[-4])))

    await connection.client.subscribe(">", cb=observe)
    await connection.client.flush()

    async def handle(job: Delivery) -> int:
        return job.sequence

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=20)):
        await publish_jobs(connection, queue, map(str, range(200)))
        await until_stored(connection, name, 0, within=40)
        await eventually(lambda: len(sent) >= 400, within=30)
    assert Counter(sent) == {
        (what, sequence): 1 for what in ("completed", "acknowledged") for sequence in range(1, 201)
    }
    order = {event: position for position, event in enumerate(sent)}
    assert all(order["completed", sequence] < order["acknowledged", sequence] for sequence in range(1, 201))
    events = await stream_messages(connection, f"{name}-events", completion_filter(name))
    assert sorted(json.loads(event.data)["result"] for event in events) == list(range(1, 201))


async def test_a_report_that_the_connection_did_not_take_is_sent_before_the_job_is_acknowledged(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, advisory_subjects=[f"done.{name}.*"], consumer=LONG)
    reports: list[bytes] = []
    lost: list[bytes] = []
    write = type(connection).write

    async def note(message: Msg) -> None:
        reports.append(message.data)

    def lose_the_first_report(self: NatsPyConnection, frames: bytes, messages: int = 1) -> None:
        if f"PUB done.{name}.a ".encode() in frames and not lost:
            lost.append(frames)
            raise UnreachableError("the connection is closed")
        write(self, frames, messages)

    await connection.client.subscribe(f"done.{name}.*", cb=note)
    monkeypatch.setattr(type(connection), "write", lose_the_first_report)
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        await publish_jobs(connection, queue, ["x"], headers={"Job-Advisory": f"done.{name}.a"})
        await until_stored(connection, name, 0, within=30)
    await connection.client.flush()
    assert len(lost) == 1
    assert len(reports) == 1


async def test_a_worker_whose_pull_request_is_lost_pulls_again(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    monkeypatch.setattr(seams.FETCHING_ANSWER_TIMEOUT, 0.3)
    lost: list[bytes] = []
    write = type(connection).write

    def lose_the_first_request(self: NatsPyConnection, frames: bytes, messages: int = 1) -> None:
        if b"$JS.API.CONSUMER.MSG.NEXT." in frames and not lost:
            lost.append(frames)
        else:
            write(self, frames, messages)

    monkeypatch.setattr(type(connection), "write", lose_the_first_request)
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        await eventually(lambda: bool(lost))
        await publish_jobs(connection, queue, ["a"])
        await until_stored(connection, name, 0, within=20)


@pytest.mark.slow
async def test_an_async_handler_that_tries_to_end_the_process_fails_only_its_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)

    async def handle(job: Delivery) -> str:
        if job.attempt == 1:
            raise SystemExit(3)
        return "done"

    async with running_worker(Worker(queue, "worker", handle, settings)):
        await publish_jobs(connection, queue, ["a"])
        await until_stored(connection, name, 0, within=30)
    assert await completion_count(connection, name) == 1


@pytest.mark.parametrize("job_id", ["order-7", 'a"b\\c', "Ünal", "100%s", "x" * 900])
async def test_a_completion_without_a_result_is_as_one_with(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, job_id: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    worker = Worker(queue, "worker", lambda job: 0 if job.body == b"b" else None, settings, name='w"%s\\é')
    async with running_worker(worker):
        await publish_jobs(connection, queue, ["a", "b"], headers={"Job-Id": job_id})
        await until_stored(connection, name, 0, within=30)
    found = [
        json.loads(message.data)
        for message in await stream_messages(connection, f"{name}-events", completion_filter(name))
    ]
    without, with_result = sorted(found, key=lambda event: event["stream_seq"])
    assert [event["job_id"] for event in found] == [job_id, job_id]
    assert list(without) == [field for field in with_result if field != "result"]
    same = dict(without, stream_seq=2, timestamp=with_result["timestamp"], result=0)
    assert same == with_result


@pytest.mark.slow
async def test_an_idle_worker_repeats_one_request_whatever_parts_it_last_pulled_in(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    requests: list[bytes] = []

    async def count(message: Msg) -> None:
        requests.append(message.data)

    async def handle(job: Delivery) -> None:
        await asyncio.sleep(0.1 * job.sequence)

    await connection.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{name}.worker", cb=count)
    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=4)):
        # Each ends alone, and is replaced by a request for one job.
        await publish_jobs(connection, queue, map(str, range(4)))
        await until_stored(connection, name, 0, within=30)
        await asyncio.sleep(2)
        requests.clear()
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(3)
        # One a second, and the one that was due.
        assert 1 <= len(requests) <= asyncio.get_running_loop().time() - begun + 1
        assert {json.loads(request)["batch"] for request in requests} == {4}
        await publish_jobs(connection, queue, map(str, range(4)))
        await until_stored(connection, name, 0, within=30)


async def _waiting(connection: NatsPyConnection, name: str) -> Any:
    return (await consumer_info(connection, name, "worker"))["num_waiting"]


@pytest.mark.parametrize("limits", [{"max_batch": 2}, {"max_expires": 300_000_000}, {"max_waiting": 2}], ids=str)
async def test_a_consumer_that_limits_its_pull_requests_is_served_as_it_asks(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    limits: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    config = (await consumer_info(connection, name, "worker"))["config"] | limits
    await connection.api(f"CONSUMER.DELETE.{name}.worker")
    body = {"stream_name": name, "config": config, "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{name}.worker", body)

    async def handle(_: Delivery) -> None:
        await asyncio.sleep(0.01)

    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=20)):
        for _ in range(10):
            await publish_jobs(connection, queue, map(str, range(20)))
        await until_stored(connection, name, 0, within=40)
    assert "was refused" not in caplog.text


@pytest.mark.slow
async def test_an_answer_to_a_request_that_was_sent_again_is_no_error(
    connection: NatsPyConnection,
    nats: NatsServer,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    handled: list[int] = []
    async with tcp_proxy(nats.port) as proxy:
        settings = ConnectionSettings(servers=(proxy.url,))
        async with running_worker(Worker(queue, "worker", lambda job: handled.append(job.sequence), settings)):
            await eventually(lambda: _waiting(connection, name))
            proxy.pause_at(f"completed.{name}.worker.".encode())
            await publish_jobs(connection, queue, ["a"])
            await eventually(lambda: "isn't confirmed yet, sending it again" in caplog.text)
            proxy.resume()
            await until_stored(connection, name, 0)
            await publish_jobs(connection, queue, map(str, range(5)))
            await until_stored(connection, name, 0)
    assert Counter(handled) == dict.fromkeys(range(1, 7), 1)
    assert "Traceback" not in caplog.text
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    # The server knew the second one by its id.
    assert await completion_count(connection, name) == 6
