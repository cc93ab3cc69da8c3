from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f
from spark_streams import delete, make_stream, publish_numbers, read_all

from testbed.spark_face import open_stream

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
