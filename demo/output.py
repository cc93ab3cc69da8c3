"""Output and timing for both parts of the demo."""

from datetime import datetime
from pathlib import Path
from typing import Any

from testbed.airflow import Airflow

ROOT = Path(__file__).resolve().parent.parent


class DemoError(Exception):
    """The demo didn't show what it should; the message says what happened instead."""


def show(text: str) -> None:
    """Print a line of progress at once."""
    print(text, flush=True)


def task_seconds(task: dict[str, Any]) -> float:
    """Return a task instance's time from its start to its end, deferral included."""
    started, ended = (datetime.fromisoformat(task[key]) for key in ("start_date", "end_date"))
    return (ended - started).total_seconds()


def failure_text(airflow: Airflow, dag_id: str, run_id: str) -> str:
    """Return which tasks of a run failed, with the end of their logs."""
    failed = [task["task_id"] for task in airflow.task_instances(dag_id, run_id) if task["state"] == "failed"]
    logs = "\n".join(f"--- {task}\n{airflow.task_log(dag_id, run_id, task)[-3000:]}" for task in failed)
    return f"the run ended without success; failed tasks: {', '.join(failed) or 'none'}\n{logs}"
