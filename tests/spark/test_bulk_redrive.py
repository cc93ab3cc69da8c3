"""Bulk redrives: every letter is redriven once, as requested, and recorded in the audit."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from bulk_letters import exhaust_deliveries, letter_records, make_letters, publish, stored_messages, waiting_jobs
from pyspark.sql import Row
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream import (
    Origin,
    Protocol,
    RedriveRequest,
    Selection,
    connect,
    connection_settings,
)
from airflow_provider_jetstream.jetstream.contract import run_audit_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError, RedriveRequestError
from airflow_provider_jetstream.spark import preview_letters, redrive_letters
from airflow_provider_jetstream.spark.errors import SparkOptionError
from testbed.dead_letters import store_task
from testbed.face import Headers, redrive_message_id
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


COUNT = 2_000
HEADERS = "array<struct<key:string,value:string>>"


def sequences(spark: SparkSession, first: int, last: int) -> DataFrame:
    return spark.range(first, last + 1).withColumnRenamed("id", "sequence")


@pytest.mark.smoke
def test_every_letter_is_redriven_once(spark: SparkSession, connection_options: dict[str, str], name: str) -> None:
    queue = make_letters(connection_options, name, COUNT, Headers([("Kind", "a"), ("Kind", "b")]))
    times = {message.sequence: message.time for message in stored_messages(connection_options, name)}
    request = RedriveRequest(run="all", why="ticket 4711", who={"task_id": "bulk"})
    report = redrive_letters(spark, sequences(spark, 1, COUNT), queue, request, connection_options)
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert (report.protocol, report.failures, list(report.gone), report.entries_left) == (Protocol.COPY, 0, [], 0)
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    for message in stored_messages(connection_options, name, f"{name}.jobs.>"):
        sequence = int(message.data)
        assert list(message.headers) == [
            ("Kind", "a"),
            ("Kind", "b"),
            ("Redrive-Count", "1"),
            ("Redrive-Stream", name),
            ("Redrive-Sequence", str(sequence)),
            ("Redrive-Consumer", "worker"),
            ("Nats-Msg-Id", redrive_message_id(name, sequence, times[sequence], 1)),
        ]
        assert report.redriven[sequence] == message.sequence
    records = letter_records(connection_options, queue)
    assert {record.sequence: record.new_sequence for record in records} == dict(report.redriven)
    assert len(records) == COUNT
    assert {(record.run, record.why, record.who["task_id"], record.action) for record in records} == {
        ("all", "ticket 4711", "bulk", "redriven")
    }
    assert stored_messages(connection_options, f"{name}-dead") == []
    assert queue.audit
    (*_, last) = stored_messages(connection_options, queue.audit.name, run_audit_subject(name, "all"))
    assert json.loads(last.data)["finished"]


def test_a_frame_changes_the_columns_that_it_has_and_no_others(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 9, Headers([("Kind", "a"), ("Kind", "b"), ("Old", "x")]))
    stored = [Row(key="Kind", value="a"), Row(key="Kind", value="b"), Row(key="Old", value="x")]
    changed = [Row(key="Kind", value="c"), Row(key="Kind", value="d"), Row(key="New", value="y")]
    rows = [
        (1, f"{name}.jobs.plain", b"1", stored, False),
        (2, f"{name}.jobs.plain", b"22", stored, True),
        (3, f"{name}.jobs.other", b"3", stored, True),
        (4, f"{name}.jobs.plain", b"4", changed, True),
        (5, None, None, None, True),
        # A row that isn't repaired leaves the letter unchanged, whatever its other columns contain.
        (6, "elsewhere", b"66", changed, False),
        (7, "elsewhere", b"7", stored, True),
        (8, f"{name}.jobs.plain", b"8", [*stored, Row(key="Redrive-Count", value="9"), Row(key="a b", value="")], True),
    ]
    schema = f"sequence bigint, subject string, body binary, headers {HEADERS}, repaired boolean"
    request = RedriveRequest(run="repair")
    report = redrive_letters(spark, spark.createDataFrame(rows, schema), queue, request, connection_options)
    assert sorted(report.redriven) == [1, 2, 3, 4, 5, 6]
    assert sorted(report.failed) == [7, 8]
    assert "expected a subject of" in report.failed[7]
    assert "expected a name of letters, digits and dashes" in report.failed[8]
    redriven = {
        message.data: (message.subject, [pair for pair in message.headers if pair[0] in ("Kind", "Old", "New")])
        for message in stored_messages(connection_options, name)
        if message.sequence > 9
    }
    plain, own = f"{name}.jobs.plain", [("Kind", "a"), ("Kind", "b"), ("Old", "x")]
    assert redriven == {
        b"1": (plain, own),
        b"22": (plain, own),
        b"3": (f"{name}.jobs.other", own),
        b"4": (plain, [("Kind", "c"), ("Kind", "d"), ("New", "y")]),
        b"5": (plain, own),
        b"6": (plain, own),
    }
    changes = {record.sequence: record.changes for record in letter_records(connection_options, queue)}
    assert (changes[1], changes[3], changes[5], changes[6]) == (None, None, None, None)
    assert changes[2] is not None
    assert "body" in changes[2]
    assert changes[4] == {
        "headers": {
            "Kind": {"before": ["a", "b"], "after": ["c", "d"]},
            "New": {"before": None, "after": ["y"]},
            "Old": {"before": ["x"], "after": None},
        }
    }
    # Seven and eight failed, nine wasn't requested: they are unchanged.
    again = redrive_letters(spark, sequences(spark, 1, 9), queue, RedriveRequest(run="rest"), connection_options)
    assert sorted(again.redriven) == [7, 8, 9]
    assert sorted(again.gone) == [1, 2, 3, 4, 5, 6]


def test_letters_are_parked_after_some_redrives_and_can_be_redriven_from_there(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 4)
    rows = sequences(spark, 1, 4)
    once = RedriveRequest(max_redrives=1, why="enough")
    assert sorted(redrive_letters(spark, rows, queue, once, connection_options).redriven) == [1, 2, 3, 4]
    exhaust_deliveries(connection_options, queue, 4)
    before = preview_letters(spark, sequences(spark, 5, 8), queue, once, connection_options)
    assert (before.redriven, before.parked, before.failures) == (0, 4, 0)
    report = redrive_letters(spark, sequences(spark, 5, 8), queue, once, connection_options)
    assert (list(report.parked), list(report.redriven)) == ([5, 6, 7, 8], [])
    assert stored_messages(connection_options, name) == []
    refused = redrive_letters(spark, sequences(spark, 5, 8), queue, None, connection_options)
    assert refused.failed == dict.fromkeys(range(5, 9), "it is parked; select parked to bring it back")
    back = redrive_letters(
        spark, sequences(spark, 5, 8), queue, RedriveRequest(Selection(parked=True)), connection_options
    )
    assert sorted(back.redriven) == [5, 6, 7, 8]
    assert waiting_jobs(connection_options, queue) == Counter([1, 2, 3, 4])


def test_a_selection_by_task_redrives_the_letters_whose_headers_hold_its_key(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    task = Origin("prints/größe", "r", "publish", 3)
    queue = make_letters(connection_options, name, 4, Headers([("Airflow-Task", task.key)]))
    other = Headers([("Airflow-Task", "0" * 32), ("Airflow-Dag-Id", task.dag_id)])
    run_on_own_connection(connection_options, lambda connection: publish(connection, queue, 2, other))
    exhaust_deliveries(connection_options, queue, 2)

    async def store_record() -> None:
        async with connect(connection_settings({"servers": (connection_options["servers"],)})) as connection:
            await store_task(connection, queue, task)

    asyncio.run(store_record())
    request = RedriveRequest(Selection(dag_id=task.dag_id))
    preview = preview_letters(spark, sequences(spark, 1, 6), queue, request, connection_options)
    assert (preview.redriven, preview.failures) == (4, 2)
    report = redrive_letters(spark, sequences(spark, 1, 6), queue, request, connection_options)
    assert sorted(report.redriven) == [1, 2, 3, 4]
    assert report.failed == dict.fromkeys((5, 6), "the request's selection excludes it")


def test_without_an_audit_nothing_is_redriven(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 3, audit=False)
    for operation in (redrive_letters, preview_letters):
        with pytest.raises(RedriveRequestError, match=f"^expected an audit of {name}, found none"):
            operation(spark, sequences(spark, 1, 3), queue, None, connection_options)
    assert len(stored_messages(connection_options, name)) == 3


def test_jobs_that_are_no_longer_dead_letters_are_left_unchanged(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 3)
    first = redrive_letters(spark, sequences(spark, 1, 1), queue, None, connection_options)
    run_on_own_connection(connection_options, lambda connection: publish(connection, queue, 1))
    # One was redriven, its new job and one more wait, two and three are dead, and 99 never was.
    rows = spark.createDataFrame([(1,), (2,), (2,), (3,), (4,), (5,), (99,)], "sequence bigint")
    report = redrive_letters(spark, rows, queue, None, connection_options)
    assert dict(first.redriven) == {1: 4}
    assert sorted(report.redriven) == [2, 3]
    assert sorted(report.gone) == [1, 4, 5, 99]
    assert report.failed == {2: "the frame has another row for it, which counts"}
    assert waiting_jobs(connection_options, queue) == Counter([1, 1, 2, 3])


def test_the_letters_of_a_full_queue_are_requeued_in_place(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 30, discard="new", max_msgs=30)
    with pytest.raises(RedriveRequestError, match="the frame leaves dead letters out"):
        redrive_letters(
            spark, sequences(spark, 2, 30), queue, RedriveRequest(protocol=Protocol.IN_PLACE), connection_options
        )
    frame = sequences(spark, 1, 30).withColumn("repaired", f.expr("false"))
    progress: list[tuple[int, int]] = []
    report = redrive_letters(
        *(spark, frame, queue, None, connection_options),
        progress=lambda said: progress.append((said.done, said.letters)),
    )
    assert progress[-1] == (30, 30)
    assert (report.protocol, dict(report.redriven)) == (
        Protocol.IN_PLACE,
        {sequence: sequence for sequence in range(1, 31)},
    )
    assert {record.action for record in letter_records(connection_options, queue)} == {"requeued"}
    assert waiting_jobs(connection_options, queue) == Counter(range(1, 31))


def test_invalid_arguments_are_refused_before_anything_changes(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 1)
    rows = sequences(spark, 1, 1)
    for frame, problem in (
        (rows.withColumnRenamed("sequence", "seq"), "expected a column sequence"),
        (rows.withColumn("priority", f.lit(1)), "found priority"),
        (rows.withColumn("body", f.lit(1)), "expected the column body as binary or string, found int"),
    ):
        with pytest.raises(SparkOptionError, match=problem):
            redrive_letters(spark, frame, queue, None, connection_options)
    with pytest.raises(SparkOptionError, match="expected repairs in the frame"):
        redrive_letters(spark, rows, queue, RedriveRequest(transform=lambda _: None), connection_options)
    with pytest.raises(SparkOptionError, match="expected letters by the frame's rows"):
        redrive_letters(spark, rows, queue, RedriveRequest(Selection(sequences=frozenset({1}))), connection_options)
    elsewhere = RedriveRequest(target=queue.model_copy(update={"name": "other"}), subject="other.a")
    for request, field in ((elsewhere, "target"), (RedriveRequest(order_key="header:Customer"), "order_key")):
        with pytest.raises(SparkOptionError, match=f"own queue in any order, found {field}: Spark's tasks"):
            redrive_letters(spark, rows, queue, request, connection_options)
    for request in (RedriveRequest(discard=True), RedriveRequest(undo="20260101T000000-0")):
        with pytest.raises(SparkOptionError, match="do that without Spark"):
            redrive_letters(spark, rows, queue, request, connection_options)
    with pytest.raises(SparkOptionError, match="found tasks 0"):
        redrive_letters(spark, rows, queue, None, connection_options, tasks=0)
    with pytest.raises(QueueDeclarationError, match="declare a dead letter queue"):
        redrive_letters(spark, rows, queue.model_copy(update={"dead_letters": None}), None, connection_options)
    with pytest.raises(NotFoundError):
        redrive_letters(spark, rows, f"{name}-other", None, connection_options)
    assert [message.sequence for message in stored_messages(connection_options, name)] == [1]
