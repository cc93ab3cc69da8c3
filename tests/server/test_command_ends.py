"""How commands end and what they leave out: an exporter that is stopped, many subjects, metrics on one address."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Job, publish
from airflow_provider_jetstream.worker.metrics import PrometheusMetrics
from testbed.ports import free_ports
from testbed.queues import eventually, make_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

COMMAND = Path(sys.executable).parent / "jetstream-queue"


def environment(nats: NatsServer) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NATS_")} | {"NATS_URL": nats.url}


@pytest.mark.slow
async def test_a_queue_with_many_subjects_without_a_consumer_is_shown_in_some_lines(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    consumer = {"filter_subject": f"{name}.jobs.taken"}
    queue = await make_queue(connection, name, consumer=consumer)
    await publish(connection, queue, [Job(b"", subject=f"{name}.jobs.other.{number}") for number in range(60)])
    process = await asyncio.create_subprocess_exec(
        *(COMMAND, "queue", "show", name), env=environment(nats), stdout=subprocess.PIPE
    )
    shown, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    lines = [line for line in shown.decode().splitlines() if "match no consumer" in line]
    assert len(lines) == 21
    assert lines[-1] == "40 jobs on 40 other subjects match no consumer (--json lists all)"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_exporter_that_is_stopped_has_ended_well(nats: NatsServer, number: int) -> None:
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(COMMAND, "exporter", "--port", str(port), "--address", "127.0.0.1"), env=environment(nats)
    )

    def is_up() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return bool(answer.read())
        except OSError:
            return False

    try:
        await eventually(lambda: asyncio.to_thread(is_up))
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
def test_a_workers_metrics_are_on_one_address() -> None:
    metrics = PrometheusMetrics(0, "w", "127.0.0.2")
    try:
        with urllib.request.urlopen(f"http://127.0.0.2:{metrics.port}/metrics", timeout=5) as answer:
            assert b"jetstream_worker_jobs" in answer.read()
        with pytest.raises(OSError, match=r"refused|Forbidden|timed out"):
            urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5)
    finally:
        metrics.close()
