"""One report per job: as an XCom also of a failed task, in the failure's text, behind a link, and to map over."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from airflow_steps import log_text, process_jobs, provisioned, succeeded, wait_for, wait_for_states
from dags.job_reports import MANY, queue

from airflow_provider_jetstream.jetstream import connect
from testbed.dead_letters import stream_messages
from testbed.queues import pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

RUN = "reports"
WAITING = ("reported_dead", "reported_acks", "reported_parts")


async def acknowledge(settings: ConnectionSettings, name: str, count: int) -> None:
    """Do jobs as a worker that knows nothing of this package."""
    async with connect(settings) as connection:
        while count:
            messages = await pull_jobs(connection, queue(name), min(count, 500), within=60)
            await asyncio.gather(*(message.ack_sync(timeout=30) for message in messages))
            count -= len(messages)


@pytest.fixture(scope="module", autouse=True)
def run(airflow: Airflow, settings: ConnectionSettings) -> None:
    airflow.wait_for_dags("job_reports", "hook_publishing")
    for name in (*WAITING, "hooked"):
        asyncio.run(provisioned(settings, queue(name)))
    for dag_id in ("job_reports", "hook_publishing"):
        airflow.trigger(dag_id, run_id=RUN)
    wait_for_states(airflow, "job_reports", RUN, dict.fromkeys(WAITING, "deferred"))
    asyncio.run(process_jobs(settings, queue("reported_dead"), 7, fail=True))
    asyncio.run(acknowledge(settings, "reported_acks", 3))
    asyncio.run(acknowledge(settings, "reported_parts", MANY))


def mapped_results(airflow: Airflow, task_id: str, count: int) -> list[Any]:
    def results() -> list[Any] | None:
        tasks = [task for task in airflow.task_instances("job_reports", RUN) if task["task_id"] == task_id]
        done = [task for task in tasks if task["state"] == "success"]
        assert not [task for task in tasks if task["state"] in ("failed", "upstream_failed")]
        if len(done) < count or len(tasks) != count:
            return None
        return [airflow.xcom("job_reports", RUN, task_id, map_index=task["map_index"]) for task in done]

    return wait_for(results, f"{count} mapped tasks of {task_id}")


def test_a_failure_names_the_first_five_jobs_with_their_errors_and_counts_the_rest(airflow: Airflow) -> None:
    wait_for_states(airflow, "job_reports", RUN, {"reported_dead": "failed"})
    text = log_text(airflow, "job_reports", RUN, "reported_dead")
    named = "; ".join(
        f"job reported_dead-{number} (sequence {number + 1}): ValueError: this job can't be done" for number in range(5)
    )
    assert f"JS131 expected at most 6 dead letters, found 7: {named}; and 2 more; see the dead letter queue" in text


def test_a_failed_task_has_a_report_on_each_job_as_an_xcom(airflow: Airflow) -> None:
    wait_for_states(airflow, "job_reports", RUN, {"reported_dead": "failed"})
    reports = airflow.xcom("job_reports", RUN, "reported_dead", "job_reports")
    assert (reports["jobs"], reports["states"]) == (7, {"dead": 7})
    assert reports["reports"][6] == {
        "id": "reported_dead-6",
        "sequence": 7,
        "state": "dead",
        "attempts": 1,
        "error_class": "ValueError",
        "error_message": "this job can't be done",
        "result": None,
        "result_at": None,
    }


def test_after_a_failure_a_task_is_mapped_over_the_jobs_that_failed(airflow: Airflow) -> None:
    treated = mapped_results(airflow, "treat_dead", 7)
    assert sorted(treated) == [f"reported_dead-{number} ValueError" for number in range(7)]


def test_a_task_is_mapped_over_the_reports_that_it_returns(airflow: Airflow) -> None:
    treated = mapped_results(airflow, "treat_acknowledged", 3)
    # The worker only acknowledged them; the ids are the publisher's.
    assert sorted(treated) == [f"reported_acks-{number} None" for number in range(3)]


def test_reports_that_are_too_many_for_an_xcom_are_parts_to_map_over(airflow: Airflow) -> None:
    assert sum(mapped_results(airflow, "count", 2)) == MANY
    document = airflow.xcom("job_reports", RUN, "reported_parts", "job_reports")
    returned = airflow.xcom("job_reports", RUN, "reported_parts")
    # As Airflow shows what isn't plain JSON.
    assert "__classname__" not in json.dumps([document, returned])
    assert (document["jobs"], document["states"], len(document["parts"])) == (MANY, {"completed": MANY}, 2)


def test_a_link_leads_to_the_reports(airflow: Airflow) -> None:
    wait_for_states(airflow, "job_reports", RUN, {"reported_dead": "failed"})
    links = airflow.api("GET", f"dags/job_reports/dagRuns/{RUN}/taskInstances/reported_dead/links")["extra_links"]
    address = urlsplit(links["JetStream job reports"])
    assert address.path == f"/dags/job_reports/runs/{RUN}/tasks/reported_dead/xcom"


async def test_the_tries_of_a_task_publish_once_what_its_own_code_publishes_through_the_hook(
    airflow: Airflow, settings: ConnectionSettings
) -> None:
    await asyncio.to_thread(succeeded, airflow, "hook_publishing", RUN)
    assert airflow.xcom("hook_publishing", RUN, "publishing_twice") == [3, 0]
    async with connect(settings) as connection:
        bodies = [message.data for message in await stream_messages(connection, "hooked")]
    assert bodies == [b"c", b"a", b"b", b"a"]
