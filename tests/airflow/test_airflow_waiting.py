"""The outcomes of waiting: dead letters, a timeout, or a later try that publishes nothing twice."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, process_jobs, provisioned, succeeded, wait_for_states
from dags.waiting import FORGETFUL, FULL, PROGRESS, UNAUDITED, queue

from airflow_provider_jetstream.jetstream import connect
from airflow_provider_jetstream.worker import Worker
from testbed.face import stream_info
from testbed.queues import eventually, running_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.airflow import Airflow

RUN = "waiting"


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


async def last_sequence(settings: ConnectionSettings, stream: str) -> int:
    """Return the sequence of the last message that a stream has stored."""
    async with connect(settings) as connection:
        return int((await stream_info(connection, stream))["state"]["last_seq"])


async def make_letter(settings: ConnectionSettings, queue: WorkQueue) -> None:
    """Make a dead letter."""
    await provisioned(settings, queue)
    async with connect(settings) as connection:
        await connection.client.jetstream().publish(queue.name, b"job")
    await process_jobs(settings, queue, 1, fail=True)


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings, pool: ThreadPoolExecutor) -> None:
    """Start all runs at once, since each spends its time waiting."""
    airflow.wait_for_dags("deaths", "too_late", "full", "forgetful")
    failing = ("dead_inline", "dead_blocking", "dead_allowed")
    for name in (*failing, "dead_deferred", "late_deferred", "late_blocking"):
        asyncio.run(provisioned(settings, queue(name)))
    for declared in (FULL, FORGETFUL):
        asyncio.run(provisioned(settings, declared))
    for name in failing:
        pool.submit(asyncio.run, process_jobs(settings, queue(name), 3, fail=True))
    for name in ("late_deferred", "late_blocking"):
        pool.submit(asyncio.run, process_jobs(settings, queue(name), 2))
    for late in (queue("late_redrive"), UNAUDITED):
        asyncio.run(make_letter(settings, late))
    for dag_id in ("too_late", "deaths", "forgetful"):
        airflow.trigger(dag_id, run_id=RUN)


@pytest.mark.parametrize("task_id", ["late_deferred", "late_blocking"])
def test_a_timeout_names_the_missing_jobs_and_is_retried(airflow: Airflow, task_id: str) -> None:
    wait_for_states(airflow, "too_late", RUN, {task_id: "up_for_retry"})
    log = log_text(airflow, "too_late", RUN, task_id)
    assert (
        f"DeadlineError: JS202 expected every job to end within 0:00:04, found 3 of {task_id} that did not (sequences"
        " 3-5): see whether workers take them, or raise wait_timeout; a retry goes on waiting"
    ) in log
    assert ("Pausing task as DEFERRED" in log) == (task_id == "late_deferred")


def test_a_retry_publishes_nothing_twice_and_resumes_waiting(airflow: Airflow, settings: ConnectionSettings) -> None:
    airflow.trigger("full", run_id=RUN)
    wait_for_states(airflow, "full", RUN, {"full": "up_for_retry"})
    log = log_text(airflow, "full", RUN, "full")
    assert "PublishIncompleteError: JS402 3 of 5 jobs are stored in full (sequences 1-3); 2 are not known to be:" in log
    for index in (3, 4):
        assert re.search(rf"job {index} \(id [\w-]{{22}}\) is not stored: full is full \(max", log)
    processed = asyncio.run(process_jobs(settings, FULL, 3))
    processed += asyncio.run(process_jobs(settings, FULL, 2))
    succeeded(airflow, "full", RUN)
    assert sorted(job.body.decode() for job in processed) == [f"full-{number}" for number in range(5)]
    result = airflow.xcom("full", RUN, "full")
    assert (result["published"], result["duplicates"]) == (5, 3)
    assert (result["completed"], result["dead"]) == (5, 0)
    (task,) = airflow.task_instances("full", RUN)
    assert task["try_number"] > 1
    assert asyncio.run(last_sequence(settings, "full")) == 5


@pytest.mark.parametrize("task_id", ["dead_inline", "dead_blocking", "dead_deferred"])
def test_more_dead_letters_than_max_dead_fail_the_task_without_a_retry(
    airflow: Airflow, settings: ConnectionSettings, task_id: str
) -> None:
    if task_id == "dead_deferred":
        wait_for_states(airflow, "deaths", RUN, {task_id: "deferred"})
        asyncio.run(process_jobs(settings, queue(task_id), 3, fail=True))
    wait_for_states(airflow, "deaths", RUN, {task_id: "failed"})
    log = log_text(airflow, "deaths", RUN, task_id)
    assert re.search(
        r"AirflowFailException: JS131 expected at most 1 dead letters, found [23]:"
        r"( job [\w-]{22} \(sequence \d\): ValueError: this job can't be done;){2,3}"
        " see the dead letter queue, fix the cause, then redrive",
        log,
    )
    (task,) = [task for task in airflow.task_instances("deaths", RUN) if task["task_id"] == task_id]
    assert (task["try_number"], task["max_tries"]) == (1, 1)


def test_tolerated_dead_letters_are_part_of_the_result(airflow: Airflow) -> None:
    wait_for_states(airflow, "deaths", RUN, {"dead_allowed": "success"})
    result = airflow.xcom("deaths", RUN, "dead_allowed")
    assert (result["completed"], result["dead"], result["dead_sequences"]) == (0, 3, [[1, 3]])
    assert result["dead_reasons"] == dict.fromkeys(("1", "2", "3"), "1 deliveries to worker")


def test_without_a_publish_log_the_task_warns_of_retries_after_the_duplicate_window(airflow: Airflow) -> None:
    wait_for_states(airflow, "forgetful", RUN, {"forgetful": "success"})
    warning = "A retry comes 1:00:00 after a failure, and forgetful forgets the ids of jobs after 2m: "
    assert warning in log_text(airflow, "forgetful", RUN, "forgetful")
    assert "forgets the ids" not in log_text(airflow, "deaths", RUN, "dead_allowed")


async def test_the_log_of_a_deferred_task_says_how_far_its_job_is(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    airflow.wait_for_dags("progress")
    await provisioned(settings, PROGRESS)
    done, run_id = asyncio.Event(), airflow.trigger("progress")

    async def say(job: Delivery) -> None:
        job.progress(0.4, "page 12 of 30")
        await done.wait()

    def logged() -> bool:
        try:
            log = log_text(airflow, "progress", run_id, "progress")
        except FileNotFoundError:
            return False
        _, _, deferred = log.partition("Pausing task as DEFERRED")
        return "job 1 of progress, attempt 1: 40%, page 12 of 30" in deferred

    async with running_worker(Worker(PROGRESS, "worker", say, settings)):
        await eventually(logged, 180)
        done.set()
        await asyncio.to_thread(succeeded, airflow, "progress", run_id)
