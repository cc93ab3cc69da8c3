"""A task's letters, column by column, whatever headers, subjects and bodies the jobs have.

Jobs, completions, the audit and markers are on a real server; entries and the consumers' numbers are made up.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from bulk_letters import make_letters
from tcp_proxy import TcpProxy

from airflow_provider_jetstream.jetstream import Selection
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.spark.dead_letters.read import ClassifyTask
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA
from testbed.any_letters import (
    COMPLETED,
    DELETED,
    JOBS,
    TASK,
    TOUCHED,
    ScannedQueue,
    advisory,
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
    return asyncio.run(make_queue(nats, "anyletters"))


def index_of(entries: list[tuple[int, Entry]]) -> EntryIndex:
    index = EntryIndex()
    for sequence, entry in entries:
        index.add(sequence, entry)
    return index


def letter_rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        assert batch.schema == LETTER_SCHEMA
        batch.validate(full=True)
        rows += batch.to_pylist()
    return sorted(rows, key=lambda row: int(row["sequence"]))


def test_jobs_with_any_headers_and_evidence_become_letters(queue: ScannedQueue) -> None:
    now = datetime.now(UTC)
    jobs = index_of([advisory(sequence, now) for sequence in range(1, JOBS + 2)]), array("Q")
    task = ClassifyTask(queue.options, with_consumers(queue.context), frozenset(), Selection(), lost=False)
    letters = letter_rows(task.classify(*jobs))
    found = [row["sequence"] for row in letters]
    untouched = [
        sequence for sequence in range(1, JOBS + 1) if sequence not in TOUCHED and consumer_of(sequence) != "unmatched"
    ]
    assert len(untouched) > JOBS // 5
    assert set(untouched) <= set(found)
    assert len(found) == len(set(found))
    # Of a job that no consumer takes, workers of others can have stored no end that counts.
    ended = {sequence for sequence in COMPLETED if consumer_of(sequence) != "unmatched"}
    assert ended
    assert not (ended | set(DELETED)) & set(found)
    keyed = [row for row in letters if row["headers"] == [{"key": "Airflow-Task", "value": TASK.key}]]
    origins = {(row["dag_id"], row["run_id"], row["task_id"], row["map_index"]) for row in keyed}
    assert origins == {(TASK.dag_id, TASK.run_id, TASK.task_id, 2**31 - 1)}
    assert {row["dag_id"] for row in letters if row not in keyed} == {None, "prints"}
    selecting = replace(task, selection=Selection(consumer="press"))
    assert letter_rows(selecting.classify(*jobs)) == [row for row in letters if row["consumer"] == "press"]


@pytest.mark.slow
def test_the_classifier_continues_after_an_interruption(nats: NatsServer) -> None:
    options, count = {"servers": nats.url, "timeout": "10"}, 12_000
    queue = make_letters(options, "cutoff", count, allow_direct=True)
    scan = run_on_own_connection(options, lambda connection: Scan.begin(connection, queue))
    # The first batch of letters has arrived, and the second one is on its way.
    with TcpProxy(nats.port, after=3_000_000, until=2) as proxy:
        task = ClassifyTask(options | {"servers": proxy.url}, scan.context, frozenset(), Selection(), lost=False)
        batches = task.classify(scan.index, array("Q"))
        first = next(batches)
        assert 0 < first.num_rows < count
        rest = letter_rows(batches)
        assert proxy.refused == 2
    assert [*first.column("sequence").to_pylist(), *(row["sequence"] for row in rest)] == list(range(1, count + 1))
