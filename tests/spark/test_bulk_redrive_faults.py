"""Bulk redrives whose tasks fail, are killed, or run twice at the same time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from bulk_letters import letter_records, make_letters, stored_messages, waiting_jobs
from bulk_tasks import begin_task
from failing_tasks import FailingTask, KilledTask

from airflow_provider_jetstream.jetstream import Protocol, RedriveReport, RedriveRequest, connect, redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.copies import store_jobs
from airflow_provider_jetstream.spark import redrive_letters
from airflow_provider_jetstream.spark.bulk_redrive.task import read_outcomes
from airflow_provider_jetstream.spark.connection_options import socket_settings
from testbed import seams
from testbed.queues import process_all

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from airflow_provider_jetstream.jetstream import WorkQueue
    from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask

COUNT = 800


def add_all(report: RedriveReport, rows: pa.Table) -> None:
    """Add to a report what a task did, which has tried all letters."""
    for outcome in read_outcomes(rows):
        assert (outcome.cancelled, outcome.to_rescan) == ([], [])
        report.add(outcome.report)


@pytest.mark.parametrize("task", [FailingTask, KilledTask])
def test_a_failed_task_is_retried_and_redrives_no_letter_twice(
    spark: SparkSession,
    connection_options: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: type[RedriveTask],
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    monkeypatch.setattr(seams.STEP_REDRIVE_TASK, task)
    marker = tmp_path / "first_attempt"
    request = RedriveRequest(run="early", why=str(marker))
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


@pytest.mark.slow
def test_two_attempts_at_the_same_time_redrive_each_letter_once(connection_options: dict[str, str], name: str) -> None:
    queue = make_letters(connection_options, name, COUNT)
    report = RedriveReport()
    run_task, jobs = begin_task(connection_options, queue, RedriveRequest(run="twice"), report)
    with ThreadPoolExecutor(2) as threads:
        for outcomes in threads.map(run_task, [jobs] * 2):
            add_all(report, outcomes)
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    records = letter_records(connection_options, queue)
    assert Counter(record.sequence for record in records) == Counter(range(1, COUNT + 1))


@pytest.mark.parametrize("resumed", ["on Spark", "without Spark"])
def test_an_interrupted_run_is_finished_by_the_next_one(
    spark: SparkSession, connection_options: dict[str, str], name: str, resumed: str
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    request = RedriveRequest(protocol=Protocol.COPY, run="cut-off")
    run_task, jobs = begin_task(connection_options, queue, request, RedriveReport())
    run_task(jobs.slice(0, 1 + COUNT - 100))
    assert len(stored_messages(connection_options, f"{name}-dead")) == COUNT

    async def without_spark() -> RedriveReport:
        async with connect(socket_settings(connection_options)) as connection:
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


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.fixture
def _killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the first batch of a redrive after its new jobs are stored, and before they are recorded."""
    calls = count()

    async def store_and_end(*args: Any) -> Any:
        stored = await store_jobs(*args)
        if not next(calls):
            raise Killed
        return stored

    monkeypatch.setattr(seams.STEPS_STORE_JOBS, store_and_end)


async def do_waiting_jobs(connection_options: dict[str, str], queue: WorkQueue) -> Counter[str]:
    async with connect(socket_settings(connection_options)) as connection:
        return await process_all(connection, queue)


@pytest.mark.usefixtures("_killed_once")
def test_a_task_that_is_retried_past_the_duplicate_window_finds_the_copies_that_have_run(
    connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 20, duplicate_window="100ms")
    report = RedriveReport()
    run_task, jobs = begin_task(connection_options, queue, RedriveRequest(run="again"), report)
    with pytest.raises(Killed):
        run_task(jobs)
    done = asyncio.run(do_waiting_jobs(connection_options, queue))
    time.sleep(0.2)
    add_all(report, run_task(jobs))
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, 21))
    assert done + asyncio.run(do_waiting_jobs(connection_options, queue)) == {str(job): 1 for job in range(1, 21)}


@pytest.mark.usefixtures("_killed_once")
def test_a_bulk_redrive_finishes_what_another_redrive_began(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 20, duplicate_window="100ms")

    async def redrive_and_end() -> None:
        async with connect(socket_settings(connection_options)) as connection:
            with pytest.raises(Killed):
                await redrive_dead_letters(connection, queue)

    asyncio.run(redrive_and_end())
    done = asyncio.run(do_waiting_jobs(connection_options, queue))
    time.sleep(0.2)
    rows = spark.range(1, 6).withColumnRenamed("id", "sequence")
    report = redrive_letters(spark, rows, queue, RedriveRequest(protocol=Protocol.COPY), connection_options)
    report.raise_for_failures()
    # All that was begun, also what the frame leaves out.
    assert (sorted(report.redriven), report.resumed) == (list(range(1, 21)), 20)
    assert done + asyncio.run(do_waiting_jobs(connection_options, queue)) == {str(job): 1 for job in range(1, 21)}
    assert stored_messages(connection_options, f"{name}-dead") == []
