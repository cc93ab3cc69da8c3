"""Arguments that are templates, inside of jobs too, and queues' files beside the DAG's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml
from airflow_steps import QUEUES, log_text, succeeded, task_states, wait_for

from testbed.dead_letters import stream_messages
from testbed.face import stream_info

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection
    from testbed.airflow import Airflow

RUN = "arguments"


@pytest.fixture(scope="module")
def run_id(airflow: Airflow) -> str:
    dags = ("argument_forms", "wrong_arguments")
    airflow.wait_for_dags(*dags)
    airflow.trigger("argument_forms", run_id=RUN)
    succeeded(airflow, "argument_forms", RUN)
    airflow.trigger("wrong_arguments", run_id=RUN)
    wait_for(
        lambda: set(task_states(airflow, "wrong_arguments", RUN).values()) <= {"failed", "success"}, "the wrong tasks"
    )
    return RUN


async def test_templates_inside_of_a_job_are_rendered(connection: Connection, run_id: str) -> None:
    (job,) = await stream_messages(connection, "arguments", "arguments.in_jobs.ada")
    # The other task's result keeps its type, and the publishing task ran after it.
    assert json.loads(job.data) == {"hello": "ada", "size": 42}
    assert (job.header("Job-Id"), job.header("Name")) == (f"{run_id}-3", "ada")
    (plain,) = await stream_messages(connection, "arguments", "arguments.in_jobs")
    assert (plain.data, plain.header("Job-Id")) == (b"as it is: {0}", "plain")


async def test_the_jobs_of_a_mapped_task_are_rendered_for_each_of_its_instances(
    connection: Connection, run_id: str
) -> None:
    assert run_id
    assert sorted(message.data for message in await stream_messages(connection, "arguments", "arguments.mapped")) == [
        b"ada 0",
        b"ada 1",
    ]


def test_jobs_and_queues_are_shown_as_their_author_wrote_them(airflow: Airflow, run_id: str) -> None:
    tasks = f"dags/argument_forms/dagRuns/{run_id}/taskInstances"
    assert airflow.api("GET", f"{tasks}/in_jobs")["rendered_fields"]["jobs"] == [
        {
            "body": {"hello": "ada", "size": 42},
            "subject": "arguments.in_jobs.ada",
            "id": f"{run_id}-3",
            "headers": {"Name": "ada"},
        },
        {"body": "as it is: {0}", "id": "plain"},
    ]
    assert airflow.api("GET", f"{tasks}/mapped/1")["rendered_fields"]["jobs"] == [{"body": "ada 1"}]
    fields = airflow.api("GET", f"{tasks}/shown")["rendered_fields"]
    assert fields["jobs"][:3] == [
        {"body": "text", "subject": "arguments.shown"},
        "bytes",
        {"body": {"base64": "/w=="}},
    ]
    # Airflow cuts a text off that is too long; a list stays one.
    assert fields["jobs"][-2] == "x" * 100
    assert fields["jobs"][-1] == f"… and {1003 - len(fields['jobs']) + 1} more"
    declared = yaml.safe_load((QUEUES / "arguments.yaml").read_text(encoding="utf-8"))
    assert fields["work_queue"] == declared


def test_the_limits_of_a_wait_and_of_a_sensor_may_be_templates(airflow: Airflow, run_id: str) -> None:
    states = task_states(airflow, "argument_forms", run_id)
    assert (states["limits"], states["letters"]) == ("success", "skipped")


@pytest.mark.parametrize(
    ("task_id", "problem"),
    [
        ("limit_is_no_number", "JS115 expected a whole number for max_dead, found 'many'"),
        ("limit_is_nothing", "JS115 expected a whole number as max_dead, found 'None': where it is a template"),
        ("timeout_is_negative", "JS115 wait_timeout: expected"),
        ("more_than_jobs", "JS115 expected at least as many jobs as min_completed, found 2 jobs and 3"),
        ("id_is_nothing", "JS120 expected a value for id of a job, found that its template"),
        ("subject_is_wrong", "JS120 job 1 can't be published to 'ada.*'"),
    ],
)
async def test_a_template_that_renders_to_nonsense_fails_before_the_first_job_is_sent(
    airflow: Airflow, connection: Connection, run_id: str, task_id: str, problem: str
) -> None:
    assert task_states(airflow, "wrong_arguments", run_id)[task_id] == "failed"
    assert problem in log_text(airflow, "wrong_arguments", run_id, task_id)
    assert await stream_messages(connection, "arguments", f"arguments.{task_id}") == []


async def test_a_queues_file_is_beside_the_dags(airflow: Airflow, connection: Connection, run_id: str) -> None:
    assert "create stream arguments" in airflow.xcom("argument_forms", run_id, "provision")
    assert (await stream_info(connection, "arguments"))["config"]["subjects"] == ["arguments.>"]
    assert airflow.xcom("argument_forms", run_id, "from_a_hook") is True
