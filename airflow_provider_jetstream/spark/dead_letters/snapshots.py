"""Letters as they were at one time, kept as Parquet: evidence, and the same input for everything that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from airflow_provider_jetstream.spark.dead_letters.letter_rows import LETTER_DDL
from airflow_provider_jetstream.spark.dead_letters.schema import DIED_AT, SEQUENCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAY: Final = "day"

_SECONDS_OF_A_DAY = 86_400


def snapshot(letters: DataFrame, path: str) -> DataFrame:
    """Write letters as Parquet, partitioned by the day of their death in UTC, and go on from what was written.

    :param letters: as :func:`~.reading.read_letters` gives them
    :param path: a directory that doesn't exist yet, on storage that driver and executors share
    :return: the letters as they were written, with a column ``day``
    """
    # Whatever the session's time zone is.
    day = f.date_from_unix_date(f.floor(f.unix_seconds(DIED_AT) / _SECONDS_OF_A_DAY).cast("int"))
    dated = letters.withColumn(DAY, day)
    dated.sortWithinPartitions(DAY, SEQUENCE).write.partitionBy(DAY).mode("error").parquet(path)
    return read_snapshot(letters.sparkSession, path)


def read_snapshot(session: SparkSession, path: str) -> DataFrame:
    """Read letters that :func:`snapshot` wrote.

    :param session: Spark
    :param path: where
    :return: the letters
    """
    # A snapshot without letters has no files to tell the columns.
    return session.read.schema(f"{LETTER_DDL}, {DAY} date").parquet(path)
