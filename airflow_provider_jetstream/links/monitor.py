"""Links from a task to its queue, to the jobs that its run published, and to those of them that died.

Airflow asks for them in the worker after every execution, so that they are there while the task is deferred too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from airflow.providers.common.compat.sdk import BaseOperatorLink, conf

from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

_PAGE = "plugin/jetstream"


class QueueLink(BaseOperatorLink):
    """To the queue's page."""

    name = "JetStream queue"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Give the address.

        :param operator: the task's operator, its templates rendered
        :param ti_key: the task instance
        :return: the address; empty where the queue isn't known
        """
        return _address(operator)


class RunJobsLink(BaseOperatorLink):
    """To the jobs of the task."""

    name = "JetStream jobs"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Give the address.

        :param operator: the task's operator, its templates rendered
        :param ti_key: the task instance
        :return: the address; empty where the queue isn't known
        """
        return _address(operator, view="jobs", **_run(ti_key), task_id=ti_key.task_id, map_index=ti_key.map_index)


class RunLettersLink(BaseOperatorLink):
    """To the dead letters among the jobs of the run."""

    name = "JetStream dead letters"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Give the address.

        :param operator: the task's operator, its templates rendered
        :param ti_key: the task instance
        :return: the address; empty where the queue isn't known
        """
        return _address(operator, view="letters", **_run(ti_key))


def _run(ti_key: TaskInstanceKey) -> dict[str, str | int]:
    return {"dag_id": ti_key.dag_id, "run_id": ti_key.run_id}


def _address(operator: BaseOperator, **more: str | int) -> str:
    connection, queue = getattr(operator, "nats_conn_id", ""), _queue_name(operator)
    if not queue:
        return ""
    base = conf.get("api", "base_url", fallback="").rstrip("/")
    return f"{base}/{_PAGE}?{urlencode({'connection': connection, 'queue': queue, **more})}"


def _queue_name(operator: BaseOperator) -> str:
    if name := getattr(operator, "queue_name", None):
        return str(name)
    given = getattr(operator, "work_queue", None)
    if given is None:
        return ""
    try:
        return WorkQueue.load(given).name
    except (ValueError, TypeError, OSError):
        # A link is no reason to fail a task; that is told by the task itself.
        return ""
