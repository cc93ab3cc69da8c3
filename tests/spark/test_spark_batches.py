from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, StructType
from spark_streams import delete, make_stream, publish, publish_numbers

from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from testbed.spark_face import SourceStream

_COUNT = 30_000


def _load(spark: SparkSession, stream_options: Mapping[str, str], **options: object) -> DataFrame:
    return (
        spark.read.format("jetstream").options(**{**stream_options, **{k: str(v) for k, v in options.items()}}).load()
    )


def _save(frame: DataFrame, stream_options: Mapping[str, str], **options: object) -> None:
    stream_options = {**stream_options, **{key: str(value) for key, value in options.items()}}
    frame.write.format("jetstream").options(**stream_options).mode("append").save()


def _error(action: Any) -> str:
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


@pytest.mark.smoke
def test_written_rows_can_be_read(spark: SparkSession, stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream)
    rows = spark.range(0, _COUNT, 1, 2).select(
        f.col("id").cast("string").alias("value"),
        f.concat(f.lit(f"{stream.name}."), f.col("id") % 7).alias("subject"),
        f.array(f.struct(f.lit("Id").alias("key"), f.col("id").cast("string").alias("value"))).alias("headers"),
        f.concat(f.lit("id-"), f.col("id")).alias("msg_id"),
    )
    _save(rows, stream_options)
    _save(rows, stream_options)
    assert stream.info().last == _COUNT
    read = _load(spark, stream_options, includeHeaders="true", minPartitions=3)
    assert read.schema.simpleString() == (
        "struct<value:binary,subject:string,stream:string,seq:bigint,timestamp:timestamp,"
        "headers:array<struct<key:string,value:string>>>"
    )
    rows_read = read.select(
        f.col("value").cast("string").cast("bigint").alias("id"),
        "seq",
        "stream",
        f.col("subject") == f.concat(f.lit(f"{stream.name}."), f.col("value").cast("string").cast("bigint") % 7),
        f.element_at("headers", -1)["value"] == f.col("value").cast("string"),
        f.spark_partition_id(),
    ).toDF("id", "seq", "stream", "subject", "header", "task")
    (summary,) = rows_read.agg(
        f.count("*"),
        f.count_distinct("id"),
        f.count_distinct("seq"),
        f.max("seq"),
        f.min("stream"),
        f.bool_and("subject"),
        f.bool_and("header"),
        f.count_distinct("task"),
    ).collect()
    assert tuple(summary) == (_COUNT, _COUNT, _COUNT, _COUNT, stream.name, True, True, 3)


