"""Dead letters at volume: read, snapshot, triage, report, repair; see ``docs/spark-dead-letters.md``."""

from airflow_provider_jetstream.spark.dead_letters.read import read_letters
from airflow_provider_jetstream.spark.dead_letters.repair import Repairing, repair
from airflow_provider_jetstream.spark.dead_letters.report.write import ReportSummary, write_report
from airflow_provider_jetstream.spark.dead_letters.snapshots import read_snapshot, snapshot
from airflow_provider_jetstream.spark.dead_letters.triage import Triage, triage

__all__ = [
    "Repairing",
    "ReportSummary",
    "Triage",
    "read_letters",
    "read_snapshot",
    "repair",
    "snapshot",
    "triage",
    "write_report",
]
