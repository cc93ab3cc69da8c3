"""What no face shows of hostile jobs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.logs import TextFormatter
from testbed.queues import eventually, make_queue, publish_jobs, running_worker

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection


@pytest.mark.slow
async def test_no_job_forges_a_line_of_the_log(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 1})
    forged = "x\r\n2026-01-01 00:00:00,000 INFO job ended worker=w job_id=forged\u2028\x85\x1b[2K"

    def handle(job: Delivery) -> None:
        raise RuntimeError(job.json()["id"])

    caplog.set_level("INFO")
    async with running_worker(Worker(queue, "worker", handle, settings, name="w")):
        await publish_jobs(connection, queue, [json.dumps({"id": forged})])
        await eventually(lambda: "outcome=dead" in caplog.text, within=30)
    formatter = TextFormatter("%(asctime)s %(levelname)s %(message)s")
    records = [record for record in caplog.records if record.name == "jetstream.worker"]
    assert all("\n" not in record.getMessage() for record in records)
    lines = [line for record in records for line in formatter.format(record).split("\n")]
    assert any("RuntimeError: x" in line for line in lines)
    starts = [line for line in lines if not line.startswith("    ")]
    assert len(starts) == len(records)
    assert all(re.match(r"\d{4}-\d\d-\d\d ", line) for line in starts)
    assert "\x1b" not in "".join(lines)
