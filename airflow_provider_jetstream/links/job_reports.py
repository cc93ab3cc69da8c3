"""The link from a task to the reports on its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

from airflow_provider_jetstream.airflow_compat import conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class JobReportsLink(BaseOperatorLink):
    """Links to the task's XComs, of which ``job_reports`` says what became of each job."""

    name = "JetStream job reports"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty where the task doesn't wait for its jobs."""
        if not getattr(operator, "wait_for_completion", False):
            return ""
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        names = [quote(str(name), safe="") for name in (ti_key.dag_id, ti_key.run_id, ti_key.task_id)]
        # A task instance has no map index of its own in some calls, and -1 where it isn't mapped.
        index = ti_key.map_index if ti_key.map_index is not None else -1
        mapped = f"/mapped/{index}" if index >= 0 else ""
        return "{}/dags/{}/runs/{}/tasks/{}{}/xcom".format(base, *names, mapped)
