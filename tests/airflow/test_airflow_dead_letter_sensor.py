"""The sensor succeeds when a dead letter appears, in every mode, and the redrive operator redrives letters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import log_text, process_jobs, provisioned, succeeded, task_states, wait_for_states
from dags.letters import ABANDONED, LETTERS

from testbed.face import stream_info

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection
    from testbed.received_stats import ReceivedGauges


async def make_letter(connection: NatsPyConnection, settings: ConnectionSettings, body: bytes) -> None:
    """Make a dead letter."""
    await connection.client.jetstream().publish("letters", body)
    assert [job.body for job in await process_jobs(settings, LETTERS, 1, fail=True)] == [body]


def counted(airflow: Airflow, run_id: str, task_id: str) -> dict[str, Any]:
    """Return the counts of a sensor's result."""
    result = airflow.xcom("letters", run_id, task_id)
    return {name: result[name] for name in ("dead", "sequences", "dismissed", "uncertain")}


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings) -> dict[str, str]:
    """Start all runs at once, since each spends its time waiting; return their ids."""
    for queue in (LETTERS, ABANDONED):
        asyncio.run(provisioned(settings, queue))
    dag_ids = ("letters", "abandoned", "no_letters")
    airflow.wait_for_dags(*dag_ids)
    return {dag_id: airflow.trigger(dag_id) for dag_id in dag_ids}


async def test_letters_are_sensed_and_redriven(
    airflow: Airflow,
    settings: ConnectionSettings,
    connection: NatsPyConnection,
    runs: dict[str, str],
    stats: ReceivedGauges,
) -> None:
    run_id = runs["letters"]
    waiting = {"deferred": "deferred", "poking": "running", "rescheduled": "up_for_reschedule"}
    wait_for_states(airflow, "letters", run_id, waiting | {"deferred_for_two": "deferred"})

    await make_letter(connection, settings, b"first")
    wait_for_states(airflow, "letters", run_id, dict.fromkeys(waiting, "success") | {"deferred_for_two": "deferred"})
    for task_id in waiting:
        assert counted(airflow, run_id, task_id) == {"dead": 1, "sequences": [[1, 1]], "dismissed": {}, "uncertain": 0}
        diagnosis = airflow.xcom("letters", run_id, task_id)["diagnosis"]
        assert (diagnosis["dead"], diagnosis["groups"][0]["consumer"]) == (1, "worker")
        assert "1 dead letters, one " in diagnosis["headline"]
        assert diagnosis["groups"][0]["advice"] in diagnosis["text"]
        assert all(evidence in diagnosis["text"] for evidence in diagnosis["groups"][0]["evidence"])

    await make_letter(connection, settings, b"second")
    wait_for_states(airflow, "letters", run_id, {"at_once": "success", "redrive": "deferred"})
    both = {"dead": 2, "sequences": [[1, 2]], "dismissed": {}, "uncertain": 0}
    assert counted(airflow, run_id, "deferred_for_two") == counted(airflow, run_id, "at_once") == both
    # There are enough letters: a deferral would only cost time.
    assert "Pausing task as DEFERRED" in log_text(airflow, "letters", run_id, "deferred_for_two")
    assert "Pausing task as DEFERRED" not in log_text(airflow, "letters", run_id, "at_once")

    # The redriven jobs wait for a worker, and the task waits for the jobs.
    assert (await stream_info(connection, "letters"))["state"]["messages"] == 2
    assert sorted(job.body for job in await process_jobs(settings, LETTERS, 2)) == [b"first", b"second"]
    succeeded(airflow, "letters", run_id)
    result = airflow.xcom("letters", run_id, "redrive")
    assert (result["redriven"], result["completed"], result["dead"], result["failed"]) == (2, 2, 0, 0)
    assert (result["from_sequences"], result["to_sequences"]) == ([[1, 2]], [[3, 4]])
    assert airflow.xcom("letters", run_id, "nothing_left")["redriven"] == 0
    # StatsD has no tags: the queue and the outcome are in the names.
    seen = stats.of("jetstream_queue_dead_letters.letters")
    assert {name: sorted(values) for name, values in seen.items()} == {
        "airflow.jetstream_queue_dead_letters.letters": [1, 1, 1, 2, 2]
    }
    sent = stats.of("jetstream_redrive_letters.letters.")
    redriven, completed = (
        sent[f"airflow.jetstream_redrive_letters.letters.{name}"] for name in ("redriven", "completed")
    )
    assert (redriven[:2], completed[:2]) == ([2, 2], [0, 2])
    assert (await stream_info(connection, "letters"))["state"]["messages"] == 0


def test_a_deferred_sensor_without_letters_fails_or_skips_at_its_timeout(
    airflow: Airflow, runs: dict[str, str]
) -> None:
    run_id = runs["no_letters"]
    run = airflow.wait_for_run("no_letters", run_id)
    assert run["state"] == "failed"
    states = task_states(airflow, "no_letters", run_id)
    assert (states["skipped"], states["failed"]) == ("skipped", "failed")