def test_no_column_is_nullable_unless_the_users_schema_says_so(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    publish(stream, [(f"{stream.name}.a", {"Key": "one", "Other": ""}, b"1"), (f"{stream.name}.b", None, b"")])
    read = _load(spark, stream_options, includeHeaders="true")
    headers = read.schema["headers"].dataType
    assert isinstance(headers, ArrayType)
    assert isinstance(headers.elementType, StructType)
    assert not any(field.nullable for field in (*read.schema.fields, *headers.elementType.fields))
    assert not headers.containsNull
    nullable = spark.read.schema("headers array<struct<key:string,value:string>>, seq bigint, value binary")
    rows = nullable.format("jetstream").options(**stream_options, includeHeaders="true").load()
    assert all(field.nullable for field in rows.schema.fields)
    for frame in (read, rows):
        selected = frame.select("headers", "seq", f.col("value").cast("string")).orderBy("seq").collect()
        assert selected == [([("Key", "one"), ("Other", "")], 1, "1"), ([], 2, "")]
        assert frame.where("value IS NULL OR exists(headers, pair -> pair.value IS NULL)").count() == 0


def test_a_load_reads_the_messages_of_its_time(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    publish_numbers(stream, 100)
    loaded = _load(spark, stream_options)
    publish_numbers(stream, 50, 100)
    assert loaded.count() == 100
    assert _load(spark, stream_options).select("seq").agg(f.max("seq")).first() == (150,)
    assert loaded.agg(f.max("seq")).first() == (100,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": "11", "endingOffsets": "21"}, range(11, 21)),
        ({"startingOffsets": "latest"}, ()),
        ({"endingOffsets": "5", "schema": "seq bigint, subject string"}, range(1, 5)),
    ],
)
def test_bounds(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, options: dict[str, str], expected: Any
) -> None:
    make_stream(stream)
    publish_numbers(stream, 30)
    schema = options.pop("schema", None)
    reader = spark.read.format("jetstream").options(**stream_options, **options)
    rows = (reader.schema(schema) if schema else reader).load().collect()
    assert [row.seq for row in rows] == list(expected)
    assert not schema or [row.subject for row in rows] == [f"{stream.name}.{number % 7}" for number in range(4)]


def test_times_bound_a_read(spark: SparkSession, stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream)
    bounds = []
    for start in range(0, 30, 10):
        publish_numbers(stream, 10, start)
        time.sleep(0.02)
        bounds.append(datetime.now(UTC))
        time.sleep(0.02)
    delete(stream, [10, 11, 12])
    since, until = (int(bound.timestamp() * 1000) for bound in bounds[:2])
    rows = _load(spark, stream_options, startingTimestamp=since, endingTimestamp=until).collect()
    assert [row.seq for row in rows] == list(range(13, 21))
    assert all(bounds[0] <= row.timestamp.replace(tzinfo=UTC) < bounds[1] for row in rows)
    rest = _load(spark, stream_options, startingTimestamp=bounds[1].isoformat()).collect()
    assert [row.seq for row in rest] == list(range(21, 31))


def test_a_work_queue_is_read_while_its_workers_run(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream, retention="workqueue")
    config = {"name": "w", "durable_name": "w", "ack_policy": "explicit", "ack_wait": 60_000_000_000}
    stream.api(f"CONSUMER.CREATE.{stream.name}.w", {"stream_name": stream.name, "config": config})
    publish_numbers(stream, 20_000)
    delete(stream, range(500, 600))
    before = stream.api(f"CONSUMER.INFO.{stream.name}.w")
    new_consumers = _new_consumers(stream_options, stream.name)
    loaded = _load(spark, stream_options, minPartitions=2)
    done = threading.Event()
    acknowledged: list[int] = []
    worker = threading.Thread(target=_work, args=(stream_options, done, acknowledged))
    assert loaded.select(f.count_distinct("seq")).first() == (19_900,)
    after = stream.api(f"CONSUMER.INFO.{stream.name}.w")
    assert {**after, "ts": ""} == {**before, "ts": ""}
    worker.start()
    sequences = [row.seq for row in loaded.select("seq").collect()]
    done.set()
    worker.join()
    left = stream.api(f"CONSUMER.INFO.{stream.name}.w")
    assert left["delivered"]["consumer_seq"] == len(acknowledged)
    assert left["num_redelivered"] == 0
    assert new_consumers() == 0
    # Every message that wasn't done in the meantime was read, and none twice.
    assert set(range(max(acknowledged) + 1, 20_001)) - set(range(500, 600)) <= set(sequences)
    assert len(sequences) == len(set(sequences))


def _new_consumers(stream_options: Mapping[str, str], name: str) -> Callable[[], int]:
    """Store the server's advisories about new consumers of a stream; return a function that counts them."""
    advisories = {**stream_options, "stream": f"{name}advisories"}
    with open_stream(advisories) as advisory_stream:
        make_stream(advisory_stream, subjects=[f"$JS.EVENT.ADVISORY.CONSUMER.CREATED.{name}.>"])

    def count() -> int:
        with open_stream(advisories) as advisory_stream:
            return advisory_stream.info().last

    return count


def _work(stream_options: Mapping[str, str], done: threading.Event, acknowledged: list[int]) -> None:
    with open_stream(stream_options) as stream:
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.w"
        while not acknowledged or not done.is_set():
            reply = stream.socket.new_reply_subject()
            stream.socket.send(f"PUB {subject} {reply} 1\r\n1\r\n".encode())
            stream.socket.receive(lambda buffer, filled: buffer[:filled].endswith(b"\r\n") and filled > 40)
            received = bytes(stream.socket.buffer[: stream.socket.filled])
            stream.socket.consume(stream.socket.filled)
            ack = next(word for word in received.split() if word.startswith(b"$JS.ACK."))
            stream.socket.send(b"PUB %b 4\r\n+ACK\r\n" % ack)
            acknowledged.append(int(ack.split(b".")[5]))


def test_rows_that_cant_be_written_are_refused_before_any_is(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream, duplicate_window=1_000_000_000)
    rows = spark.range(1).select(f.lit("x").alias("value"), f.lit(f"{stream.name}.a").alias("subject"))
    assert "expected a duplicate_window of at least 120 s" in _error(lambda: _save(rows, stream_options))
    overwriting = rows.write.format("jetstream").options(**stream_options).mode("overwrite")
    assert 'expected mode("append"), found overwrite' in _error(overwriting.save)
    assert "found seq bigint" in _error(lambda: _save(rows.withColumn("seq", f.lit(1).cast("bigint")), stream_options))
    assert "expected a column subject or the option subject" in _error(
        lambda: _save(rows.select("value"), stream_options)
    )
    assert "did you mean maxInFlight?" in _error(lambda: _save(rows, stream_options, maxInFlite=1))
    assert stream.info().last == 0
    _save(rows, stream_options, minDuplicateWindow=1)
    assert stream.info().last == 1
