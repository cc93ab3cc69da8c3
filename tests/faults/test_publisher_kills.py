"""A publisher killed with SIGKILL several times in mid-publish while workers do its jobs: each is done once.

The short form has a third of the jobs of ``FAULTS=full``, and half the kills.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from killed_publisher import jobs

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import Job, connect, connection_settings
from testbed.face import stream_info
from testbed.queues import CONSUMER, eventually, make_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_FULL = os.environ.get("FAULTS") == "full"
_JOBS = 18_000 if _FULL else 6_000
_KILLS = 6 if _FULL else 3
_SECONDS = 120
_PROGRAM = Path(__file__).with_name("killed_publisher.py")


async def test_each_job_is_done_once_however_often_its_publisher_is_killed(
    own_nats: NatsServer, name: str, tmp_path: Path
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 10})) as connection:
        # Shorter than it takes to start the next try: the server's duplicate window helps none of them.
        await make_queue(
            connection,
            name,
            consumer={"ack_wait": "1m", "max_ack_pending": -1, "sample_freq": "100%"},
            archive=f"{name}-archive",
            duplicate_window="100ms",
        )
        done: Counter[str] = Counter()
        working = [asyncio.create_task(_work(connection, name, done)) for _ in range(2)]
        for attempt in range(_KILLS):
            publisher = _start(own_nats, name, attempt, tmp_path, "killed")
            enough = _JOBS * (attempt + 1) // (_KILLS + 1)

            async def has_stored(enough: int = enough) -> bool:
                return bool((await stream_info(connection, name))["state"]["last_seq"] >= enough)

            await eventually(has_stored, within=_SECONDS)
            assert publisher.alive, publisher.output()
            publisher.kill()
        publisher = _start(own_nats, name, _KILLS, tmp_path, "ends")
        await eventually(lambda: not publisher.alive, within=_SECONDS)
        assert publisher.returncode == 0, publisher.output()
        stored, duplicates = map(int, publisher.output().splitlines()[-1].split())
        await eventually(lambda: done.total() >= _JOBS, within=_SECONDS)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    asked = Counter(job.body if isinstance(job, Job) else str(job) for job in jobs(_JOBS, 0))
    assert (asked - done, done - asked) == (Counter(), Counter())
    assert stored == _JOBS
    assert duplicates > 0


def _start(server: NatsServer, name: str, attempt: int, logs: Path, end: str) -> Process:
    command = [sys.executable, str(_PROGRAM), server.url, name, str(_JOBS), str(attempt), end]
    return Process.start(command, log_file=logs / f"publisher-{attempt}.log")


async def _work(connection: NatsPyConnection, name: str, done: Counter[str]) -> None:
    """Do jobs as a worker of any make does, which only acknowledges."""
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=name)
    while True:
        with suppress(TimeoutError):
            for message in await pull.fetch(200, timeout=1):
                await message.ack_sync()
                done[message.data.decode()] += 1
