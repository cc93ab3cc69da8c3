"""Jobs whose handlers are done: confirmed in the background, in order, and never without a bound."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import ConnectionSettings, provision
from airflow_provider_jetstream.jetstream.contract import completion_filter
from airflow_provider_jetstream.jetstream.errors import UnreachableError
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed import seams
from testbed.face import Completion, consumer_info, read_range
from testbed.queues import completion_count, eventually, make_queue, publish_jobs, running_worker, stored_count
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

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
        await eventually(lambda: _is_empty(connection, name), within=40)
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
        await eventually(lambda: _is_empty(connection, name), within=40)
        await eventually(lambda: len(sent) >= 400, within=30)
    assert Counter(sent) == {
        (what, sequence): 1 for what in ("completed", "acknowledged") for sequence in range(1, 201)
    }
    order = {event: position for position, event in enumerate(sent)}
    assert all(order["completed", sequence] < order["acknowledged", sequence] for sequence in range(1, 201))
    events = [message async for message in read_range(connection, f"{name}-events", completion_filter(name))]
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
        await eventually(lambda: _is_empty(connection, name), within=30)
    await connection.client.flush()
    assert len(lost) == 1
    assert len(reports) == 1


async def test_a_worker_whose_pull_request_is_lost_pulls_again(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    monkeypatch.setattr(seams.CREDIT_FETCHER_ANSWER_TIMEOUT, 0.3)
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
        await eventually(lambda: _is_empty(connection, name), within=20)


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
        await eventually(lambda: _is_empty(connection, name), within=30)
    assert await completion_count(connection, name) == 1


@pytest.mark.parametrize("job_id", ["order-7", 'a"b\\c', "Ünal", "100%s", "x" * 900])
async def test_a_completion_without_a_result_is_as_one_with(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, job_id: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG)
    worker = Worker(queue, "worker", lambda job: 0 if job.body == b"b" else None, settings, name='w"%s\\é')
    async with running_worker(worker):
        await publish_jobs(connection, queue, ["a", "b"], headers={"Job-Id": job_id})
        await eventually(lambda: _is_empty(connection, name), within=30)
    found = [
        json.loads(message.data) async for message in read_range(connection, f"{name}-events", completion_filter(name))
    ]
    without, with_result = sorted(found, key=lambda event: event["stream_seq"])
    assert [Completion.model_validate(event).job_id for event in found] == [job_id, job_id]
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
        await eventually(lambda: _is_empty(connection, name), within=30)
        await asyncio.sleep(2)
        requests.clear()
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(3)
        # One a second, and the one that was due.
        assert 1 <= len(requests) <= asyncio.get_running_loop().time() - begun + 1
        assert {json.loads(request)["batch"] for request in requests} == {4}
        await publish_jobs(connection, queue, map(str, range(4)))
        await eventually(lambda: _is_empty(connection, name), within=30)


async def _waiting(connection: NatsPyConnection, name: str) -> Any:
    return (await consumer_info(connection, name, "worker"))["num_waiting"]


async def _is_empty(connection: NatsPyConnection, name: str) -> bool:
    return not await stored_count(connection, name)


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
        await eventually(lambda: _is_empty(connection, name), within=40)
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
            await eventually(lambda: _is_empty(connection, name))
            await publish_jobs(connection, queue, map(str, range(5)))
            await eventually(lambda: _is_empty(connection, name))
    assert Counter(handled) == dict.fromkeys(range(1, 7), 1)
    assert "Traceback" not in caplog.text
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    # The server knew the second one by its id.
    assert await completion_count(connection, name) == 6
