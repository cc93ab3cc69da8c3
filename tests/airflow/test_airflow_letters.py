"""The sensor fires when a dead letter appears, however it waits, and the redrive operator brings letters back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from airflow_steps import do_jobs, log_text, provisioned, succeeded, task_states, wait_for_states
from dags.letters import LETTERS

from airflow_provider_jetstream.jetstream.stored import stream_info

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.connection import Connection, ConnectionSettings
    from testbed.airflow import Airflow


async def die(connection: Connection, settings: ConnectionSettings, body: bytes) -> None:
    """Let a job become a dead letter."""
    await connection.client.jetstream().publish("letters", body)
    assert [job.body for job in await do_jobs(settings, LETTERS, 1, fail=True)] == [body]


@pytest.fixture(scope="module")
def without_letters(airflow: Airflow) -> str:
    airflow.wait_for_dags("no_letters")
    return airflow.trigger("no_letters")


async def test_letters_are_sensed_and_brought_back(
    airflow: Airflow, settings: ConnectionSettings, connection: Connection, without_letters: str
) -> None:
    await provisioned(settings, LETTERS)
    airflow.wait_for_dags("letters")
    run_id = airflow.trigger("letters")
    waiting = {"deferred": "deferred", "poking": "running", "rescheduled": "up_for_reschedule"}
    wait_for_states(airflow, "letters", run_id, waiting | {"deferred_for_two": "deferred"})

    await die(connection, settings, b"first")
    wait_for_states(airflow, "letters", run_id, dict.fromkeys(waiting, "success") | {"deferred_for_two": "deferred"})
    for task_id in waiting:
        assert airflow.xcom("letters", run_id, task_id) == {"dead": 1, "sequences": [[1, 1]], "dismissed": 0}

    await die(connection, settings, b"second")
    wait_for_states(airflow, "letters", run_id, {"at_once": "success", "redrive": "deferred"})
    both = {"dead": 2, "sequences": [[1, 2]], "dismissed": 0}
    assert airflow.xcom("letters", run_id, "deferred_for_two") == airflow.xcom("letters", run_id, "at_once") == both
    # Enough are there: a deferral would only cost time.
    assert "Pausing task as DEFERRED" in log_text(airflow, "letters", run_id, "deferred_for_two")
    assert "Pausing task as DEFERRED" not in log_text(airflow, "letters", run_id, "at_once")

    # The redriven jobs wait for a worker, and the task for them.
    assert (await stream_info(connection, "letters"))["state"]["messages"] == 2
    assert sorted(job.body for job in await do_jobs(settings, LETTERS, 2)) == [b"first", b"second"]
    succeeded(airflow, "letters", run_id)
    result = airflow.xcom("letters", run_id, "redrive")
    assert (result["redriven"], result["completed"], result["dead"], result["failed"]) == (2, 2, 0, 0)
    assert (result["from_sequences"], result["to_sequences"]) == ([[1, 2]], [[3, 4]])
    assert airflow.xcom("letters", run_id, "nothing_left")["redriven"] == 0
    assert (await stream_info(connection, "letters"))["state"]["messages"] == 0


def test_a_deferred_sensor_that_sees_nothing_fails_or_skips(airflow: Airflow, without_letters: str) -> None:
    run = airflow.wait_for_run("no_letters", without_letters)
    assert run["state"] == "failed"
    states = task_states(airflow, "no_letters", without_letters)
    assert (states["skipped"], states["failed"]) == ("skipped", "failed")
