"""Rows that a stream doesn't take are kept with their reasons; columns on which the server acts."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import nats
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from spark_streams import make_stream, read_all

from airflow_provider_jetstream.spark import SparkOptionError, write_rows
from airflow_provider_jetstream.spark.errors import RowsNotStoredError
from testbed import seams
from testbed.spark_face import RowWriter, open_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from testbed.nats_server import NatsServer
    from testbed.spark_face import SourceStream

COUNT = 6_000


def failing_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on; the first attempt of each task fails after some of them are published."""
    context = TaskContext.get()
    for number, batch in enumerate(batches):
        if number == 1 and context is not None and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails")
        yield batch


def stored_headers(server: NatsServer, stream: str) -> list[Mapping[str, str]]:
    """Read the headers of all messages of a stream with another client."""

    async def read() -> list[Mapping[str, str]]:
        client = await nats.connect(server.url)
        try:
            context = client.jetstream()
            last = (await context.stream_info(stream)).state.last_seq
            return [(await context.get_msg(stream, sequence)).headers or {} for sequence in range(1, last + 1)]
        finally:
            await client.close()

    return asyncio.run(read())


def test_rows_that_cant_be_stored_are_kept_with_their_reasons(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream, max_msg_size=300)
    number = f.col("id") % 10
    rows = spark.range(0, COUNT, 1, 2).select(
        f.when(number == 3, f.repeat(f.lit("x"), 400)).when(number != 4, f.col("id").cast("string")).alias("value"),
        f.when(number == 5, "a b").otherwise(f.lit(f"{stream.name}.a")).alias("subject"),
        f.concat(f.lit("row-"), "id").alias("msg_id"),
    )
    failing = rows.mapInArrow(failing_once, rows.schema)
    path = str(tmp_path / "quarantine")
    options = {**stream_options, "msgIdPrefix": "a/b", "maxInFlight": "100"}
    kept = write_rows(failing, options, path)
    assert kept.columns == ["value", "subject", "msg_id", "message_id", "reason"]
    reasons = {row.reason: row["count"] for row in kept.groupBy("reason").count().collect()}
    assert set(reasons.values()) == {COUNT // 10}
    assert (
        sorted(reason[:40] for reason in reasons)
        == [
            "its subject 'a b' can't be used: expecte"[:40],
            "its value is null: leave it out, or store a"[:40],
            "message size exceeds maximum allowed (error 10054)"[:40],
        ]
        or reasons
    )
    ids = {int(row.msg_id.removeprefix("row-")) for row in kept.collect()}
    assert ids == {row for row in range(COUNT) if row % 10 in (3, 4, 5)}
    stored = Counter(int(row["value"]) for row in read_all(stream_options))
    assert stored == Counter(row for row in range(COUNT) if row not in ids)
    # Once more, as a batch of a query that runs again: nothing is stored twice, and what is kept has the same ids.
    assert write_rows(rows, options, path).count() == len(ids)
    assert stream.info().last == COUNT - len(ids)
    everything = spark.read.parquet(path)
    assert (everything.count(), everything.dropDuplicates(["message_id"]).count()) == (2 * len(ids), len(ids))
    # The quarantine's own rows, into the same quarantine.
    mended = everything.dropDuplicates(["message_id"]).select(
        f.lit("mended").alias("value"), f.lit(f"{stream.name}.b").alias("subject"), "msg_id"
    )
    assert write_rows(mended, stream_options, path).count() == 0
    assert stream.info().last == COUNT


def test_a_row_whose_fate_is_unknown_is_no_refused_one(
    own_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.PUBLISHER_PAUSE, 0.01)
    stream_options = {"servers": own_nats.url, "stream": name, "timeout": "1", "ackTimeout": "1"}
    with open_stream(stream_options) as stream:
        make_stream(stream)
    refused: dict[int, tuple[str, str]] = {}
    writer = RowWriter(stream_options, "w:3", "partition 3", refused)
    own_nats.kill()
    rows = [{"value": b"x", "subject": f"{name}.{'a b' if number == 1 else 'a'}"} for number in range(3)]
    schema = pa.schema([("value", pa.binary()), ("subject", pa.string())])

    def publish() -> None:
        writer.send(pa.RecordBatch.from_pylist(rows, schema))
        writer.wait_for_all()

    with pytest.raises(RowsNotStoredError, match=r"2 rows of partition 3.*aren't known to be stored"):
        publish()
    assert list(refused) == [1]


def test_a_retried_task_is_not_refused_for_what_it_has_stored(
    stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    first, second = f"{stream.name}.a", f"{stream.name}.b"
    rows = [
        {"value": b"1", "subject": first, "expected_last_subject_sequence": 0},
        {"value": b"2", "subject": second, "expected_last_sequence": 1},
        {"value": b"3", "subject": first, "expected_last_subject_sequence": 1, "expected_last_sequence": 2},
        {"value": b"4", "subject": second, "expected_last_sequence": 3},
    ]
    schema = pa.schema(
        [
            *(("value", pa.binary()), ("subject", pa.string())),
            *(("expected_last_sequence", pa.int64()), ("expected_last_subject_sequence", pa.int64())),
        ]
    )

    def publish(identity: str) -> tuple[int, int, list[int]]:
        refused: dict[int, tuple[str, str]] = {}
        with RowWriter(stream_options, identity, refused=refused) as writer:
            writer.send(pa.RecordBatch.from_pylist(rows, schema))
            writer.wait_for_all()
        assert all("wrong last sequence" in reason for _, reason in refused.values())
        return writer.stored, writer.duplicates, sorted(refused)

    assert publish("write:0") == (4, 0, [])
    assert publish("write:0") == (4, 4, [])
    # The same rows of another write have other ids.
    assert publish("write:1") == (0, 0, [0, 1, 2, 3])
    assert stream.info().last == 4


@pytest.mark.since_server("2.12", "message schedules")
def test_columns_become_headers_on_which_the_server_acts(
    spark: SparkSession, nats: NatsServer, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream, allow_msg_ttl=True, allow_msg_schedules=True)
    name = stream.name
    rows = [
        ("1", f"{name}.a", "90s", None, None, 0, None),
        ("2", f"{name}.a", "never", None, None, 1, 1),
        ("3", f"{name}.a", None, None, None, 1, None),
        ("4", f"{name}.b", "89.5s", None, None, None, 0),
        ("5", f"{name}.b", "0.2s x", None, None, None, None),
        ("6", f"{name}.plan.x", None, "@at 2099-01-01T00:00:00Z", f"{name}.c", None, None),
        ("7", f"{name}.plan.y", None, "@at 2099-01-01T00:00:00Z", None, None, None),
        ("8", f"{name}.plan.z", None, "whenever", f"{name}.c", None, None),
        ("9", f"{name}.b", "0", None, None, None, None),
        ("10", f"{name}.b", None, None, None, -1, None),
        ("11", f"{name}.b", None, None, None, None, 0),
        ("12", f"{name}.b", None, None, None, None, None),
    ]
    schema = (
        "value string, subject string, ttl string, schedule string, schedule_target string,"
        " expected_last_sequence bigint, expected_last_subject_sequence int"
    )
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    options = {**stream_options, "msgIdPrefix": "once"}
    kept = {int(row.value): row.reason for row in write_rows(frame, options, str(tmp_path)).collect()}
    assert sorted(kept) == [3, 5, 7, 8, 9, 10, 11]
    assert "wrong last sequence: 2 (error 10071)" in kept[3]
    assert "its ttl can't be used" in kept[5]
    assert "it has only one of schedule and schedule_target" in kept[7]
    assert "(error 101" in kept[8]
    assert "expected at least 1 s" in kept[9]
    assert "its expected_last_sequence is -1" in kept[10]
    assert "wrong last sequence: 3 (error 10071)" in kept[11]
    server = [
        {key: value for key, value in headers.items() if key not in _WRITERS} for headers in stored_headers(nats, name)
    ]
    assert server == [
        {"Nats-TTL": "90s", "Nats-Expected-Last-Sequence": "0"},
        {"Nats-TTL": "never", "Nats-Expected-Last-Sequence": "1", "Nats-Expected-Last-Subject-Sequence": "1"},
        {"Nats-TTL": "90s", "Nats-Expected-Last-Subject-Sequence": "0"},
        {"Nats-Schedule": "@at 2099-01-01T00:00:00Z", "Nats-Schedule-Target": f"{name}.c", "Nats-Rollup": "sub"},
        {},
    ]
    # A task that runs again isn't refused for what it has stored itself.
    again = {int(row.value) for row in write_rows(frame, options, str(tmp_path)).collect()}
    assert again == set(kept)
    assert stream.info().last == 5


@pytest.mark.parametrize(
    ("column", "type_", "setting"),
    [("ttl", "bigint", "allow_msg_ttl"), ("schedule", "timestamp", "allow_msg_schedules")],
)
def test_a_column_without_effect_is_refused(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, column: str, type_: str, setting: str
) -> None:
    make_stream(stream)
    rows = spark.range(1).select(
        f.lit("x").alias("value"), f.lit(f"{stream.name}.a").alias("subject"), f.lit(None).cast(type_).alias(column)
    )
    writing = rows.write.format("jetstream").options(**stream_options).mode("append")
    with pytest.raises(PySparkException, match=f"expected {setting} on {stream.name}"):
        writing.save()
    with pytest.raises(SparkOptionError, match=f"expected {setting} on {stream.name}"):
        write_rows(rows, stream_options, "/nowhere")
    assert stream.info().last == 0


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("column", ["schedule", "schedule_target"])
@pytest.mark.since_server("2.12", "message schedules")
def test_a_schedule_for_a_work_queue_is_refused(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, column: str, *, allowed: bool
) -> None:
    make_stream(stream, retention="workqueue", allow_msg_schedules=allowed)
    rows = spark.range(1).select(
        f.lit("x").alias("value"), f.lit(f"{stream.name}.a").alias("subject"), f.lit("@every 1s").alias(column)
    )
    with pytest.raises(SparkOptionError, match=rf"expected no column {column} for the work queue.*Job\(body, at=…\)"):
        write_rows(rows, stream_options, "/nowhere")
    assert stream.info().last == 0


_WRITERS = ("Nats-Msg-Id", "Nats-Expected-Stream")
