"""Links from a task to its queue, its jobs and their reports, its run's dead letters, and the report on dead letters.

Airflow computes them in the worker after every execution, so they exist while the task is deferred too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from airflow.sdk import BaseOperatorLink

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.tasks.queue_source import load_queue

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


class DeadLetterReportLink(BaseOperatorLink):
    """Links to the report where a browser can open it."""

    name = "Dead letter report"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty where nothing serves the report, or none was written."""
        served_at, page = getattr(operator, "served_at", None), getattr(operator, "page", None)
        return f"{str(served_at).rstrip('/')}/{page}" if served_at and page else ""


_PAGE = "plugin/jetstream"


class QueueLink(BaseOperatorLink):
    """Links to the queue's page."""

    name = "JetStream queue"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty where the queue isn't known."""
        return _address(operator)


class TaskJobsLink(BaseOperatorLink):
    """Links to the jobs of the task."""

    name = "JetStream jobs"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty where the queue isn't known."""
        return _address(operator, view="jobs", **_task(ti_key), map_index=ti_key.map_index)


class TaskLettersLink(BaseOperatorLink):
    """Links to the dead letters among the jobs of the task."""

    name = "JetStream dead letters"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty where the queue isn't known."""
        return _address(operator, view="letters", **_task(ti_key))


def _task(ti_key: TaskInstanceKey) -> dict[str, str | int]:
    return {"dag_id": ti_key.dag_id, "run_id": ti_key.run_id, "task_id": ti_key.task_id}


def _address(operator: BaseOperator, **parameters: str | int) -> str:
    connection, queue = getattr(operator, "nats_conn_id", ""), _queue_name(operator)
    if not queue:
        return ""
    base = conf.get("api", "base_url", fallback="").rstrip("/")
    return f"{base}/{_PAGE}?{urlencode({'connection': connection, 'queue': queue, **parameters})}"


def _queue_name(operator: BaseOperator) -> str:
    if name := getattr(operator, "queue_name", None):
        return str(name)
    work_queue = getattr(operator, "work_queue", None)
    if work_queue is None:
        return ""
    try:
        return load_queue(work_queue, operator).name
    except (ValueError, TypeError, OSError):
        # A link must not fail a task. The task itself reports that its queue can't be loaded.
        return ""
