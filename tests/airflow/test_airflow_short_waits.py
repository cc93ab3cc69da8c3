"""A deferrable task stays on its slot while its jobs are about to end, since deferring costs ten seconds."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, provisioned, wait_for_states
from dags.short_waits import JOB_SECONDS, SHORT, queue

from airflow_provider_jetstream.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from airflow_provider_jetstream.worker import Delivery
    from testbed.airflow import Airflow

RUN = "short"
DEFERRED = "Pausing task as DEFERRED"


@asynccontextmanager
async def slow_workers(settings: ConnectionSettings) -> AsyncIterator[None]:
    """Run workers whose jobs take seconds."""

    async def handle(job: Delivery) -> None:
        # The body is the name of the task.
        await asyncio.sleep(JOB_SECONDS[job.body.decode()])

    async with asyncio.TaskGroup() as group:
        workers = [Worker(queue(name), "worker", handle, settings) for name in SHORT]
        tasks = [group.create_task(worker.run()) for worker in workers]
        try:
            yield
        finally:
            for worker in workers:
                worker.stop()
            await asyncio.gather(*tasks)


@pytest.fixture(scope="module", autouse=True)
def run(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Run all tasks at once."""
    airflow.wait_for_dags("short_waits")

    async def work() -> None:
        for name in (*SHORT, "idle"):
            await provisioned(settings, queue(name))
        async with slow_workers(settings):
            airflow.trigger("short_waits", run_id=RUN)
            states = dict.fromkeys(SHORT, "success") | {"idle": "failed"}
            await asyncio.to_thread(wait_for_states, airflow, "short_waits", RUN, states)

    asyncio.run(work())


@pytest.mark.parametrize("task_id", ["adaptive", "one_second", "three_seconds", "held"])
def test_a_task_whose_job_is_about_to_end_does_not_defer(airflow: Airflow, task_id: str) -> None:
    assert airflow.xcom("short_waits", RUN, task_id)["completed"] == 1
    assert DEFERRED not in log_text(airflow, "short_waits", RUN, task_id)


@pytest.mark.parametrize("task_id", ["at_once", "idle"])
def test_a_task_defers_at_once_where_it_is_told_so_and_soon_where_nobody_works(airflow: Airflow, task_id: str) -> None:
    assert DEFERRED in log_text(airflow, "short_waits", RUN, task_id)
