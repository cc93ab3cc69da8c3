"""Dead letters at volume: read, snapshot, triage, report, repair; see ``docs/spark-dead-letters.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.dead_letters.read import read_letters, read_snapshot, snapshot
    from airflow_provider_jetstream.spark.dead_letters.repairs import Repairing, read_repaired, repair
    from airflow_provider_jetstream.spark.dead_letters.report import ReportSummary, Triage, triage, write_report

__all__ = [
    "Repairing",
    "ReportSummary",
    "Triage",
    "read_letters",
    "read_repaired",
    "read_snapshot",
    "repair",
    "snapshot",
    "triage",
    "write_report",
]

__getattr__ = lazy_exports(__name__)
