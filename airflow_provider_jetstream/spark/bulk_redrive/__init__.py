"""Bringing dead letters back in bulk, by the same protocols as elsewhere; see ``docs/spark-redrive.md``."""

from airflow_provider_jetstream.spark.bulk_redrive.driver import Progress, preview_letters, redrive_letters

__all__ = ["Progress", "preview_letters", "redrive_letters"]
