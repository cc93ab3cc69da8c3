"""Error messages to Spark's users, and the number of connections where a server can't be reached."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from spark_streams import make_stream, publish_numbers

if TYPE_CHECKING:
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
