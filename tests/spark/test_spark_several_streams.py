"""Several streams in one read by Spark: a batch, and queries that are restarted from their checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f
from spark_streams import make_stream, publish_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream


def _follow(spark: SparkSession, folder: Path, options: Mapping[str, str]) -> list[int]:
    """Run a query until it has read what is available, and return how many rows each batch had."""
    frame = spark.readStream.format("jetstream").options(**{"startingOffsets": "earliest", **options}).load()
    writer = frame.select("stream", "seq", f.col("value").cast("string")).writeStream.format("parquet")
    writer = writer.option("path", str(folder / "out")).option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination(120)
    return [size for progress in query.recentProgress if (size := progress["numInputRows"])]


def _written(spark: SparkSession, folder: Path) -> list[tuple[str, int]]:
    rows = spark.read.parquet(str(folder / "out")).select("stream", "seq").collect()
    return sorted((row.stream, row.seq) for row in rows)


def _numbers(stream: SourceStream, first: int, last: int) -> list[tuple[str, int]]:
    return [(stream.name, sequence) for sequence in range(first, last + 1)]


def test_streams_come_and_go_under_a_pattern(
    spark: SparkSession, pair: list[SourceStream], pair_options: dict[str, str], tmp_path: Path
) -> None:
    one, other = pair
    options = {"servers": pair_options["servers"], "streamPattern": f"{one.name[:-1]}*", "startingOffsets": "latest"}
    assert _follow(spark, tmp_path, options) == []
    make_stream(one)
    publish_numbers(one, 5)
    # What each stream starts at is asked for by a query that begins, which this one has done without streams.
    bounds = {"startingOffsets": json.dumps({one.name: 3})}
    assert _follow(spark, tmp_path, {**options, **bounds}) == [5]
    make_stream(other)
    publish_numbers(other, 7)
    assert _follow(spark, tmp_path, {**options, **bounds}) == [7]
    publish_numbers(one, 1)
    other.api(f"STREAM.DELETE.{other.name}")
    with pytest.raises(StreamingQueryException, match=f"{other.name} was deleted after sequence 7 was read"):
        _follow(spark, tmp_path, options)
    assert _follow(spark, tmp_path, {**options, "failOnDataLoss": "false"}) == [1]
    make_stream(other)
    publish_numbers(other, 2)
    assert _follow(spark, tmp_path, options) == [2]
    assert _written(spark, tmp_path) == sorted([*_numbers(one, 1, 6), *_numbers(other, 1, 7), *_numbers(other, 1, 2)])
