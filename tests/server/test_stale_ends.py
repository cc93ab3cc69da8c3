"""Ends of deliveries from before a loss of power: they are nobody else's, although another job has the sequence."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_queue, publish_jobs, running_worker
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "end"),
    [("2.15.0", "done"), ("2.12.8", "done"), ("2.15.0", "acknowledged"), ("2.15.0", "failed"), ("2.15.0", "given up")],
)
async def test_an_end_from_before_a_loss_of_power_ends_no_other_job_of_its_sequence(
    tmp_path: Path, version: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    binary = find_nats_server() if version == "2.15.0" else nats_server_of(version)
    caplog.set_level("INFO", "jetstream.worker")
    began: list[tuple[str, int]] = []
    ends = {"early": asyncio.Event(), "late": asyncio.Event()}

    async def handle(job: Delivery) -> None:
        body = job.body.decode()
        began.append((body, job.attempt))
        await ends[body].wait()
        if (body == "late" and job.attempt == 1) or (body == "early" and end == "failed"):
            raise ValueError("failed")
        if body == "early" and end == "given up":
            raise GiveUpError("broken")

    with NatsServer(tmp_path / "server", binary=binary) as server:
        async with tcp_proxy(server.port) as proxy:
            async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
                queue = await make_queue(connection, "q", consumer={"ack_wait": "60s", "max_deliver": 3})
                folder, kept = server.store / "jetstream" / "$G" / "streams" / "q", server.folder / "q-before"
                await asyncio.sleep(0.4)
                shutil.copytree(folder, kept)
            settings = connection_settings({"servers": (proxy.url,), "timeout": 10})
            async with running_worker(Worker(queue, "worker", handle, settings, concurrency=2)):
                early = await _publish(server, queue, "early")
                await eventually(lambda: began == [("early", 1)])
                if end == "acknowledged":
                    proxy.pause_at(b"$JS.ACK.q.worker.")
                    ends["early"].set()
                    await proxy.found.wait()
                proxy.cut()
                proxy.drop()
                server.kill()
                shutil.rmtree(folder)
                shutil.copytree(kept, folder)
                server.start()
                assert await _publish(server, queue, "late") == early
                proxy.mend()
                await eventually(lambda: ("late", 1) in began)
                ends["early"].set()
                await eventually(lambda: "job ended" in caplog.text, within=30)
                for _ in range(4 if end == "failed" else 1):
                    await asyncio.sleep(0.4)
                    assert began == [("early", 1), ("late", 1)]
                ends["late"].set()
                await eventually(lambda: began[2:] == [("late", 2)], within=30)


async def _publish(server: NatsServer, queue: WorkQueue, body: str) -> int:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        (sequence,) = await publish_jobs(connection, queue, [body])
        return sequence
