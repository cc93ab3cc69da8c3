"""JetStream for Spark: the data source ``jetstream``, on PySpark 4.1 or later; see ``docs/spark.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(session: SparkSession) -> None:
    """Make the format ``jetstream`` known to a session.

    :param session: the session
    """
    from airflow_provider_jetstream.spark.source.data_source import JetStreamDataSource

    session.dataSource.register(JetStreamDataSource)
