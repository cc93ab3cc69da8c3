"""Redrives in a real Airflow: killed, stopped, templated, cleared and mapped; no letter is lost or redriven twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import process_jobs, provisioned, succeeded, wait_for, wait_for_states
from dags.redrives import LETTERS, queue

from airflow_provider_jetstream.jetstream import connect
from testbed.dead_letters import stream_messages
from testbed.face import open_audit, stream_info
from testbed.queues import eventually

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.airflow import Airflow

RUN = "redriving"
BODIES = [f"job-{number}" for number in range(LETTERS)]


async def make_letters(settings: ConnectionSettings, name: str, *jobs: tuple[str, str]) -> None:
    """Make dead letters of jobs, each given as the last token of its subject and its body."""
    declared = await provisioned(settings, queue(name))
    async with connect(settings) as connection:
        for end, body in jobs:
            await connection.client.jetstream().publish(f"{name}.{end}", body.encode())
    await process_jobs(settings, declared, len(jobs), fail=True)


@pytest.fixture(scope="module", autouse=True)
def runs(airflow: Airflow, settings: ConnectionSettings) -> None:
    """Start all runs at once; the first two are interrupted by their tests, which therefore start them."""
    many = [("one", body) for body in BODIES]

    async def prepare() -> None:
        await asyncio.gather(
            make_letters(settings, "cut_off", *many),
            make_letters(settings, "marked_failed", *many),
            make_letters(settings, "as_text", ("one", "first"), ("one", "second"), ("too.deep", "other")),
            make_letters(settings, "patched", ("one", '{"f":1.10,"currency":"usd"}'), ("one", '{"f":2}')),
            make_letters(settings, "cleared", ("one", "first")),
            make_letters(settings, "by_index", *many[:4]),
        )

    asyncio.run(prepare())
    dag_ids = ("cut_off", "marked_failed", "as_text", "patched", "cleared", "by_index")
    airflow.wait_for_dags(*dag_ids)
    for dag_id in dag_ids[2:]:
        airflow.trigger(dag_id, run_id=RUN)


def instance(airflow: Airflow, dag_id: str) -> dict[str, Any]:
    """Return the only task instance of a run."""
    (task,) = airflow.task_instances(dag_id, RUN)
    return task


async def redriven_count(connection: Connection, name: str, before: int) -> int:
    """Count the jobs that a redrive has stored."""
    return int((await stream_info(connection, name))["state"]["last_seq"]) - before


async def wait_for_redriven(connection: Connection, name: str, count: int) -> None:
    """Wait until so many jobs are redriven."""

    async def reached() -> bool:
        return await redriven_count(connection, name, LETTERS) >= count

    await eventually(reached, 90)


async def test_the_retry_of_a_killed_process_continues_and_waits_for_the_jobs_of_both(
    airflow: Airflow, settings: ConnectionSettings, connection: Connection
) -> None:
    airflow.trigger("cut_off", run_id=RUN)
    await wait_for_redriven(connection, "cut_off", 3)
    os.kill(instance(airflow, "cut_off")["pid"], signal.SIGKILL)
    # They end before the retry begins.
    processed = await process_jobs(settings, queue("cut_off"), 2)
    assert await redriven_count(connection, "cut_off", LETTERS) < LETTERS

    def waits_again() -> bool:
        task = instance(airflow, "cut_off")
        return (task["state"], task["try_number"]) == ("deferred", 2)

    # The lease of the process that was killed runs out after half a minute.
    await asyncio.to_thread(wait_for, waits_again, "the second try to wait", 120)
    processed += await process_jobs(settings, queue("cut_off"), LETTERS - 2)
    await asyncio.to_thread(succeeded, airflow, "cut_off", RUN)
    result = airflow.xcom("cut_off", RUN, "cut_off")
    assert (result["redriven"], result["completed"], result["dead"], result["failed"]) == (LETTERS, LETTERS, 0, 0)
    assert 3 <= result["resumed"] < LETTERS
    assert Counter(job.body.decode() for job in processed) == dict.fromkeys(BODIES, 1)
    assert await stream_messages(connection, "cut_off") == []


async def test_arguments_that_are_rendered_as_text_are_parsed(airflow: Airflow, connection: Connection) -> None:
    await asyncio.to_thread(succeeded, airflow, "as_text", RUN)
    (group,) = airflow.xcom("as_text", RUN, "sense")["groups"]
    assert group.pop("oldest_age_seconds") > 0
    assert group == {"group": {"subject": "as_text.one", "error_class": "ValueError"}, "count": 2}
    result = airflow.xcom("as_text", RUN, "as_text")
    assert (result["redriven"], result["from_sequences"]) == (2, [[1, 2]])
    assert [(message.subject, message.data) for message in await stream_messages(connection, "as_text")] == [
        ("as_text.too.deep", b"other"),
        ("as_text.again", b"first"),
        ("as_text.again", b"second"),
    ]
    audit = await open_audit(connection, queue("as_text"))
    record = await audit.last_record(1)
    assert record is not None
    assert (record.why, record.run) == ("as_text", result["run"])
    assert record.who == {
        "dag_id": "as_text",
        "run_id": RUN,
        "task_id": "as_text",
        "map_index": -1,
        "try_number": 1,
        "person": "admin",
    }


async def test_a_task_that_is_cleared_after_its_success_starts_a_new_redrive(
    airflow: Airflow, settings: ConnectionSettings, connection: Connection
) -> None:
    wait_for_states(airflow, "cleared", RUN, {"cleared": "deferred"})
    await process_jobs(settings, queue("cleared"), 1)
    await asyncio.to_thread(succeeded, airflow, "cleared", RUN)
    first = airflow.xcom("cleared", RUN, "cleared")
    await make_letters(settings, "cleared", ("one", "second"))
    airflow.api(
        "POST",
        "dags/cleared/clearTaskInstances",
        {"dry_run": False, "dag_run_id": RUN, "task_ids": ["cleared"], "only_failed": False, "reset_dag_runs": True},
    )
    wait_for_states(airflow, "cleared", RUN, {"cleared": "deferred"})
    assert [job.body for job in await process_jobs(settings, queue("cleared"), 1)] == [b"second"]
    await asyncio.to_thread(succeeded, airflow, "cleared", RUN)
    second = airflow.xcom("cleared", RUN, "cleared")
    assert first["run"] == second["run"]
    assert (first["redriven"], first["to_sequences"]) == (1, [[2, 2]])
    assert (second["redriven"], second["to_sequences"], second["resumed"]) == (1, [[4, 4]], 0)
