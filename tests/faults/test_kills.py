"""A redrive killed -9 at every step between two calls to the server, then run again: what is lost, what is repeated.

The short form has one letter of each kind in a queue; ``FAULTS=full`` has more, so that the steps of several letters
are interleaved in every way.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from faulty_redrive import order_by

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from testbed.crash_points import crash_at_every_call
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.crash_points import CrashRun
    from testbed.nats_server import NatsServer

FULL = os.environ.get("FAULTS") == "full"
DEAD = ["a", "b", "c"] if FULL else ["a"]
TERMINATED = ["x", "y"] if FULL else ["x"]
WINDOW = "1s"

WHEN = ["inside the duplicate window", "after the duplicate window", "after a restart of the server"]
WORKERS = ["take what is there before", "are away"]


async def prepare(connection: Connection, name: str, protocol: str, when: str) -> WorkQueue:
    """Give a queue with letters of both kinds: still stored, and gone but archived."""
    queue = await make_queue(
        connection,
        name,
        consumer={"ack_wait": "200ms"},
        atomic_redrive=protocol == "atomic",
        duplicate_window=WINDOW if when == "after the duplicate window" else "2m",
    )
    await publish_jobs(connection, queue, TERMINATED)
    for message in await pull_jobs(connection, queue, len(TERMINATED)):
        await connection.request(message.reply, b"+TERM poison")

    async def told() -> bool:
        return await stored_count(connection, f"{name}-dead") == len(TERMINATED)

    await eventually(told)
    await make_dead_letters(connection, queue, DEAD)
    return queue


async def work(connection: Connection, queue: WorkQueue) -> Counter[str]:
    """Do what the queue hands out just now; unlike draining it puts up with a consumer that is paused."""
    done: Counter[str] = Counter()
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
    with suppress(TimeoutError):
        while messages := await pull.fetch(100, timeout=0.3):
            for message in messages:
                done[message.data.decode()] += 1
                await message.ack_sync()
    await pull.unsubscribe()
    return done


def may_repeat(protocol: str, when: str, workers: str, run: CrashRun) -> bool:
    """Tell whether this is the window that docs/redrive.md states."""
    if protocol == "atomic" or not run.kind.startswith("publish audit.<queue>.letters"):
        return False
    if protocol == "in_place" and int(run.subject.rsplit(".", 1)[1]) > len(TERMINATED):
        # Only letters that aren't stored any more come back by copies.
        return False
    return when == WHEN[1] or (when == WHEN[2] and workers == WORKERS[0])


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("workers", WORKERS if FULL else WORKERS[:1])
@pytest.mark.parametrize("protocol", ["copy", "atomic", "in_place"])
async def test_nothing_is_lost_or_repeated_beyond_what_is_stated(
    own_nats: NatsServer, protocol: str, when: str, workers: str, tmp_path: Path, tried: Callable[..., None]
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        deaths = await crash_at_every_call(
            [own_nats.url],
            "faulty_redrive:redrive_by",
            lambda call: prepare(connection, f"q{call}", protocol, when),
            options={"protocol": protocol},
            counted="changes",
            logs=tmp_path,
        )
        done: dict[str, Counter[str]] = defaultdict(Counter)
        if workers == WORKERS[0]:
            for run in deaths.runs:
                done[run.queue.name] += await work(connection, run.queue)
        if when == WHEN[1]:
            await asyncio.sleep(1.5)
        if when == WHEN[2]:
            own_nats.kill()
            await asyncio.to_thread(own_nats.restart)
            await eventually(lambda: connection.client.is_connected)
        fates: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for run in deaths.runs:
            await again(connection, run.queue, protocol)
            done[run.queue.name] += await process_all(connection, run.queue, within=30)
            fates[run.kind or "nothing"].append(fate(done[run.queue.name]))
            assert fate(done[run.queue.name])[0] == 0, (run, done[run.queue.name])
            if not may_repeat(protocol, when, workers, run):
                assert fate(done[run.queue.name])[1] == 0, (run, done[run.queue.name])
            assert await left(connection, run.queue) == 0, run
    for what, found in fates.items():
        lost, repeated = sum(each[0] for each in found), sum(each[1] for each in found)
        tried(protocol, when, workers, what, len(found), lost, repeated)
    # Every step was cut off at least once, the way in which it changes something included.
    steps = {run.kind for run in deaths.runs}
    expected = {
        "copy": {"publish jobs", "publish audit.<queue>.letters.*", "$JS.ACK", "$JS.API.STREAM.MSG.DELETE"},
        "atomic": {"publish jobs", "publish audit.<queue>.letters.*", "$JS.ACK", "$JS.API.STREAM.MSG.DELETE"},
        "in_place": {"$JS.API.CONSUMER.PAUSE", "$JS.API.CONSUMER.RESET", "$JS.API.STREAM.MSG.DELETE"},
    }
    assert expected[protocol] <= steps


async def again(connection: Connection, queue: WorkQueue, protocol: str) -> None:
    """Run it a second time, and a third where the second can't see yet what a restarted server forgot."""

    async def finished() -> bool:
        report = await redrive_dead_letters(connection, queue, order_by(protocol))
        return not report.failures and not report.uncertain

    await eventually(finished, within=30)


async def left(connection: Connection, queue: WorkQueue) -> int:
    """Count the dead letters left."""
    return len((await find_dead_letters(connection, queue)).letters)


def fate(done: Counter[str]) -> tuple[int, int]:
    """Count the jobs that were lost, and those that were done more than once."""
    jobs = [*DEAD, *TERMINATED]
    return sum(done[job] == 0 for job in jobs), sum(done[job] > 1 for job in jobs)


async def test_the_stated_window_is_real(own_nats: NatsServer, tmp_path: Path) -> None:
    """What can't be repeated in any test would not have to be stated."""
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        deaths = await crash_at_every_call(
            [own_nats.url],
            "faulty_redrive:redrive_by",
            lambda call: prepare(connection, f"q{call}", "copy", WHEN[1]),
            options={"protocol": "copy"},
            counted="changes",
            logs=tmp_path,
        )
        runs = [run for run in deaths.runs if may_repeat("copy", WHEN[1], WORKERS[1], run)]
        assert runs
        await asyncio.sleep(1.5)
        for run in runs:
            await redrive_dead_letters(connection, run.queue, order_by("copy"))
            assert (await process_all(connection, run.queue)).total() > len([*DEAD, *TERMINATED])
            assert await stored_count(connection, run.queue.name) == 0
