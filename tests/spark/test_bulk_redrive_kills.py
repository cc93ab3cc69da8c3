"""Bulk redrives at a rate whose executors are killed again and again while workers do the jobs of the queue.

The short form kills two executors, ``FAULTS=full`` five.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from bulk_letters import letter_records, make_letters, stored_messages
from driver_processes import driver_process, read_message, resume
from process_killer import kill_executor

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.queues import CONSUMER, eventually, running_worker
from testbed.rates import most_within
from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from pathlib import Path

    from nats.aio.msg import Msg

    from testbed.spark_face import SourceStream

pytestmark = pytest.mark.jvm

_KILLS, _LETTERS, _RATE = (5, 6_000, 120) if os.environ.get("FAULTS") == "full" else (2, 2_000, 120)
_WITHIN = 300.0


def _has_stored(stream: SourceStream, sequence: int) -> bool:
    return stream.info().last > sequence


def _redrive_and_kill(options: dict[str, str], declared: str, name: str, log: Path) -> list[int]:
    """Redrive on two executors, kill one after each further part of the letters; returns the processes killed."""
    request = json.dumps({"rate": _RATE})
    killed: list[int] = []
    arguments = (json.dumps(options), declared, request, str(_LETTERS))
    with (
        open_stream({**options, "stream": name}) as stream,
        driver_process("cluster_redrive.py", *arguments, log=log) as driver,
    ):
        assert read_message(driver) == {"ready": 10}
        resume(driver)
        port = int(urlsplit(options["servers"]).port or 0)
        for number in range(1, _KILLS + 1):
            after = _LETTERS + _LETTERS * number // (_KILLS + 1)
            killed.append(kill_executor(driver.pid, port, partial(_has_stored, stream, after)))
        assert read_message(driver) == {"redriven": _LETTERS, "gone": 0, "failed": {}}
    return killed


def test_executors_that_are_killed_beside_workers_neither_repeat_a_letter_nor_exceed_the_rate(
    connection_options: dict[str, str], name: str, tmp_path: Path
) -> None:
    queue = make_letters(connection_options, name, _LETTERS, consumer={"ack_wait": "10s", "max_ack_pending": -1})
    assert queue.archive is not None
    archived = queue.archive.subjects[0]
    declared = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    settings = connection_settings({"servers": (connection_options["servers"],)})
    stored: list[tuple[float, int]] = []
    done: Counter[int] = Counter()

    async def record(message: Msg) -> None:
        # The server's own time, which it adds to the copies for the archive.
        moment = (message.headers or {})["Nats-Time-Stamp"]
        stored.append((datetime.fromisoformat(moment).timestamp(), int(message.data)))

    async def handle(job: Delivery) -> None:
        done[int(job.body)] += 1

    async def redrive_beside_workers() -> list[int]:
        async with connect(settings) as connection:
            await connection.client.subscribe(archived, cb=record)
            await connection.client.flush()
            async with running_worker(Worker(queue, CONSUMER, handle, settings, concurrency=50)):
                arguments = (connection_options, declared, name, tmp_path / "driver.log")
                killed = await asyncio.to_thread(_redrive_and_kill, *arguments)
                await eventually(lambda: sum(done.values()) >= _LETTERS, _WITHIN)
        return killed

    assert len(set(asyncio.run(redrive_beside_workers()))) == _KILLS
    assert done == Counter(range(1, _LETTERS + 1))
    assert Counter(number for _, number in stored) == done
    assert Counter(record.sequence for record in letter_records(connection_options, queue)) == done
    assert stored_messages(connection_options, name) == []
    assert stored_messages(connection_options, f"{name}-dead") == []
    moments = sorted(moment for moment, _ in stored)
    seconds = moments[-1] - moments[0]
    most = most_within(moments, 10.0)
    print(f"{_KILLS} kills: {len(moments) / seconds:.1f}/s of {_RATE}/s for {seconds:.0f} s, {most} in ten seconds")
    assert most <= _RATE * 10
    # For the whole run as for ten seconds, with what each task may have stored early or late.
    assert len(moments) <= _RATE * (seconds + 0.18) + 2
