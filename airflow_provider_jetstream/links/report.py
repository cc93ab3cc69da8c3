"""The link from a task to the report on dead letters that it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class DeadLetterReportLink(BaseOperatorLink):
    """Links to the report where a browser can open it."""

    name = "Dead letter report"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty where nothing serves the report, or none was written."""
        served_at, page = getattr(operator, "served_at", None), getattr(operator, "page", None)
        return f"{str(served_at).rstrip('/')}/{page}" if served_at and page else ""
