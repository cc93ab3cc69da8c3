"""The usual mistakes: what Spark prints is what the table of docs/spark.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from spark_streams import make_stream, publish_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from testbed.spark_face import SourceStream

_PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
# The mistake, what Spark prints, what to do.
_ROW = re.compile(r"^\| (?P<mistake>[^|]+) \| `(?P<printed>[^|`]+)` \| [^|]+ \|$", re.MULTILINE)
_TABLE = _PAGE.partition("### Usual mistakes")[2].partition("### Codes")[0]
_PRINTED = {row["mistake"]: row["printed"] for row in _ROW.finditer(_TABLE)}


_LINES = 6


class _Attempt:
    def __init__(self, spark: SparkSession, options: dict[str, str], folder: Path) -> None:
        self.spark = spark
        self.options = options
        self.folder = folder
        self.rows = spark.createDataFrame([("x",)], "value STRING")

    def read(self, **more: str) -> DataFrame:
        return self.spark.read.format("jetstream").options(**{**self.options, **more}).load()

    def writer(self, **more: str) -> Any:
        subject = f"{self.options['stream']}.a"
        return self.rows.write.format("jetstream").options(**{**self.options, "subject": subject, **more})

    def stream(self, output: str = "append", **more: str) -> None:
        read = self.spark.readStream.format("jetstream").options(**{**self.options, **more}).load()
        counts = read.groupBy("subject").count().selectExpr("CAST(count AS STRING) AS value", "subject")
        frame = read.select("value", "subject") if output == "append" else counts
        writer = frame.writeStream.format("jetstream").options(**self.options).outputMode(output)
        query = writer.option("checkpointLocation", str(self.folder)).trigger(availableNow=True).start()
        try:
            query.awaitTermination(60)
        finally:
            query.stop()


_MISTAKES: dict[str, Callable[[_Attempt], object]] = {
    "`register(spark)` wasn't called": lambda attempt: attempt.spark.read.format("jetstreams").load(),
    "no server at the address": lambda attempt: attempt.read(servers="nats://localhost:1", timeout="1").collect(),
    "another stream's name": lambda attempt: attempt.read(stream="oders").collect(),
    "an option's name": lambda attempt: attempt.read(startingOffset="1"),
    "an option of Kafka": lambda attempt: attempt.read(subscribe="orders"),
    "`mode` left out, or `ignore`": lambda attempt: attempt.writer().save(),
    '`mode("overwrite")`': lambda attempt: attempt.writer().mode("overwrite").save(),
    "`partitionBy`": lambda attempt: attempt.writer().mode("append").partitionBy("value").save(),
    '`outputMode("update")`': lambda attempt: attempt.stream("update", startingOffsets="earliest"),
    "a column to be encoded": lambda attempt: (
        attempt.spark.range(3)
        .selectExpr("id AS value")
        .write.format("jetstream")
        .options(**attempt.options, subject="a")
        .mode("append")
        .save()
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_usual_mistake_prints_what_the_page_says(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path, mistake: str
) -> None:
    make_stream(stream)
    publish_numbers(stream, 2)
    # For an unknown format Spark has no error of its own in Python.
    with pytest.raises((PySparkException, Py4JJavaError)) as caught:
        _MISTAKES[mistake](_Attempt(spark, stream_options, tmp_path))
    printed = str(caught.value)
    assert _PRINTED[mistake] in printed
    if "PYTHON_DATA_SOURCE_ERROR" in printed:
        # Two lines of one place in this package, and the cause.
        assert len(printed.strip().splitlines()) <= _LINES


def test_each_mistake_of_the_page_is_made() -> None:
    assert _PRINTED.keys() == _MISTAKES.keys()
