"""Bulk redrives: every letter comes back once, as it is asked for, and everything about it is written down."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from bulk_letters import exhaust_deliveries, letter_records, make_letters, publish, stored_messages, waiting_jobs
from pyspark.sql import Row
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.audit.log import RunRecord
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.contract import run_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError, RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive import preview_letters, redrive_letters
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


COUNT = 2_000
HEADERS = "array<struct<key:string,value:string>>"


def sequences(spark: SparkSession, first: int, last: int) -> DataFrame:
    return spark.range(first, last + 1).withColumnRenamed("id", "sequence")


@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.ATOMIC])
def test_every_letter_comes_back_once(
    spark: SparkSession, connection_options: dict[str, str], name: str, protocol: Protocol
) -> None:
    atomic = protocol == Protocol.ATOMIC
    queue = make_letters(
        connection_options, name, COUNT, Headers([("Kind", "a"), ("Kind", "b")]), atomic_redrive=atomic
    )
    times = {message.sequence: message.time for message in stored_messages(connection_options, name)}
    order = RedriveRequest(protocol=protocol, run="all", why="ticket 4711", who={"task_id": "bulk"})
    report = redrive_letters(spark, sequences(spark, 1, COUNT), queue, order, connection_options)
    report.raise_for_failures()
    assert sorted(report.redriven) == list(range(1, COUNT + 1))
    assert (report.protocol, report.failures, list(report.gone), report.entries_left) == (protocol, 0, [], 0)
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    for message in stored_messages(connection_options, name, f"{name}.jobs.>"):
        sequence = int(message.data)
        own = [pair for pair in message.headers if not pair[0].startswith("Nats-Batch")]
        assert own == [
            ("Kind", "a"),
            ("Kind", "b"),
            ("Redrive-Count", "1"),
            ("Redrive-Stream", name),
            ("Redrive-Sequence", str(sequence)),
            ("Redrive-Consumer", "worker"),
            ("Nats-Msg-Id", f"redrive:{name}:{sequence}:{times[sequence]}"),
        ]
        assert report.redriven[sequence] == message.sequence
    records = letter_records(connection_options, queue)
    assert {each.sequence: each.new_sequence for each in records} == dict(report.redriven)
    assert len(records) == COUNT
    assert {(each.run, each.why, each.who["task_id"], each.action) for each in records} == {
        ("all", "ticket 4711", "bulk", "redriven")
    }
    assert stored_messages(connection_options, f"{name}-dead") == []
    assert queue.audit
    (*_, last) = stored_messages(connection_options, queue.audit.name, run_audit_subject(name, "all"))
    assert RunRecord.model_validate_json(last.data).finished


def test_a_frame_repairs_what_it_changes_and_leaves_what_it_lacks(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 9, Headers([("Kind", "a"), ("Kind", "b"), ("Old", "x")]))
    kept = [Row(key="Kind", value="a"), Row(key="Kind", value="b"), Row(key="Old", value="x")]
    changed = [Row(key="Kind", value="c"), Row(key="Kind", value="d"), Row(key="New", value="y")]
    rows = [
        (1, f"{name}.jobs.plain", b"1", kept, False),
        (2, f"{name}.jobs.plain", b"22", kept, True),
        (3, f"{name}.jobs.other", b"3", kept, True),
        (4, f"{name}.jobs.plain", b"4", changed, True),
        (5, None, None, None, True),
        # What is said not to be repaired stays as it is stored, whatever it looks like.
        (6, "elsewhere", b"66", changed, False),
        (7, "elsewhere", b"7", kept, True),
        (8, f"{name}.jobs.plain", b"8", [*kept, Row(key="Redrive-Count", value="9"), Row(key="a b", value="")], True),
    ]
    schema = f"sequence bigint, subject string, body binary, headers {HEADERS}, repaired boolean"
    order = RedriveRequest(run="repair")
    report = redrive_letters(spark, spark.createDataFrame(rows, schema), queue, order, connection_options)
    assert sorted(report.redriven) == [1, 2, 3, 4, 5, 6]
    assert sorted(report.failed) == [7, 8]
    assert "expected a subject of" in report.failed[7]
    assert "expected a name of letters, digits and dashes" in report.failed[8]
    found = {
        message.data: (message.subject, [pair for pair in message.headers if pair[0] in ("Kind", "Old", "New")])
        for message in stored_messages(connection_options, name)
        if message.sequence > 9
    }
    plain, own = f"{name}.jobs.plain", [("Kind", "a"), ("Kind", "b"), ("Old", "x")]
    assert found == {
        b"1": (plain, own),
        b"22": (plain, own),
        b"3": (f"{name}.jobs.other", own),
        b"4": (plain, [("Kind", "c"), ("Kind", "d"), ("New", "y")]),
        b"5": (plain, own),
        b"6": (plain, own),
    }
    changes = {each.sequence: each.changes for each in letter_records(connection_options, queue)}
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
    # Seven and eight failed, nine wasn't asked for: they are as they were.
    again = redrive_letters(spark, sequences(spark, 1, 9), queue, RedriveRequest(run="rest"), connection_options)
    assert sorted(again.redriven) == [7, 8, 9]
    assert sorted(again.gone) == [1, 2, 3, 4, 5, 6]


def test_all_tasks_together_keep_to_the_rate(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 400)
    order = RedriveRequest(protocol=Protocol.COPY, rate=200)
    report = redrive_letters(spark, sequences(spark, 1, 400), queue, order, connection_options, tasks=2)
    assert len(report.redriven) == 400
    stored = sorted(message.stored_at for message in stored_messages(connection_options, name))
    assert (stored[-1] - stored[0]).total_seconds() >= 1.8
    for first, later in zip(stored, stored[230:], strict=False):
        assert (later - first).total_seconds() >= 1


def test_letters_are_parked_after_so_many_redrives_and_brought_back_from_there(
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


def test_a_preview_changes_nothing(spark: SparkSession, connection_options: dict[str, str], name: str) -> None:
    queue = make_letters(connection_options, name, 20)
    frame = sequences(spark, 1, 20).withColumn("body", f.when(f.col("sequence") == 1, f.lit("one")))
    stored, told = stored_messages(connection_options, name), stored_messages(connection_options, f"{name}-dead")
    found = preview_letters(spark, frame, queue, RedriveRequest(rate=1), connection_options)
    assert (found.redriven, found.parked, found.failures) == (20, 0, 0)
    assert sum(group.count for group in found.groups.values()) == 20
    assert [each["sequence"] for each in found.sample] == [1, 2, 3, 4, 5]
    assert found.sample[0]["body"] == "one"
    assert (stored_messages(connection_options, name), stored_messages(connection_options, f"{name}-dead")) == (
        stored,
        told,
    )
    assert letter_records(connection_options, queue) == []


@pytest.mark.parametrize("audited", [True, False])
def test_a_redrive_that_is_told_to_stop_leaves_the_rest_and_goes_on_later(
    spark: SparkSession, connection_options: dict[str, str], name: str, *, audited: bool
) -> None:
    queue = make_letters(connection_options, name, 300, **({} if audited else {"audit": False}))
    order = RedriveRequest(protocol=Protocol.COPY, run="stopped", rate=60)

    def some_are_done() -> bool:
        return any(message.sequence > 300 for message in stored_messages(connection_options, name))

    report = redrive_letters(
        spark, sequences(spark, 1, 300), queue, order, connection_options, is_stopped=some_are_done
    )
    assert report.cancelled
    done = [message.sequence for message in stored_messages(connection_options, name) if message.sequence > 300]
    assert 0 < len(done) < 300
    if audited:
        assert len(report.redriven) == len(done)
    again = RedriveRequest(protocol=Protocol.COPY, run="stopped")
    report = redrive_letters(spark, sequences(spark, 1, 300), queue, again, connection_options)
    assert (report.cancelled, report.failures) == (False, 0)
    if audited:
        assert sorted(report.redriven) == list(range(1, 301))
    assert waiting_jobs(connection_options, queue) == Counter(range(1, 301))


def test_what_is_no_dead_letter_any_more_is_left_alone(
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


def test_a_full_queue_gets_all_its_letters_back_in_their_place(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 30, discard="new", max_msgs=30)
    with pytest.raises(RedriveRequestError, match="the frame leaves dead letters out"):
        redrive_letters(
            spark, sequences(spark, 2, 30), queue, RedriveRequest(protocol=Protocol.IN_PLACE), connection_options
        )
    frame = sequences(spark, 1, 30).withColumn("repaired", f.expr("false"))
    report = redrive_letters(spark, frame, queue, None, connection_options)
    assert (report.protocol, dict(report.redriven)) == (Protocol.IN_PLACE, {each: each for each in range(1, 31)})
    assert {each.action for each in letter_records(connection_options, queue)} == {"requeued"}
    assert waiting_jobs(connection_options, queue) == Counter(range(1, 31))


def test_what_cannot_be_used_is_refused_before_anything_is_done(
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
    with pytest.raises(SparkOptionError, match="found tasks 0"):
        redrive_letters(spark, rows, queue, None, connection_options, tasks=0)
    with pytest.raises(QueueDeclarationError, match="declare a dead letter queue"):
        redrive_letters(spark, rows, queue.model_copy(update={"dead_letters": None}), None, connection_options)
    with pytest.raises(NotFoundError):
        redrive_letters(spark, rows, f"{name}-other", None, connection_options)
    with pytest.raises(RedriveRequestError, match="doesn't allow atomic batches"):
        redrive_letters(spark, rows, queue, RedriveRequest(protocol=Protocol.ATOMIC), connection_options)
    assert [message.sequence for message in stored_messages(connection_options, name)] == [1]
