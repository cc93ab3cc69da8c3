"""Jobs that are published in one task and awaited in another, and waits that nobody could end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import log_text, process_jobs, provisioned, succeeded, wait_for_states
from dags.elsewhere import ENDLESS, MODES, queue

from airflow_provider_jetstream.jetstream import connect, publish_with_handle
from testbed.dead_letters import stream_messages
from testbed.queues import store_completion

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

RUN = "elsewhere"
SENSORS = ("sensor", "blocking_sensor", "rescheduled_sensor", "sensor_of_hook")
TASKS = ("publish", "publish_by_hook", "wait_by_hook", *SENSORS)


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Start all runs at once, since each spends its time waiting."""
    airflow.wait_for_dags("elsewhere", "elsewhere_still", "elsewhere_over", "endless")
    for name in ("elsewhere", "late", "died", *ENDLESS):
        asyncio.run(provisioned(settings, queue(name)))
    asyncio.run(publish_one(settings))
    for dag_id in ("endless", "elsewhere"):
        airflow.trigger(dag_id, run_id=RUN)


async def publish_one(settings: ConnectionSettings) -> None:
    """Publish the job that keeps a queue from being drained."""
    async with connect(settings) as connection:
        await connection.client.jetstream().publish("overdue_sensor.taken", b"job")


def test_jobs_are_awaited_in_other_tasks_and_in_another_dag(airflow: Airflow, settings: ConnectionSettings) -> None:
    wait_for_states(airflow, "elsewhere", RUN, {"publish": "success", "publish_by_hook": "success"})
    handle = airflow.xcom("elsewhere", RUN, "publish")["handle"]
    airflow.trigger("elsewhere_still", run_id=RUN, conf={"handle": handle, "minutes": 10})
    waiting = {"sensor": "deferred", "sensor_of_hook": "deferred", "rescheduled_sensor": "up_for_reschedule"}
    wait_for_states(airflow, "elsewhere", RUN, waiting)
    asyncio.run(process_jobs(settings, queue("elsewhere"), 6))
    succeeded(airflow, "elsewhere", RUN)
    succeeded(airflow, "elsewhere_still", RUN)
    results = {task_id: airflow.xcom("elsewhere", RUN, task_id) for task_id in TASKS}
    assert results["wait_by_hook"] == 3
    for task_id in SENSORS:
        assert (results[task_id]["jobs"], results[task_id]["completed"], results[task_id]["awaited"]) == (3, 3, 0)
    # Each waits for its own jobs only.
    published = results["publish"]["sequences"]
    for task_id in ("sensor", "blocking_sensor", "rescheduled_sensor"):
        assert results[task_id]["completed_sequences"] == published
    assert results["sensor_of_hook"]["completed_sequences"] != published
    assert airflow.xcom("elsewhere_still", RUN, "other_dag")["completed_sequences"] == published


def test_the_execution_timeout_ends_a_deferred_wait(airflow: Airflow) -> None:
    wait_for_states(airflow, "endless", RUN, {"overdue": "failed"})
    assert (
        "DeadlineError: JS202 expected every job to end within the execution_timeout of 0:00:10, found 3 of overdue"
        " that did not (sequences 1-3): see whether workers take them, or raise execution_timeout"
    ) in log_text(airflow, "endless", RUN, "overdue")


def test_the_execution_timeout_ends_a_deferred_sensor_and_lets_it_be_tried_again(airflow: Airflow) -> None:
    wait_for_states(airflow, "endless", RUN, {"overdue_sensor": "up_for_retry"})
    assert "DeadlineError: JS202 expected the sensor to succeed within its execution_timeout of 0:00:10" in log_text(
        airflow, "endless", RUN, "overdue_sensor"
    )


def test_a_subject_that_no_consumer_takes_ends_the_wait_and_a_retry_goes_on(airflow: Airflow) -> None:
    wait_for_states(airflow, "endless", RUN, {"untaken": "up_for_retry"})
    log = log_text(airflow, "endless", RUN, "untaken")
    assert "JobsStalledError: JS221 expected every awaited job of untaken to be delivered, found for 1 s that " in log
    assert "no consumer takes its subject untaken.nobody (consumers: worker)" in log
    assert "The jobs stay stored, so don't publish them again; a retry goes on waiting" in log


