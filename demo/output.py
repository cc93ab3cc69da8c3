"""What both parts of the demo tell with."""

from datetime import datetime
from pathlib import Path
from typing import Any

from testbed.airflow import Airflow

ROOT = Path(__file__).resolve().parent.parent


class DemoError(Exception):
    """The demo didn't show what it should; the message says what happened instead."""


def show(text: str) -> None:
    """
    Show progress at once.

    :param text: what to show
    """
    print(text, flush=True)


def task_seconds(task: dict[str, Any]) -> float:
    """
    Measure a task from its start to its end, deferral included.

    :param task: the task instance as Airflow's API gives it
    """
    started, ended = (datetime.fromisoformat(task[key]) for key in ("start_date", "end_date"))
    return (ended - started).total_seconds()


def failure_text(airflow: Airflow, dag_id: str, run_id: str) -> str:
    """
    Say which task failed and why.

    :param airflow: where the DAG ran
    :param dag_id: the DAG
    :param run_id: the run
    """
    failed = [task["task_id"] for task in airflow.task_instances(dag_id, run_id) if task["state"] == "failed"]
    logs = "\n".join(f"--- {task}\n{airflow.task_log(dag_id, run_id, task)[-3000:]}" for task in failed)
    return f"the run ended without success; failed tasks: {', '.join(failed) or 'none'}\n{logs}"
