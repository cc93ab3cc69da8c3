"""Bulk redrives whose tasks fail, are killed, or run twice at the same time."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from bulk_letters import letter_records, make_letters, stored_messages, waiting_jobs
from driver_processes import driver_process, read_message, resume
from failing_tasks import FailingTask, KilledTask
from process_killer import kill_executor
from spark_streams import open_stream

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive import driver as driver_module
from airflow_provider_jetstream.spark.bulk_redrive.driver import redrive_letters
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import begin_run, scan_queue
from airflow_provider_jetstream.spark.bulk_redrive.entry_cleanup import remove_finished_entries
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import add_outcomes
from airflow_provider_jetstream.spark.bulk_redrive.rows import PACKED_ENTRIES
from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import pack_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import DriverScan
    from testbed.nats_server import NatsServer

COUNT = 800
# Some seconds of work, so that there is time to kill an executor.
MANY = 12_000
PROTOCOLS = [Protocol.COPY, Protocol.ATOMIC]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("task", [FailingTask, KilledTask])
def test_a_failed_task_is_retried_and_redrives_no_letter_twice(
    spark: SparkSession,
    connection_options: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    protocol: Protocol,
    task: type[RedriveTask],
) -> None:
    queue = make_letters(connection_options, name, COUNT, atomic_redrive=protocol == Protocol.ATOMIC)
    monkeypatch.setattr(driver_module, "RedriveTask", task)
    marker = tmp_path / "first_attempt"
    request = RedriveRequest(protocol=protocol, run="early", why=str(marker))
    rows = spark.range(1, COUNT + 1).withColumnRenamed("id", "sequence")
    report = redrive_letters(spark, rows, queue, request, connection_options, tasks=2)
    assert marker.exists()
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert list(report.gone) == []
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    records = letter_records(connection_options, queue)
    assert {record.sequence: record.new_sequence for record in records} == dict(report.redriven)
    assert len(records) == COUNT
    assert stored_messages(connection_options, f"{name}-dead") == []


# Two JVMs and half a minute for each.
@pytest.mark.parametrize("protocol", PROTOCOLS if os.environ.get("FAULTS") == "full" else PROTOCOLS[:1])
def test_a_killed_executor_neither_loses_nor_repeats_a_letter(
    nats: NatsServer, connection_options: dict[str, str], name: str, tmp_path: Path, protocol: Protocol
) -> None:
    queue = make_letters(connection_options, name, MANY, atomic_redrive=protocol == Protocol.ATOMIC)
    declared = json.dumps(queue.model_dump(mode="json", exclude_unset=True))

    def some_are_done() -> bool:
        with open_stream({**connection_options, "stream": name}) as stream:
            return stream.info().last > MANY + MANY // 10

    arguments = (json.dumps(connection_options), declared, protocol.value, str(MANY))
    with driver_process("cluster_redrive.py", *arguments, log=tmp_path / "driver.log") as driver:
        assert read_message(driver) == {"ready": 10}
        resume(driver)
        kill_executor(driver.pid, int(urlsplit(nats.url).port or 0), some_are_done)
        assert read_message(driver) == {"redriven": MANY, "gone": 0, "failed": {}}
    assert waiting_jobs(connection_options, queue) == Counter(range(1, MANY + 1))
    records = letter_records(connection_options, queue)
    assert Counter(record.sequence for record in records) == Counter(range(1, MANY + 1))
    assert stored_messages(connection_options, f"{name}-dead") == []


def begin(
    connection_options: dict[str, str], queue: WorkQueue, request: RedriveRequest, report: RedriveReport
) -> tuple[DriverScan, Callable[[pa.Table], pa.Table], pa.Table]:
    """Begin a run; return the driver's scan, a function that runs one task, and the rows of all letters."""
    scan = run_on_own_connection(connection_options, lambda connection: scan_queue(connection, queue, request))
    run_on_own_connection(connection_options, lambda connection: begin_run(connection, scan, request, report))
    task = RedriveTask(
        *(connection_options, scan.server_info, scan.scan.context, frozenset[str](), scan.acknowledged),
        *(request, scan.choice.protocol, None),
    )
    sequences = scan.jobs.column("sequence").to_pylist()
    entries = [pack_table(scan.jobs), *[None] * len(sequences)]
    jobs = pa.table({"sequence": [sequences[0], *sequences], PACKED_ENTRIES: pa.array(entries, pa.binary())})
    return scan, lambda rows: jobs.from_batches(list(task.run(iter(rows.to_batches())))), jobs


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_attempts_at_the_same_time_redrive_each_letter_once(
    connection_options: dict[str, str], name: str, protocol: Protocol
) -> None:
    queue = make_letters(connection_options, name, COUNT, atomic_redrive=protocol == Protocol.ATOMIC)
    report = RedriveReport()
    scan, run_task, jobs = begin(connection_options, queue, RedriveRequest(protocol=protocol, run="twice"), report)
    with ThreadPoolExecutor(2) as threads:
        for outcomes in threads.map(run_task, [jobs] * 2):
            assert add_outcomes(report, outcomes) == frozenset()
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    records = letter_records(connection_options, queue)
    assert Counter(record.sequence for record in records) == Counter(range(1, COUNT + 1))
    assert remove_finished_entries(connection_options, scan.scan, report.redriven) == 0
    assert stored_messages(connection_options, f"{name}-dead") == []


@pytest.mark.parametrize("resumed", ["on Spark", "without Spark"])
def test_an_interrupted_run_is_finished_by_the_next_one(
    spark: SparkSession, connection_options: dict[str, str], name: str, resumed: str
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    request = RedriveRequest(protocol=Protocol.COPY, run="cut-off")
    _, run_task, jobs = begin(connection_options, queue, request, RedriveReport())
    run_task(jobs.slice(0, 1 + COUNT - 100))
    assert len(stored_messages(connection_options, f"{name}-dead")) == COUNT

    async def without_spark() -> RedriveReport:
        async with connect(socket_settings(connection_options).connection) as connection:
            return await redrive_dead_letters(connection, queue, request)

    rows = spark.range(1, COUNT + 1).withColumnRenamed("id", "sequence")
    report = (
        redrive_letters(spark, rows, queue, request, connection_options)
        if resumed == "on Spark"
        else asyncio.run(without_spark())
    )
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    assert stored_messages(connection_options, f"{name}-dead") == []
