"""JetStream for Spark: the data source ``jetstream``, on PySpark 4.1 or later; see ``docs/spark.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.bulk_redrive.driver import preview_letters, redrive_letters
    from airflow_provider_jetstream.spark.dead_letters.read import read_letters, read_snapshot, snapshot
    from airflow_provider_jetstream.spark.dead_letters.repairs import read_repaired, repair
    from airflow_provider_jetstream.spark.dead_letters.report import triage, write_report
    from airflow_provider_jetstream.spark.errors import (
        DataLossError,
        RepairContractError,
        RepairedLettersError,
        RowsNotStoredError,
        SparkOptionError,
    )
    from airflow_provider_jetstream.spark.source.data_source import register
    from airflow_provider_jetstream.spark.source.lag_listener import LagListener, QueryLag, StreamLag
    from airflow_provider_jetstream.spark.source.writer import write_rows

__all__ = [
    "DataLossError",
    "LagListener",
    "QueryLag",
    "RepairContractError",
    "RepairedLettersError",
    "RowsNotStoredError",
    "SparkOptionError",
    "StreamLag",
    "preview_letters",
    "read_letters",
    "read_repaired",
    "read_snapshot",
    "redrive_letters",
    "register",
    "repair",
    "snapshot",
    "triage",
    "write_report",
    "write_rows",
]

__getattr__ = lazy_exports(__name__)
