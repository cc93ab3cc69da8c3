"""Redrives dead letters in bulk, by the core's protocols; see ``docs/spark-redrive.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.bulk_redrive.driver import preview_letters, redrive_letters
    from airflow_provider_jetstream.spark.bulk_redrive.step import Progress

__all__ = ["Progress", "preview_letters", "redrive_letters"]

__getattr__ = lazy_exports(__name__)
