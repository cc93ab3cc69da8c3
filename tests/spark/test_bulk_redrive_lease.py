"""The lease of a bulk redrive: its driver takes and renews it, and its tasks stop once somebody else has it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from bulk_letters import letter_records, make_letters, stored_messages
from bulk_tasks import begin_task

from airflow_provider_jetstream.jetstream import Protocol, RedriveReport, RedriveRequest
from airflow_provider_jetstream.jetstream.audit.lease import read_lease
from airflow_provider_jetstream.jetstream.errors import LeaseHeldError, LeaseLostError
from airflow_provider_jetstream.spark import redrive_letters
from testbed import seams
from testbed.face import take_redrive_lease
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_provider_jetstream.jetstream import WorkQueue
    from airflow_provider_jetstream.jetstream.audit.lease import Lease

COUNT = 40
AT_ONCE = RedriveRequest(lease_timeout=0)


def take(connection_options: dict[str, str], queue: WorkQueue) -> Lease:
    lease = run_on_own_connection(
        connection_options, lambda connection: take_redrive_lease(connection, queue, AT_ONCE, "redrive")
    )
    assert lease is not None
    return lease


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.LEASE_LEASE_SECONDS, 1.5)
    monkeypatch.setattr(seams.LEASE_TIME_LIMITS, 0.0)


def test_a_bulk_redrive_does_nothing_while_another_operation_has_the_lease(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    take(connection_options, queue)
    rows = spark.range(1, COUNT + 1).withColumnRenamed("id", "sequence")
    with pytest.raises(LeaseHeldError, match="held by redrive"):
        redrive_letters(spark, rows, queue, AT_ONCE, connection_options)
    assert len(stored_messages(connection_options, name)) == COUNT


@pytest.mark.usefixtures("short_leases")
def test_the_driver_renews_its_lease_for_as_long_as_its_tasks_work(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    rows = spark.range(1, COUNT + 1).withColumnRenamed("id", "sequence")
    held: dict[int, timedelta] = {}
    with ThreadPoolExecutor(1) as thread:
        redrive = thread.submit(redrive_letters, spark, rows, queue, RedriveRequest(rate=10), connection_options)
        while not redrive.done():
            time.sleep(0.1)
            state = run_on_own_connection(
                connection_options, lambda connection: read_lease(connection, f"{name}-audit", name)
            )
            if state and not state.record.released:
                assert state.record.operation == "bulk redrive"
                held[state.token] = state.until - state.since
    assert len(redrive.result().redriven) == COUNT
    # It was taken once, and lasted twice as long as a lease does by itself.
    (lasted,) = held.values()
    assert lasted > timedelta(seconds=3)
    take(connection_options, queue)


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize("taken_over", [True, False])
def test_a_task_stops_before_it_stores_anything_once_its_driver_has_lost_the_lease(
    connection_options: dict[str, str],
    name: str,
    taken_over: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    request = RedriveRequest(protocol=Protocol.COPY, run="lost")
    lease = take(connection_options, queue)
    run_task, jobs = begin_task(connection_options, queue, request, RedriveReport(), lease.token)
    # As if the driver had been killed.
    time.sleep(1.6)
    if taken_over:
        take(connection_options, queue)
    with pytest.raises(LeaseLostError):
        run_task(jobs)
    assert len(stored_messages(connection_options, name)) == COUNT
    assert letter_records(connection_options, queue) == []
