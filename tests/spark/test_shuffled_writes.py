"""What a shuffle hands on in another order when a task, a batch or a write runs again is stored once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from failing_source import FailingDataSource
from pyspark.sql import functions as f
from shuffled_rows import in_any_order
from spark_streams import make_stream, publish_numbers, read_all

from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from testbed.spark_face import SourceStream

_ROWS = 6000
# Each content is there twelve times, in one partition or in several.
_CONTENTS = 500
_HEADER = "array(struct('Kind' as key, string(id % 2) as value)) headers"


def _rows(spark: SparkSession, subject: str) -> DataFrame:
    return spark.range(0, _ROWS, 1, 4).selectExpr(
        "id", f"string(id % {_CONTENTS}) value", f"'{subject}' subject", _HEADER
    )


def _repartitioned(rows: DataFrame) -> DataFrame:
    return rows.repartition(3, "id").drop("id")


def _grouped(rows: DataFrame) -> DataFrame:
    return (
        rows.groupBy("value", "subject", "headers")
        .agg(f.count("*").alias("n"))
        .selectExpr("concat(value, ' ', n) value", "subject", "headers")
    )


def _round_robin(rows: DataFrame) -> DataFrame:
    return rows.repartition(3).drop("id")


def _joined(rows: DataFrame) -> DataFrame:
    return rows.hint("shuffle_hash").join(rows.select("id").distinct(), "id").drop("id")


def _values(stream_options: Mapping[str, str]) -> Counter[bytes]:
    return Counter(row["value"] for row in read_all(stream_options, names=("value",)))


@pytest.mark.parametrize("shuffled", [_repartitioned, _grouped, _round_robin, _joined])
def test_a_task_that_is_retried_after_a_shuffle_stores_each_row_once(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, shuffled: object
) -> None:
    make_stream(stream)
    spark.dataSource.register(FailingDataSource)
    assert callable(shuffled)
    rows: DataFrame = shuffled(_rows(spark, f"{stream.name}.a"))
    expected = Counter(row.value.encode() for row in rows.select("value").collect())
    # The task fails after it has stored everything, and the next attempt asserts that all are duplicates.
    in_other_order = rows.mapInArrow(in_any_order, rows.schema)
    in_other_order.write.format("failing").options(**stream_options).mode("append").save()
    assert _values(stream_options) == expected
    # Another write of the same rows is meant.
    rows.write.format("jetstream").options(**stream_options).mode("append").save()
    assert _values(stream_options) == expected + expected


def test_a_streaming_batch_that_runs_again_in_another_order_stores_each_row_once(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 3000)
    copies = {**stream_options, "stream": f"{stream.name}c"}
    with open_stream(copies) as copied:
        make_stream(copied)
        source = {**stream_options, "startingOffsets": "earliest", "minPartitions": "3"}
        loaded = spark.readStream.format("jetstream").options(**source).load()
        # Ten of each.
        rows = loaded.repartition(3, "seq").selectExpr(
            "string(int(string(value)) % 300) value", f"'{copied.name}.a' subject"
        )
        frame = rows.mapInArrow(in_any_order, rows.schema)

        def run() -> None:
            writer = frame.writeStream.format("jetstream").options(**copies)
            query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
            query.awaitTermination(120)

        run()
        # As if the query had ended after it stored everything, and before it recorded that.
        (tmp_path / "commits" / "0").unlink()
        (tmp_path / "commits" / ".0.crc").unlink()
        run()
        # The next batch has the same contents, and is another one.
        publish_numbers(stream, 300)
        run()
    assert _values(copies) == {str(number).encode(): 11 for number in range(300)}