def test_a_queue_that_is_deleted_or_created_anew_during_the_wait_fails_the_task(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    wait_for_states(airflow, "endless", RUN, {"deleted": "deferred", "anew": "deferred"})
    asyncio.run(replace_queues(settings))
    wait_for_states(airflow, "endless", RUN, {"deleted": "failed", "anew": "failed"})
    assert "AirflowFailException: JS137 expected stream deleted with the awaited jobs, found for 1 s" in log_text(
        airflow, "endless", RUN, "deleted"
    )
    log = log_text(airflow, "endless", RUN, "anew")
    assert "AirflowFailException: JS137 expected stream anew to be the one that stored the awaited jobs" in log
    assert "a stranger's result" not in log


async def replace_queues(settings: ConnectionSettings) -> None:
    """Delete two queues, create one of them anew, and let the jobs of others in it complete."""
    async with connect(settings) as connection:
        for name in ("deleted", "anew"):
            await connection.api(f"STREAM.DELETE.{name}")
        await provisioned(settings, queue("anew"))
        for number in range(1, 4):
            await connection.client.jetstream().publish("anew.taken", b"of somebody else")
            await store_completion(connection, queue("anew"), number, result="a stranger's result")


def test_a_failed_wait_cancels_what_still_waits(airflow: Airflow, settings: ConnectionSettings) -> None:
    wait_for_states(airflow, "endless", RUN, {"unwanted": "deferred"})
    asyncio.run(process_jobs(settings, queue("unwanted"), 1, fail=True))
    wait_for_states(airflow, "endless", RUN, {"unwanted": "failed"})
    assert asyncio.run(cancelled(settings)) == {"cancelled.unwanted.2", "cancelled.unwanted.3"}


async def cancelled(settings: ConnectionSettings, name: str = "unwanted") -> set[str]:
    """Return the subjects on which jobs are cancelled."""
    async with connect(settings) as connection:
        events = queue(name).events
        assert events
        return {message.subject for message in await stream_messages(connection, events.name, f"cancelled.{name}.>")}


async def published(settings: ConnectionSettings, name: str) -> dict[str, Any]:
    """Publish two jobs as another program does, and return their handle."""
    async with connect(settings) as connection:
        report = await publish_with_handle(connection, queue(name), ["a", "b"], subject=f"{name}.taken")
        assert report.handle is not None
        return report.handle


def test_a_sensor_of_jobs_ends_in_each_mode_as_airflows_sensors_do(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    handles = {name: asyncio.run(published(settings, name)) for name in ("late", "died")}
    airflow.trigger("elsewhere_over", run_id=RUN, conf=handles)
    wait_for_states(airflow, "elsewhere_over", RUN, {"poking_died": "running", "deferred_died": "deferred"}, 400.0)
    asyncio.run(process_jobs(settings, queue("died"), 1, fail=True))
    ends = {
        f"{mode}_{end}{suffix}": state
        for mode in MODES
        for end in ("late", "died")
        for suffix, state in (("", "failed"), ("_soft", "skipped"))
    }
    wait_for_states(airflow, "elsewhere_over", RUN, ends, timeout=400.0)
    for mode in MODES:
        late = log_text(airflow, "elsewhere_over", RUN, f"{mode}_late")
        assert "AirflowSensorTimeout: expected every job to end within 0:00:03, found 2 of late that did not" in late
        assert "raise timeout; a task that is cleared goes on waiting" in late
        died = log_text(airflow, "elsewhere_over", RUN, f"{mode}_died")
        assert "AirflowFailException: JS131 expected at most 0 dead letters, found 1" in died
        assert airflow.xcom("elsewhere_over", RUN, f"{mode}_died_soft", key="job_reports")["states"]["dead"] == 1
    # No retry goes on waiting after the time limit of a sensor.
    assert asyncio.run(cancelled(settings, "late")) == {"cancelled.late.1", "cancelled.late.2"}
