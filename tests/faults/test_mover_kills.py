"""Movers and the server killed with SIGKILL while jobs become due and the queue is full: each job is stored once.

The short form has a quarter of the jobs of ``FAULTS=full``, and fewer kills.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import Job, connect, connection_settings, publish
from airflow_provider_jetstream.jetstream.contract import MOVER
from testbed.face import consumer_info
from testbed.queues import CONSUMER, eventually, make_queue, stored_count

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_FULL = os.environ.get("FAULTS") == "full"
_JOBS = 1_600 if _FULL else 400
_SERVER_KILLS = 8 if _FULL else 3
_SECONDS = 240


async def test_each_scheduled_job_is_stored_once_however_often_movers_and_server_are_killed(
    own_nats: NatsServer, name: str, tmp_path: Path
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 10})) as connection:
        limits: dict[str, Any] = {"discard": "new", "max_msgs": 20, "deny_delete": True}
        # Shorter than a mover's job is in nobody's hands: the server's duplicate window helps only at first.
        limits |= {"schedules": True, "duplicate_window": "1s", "archive": {"max_msgs": -1}}
        # What a worker had as the server was killed comes again: twenty dead letters would fill the queue.
        queue = await make_queue(connection, name, consumer={"ack_wait": "5s", "max_deliver": 1_000}, **limits)
        await _shorten_ack_wait(connection, f"{name}-schedules")
        start = datetime.now(UTC) + timedelta(seconds=1)
        jobs = [Job(b"%d" % number, at=start + timedelta(milliseconds=10 * number)) for number in range(_JOBS)]
        (await publish(connection, queue, jobs, subject=f"{name}.jobs.a")).raise_for_failures()
        # What was stored, by body: each time under another sequence.
        stored: set[tuple[bytes, int]] = set()
        working = [asyncio.create_task(_work(connection, name, stored)) for _ in range(2)]
        movers = [_start(own_nats, name, tmp_path, number) for number in range(2)]
        number, kills, chance = 2, 0, random.Random(name)  # noqa: S311
        deadline = asyncio.get_running_loop().time() + _SECONDS
        while left := await _left(connection, name):
            assert asyncio.get_running_loop().time() < deadline, (left, len(stored), connection.client.is_connected)
            victim = chance.randrange(2)
            await asyncio.sleep(chance.uniform(0.2, 0.5))
            if len({body for body, _ in stored}) > (kills + 1) * _JOBS // (_SERVER_KILLS + 1):
                kills += 1
                own_nats.kill()
                own_nats.restart()
                await eventually(lambda: connection.client.is_connected)
            elif number == 2 or (len(stored) < _JOBS * 9 // 10 and chance.random() < 0.3):
                movers[victim].kill()
                movers[victim] = _start(own_nats, name, tmp_path, number)
                number += 1
        for mover in movers:
            mover.signal(signal.SIGTERM)
        await eventually(lambda: not any(mover.alive for mover in movers))
        assert [mover.returncode for mover in movers] == [0, 0], [mover.output() for mover in movers]
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    assert kills == _SERVER_KILLS
    assert number > 2, "no mover was killed"
    times = Counter(body for body, _ in stored)
    assert {body for body, count in times.items() if count > 1} == set()
    assert set(times) == {job.body for job in jobs}


def _start(server: NatsServer, name: str, logs: Path, number: int) -> Process:
    command = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "schedules", "run", name]
    return Process.start([*command, "--server", server.url], log_file=logs / f"mover-{number}.log")


async def _shorten_ack_wait(connection: NatsPyConnection, stream: str) -> None:
    """Have jobs of a mover that was killed come again sooner than provisioning declares."""
    config = (await consumer_info(connection, stream, MOVER))["config"] | {"ack_wait": 3_000_000_000}
    await connection.api(
        f"CONSUMER.CREATE.{stream}.{MOVER}", {"stream_name": stream, "config": config, "action": "update"}
    )


async def _left(connection: NatsPyConnection, name: str) -> int:
    with suppress(Exception):
        return await stored_count(connection, f"{name}-schedules") + await stored_count(connection, name)
    return 1


async def _work(connection: NatsPyConnection, name: str, stored: set[tuple[bytes, int]]) -> None:
    """Do jobs as a worker of any make does, which only acknowledges."""
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=name)
    while True:
        with suppress(TimeoutError, NatsError):
            for message in await pull.fetch(10, timeout=1):
                stored.add((message.data, message.metadata.sequence.stream))
                await message.ack_sync()
