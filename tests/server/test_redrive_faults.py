"""Redrives that are killed, cut off or concurrent: no job is lost or done twice."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, find_dead_letters, redrive_dead_letters
from airflow_provider_jetstream.jetstream.errors import TransientError
from testbed import seams
from testbed.crash_points import crash_at_every_call
from testbed.queues import eventually, make_dead_letters, make_queue, process_all, stored_count
from testbed.sent_frames import sent_messages

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

JOBS = ["a", "b", "c"]
AT_ONCE = 8

HANDLER = {"name": "unprocessed_order_handler", "max_deliver": 2, "backoff": ["5s"]}


def fields(kind: str, name: str) -> dict[str, Any]:
    """Return the fields of a queue: the defaults, or those of the orders document."""
    if kind == "plain":
        return {}
    letters = {"name": f"{name}-dead", "retention": "workqueue", "deny_delete": True, "consumers": [HANDLER]}
    return {"discard": "new", "deny_delete": True, "dead_letters": letters}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "orders"])
@pytest.mark.parametrize("workers", ["workers are away", "workers take each copy at once"])
async def test_a_redrive_killed_before_any_of_its_calls_loses_and_repeats_nothing_when_it_is_run_again(
    nats: NatsServer, connection: NatsPyConnection, name: str, kind: str, workers: str, tmp_path: Path
) -> None:
    async def prepare(call: int) -> WorkQueue:
        queue = await make_queue(connection, f"{name}-{call}", **fields(kind, f"{name}-{call}"))
        await make_dead_letters(connection, queue, JOBS)
        return queue

    deaths = await crash_at_every_call(
        (nats.url,), f"{redrive_dead_letters.__module__}:redrive_dead_letters", prepare, logs=tmp_path
    )
    print(deaths.table())
    assert set(deaths.statuses) == {-signal.SIGKILL, 0}
    # Reading, then five calls for each of three letters, then the removal of the entries.
    assert len(deaths.killed_calls) >= 20

    async def redrive_again(queue: WorkQueue) -> None:
        done: Counter[str] = Counter()
        if workers == "workers take each copy at once":
            done += await process_all(connection, queue)
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        done += await process_all(connection, queue)
        assert done == dict.fromkeys(JOBS, 1), queue.name
        assert await stored_count(connection, queue.name) == 0
        assert (await find_dead_letters(connection, queue)).letters == ()

    for start in range(0, len(deaths.queues), AT_ONCE):
        await asyncio.gather(*map(redrive_again, deaths.queues[start : start + AT_ONCE]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "orders"])
@pytest.mark.parametrize("redrivers", [2, 3])
async def test_concurrent_redrives_lose_and_repeat_nothing(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, kind: str, redrivers: int
) -> None:
    # On a loaded machine, forty acknowledgements take longer than the half second that other tests give them. Once its
    # ack wait is over a job is done without evidence, and its entry stays.
    queue = await make_queue(connection, name, consumer={"ack_wait": "3s"}, **fields(kind, name))
    jobs = [str(number) for number in range(40)]
    await make_dead_letters(connection, queue, jobs, headers={"Customer": "x"})
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connect(settings)) for _ in range(redrivers)]
        draining = asyncio.create_task(drain_until_empty(connection, queue, len(jobs)))
        reports = await asyncio.gather(*(redrive_dead_letters(client, queue) for client in connections))
    assert await draining == dict.fromkeys(jobs, 1)
    assert all(report.failed == {} for report in reports)
    # One after the other: whoever had the lease first redrove all.
    assert sorted(sequence for report in reports for sequence in report.redriven) == list(range(1, 41))
    assert await stored_count(connection, name) == 0
    assert await stored_count(connection, f"{name}-dead") == 0


async def drain_until_empty(connection: NatsPyConnection, queue: WorkQueue, count: int) -> Counter[str]:
    """Do jobs until so many were done and none is left, while the redrives run."""
    done: Counter[str] = Counter()

    async def over() -> bool:
        done.update(await process_all(connection, queue))
        return done.total() >= count and not await stored_count(connection, queue.name)

    await eventually(over, within=20)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("call", [2, 6, 8, 10, 11, 12, 13, 16])
async def test_a_redrive_whose_server_is_killed_is_finished_by_the_next(
    own_nats: NatsServer, name: str, call: int
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 2})) as connection:
        queue = await make_queue(connection, name)
        await make_dead_letters(connection, queue, JOBS)
        await kill_server_before(own_nats, connection, call, redrive_dead_letters(connection, queue))
        await eventually(lambda: connection.client.is_connected)
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        assert await process_all(connection, queue) == dict.fromkeys(JOBS, 1)
        assert await stored_count(connection, name) == 0


async def kill_server_before(server: NatsServer, connection: NatsPyConnection, call: int, redrive_module: Any) -> None:
    """Run a redrive, and kill and restart the server before its n-th call."""
    publish, write, sent = connection.client.publish, connection.client.write, 0

    async def killing(*args: Any, **kwargs: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == call:
            server.kill()
            await asyncio.to_thread(server.restart)
        await publish(*args, **kwargs)

    def killing_write(frames: bytes, messages: int) -> None:
        nonlocal sent
        written = list(sent_messages(frames))
        assert len(written) == messages
        for _, message in written:
            sent += 1
            if sent == call:
                server.kill()
                server.start()
            write(message, 1)

    connection.client.publish = killing  # type: ignore[method-assign]
    connection.client.write = killing_write  # type: ignore[method-assign]
    try:
        await redrive_module
    except TransientError:
        pass
    finally:
        connection.client.publish = publish  # type: ignore[method-assign]
        connection.client.write = write  # type: ignore[method-assign]
    assert sent >= call


@pytest.mark.slow
async def test_a_cancelled_redrive_is_finished_by_the_next(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    jobs = [str(number) for number in range(1_000)]
    await make_dead_letters(connection, queue, jobs)
    first = asyncio.create_task(redrive_dead_letters(connection, queue))

    async def begun() -> bool:
        return int((await connection.api(f"STREAM.INFO.{name}"))["state"]["last_seq"]) > 1_000

    await eventually(begun)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    second = await redrive_dead_letters(connection, queue)
    assert second.redriven
    assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)


async def test_letters_whose_consumer_is_deleted_in_the_middle_are_redriven_all_the_same(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    looked_at = 0

    async def delete_before_the_second(*_: object) -> bool:
        nonlocal looked_at
        looked_at += 1
        if looked_at == 2:
            await connection.api(f"CONSUMER.DELETE.{name}.worker")
        return True

    monkeypatch.setattr(seams.REDRIVE_STEP_WAIT_UNTIL, delete_before_the_second)
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 1)
    report = await redrive_dead_letters(connection, queue)
    report.raise_for_failures()
    assert report.redriven == {1: 3, 2: 4}
    assert (await stored_count(connection, name), await stored_count(connection, f"{name}-dead")) == (2, 0)
