"""The link from a task to the page that it wrote about dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class DeadLetterReportLink(BaseOperatorLink):
    """To the report, where it can be opened in a browser."""

    name = "Dead letter report"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Give the address.

        :param operator: the task's operator, after it has run
        :param ti_key: the task instance
        :return: the address; empty where nothing serves the report, or none was written
        """
        served_at, page = getattr(operator, "served_at", None), getattr(operator, "page", None)
        return f"{str(served_at).rstrip('/')}/{page}" if served_at and page else ""
