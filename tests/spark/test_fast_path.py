"""The fast path finds the same letters as the classifier, column by column, whatever the entries and streams contain.

Each test classifies all jobs with the classifier alone, then with the fast path before it. Jobs, completions, the audit
and markers are on a real server; entries and the consumers' numbers are made up.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from bulk_letters import make_letters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tcp_proxy import TcpProxy

from airflow_provider_jetstream.jetstream import Reason, Selection
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.spark.dead_letters.classify import ClassifyTask
from airflow_provider_jetstream.spark.dead_letters.entry_table import job_table
from airflow_provider_jetstream.spark.dead_letters.fast_path import FastPath
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA
from testbed.any_letters import (
    JOBS,
    TASK,
    TOUCHED,
    ScannedQueue,
    advisory,
    any_context,
    any_entries,
    consumer_of,
    make_queue,
    with_consumers,
)
from testbed.face import Scan
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from testbed.nats_server import NatsServer


@pytest.fixture(scope="module")
def queue(nats: NatsServer) -> ScannedQueue:
    return asyncio.run(make_queue(nats, "fastpath"))


def job_batches(entries: list[tuple[int, Entry]], orphans: set[int]) -> list[pa.RecordBatch]:
    index = EntryIndex()
    for sequence, entry in entries:
        index.add(sequence, entry)
    without_entry = array("Q", sorted(orphans - {sequence for sequence, _ in entries}))
    batches: list[pa.RecordBatch] = job_table(index, without_entry).to_batches()
    return batches


def letter_rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        assert batch.schema == LETTER_SCHEMA
        batch.validate(full=True)
        rows += batch.to_pylist()
    return sorted(rows, key=lambda row: int(row["sequence"]))


def by_classifier_alone(task: ClassifyTask, jobs: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    # Selects the same letters by a condition that only the classifier can check.
    selection = task.selection.model_copy(update={"reasons": frozenset(Reason) - {Reason.UNDELIVERABLE}})
    return letter_rows(replace(task, selection=selection).classify(iter(jobs)))


numbers = st.integers(0, 12)


def test_the_fast_path_takes_only_jobs_whose_one_entry_decides(queue: ScannedQueue) -> None:
    now = datetime.now(UTC)
    jobs = job_batches([advisory(sequence, now) for sequence in range(1, JOBS + 2)], set())
    context = with_consumers(queue.context)
    fast = letter_rows(FastPath(queue.options, context, ()).find_letters(jobs[0]))
    expected = [
        sequence for sequence in range(1, JOBS + 1) if sequence not in TOUCHED and consumer_of(sequence) != "unmatched"
    ]
    assert [row["sequence"] for row in fast] == expected
    assert len(expected) > JOBS // 5
    keyed = [row for row in fast if row["headers"] == [{"key": "Airflow-Task", "value": TASK.key}]]
    origins = {(row["dag_id"], row["run_id"], row["task_id"], row["map_index"]) for row in keyed}
    assert origins == {(TASK.dag_id, TASK.run_id, TASK.task_id, 2**31 - 1)}
    assert {row["dag_id"] for row in fast if row not in keyed} == {None, "prints"}
    # While jobs are in flight, deaths from before the server's last restart prove nothing.
    restarted = with_consumers(queue.context, up_since=now + timedelta(minutes=1))
    assert letter_rows(FastPath(queue.options, restarted, ()).find_letters(jobs[0])) == []
    idle = with_consumers(queue.context, up_since=now + timedelta(minutes=1), in_flight=0)
    assert letter_rows(FastPath(queue.options, idle, ()).find_letters(jobs[0])) == fast
    task = ClassifyTask(queue.options, context, frozenset(), Selection(), lost=False)
    classified = by_classifier_alone(task, jobs)
    assert letter_rows(task.classify(iter(jobs))) == classified
    assert len(classified) > len(expected)
    selecting = replace(task, selection=Selection(consumer="press"))
    assert letter_rows(selecting.classify(iter(jobs))) == [row for row in classified if row["consumer"] == "press"]


@pytest.mark.slow
def test_the_classifier_continues_after_an_interruption_of_the_fast_path(nats: NatsServer) -> None:
    options, count = {"servers": nats.url, "timeout": "10"}, 12_000
    queue = make_letters(options, "cutoff", count, allow_direct=True)
    scan = run_on_own_connection(options, lambda connection: Scan.begin(connection, queue))
    jobs = job_table(scan.index, array("Q")).to_batches()
    # The first batch of letters has arrived, and the second one is on its way.
    with TcpProxy(nats.port, after=3_000_000, until=2) as proxy:
        task = ClassifyTask(options | {"servers": proxy.url}, scan.context, frozenset(), Selection(), lost=False)
        batches = task.classify(iter(jobs))
        first = next(batches)
        assert 0 < first.num_rows < count
        rest = letter_rows(batches)
        assert proxy.refused == 2
    assert [*first.column("sequence").to_pylist(), *(row["sequence"] for row in rest)] == list(range(1, count + 1))


@pytest.mark.parametrize(
    ("consumer", "entries", "consumer_age", "stream_age"),
    [
        ("other", 1, timedelta(days=-1), timedelta(days=-1)),
        (None, 2, timedelta(days=-1), timedelta(days=-1)),
        (None, 1, timedelta(seconds=1), timedelta(days=-1)),
        (None, 1, timedelta(days=-1), timedelta(seconds=1)),
        (None, 1, timedelta(), timedelta()),
    ],
)
def test_both_agree_on_properties_that_all_jobs_share(
    queue: ScannedQueue, consumer: str | None, entries: int, consumer_age: timedelta, stream_age: timedelta
) -> None:
    now = datetime.now(UTC)
    advisories = [
        advisory(job, now, consumer, sequence=500 * number + job)
        for number in range(1, entries + 1)
        for job in range(1, JOBS + 1)
    ]
    context = with_consumers(queue.context, created=now + consumer_age)
    context = replace(context, snapshot=replace(context.snapshot, created=(now + stream_age).isoformat()))
    task = ClassifyTask(queue.options, context, frozenset(), Selection(), lost=True)
    jobs = job_batches(advisories, set())
    assert letter_rows(task.classify(iter(jobs))) == by_classifier_alone(task, jobs)


# Each example opens connections of its own.
_FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@settings(_FEW, max_examples=150)
@given(st.data())
def test_both_agree_on_any_entries_in_many_examples(queue: ScannedQueue, data: st.DataObject) -> None:
    check_any_entries(queue, data)


def check_any_entries(queue: ScannedQueue, data: st.DataObject) -> None:
    entries, context = data.draw(any_entries(queue)), data.draw(any_context(queue))
    jobs = job_batches(entries, data.draw(st.sets(st.integers(1, JOBS + 3), max_size=5)))
    inconsistent = frozenset(data.draw(st.sets(st.sampled_from(["till", "press"]))))
    selection = data.draw(st.sampled_from([Selection(), Selection(consumer="press"), Selection(unaccounted=True)]))
    task = ClassifyTask(queue.options, context, inconsistent, selection, lost=data.draw(st.booleans()))
    classified = by_classifier_alone(task, jobs)
    assert letter_rows(task.classify(iter(jobs))) == classified
