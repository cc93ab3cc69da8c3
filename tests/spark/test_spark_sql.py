"""Streams in SQL: views and tables, whose own options Spark keeps from a Python data source."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from spark_streams import make_stream, publish_numbers, read_all

from testbed.spark_face import JetStreamDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream


def quoted(options: Mapping[str, str]) -> str:
    return "(" + ", ".join(f"{name} '{value}'" for name, value in options.items()) + ")"


@contextmanager
def dropped(spark: SparkSession, *names: str) -> Iterator[None]:
    """Drop tables at the end."""
    try:
        yield
    finally:
        for name in names:
            spark.sql(f"DROP TABLE IF EXISTS {name}")


def count_of(spark: SparkSession, query: str) -> int:
    return int(spark.sql(query).collect()[0][0])


def test_tables_with_and_without_columns_are_read_and_inserted_into(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    publish_numbers(stream, 5)
    options, subject = quoted(stream_options), f"{stream.name}.sql"
    with dropped(spark, "plain_jobs", "written_jobs"):
        spark.sql(f"CREATE TABLE plain_jobs USING jetstream OPTIONS {options}")
        spark.sql("CREATE TABLE written_jobs (value BINARY, subject STRING) USING jetstream")
        assert count_of(spark, f"SELECT count(*) FROM plain_jobs WITH {options} WHERE seq > 2") == 3
        spark.sql(f"INSERT INTO written_jobs WITH {options} VALUES (CAST('one' AS BINARY), '{subject}')")
        spark.sql(
            f"INSERT INTO written_jobs WITH {options} SELECT value, '{subject}' FROM plain_jobs WITH {options}"
            " WHERE seq < 3"
        )
        assert count_of(spark, f"SELECT count(*) FROM written_jobs WITH {options} WHERE subject = '{subject}'") == 3
        for query in (
            "SELECT * FROM plain_jobs",
            f"INSERT INTO written_jobs VALUES (CAST('1' AS BINARY), '{subject}')",
        ):
            with pytest.raises(PySparkException, match="WITH \\(stream 'orders'"):
                spark.sql(query).collect()
    assert stream.info().last == 8


def test_views_are_read_and_inserted_into(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    publish_numbers(stream, 3)
    options = quoted(stream_options)
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW read_jobs USING jetstream OPTIONS {options}")
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW new_jobs (value BINARY, subject STRING) USING jetstream OPTIONS {options}"
    )
    assert count_of(spark, "SELECT max(seq) FROM read_jobs") == 3
    spark.sql(f"INSERT INTO new_jobs SELECT value, '{stream.name}.again' FROM read_jobs WHERE seq = 2")
    assert [(row["value"], row["subject"]) for row in read_all(stream_options, first=4)] == [
        (b"1", f"{stream.name}.again")
    ]


def test_a_view_of_a_table_reads_what_is_stored_at_each_query(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream, max_msgs=4)
    publish_numbers(stream, 3)
    options = quoted(stream_options)
    with dropped(spark, "live_jobs_table"):
        spark.sql("CREATE TABLE live_jobs_table (value BINARY, subject STRING, seq BIGINT) USING jetstream")
        spark.sql(f"CREATE TEMPORARY VIEW live_jobs AS SELECT * FROM live_jobs_table WITH {options}")
        assert count_of(spark, "SELECT count(*) FROM live_jobs") == 3
        spark.sql("CREATE TABLE IF NOT EXISTS new_jobs_table (value BINARY, subject STRING) USING jetstream")
        with dropped(spark, "new_jobs_table"):
            spark.sql(f"INSERT INTO new_jobs_table WITH {options} VALUES (CAST('one' AS BINARY), '{stream.name}.new')")
        assert count_of(spark, "SELECT max(seq) FROM live_jobs") == 4
        # The stream is full: each message drops the first one.
        publish_numbers(stream, 2)
        assert [row.seq for row in spark.sql("SELECT seq FROM live_jobs ORDER BY seq").collect()] == [3, 4, 5, 6]


def test_what_a_load_fixes_is_said_at_once_but_for_a_table(
    stream_options: dict[str, str], stream: SourceStream, caplog: pytest.LogCaptureFixture
) -> None:
    make_stream(stream)
    publish_numbers(stream, 3)
    caplog.set_level(logging.WARNING)
    # What Spark passes for CREATE TEMPORARY VIEW … USING, and for each query of a table.
    JetStreamDataSource(dict(stream_options)).schema()
    assert f"A batch reads {stream.name} to sequence 3 at every action" in caplog.text
    assert "also after REFRESH TABLE" in caplog.text
    caplog.clear()
    JetStreamDataSource({**stream_options, "provider": "jetstream", "owner": "ann"}).schema()
    assert caplog.text == ""


def test_the_loss_of_a_frozen_view_says_what_reads_anew(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream, max_msgs=3)
    publish_numbers(stream, 3)
    # With columns of its own, for INSERT: its first query fixes what it reads.
    columns = "(value BINARY, subject STRING, seq BIGINT)"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW frozen {columns} USING jetstream OPTIONS {quoted(stream_options)}")
    assert count_of(spark, "SELECT count(*) FROM frozen") == 3
    publish_numbers(stream, 2)
    with pytest.raises(PySparkException, match="for what is stored now load it again, or query a view of a table"):
        count_of(spark, "SELECT count(*) FROM frozen")
