"""Bulk redrives whose tasks fail, are killed, or are run twice at once."""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from bulk_letters import jobs_of, letter_records, make_letters, messages_of
from drivers import driver_of, go, told_by
from dying import kill_executor
from faulty_shares import FailingShare, KilledShare
from spark_streams import opened

from airflow_provider_jetstream.jetstream.redrive import Protocol, RedriveOrder, RedriveReport
from airflow_provider_jetstream.spark.bulk_redrive import redrive_letters
from airflow_provider_jetstream.spark.bulk_redrive import run as running
from airflow_provider_jetstream.spark.bulk_redrive.clearing import clear_entries
from airflow_provider_jetstream.spark.bulk_redrive.looking import begin_run, look
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import add_outcomes
from airflow_provider_jetstream.spark.bulk_redrive.rows import TOLD, TOLD_PREFIX
from airflow_provider_jetstream.spark.bulk_redrive.share import Share
from airflow_provider_jetstream.spark.driven import asked_apart

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from testbed.nats_server import NatsServer

COUNT = 800
# Some seconds of work, so that there is time to kill somebody.
MANY = 12_000
PROTOCOLS = [Protocol.COPY, Protocol.ATOMIC]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("share", [FailingShare, KilledShare])
def test_a_task_that_ends_early_is_tried_again_and_repeats_nothing(
    spark: SparkSession,
    where: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    protocol: Protocol,
    share: type[Share],
) -> None:
    queue = make_letters(where, name, COUNT, atomic_redrive=protocol == Protocol.ATOMIC)
    monkeypatch.setattr(running, "Share", share)
    marker = tmp_path / "begun"
    order = RedriveOrder(protocol=protocol, run="early", why=str(marker))
    rows = spark.range(1, COUNT + 1).withColumnRenamed("id", "sequence")
    report = redrive_letters(spark, rows, queue, order, where, tasks=2)
    assert marker.exists()
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert list(report.gone) == []
    assert jobs_of(where, queue) == Counter(range(1, COUNT + 1))
    records = letter_records(where, queue)
    assert {each.sequence: each.new_sequence for each in records} == dict(report.redriven)
    assert len(records) == COUNT
    assert messages_of(where, f"{name}-dead") == []


# Two JVMs and half a minute for each.
@pytest.mark.parametrize("protocol", PROTOCOLS if os.environ.get("FAULTS") == "full" else PROTOCOLS[:1])
def test_an_executor_that_is_killed_costs_and_repeats_nothing(
    nats: NatsServer, where: dict[str, str], name: str, tmp_path: Path, protocol: Protocol
) -> None:
    queue = make_letters(where, name, MANY, atomic_redrive=protocol == Protocol.ATOMIC)
    declared = json.dumps(queue.model_dump(mode="json", exclude_unset=True))

    def some_are_done() -> bool:
        with opened({**where, "stream": name}) as stream:
            return stream.facts().last > MANY + MANY // 10

    arguments = (json.dumps(where), declared, protocol.value, str(MANY))
    with driver_of("cluster_redrive.py", *arguments, log=tmp_path / "driver.log") as driver:
        assert told_by(driver) == {"ready": 10}
        go(driver)
        kill_executor(driver.pid, int(urlsplit(nats.url).port or 0), some_are_done)
        assert told_by(driver) == {"redriven": MANY, "gone": 0, "failed": {}}
    assert jobs_of(where, queue) == Counter(range(1, MANY + 1))
    assert Counter(each.sequence for each in letter_records(where, queue)) == Counter(range(1, MANY + 1))
    assert messages_of(where, f"{name}-dead") == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_share_that_is_done_twice_at_once_is_done_once(where: dict[str, str], name: str, protocol: Protocol) -> None:
    queue = make_letters(where, name, COUNT, atomic_redrive=protocol == Protocol.ATOMIC)
    order = RedriveOrder(protocol=protocol, run="twice")
    found = asked_apart(where, lambda connection: look(connection, queue, order))
    report = RedriveReport()
    asked_apart(where, lambda connection: begin_run(connection, found, order, report))
    share = Share(
        where, found.server, found.scan.premises, frozenset(), found.acknowledged, order, protocol, None, audited=True
    )
    jobs = found.jobs.rename_columns(["sequence", *(TOLD_PREFIX + each for each in TOLD)])

    def do(_: int) -> pa.Table:
        return jobs.from_batches(list(share.run(iter(jobs.to_batches()))))

    with ThreadPoolExecutor(2) as threads:
        for told in threads.map(do, range(2)):
            assert add_outcomes(report, told) == frozenset()
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert jobs_of(where, queue) == Counter(range(1, COUNT + 1))
    assert Counter(each.sequence for each in letter_records(where, queue)) == Counter(range(1, COUNT + 1))
    assert asked_apart(where, lambda connection: clear_entries(connection, found.scan, report.redriven)) == 0
    assert messages_of(where, f"{name}-dead") == []
