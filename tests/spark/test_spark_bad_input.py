"""Error messages to Spark's users, and the number of connections where a server can't be reached."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from spark_streams import make_stream, publish_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream


def _error(action: Any) -> str:
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


def test_the_error_names_the_rows_that_a_full_stream_refused(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream, max_msgs=500, discard="new")
    rows = spark.range(0, 2000, 1, 2).select(f.col("id").cast("string").alias("value"))
    writer = rows.write.format("jetstream").options(**stream_options, subject=f"{stream.name}.a").mode("append")
    message = _error(writer.save)
    assert re.search(r"\d+ rows of partition [01], counted from 0, aren't known to be stored", message)
    assert re.search(r"rows [-0-9, ]+: maximum messages exceeded \(error 10077\) \(such as ", message)
    assert stream.info().last == 500


def test_columns_of_another_type_are_refused_before_anything_is_read_or_written(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    publish_numbers(stream, 10)
    for schema in ("value string", "seq int", "body binary", "timestamp string"):
        wrong = spark.read.format("jetstream").options(**stream_options).schema(schema).load()
        assert "expected columns of value binary, subject string" in _error(wrong.collect)
    numbers = spark.range(10).select(f.col("id").alias("value"))
    writer = numbers.write.format("jetstream").options(**stream_options, subject=f"{stream.name}.a").mode("append")
    assert "found value bigint: select or cast before writing" in _error(writer.save)
    assert stream.info().last == 10


_WRONG = {
    "an unknown option": ({"startingOffset": "1"}, "did you mean startingOffsets?"),
    "Kafka's option": ({"subscribe": "orders"}, "which is Kafka's: name the stream with the option stream"),
    "a wrong value": ({"minPartitions": "few"}, "minPartitions: expected a whole number from 1"),
    "no stream": ({"stream": "", "streams": "a..b"}, "expected"),
    "options that exclude each other": ({"streams": "a,b"}, "expected stream or streams, found both"),
    "two limits in the wrong order": ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "found 9 and 8"),
    "a connection that isn't there": ({"servers": "", "connection": "nowhere"}, "NATS_NOWHERE_URL"),
}


@pytest.mark.parametrize(("wrong", "cause"), _WRONG.values(), ids=_WRONG)
def test_the_error_of_a_query_is_that_of_its_options(
    spark: SparkSession, stream_options: dict[str, str], wrong: dict[str, str], cause: str
) -> None:
    options = {name: value for name, value in {**stream_options, **wrong}.items() if value}

    def follow() -> None:
        # With columns of the user's own, Spark asks for no schema, and the options are first seen by the query.
        frame = spark.readStream.format("jetstream").options(**options).schema("value binary, seq bigint").load()
        query = frame.writeStream.format("noop").trigger(availableNow=True).start()
        try:
            query.awaitTermination(60)
        finally:
            query.stop()

    message = _error(follow)
    assert cause in message
    assert "UnboundLocalError" not in message


def test_rows_that_can_never_be_stored_are_tried_once(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream, max_msg_size=200)

    def note(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        (tmp_path / uuid4().hex).touch()
        yield from batches

    for value, cause in (
        (f.when(f.col("id") == 3, None).otherwise("x"), "rows 3: its value is null"),
        (f.when(f.col("id") == 3, f.repeat(f.lit("x"), 300)).otherwise("x"), "rows 3: message size exceeds maximum"),
    ):
        rows = spark.range(0, 5, 1, 1).mapInArrow(note, "id bigint").select(value.alias("value"))
        writer = rows.write.format("jetstream").options(**stream_options, subject=f"{stream.name}.a").mode("append")
        assert cause in _error(writer.save)
        assert len(list(tmp_path.iterdir())) == 1
        for path in tmp_path.iterdir():
            path.unlink()
    assert stream.info().last == 8
