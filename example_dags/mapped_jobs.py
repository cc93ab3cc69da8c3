r"""Mapped tasks: one for each station, with jobs of its own that it waits for, and one for each job with some result.

``average`` is mapped over the stations, and no instance waits for the jobs of another. With ``returns="jobs"`` it
returns a report on each job, with what its handler returned. ``warn`` is mapped over the days with frost. Workers::

    jetstream-worker run --queue example_dags/queues/readings.yaml --consumer averager \
        --handler example_workers.readings:average
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

QUEUE = str(Path(__file__).parent / "queues" / "readings.yaml")
# The temperatures that each station has read, by day.
STATIONS = {
    "graz": {"monday": [3.5, 8.5], "tuesday": [-4.0, 1.0]},
    "linz": {"monday": [0.5, 6.5]},
    "wien": {"monday": [1.0, 9.0], "tuesday": [2.5, 7.5], "wednesday": [-6.0, -1.0]},
}

with DAG("mapped_jobs", schedule=None, catchup=False, tags=["jetstream"], doc_md=__doc__) as dag:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    @task
    def stations() -> list[list[dict[str, Any]]]:
        """Return the jobs of each station: one for each day."""
        return [
            [{"id": f"{station}-{day}", "celsius": celsius} for day, celsius in days.items()]
            for station, days in STATIONS.items()
        ]

    average = JetStreamPublishOperator.partial(
        task_id="average",
        work_queue=QUEUE,
        subject="readings.average",
        job_id="id",
        wait_for_completion=True,
        wait_timeout=timedelta(minutes=10),
        returns="jobs",
        deferrable=True,
    ).expand(jobs=stations())

    @task
    def frosty(reports: Any) -> list[dict[str, Any]]:
        """Return the reports on the days whose average is below zero."""
        jobs = [job for station in reports for job in JetStreamHook().job_reports(station)]
        return [job for job in jobs if job["result"]["average"] < 0]

    @task
    def warn(job: dict[str, Any]) -> str:
        """Return the warning for one day of a station."""
        return f"{job['id']}: {job['result']['average']} °C"

    provision >> average
    warn.expand(job=frosty(average.output))
