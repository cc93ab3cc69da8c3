"""Publishing that waits for room in a full queue, and publishing at a rate."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import ConnectionSettings, Job, PublishIncompleteError, connect, publish
from airflow_provider_jetstream.jetstream.errors import JobError, QueueFullError, TransientError, UnreachableError
from testbed.face import AskedForEach, prepare_jobs, publish_prepared, read_range, stream_info
from testbed.queues import eventually, make_dead_letters, make_queue, pull_jobs, stored_count
from testbed.rates import most_within
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

FULL: dict[str, Any] = {"discard": "new", "consumer": {"ack_wait": "1m", "max_deliver": 3}, "archive": False}


async def _acknowledge_slowly(connection: NatsPyConnection, queue: WorkQueue, count: int) -> list[str]:
    done: list[str] = []
    while len(done) < count:
        for message in await pull_jobs(connection, queue, 1, within=20):
            done.append(message.data.decode())
            await message.ack_sync()
    return done


async def test_jobs_wait_for_room_and_are_stored_once_each(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=3, **FULL)
    worker = asyncio.create_task(_acknowledge_slowly(connection, queue, 60))
    bodies = [f"{number}" for number in range(60)]
    report = await publish(connection, queue, bodies, subject=f"{name}.jobs.a", room_timeout=20)
    assert (report.stored, report.duplicates, report.failures) == (60, 0, [])
    assert sorted(report.sequences) == list(range(1, 61))
    assert sorted(await worker, key=int) == bodies
    assert await stored_count(connection, name) == 0


async def test_a_queue_limited_by_bytes_stores_the_jobs_that_wait_in_their_order(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_bytes=3_000, **FULL)
    # The limit holds two of them, so that each of the others waits for room alone.
    jobs = [Job(f"{number}".encode() + bytes(1_000)) for number in range(12)]
    publishing = asyncio.create_task(publish(connection, queue, jobs, subject=f"{name}.jobs.a", room_timeout=20))
    done = await _acknowledge_slowly(connection, queue, 12)
    report = await publishing
    assert list(report.sequences) == list(range(1, 13))
    assert [text.rstrip("\0") for text in done] == [f"{number}" for number in range(12)]


async def test_a_queue_that_stays_full_ends_the_call_with_the_jobs_not_stored(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msgs=3, **FULL)
    with pytest.raises(PublishIncompleteError) as raised:
        await publish(connection, queue, range(1_300), subject=f"{name}.jobs.a", room_timeout=0.4)
    report = raised.value.report
    assert list(report.sequences) == [1, 2, 3] + [0] * 1_297
    assert [failure.index for failure in report.failures] == list(range(3, 1_300))
    assert all(failure.certain and isinstance(failure.error, QueueFullError) for failure in report.failures)
    full = (
        f"{name} is full (maximum messages exceeded) and stored nothing for 0.4 s: let workers or a redrive free space,"
        " or raise the limit, then try again"
    )
    assert str(report.failures[0].error) == full
    # Of so many jobs no more than a window is sent to a full queue.
    assert str(report.failures[-1].error) == f"it was not sent: {full}"
    assert await stored_count(connection, name) == 3


@pytest.mark.slow
async def test_the_time_for_room_counts_anew_with_each_stored_job(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=1, **FULL)
    publishing = asyncio.create_task(publish(connection, queue, range(4), subject=f"{name}.jobs.a", room_timeout=1.0))
    started = time.monotonic()
    for _ in range(4):
        (message,) = await pull_jobs(connection, queue, 1)
        await asyncio.sleep(0.4)
        await message.ack_sync()
    assert (await publishing).stored == 4
    # Longer than the time for room in all.
    assert time.monotonic() - started > 1.0


async def test_dead_letters_give_no_room_until_they_are_gone(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=1, **FULL | {"consumer": {}})
    await make_dead_letters(connection, queue, ["dead"])
    with pytest.raises(PublishIncompleteError, match="let workers or a redrive free space"):
        await publish(connection, queue, ["a"], subject=f"{name}.jobs.a", room_timeout=0.2)


async def test_a_limit_of_each_subject_is_waited_for_too(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs_per_subject=1, **FULL)
    config = (await stream_info(connection, name))["config"] | {"discard_new_per_subject": True}
    await connection.api(f"STREAM.UPDATE.{name}", config)
    publishing = asyncio.create_task(publish(connection, queue, "abc", subject=f"{name}.jobs.a", room_timeout=20))
    assert await _acknowledge_slowly(connection, queue, 3) == ["a", "b", "c"]
    assert (await publishing).stored == 3


async def test_a_queue_without_room_is_not_waited_for_unless_asked(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=1, **FULL)
    with pytest.raises(PublishIncompleteError, match=r"full \(maximum messages exceeded\): let workers"):
        await publish(connection, queue, "ab", subject=f"{name}.jobs.a")


async def test_a_server_that_goes_away_while_a_call_waits_for_room_ends_the_call(
    connection: NatsPyConnection, name: str
) -> None:
    full = json.dumps(
        {"error": {"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}, "stream": name}
    ).encode()
    answers = 0

    async def answer_as_a_stream_that_vanishes(message: Msg) -> None:
        nonlocal answers
        answers += 1
        if answers <= 3:
            await message.respond(full)

    await connection.client.subscribe(f"{name}.>", cb=answer_as_a_stream_that_vanishes)
    jobs = prepare_jobs("abc", subject=f"{name}.a", origin=None, batch=name)
    report = await publish_prepared(connection, jobs, ack_timeout=0.1, attempts=2, room_timeout=30)
    assert [failure.certain for failure in sorted(report.failures, key=lambda failure: failure.index)] == [
        False,
        True,
        True,
    ]
    assert all(isinstance(failure.error, UnreachableError) for failure in report.failures)


async def stored_count_reaches(connection: NatsPyConnection, name: str, count: int) -> bool:
    return await stored_count(connection, name) >= count


async def stored_times(connection: NatsPyConnection, name: str) -> list[float]:
    return [message.stored_at.timestamp() async for message in read_range(connection, name, ">")]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "count", "most"), [(0.2, 3, 2), (1, 12, 10), (20, 230, 200), (400, 4_200, 4_000)])
async def test_ten_seconds_have_no_more_jobs_than_the_rate_allows(
    connection: NatsPyConnection, name: str, rate: float, count: int, most: int
) -> None:
    queue = await make_queue(connection, name, archive=False)
    await publish(connection, queue, range(count), subject=f"{name}.jobs.a", rate=rate)
    times = await stored_times(connection, name)
    assert len(times) == count
    assert most_within(times, 10.0) <= most
    assert (count - 1) / (times[-1] - times[0]) >= rate * 0.85


@pytest.mark.slow
async def test_jobs_that_arrive_late_and_at_once_delay_those_after_them(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue, rate = await make_queue(connection, name, archive=False), 20
    async with tcp_proxy(nats.port) as proxy, connect(ConnectionSettings(servers=(proxy.url,))) as slow:
        publishing = asyncio.create_task(publish(slow, queue, range(260), subject=f"{name}.jobs.a", rate=rate))
        await eventually(lambda: stored_count_reaches(connection, name, 40))
        proxy.pause()
        await asyncio.sleep(1.5)
        proxy.resume()
        await publishing
    assert most_within(await stored_times(connection, name), 10.0) <= rate * 10


async def test_a_rate_counts_no_job_that_is_stored_already(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    jobs = prepare_jobs(range(1_000), subject=f"{name}.jobs.a", origin=None, batch=name)
    async with asyncio.timeout(60):
        report = await publish_prepared(
            connection, jobs, rate=1, known=AskedForEach(lambda index, _: index + 1 if index < 999 else None)
        )
    assert (report.stored, report.duplicates) == (1_000, 999)


async def _are_stored(connection: NatsPyConnection, name: str, count: int) -> bool:
    return await stored_count(connection, name) == count


@pytest.mark.parametrize(("arguments", "sent"), [({"rate": 0.01}, 1), ({"room_timeout": 1_000}, 2)])
async def test_a_call_that_is_stopped_leaves_the_other_jobs_unsent(
    connection: NatsPyConnection, name: str, arguments: dict[str, Any], sent: int
) -> None:
    await make_queue(connection, name, max_msgs=2, **FULL)
    stopped, read = False, 0

    def items() -> Iterator[int]:
        nonlocal read
        for number in range(1_000):
            read += 1
            yield number

    jobs = prepare_jobs(items(), subject=f"{name}.jobs.a", origin=None, batch=name)
    publishing = asyncio.create_task(publish_prepared(connection, jobs, stopped=lambda: stopped, **arguments))
    await eventually(lambda: read > sent)
    await eventually(lambda: _are_stored(connection, name, sent))
    stopped = True
    report = await asyncio.wait_for(publishing, 10)
    assert list(report.sequences)[:sent] == [1, 2][:sent]
    assert all(type(failure.error) is TransientError and failure.certain for failure in report.failures)
    assert report.failures
    assert await stored_count(connection, name) == sent


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
async def test_a_rate_that_is_none_is_refused_before_anything_is_sent(
    connection: NatsPyConnection, name: str, rate: float
) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(JobError, match=f"expected a rate above 0 jobs a second, found {rate}"):
        await publish(connection, queue, "ab", subject=f"{name}.jobs.a", rate=rate)
    assert await stored_count(connection, name) == 0
