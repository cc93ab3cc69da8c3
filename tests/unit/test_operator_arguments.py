"""What operators refuse when a DAG is parsed, and leave to the task where it is a template."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.errors import JobError, SelectionError
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.tasks.template_values import parse_job_ids, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = "{{ params.value }}"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rate": 0}, "expected a rate above 0 jobs a second, found 0"),
        ({"rate": "fast"}, "expected a number for rate, found 'fast'"),
        ({"room_timeout": "soon"}, 'room_timeout: expected a duration such as "30s"'),
        ({"room_timeout": -1}, "room_timeout: expected seconds"),
        ({"idempotency_key": ""}, "expected an idempotency_key, found that its template rendered to nothing"),
    ],
)
def test_arguments_of_publishing_are_refused_when_the_dag_is_parsed(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        JetStreamPublishOperator(task_id="send", work_queue="queue.yaml", jobs=[], **arguments)


@pytest.mark.parametrize("name", ["rate", "room_timeout", "idempotency_key"])
def test_a_template_is_checked_by_the_task(name: str) -> None:
    assert name in JetStreamPublishOperator.template_fields
    JetStreamPublishOperator(task_id="send", work_queue="queue.yaml", jobs=[], **{name: TEMPLATE})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "in one of job_ids, jobs and sequences, found none of them"),
        ({"job_ids": "a", "sequences": [1]}, "found job_ids and sequences"),
        ({"job_ids": {"a": 1}}, "expected the id of a job, or a list of ids, found {'a': 1}"),
        ({"job_ids": [1.5]}, "expected text or a number as id 0, found 1.5"),
        ({"job_ids": [{"id": "a"}]}, "found {'id': 'a'}: take the ids out of the jobs"),
    ],
)
def test_jobs_to_cancel_are_checked_when_the_dag_is_parsed(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        JetStreamCancelOperator(task_id="cancel", work_queue="queue.yaml", **arguments)


def test_sequences_to_cancel_are_checked_when_the_dag_is_parsed() -> None:
    with pytest.raises(SelectionError, match="expected stream sequences"):
        JetStreamCancelOperator(task_id="cancel", work_queue="queue.yaml", sequences="first")


def test_ids_from_an_iterator_are_read_once() -> None:
    def ids() -> Iterator[str]:
        yield from ("a", "b")

    operator = JetStreamCancelOperator(task_id="cancel", work_queue="queue.yaml", job_ids=ids())
    assert operator.job_ids == ["a", "b"]


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


@pytest.mark.parametrize("value", [None, "", "None", True, b"a", 1.5])
def test_what_is_no_id_is_refused(value: object) -> None:
    with pytest.raises(JobError):
        parse_job_ids(value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, 0), ("None", 0), (0, 0), (90, 90), ("1m30s", 90), ("2.5", 2.5), (timedelta(minutes=2), 120)],
)
def test_a_time_limit_in_every_form(value: object, seconds: float) -> None:
    assert parse_time_limit("room_timeout", value) == seconds
