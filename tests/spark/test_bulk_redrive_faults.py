"""Bulk redrives whose tasks fail, are killed, or are run twice at once."""

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
from airflow_provider_jetstream.spark.bulk_redrive import redrive_letters
from airflow_provider_jetstream.spark.bulk_redrive import run as running
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
# Some seconds of work, so that there is time to kill somebody.
MANY = 12_000
PROTOCOLS = [Protocol.COPY, Protocol.ATOMIC]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("share", [FailingTask, KilledTask])
def test_a_task_that_ends_early_is_tried_again_and_repeats_nothing(
    spark: SparkSession,
    connection_options: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    protocol: Protocol,
    share: type[RedriveTask],
) -> None:
    queue = make_letters(connection_options, name, COUNT, atomic_redrive=protocol == Protocol.ATOMIC)
    monkeypatch.setattr(running, "Share", share)
    marker = tmp_path / "begun"
    order = RedriveRequest(protocol=protocol, run="early", why=str(marker))
    rows = spark.range(1, COUNT + 1).withColumnRenamed("id", "sequence")
    report = redrive_letters(spark, rows, queue, order, connection_options, tasks=2)
    assert marker.exists()
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert list(report.gone) == []
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    records = letter_records(connection_options, queue)
    assert {each.sequence: each.new_sequence for each in records} == dict(report.redriven)
    assert len(records) == COUNT
    assert stored_messages(connection_options, f"{name}-dead") == []


# Two JVMs and half a minute for each.
@pytest.mark.parametrize("protocol", PROTOCOLS if os.environ.get("FAULTS") == "full" else PROTOCOLS[:1])
def test_an_executor_that_is_killed_costs_and_repeats_nothing(
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
    assert Counter(each.sequence for each in letter_records(connection_options, queue)) == Counter(range(1, MANY + 1))
    assert stored_messages(connection_options, f"{name}-dead") == []


def begun(
    connection_options: dict[str, str], queue: WorkQueue, order: RedriveRequest, report: RedriveReport
) -> tuple[DriverScan, Callable[[pa.Table], pa.Table], pa.Table]:
    """Begin a run; give the driver's look, what does a task's share of it, and the rows of all letters."""
    found = run_on_own_connection(connection_options, lambda connection: scan_queue(connection, queue, order))
    run_on_own_connection(connection_options, lambda connection: begin_run(connection, found, order, report))
    facts = (connection_options, found.server, found.scan.context, frozenset[str](), found.acknowledged)
    share = RedriveTask(*facts, order, found.choice.protocol, None, audited=True)
    sequences = found.jobs.column("sequence").to_pylist()
    told = [pack_table(found.jobs), *[None] * len(sequences)]
    jobs = pa.table({"sequence": [sequences[0], *sequences], PACKED_ENTRIES: pa.array(told, pa.binary())})
    return found, lambda rows: jobs.from_batches(list(share.run(iter(rows.to_batches())))), jobs


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_share_that_is_done_twice_at_once_is_done_once(
    connection_options: dict[str, str], name: str, protocol: Protocol
) -> None:
    queue = make_letters(connection_options, name, COUNT, atomic_redrive=protocol == Protocol.ATOMIC)
    report = RedriveReport()
    found, do, jobs = begun(connection_options, queue, RedriveRequest(protocol=protocol, run="twice"), report)
    with ThreadPoolExecutor(2) as threads:
        for told in threads.map(do, [jobs] * 2):
            assert add_outcomes(report, told) == frozenset()
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    assert Counter(each.sequence for each in letter_records(connection_options, queue)) == Counter(range(1, COUNT + 1))
    assert remove_finished_entries(connection_options, found.scan, report.redriven) == 0
    assert stored_messages(connection_options, f"{name}-dead") == []


@pytest.mark.parametrize("then", ["on Spark", "elsewhere"])
def test_a_run_that_ended_before_its_driver_removed_entries_is_finished_by_the_next(
    spark: SparkSession, connection_options: dict[str, str], name: str, then: str
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    order = RedriveRequest(protocol=Protocol.COPY, run="cut-off")
    _, do, jobs = begun(connection_options, queue, order, RedriveReport())
    do(jobs.slice(0, 1 + COUNT - 100))
    assert len(stored_messages(connection_options, f"{name}-dead")) == COUNT

    async def elsewhere() -> RedriveReport:
        async with connect(socket_settings(connection_options).connection) as connection:
            return await redrive_dead_letters(connection, queue, order)

    rows = spark.range(1, COUNT + 1).withColumnRenamed("id", "sequence")
    report = (
        redrive_letters(spark, rows, queue, order, connection_options)
        if then == "on Spark"
        else asyncio.run(elsewhere())
    )
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    assert stored_messages(connection_options, f"{name}-dead") == []
