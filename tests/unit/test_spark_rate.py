"""How tasks of Spark share a rate."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.spark.bulk_redrive.spark_job import rate_per_task


@pytest.mark.parametrize(
    ("rate", "tasks", "each"), [(0.2, 1, 0.2), (50, 1, 50), (100, 2, 50), (101, 2, 50.5), (157, 3, 52.3)]
)
def test_tasks_store_whole_letters_in_ten_seconds(rate: float, tasks: int, each: float) -> None:
    assert rate_per_task(rate, tasks) == each
