"""What operators refuse when a DAG is parsed, and leave to the task where it is a template."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream.errors import JobError, RedriveRequestError, SelectionError
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.tasks.arguments import parse_job_ids, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable

TEMPLATE = "{{ params.value }}"
# Only the machine of the task has it.
ELSEWHERE = "/srv/queues/queue.yaml"


QUEUE = {
    "name": "q",
    "subjects": ["q.>"],
    "consumers": [{"name": "w", "max_deliver": 2}],
    "dead_letters": "q-dlq",
    "events": "q-events",
}
PUBLISH = partial(JetStreamPublishOperator, task_id="t", work_queue=QUEUE, jobs=[])
REDRIVE = partial(JetStreamRedriveOperator, task_id="t", work_queue=QUEUE)
PROVISION = partial(JetStreamProvisionOperator, task_id="t", work_queue=QUEUE)
DEAD_LETTERS = partial(JetStreamDeadLetterSensor, task_id="t", work_queue=QUEUE)


@pytest.mark.parametrize("value", [TEMPLATE, {**QUEUE, "name": TEMPLATE}, Path(ELSEWHERE), ELSEWHERE])
def test_a_template_or_the_path_of_a_queue_is_read_by_the_task(value: Any) -> None:
    PROVISION(work_queue=value, nats_conn_id=TEMPLATE)
    PUBLISH(work_queue=value, jobs=TEMPLATE, subject=TEMPLATE)


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("order-1", ["order-1"]),
        (7, ["7"]),
        (["a", 7], ["a", "7"]),
        ("['a', 'b']", ["a", "b"]),
        ('["a", 7]', ["a", "7"]),
        ("[unclosed", ["[unclosed"]),
        ([], []),
        ("[]", []),
        (("a",), ["a"]),
    ],
)
def test_ids_in_every_form_of_a_template(value: object, ids: list[str]) -> None:
    assert parse_job_ids(value) == ids


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, 0), ("None", 0), (0, 0), (90, 90), ("1m30s", 90), ("2.5", 2.5), (timedelta(minutes=2), 120)],
)
def test_a_time_limit_in_every_form(value: object, seconds: float) -> None:
    assert parse_time_limit("room_timeout", value) == seconds


@pytest.mark.parametrize(("operator", "error"), [(REDRIVE, RedriveRequestError), (DEAD_LETTERS, SelectionError)])
def test_a_count_under_a_pause_is_a_flag_or_a_template(operator: Callable[..., Any], error: type[Exception]) -> None:
    assert "count_under_pause" in operator(count_under_pause=TEMPLATE).template_fields
    for flag in (True, False, "true", "False", ""):
        operator(count_under_pause=flag)
    with pytest.raises(error, match="expected true or false for count_under_pause, found 'perhaps'"):
        operator(count_under_pause="perhaps")


OTHER = {"name": "other", "subjects": ["other.>"], "consumers": [{"name": "w", "max_deliver": 2}]}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"target_queue": 7, "subject": "other.a"}, "its YAML as target_queue, found 7"),
        ({"target_queue": {"name": "other"}, "subject": "other.a"}, "stream other has no subjects"),
        ({"target_queue": OTHER}, "expected a subject of other for the new jobs, found none"),
        ({"target_queue": OTHER, "subject": "other.a", "protocol": "in_place"}, "found subject, target: a redrive in"),
        (
            {"target_queue": OTHER, "subject": "other.a", "engine": "spark"},
            'expected no target_queue with engine="spark"',
        ),
        ({"order_key": "customer"}, "expected header:<name>, subject:<number of the token"),
        ({"order_key": "header:Customer", "engine": "spark"}, 'expected no order_key with engine="spark"'),
        ({"order_key": "header:Customer", "protocol": "in_place"}, "found order_key: a redrive in place"),
    ],
)
def test_a_target_and_an_order_are_checked_when_the_dag_is_parsed(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        REDRIVE(**arguments)


def test_a_task_without_a_task_instance_says_what_its_context_lacks() -> None:
    with pytest.raises(AirflowFailException, match="a task's context with its task instance as ti, found none"):
        PUBLISH(jobs=["a"], subject="q.a").execute({})


def test_jobs_of_a_task_that_returned_nothing_are_refused_with_that_cause() -> None:
    nothing: Any = None
    with pytest.raises(JobError, match="found NoneType: the task or function that makes them returned nothing"):
        PUBLISH(jobs=nothing)
