from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f
from spark_streams import delete, make_stream, open_stream, publish_numbers, purge, read_all

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from testbed.spark_face import SourceStream


def _stream(spark: SparkSession, stream_options: Mapping[str, str], **options: object) -> DataFrame:
    settings = {"startingOffsets": "earliest", **stream_options, **{key: str(value) for key, value in options.items()}}
    return spark.readStream.format("jetstream").options(**settings).load()


def _available(frame: DataFrame, folder: Path) -> StreamingQuery:
    writer = frame.select("seq", f.col("value").cast("string").alias("value")).writeStream.format("parquet")
    writer = writer.option("path", str(folder / "out")).option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination(120)
    return query


def _sizes(query: StreamingQuery) -> list[int]:
    return [size for progress in query.recentProgress if (size := progress["numInputRows"])]


def _values(spark: SparkSession, folder: Path) -> list[int]:
    return sorted(int(row.value) for row in spark.read.parquet(str(folder / "out")).select("value").collect())


def test_batches_are_bounded_and_a_restart_continues(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 2500)
    delete(stream, range(1100, 2000))
    first = _available(_stream(spark, stream_options, maxOffsetsPerTrigger=1000, minPartitions=2), tmp_path)
    # The second batch begins after the gap.
    assert _sizes(first) == [1000, 99, 501] or sum(_sizes(first)) == 1600
    publish_numbers(stream, 300, 2500)
    second = _available(_stream(spark, stream_options, maxOffsetsPerTrigger=1000, startingOffsets=1), tmp_path)
    assert sum(_sizes(second)) == 300
    assert _values(spark, tmp_path) == [*range(1099), *range(1999, 2800)]


def test_a_state_with_nullable_columns_is_read_on(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    options = {**stream_options, "includeHeaders": "true", "startingOffsets": "earliest"}
    reader = spark.readStream.format("jetstream").options(**options)
    nullable = "value binary, subject string, seq bigint, headers array<struct<key:string,value:string>>"
    # The columns of a read were nullable before 0.2.0, and so is what its checkpoints hold.
    for number, schema in enumerate((nullable, None, nullable)):
        publish_numbers(stream, 10, 10 * number)
        frame = (reader.schema(schema) if schema else spark.readStream.format("jetstream").options(**options)).load()
        counts = frame.groupBy("subject", "headers").agg(f.max("value").alias("value"), f.count("seq").alias("count"))
        writer = counts.writeStream.outputMode("complete").foreachBatch(
            lambda batch, _: batch.write.mode("overwrite").parquet(str(tmp_path / "out"))
        )
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination(120)
        assert _sizes(query) == [10]
        (total,) = spark.read.parquet(str(tmp_path / "out")).agg(f.sum("count")).collect()
        assert total[0] == 10 * (number + 1)


def test_batches_are_bounded_in_bytes(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 1000)
    # A number of two or three digits, and the subject.
    limit = 400 * (3 + len(f"{stream.name}.0"))
    query = _available(_stream(spark, stream_options, maxBytesPerTrigger=limit, maxOffsetsPerTrigger=405), tmp_path)
    sizes = _sizes(query)
    assert sizes[0] == 405
    assert sizes[1:] == [400, 195]
    # A limit that no message is below, and another one since the last start.
    publish_numbers(stream, 3, 1000)
    assert _sizes(_available(_stream(spark, stream_options, maxBytesPerTrigger=1), tmp_path)) == [1, 1, 1]
    assert _values(spark, tmp_path) == list(range(1003))


def test_a_batch_waits_for_enough_messages_or_for_the_delay(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 5)
    frame = _stream(spark, stream_options, minOffsetsPerTrigger=100, maxTriggerDelay="8s")
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(processingTime="100 milliseconds").start()
    try:
        # The first batch after a start waits for nothing.
        _wait(lambda: _sizes(query) == [5])
        publish_numbers(stream, 99, 5)
        time.sleep(1.5)
        assert _sizes(query) == [5]
        publish_numbers(stream, 1, 104)
        _wait(lambda: _sizes(query) == [5, 100])
        publish_numbers(stream, 1, 105)
        _wait(lambda: _sizes(query) == [5, 100, 1])
        first, second = (progress for progress in query.recentProgress if progress["numInputRows"] in (100, 1))
        began = [datetime.fromisoformat(progress["timestamp"]) for progress in (first, second)]
        assert (began[1] - began[0]).total_seconds() > 7
    finally:
        query.stop()


def test_a_query_that_is_stopped_three_times_reads_every_message_once(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 30_000)
    frame = _stream(spark, stream_options, maxOffsetsPerTrigger=5000).select("seq", f.col("value").cast("string"))
    for attempt in range(3):
        writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        _wait(lambda query=query, attempt=attempt: query.isActive and _started_batches(tmp_path) > attempt)
        query.stop()
    publish_numbers(stream, 1000, 30_000)
    _available(_stream(spark, stream_options), tmp_path)
    assert _values(spark, tmp_path) == list(range(31_000))


def _started_batches(folder: Path) -> int:
    offsets = folder / "checkpoint" / "offsets"
    return len([file for file in offsets.iterdir() if file.name.isdigit()]) if offsets.exists() else 0


def _wait(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_query_copies_each_message_once(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 3000)
    copies = {**stream_options, "stream": f"{stream.name}c"}
    with open_stream(copies) as copied:
        make_stream(copied)
        frame = _stream(spark, stream_options).select(
            "value", f.concat(f.lit(f"{copied.name}."), "subject").alias("subject")
        )

        def run() -> None:
            writer = frame.writeStream.format("jetstream").options(**copies)
            query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
            query.awaitTermination(120)

        run()
        assert copied.info().last == 3000
        # As if the query had ended after it stored everything, and before it recorded that.
        (tmp_path / "commits" / "0").unlink()
        (tmp_path / "commits" / ".0.crc").unlink()
        publish_numbers(stream, 500, 3000)
        run()
        assert copied.info().last == 3500
        assert [int(row["value"]) for row in read_all(copies)] == list(range(3500))


def test_a_query_fails_where_messages_are_gone_unless_losses_are_allowed(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 100)
    _available(_stream(spark, stream_options), tmp_path)
    publish_numbers(stream, 100, 100)
    purge(stream, 151)
    with pytest.raises(StreamingQueryException, match="begins at 151, and 101 wasn't read"):
        _available(_stream(spark, stream_options), tmp_path)
    _available(_stream(spark, stream_options, failOnDataLoss="false"), tmp_path)
    assert _values(spark, tmp_path) == [*range(100), *range(150, 200)]
    stream.api(f"STREAM.DELETE.{stream.name}")
    make_stream(stream)
    publish_numbers(stream, 500, 1000)
    with pytest.raises(StreamingQueryException, match="was deleted and recreated after sequence 200 was read"):
        _available(_stream(spark, stream_options), tmp_path)
    _available(_stream(spark, stream_options, failOnDataLoss="false"), tmp_path)
    assert _values(spark, tmp_path) == [*range(100), *range(150, 200), *range(1000, 1500)]
