"""Many jobs from a generator: neither the publisher nor its retry holds them.

The short form publishes 40,000 jobs, ``FAULTS=full`` a million.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.queues import eventually, make_queue

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer

_FULL = os.environ.get("FAULTS") == "full"
_JOBS = 1_000_000 if _FULL else 40_000
_SECONDS = 1_200 if _FULL else 300
_PROGRAM = Path(__file__).with_name("publisher_memory.py")
# The jobs themselves have 230 bytes and more, and several hundred as Python's objects.
_BYTES_PER_JOB = 200
_MEBIBYTES = 40


async def test_the_memory_of_a_publisher_is_bounded(own_nats: NatsServer, name: str, tmp_path: Path) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 10})) as connection:
        await make_queue(connection, name, duplicate_window="100ms")
        command = [sys.executable, str(_PROGRAM), own_nats.url, name, str(_JOBS)]
        publisher = Process.start(command, log_file=tmp_path / "publisher.log")
        await eventually(lambda: not publisher.alive, within=_SECONDS)
        assert publisher.returncode == 0, publisher.output()
    first, retry = map(json.loads, await asyncio.to_thread(lambda: publisher.output().splitlines()[-2:]))
    assert (first["stored"], first["duplicates"]) == (_JOBS, 0)
    assert retry["stored"] == _JOBS
    for figures in (first, retry):
        assert figures["grown"] < _MEBIBYTES + _BYTES_PER_JOB * _JOBS / 2**20, figures
