"""What operators refuse when a DAG is parsed, and leave to the task where it is a template."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.errors import JobError, RedriveRequestError, SelectionError
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from airflow_provider_jetstream.tasks.template_values import parse_job_ids, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


QUEUE = {"name": "q", "subjects": ["q.>"], "consumers": [{"name": "w", "max_deliver": 2}]}
PUBLISH = partial(JetStreamPublishOperator, task_id="t", work_queue=QUEUE, jobs=[])
REDRIVE = partial(JetStreamRedriveOperator, task_id="t", work_queue=QUEUE)
PROVISION = partial(JetStreamProvisionOperator, task_id="t", work_queue=QUEUE)
CANCEL = partial(JetStreamCancelOperator, task_id="t", work_queue=QUEUE)
REPORT = partial(JetStreamDeadLetterReportOperator, task_id="t", work_queue=QUEUE, directory="/reports")
DEAD_LETTERS = partial(JetStreamDeadLetterSensor, task_id="t", work_queue=QUEUE)
DRAINED = partial(JetStreamQueueDrainedSensor, task_id="t", work_queue=QUEUE)


@pytest.mark.parametrize("operator", [PUBLISH, REDRIVE, PROVISION, partial(CANCEL, job_ids="a"), REPORT, DEAD_LETTERS])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"work_queue": None}, "expected a WorkQueue, its dict, or the path of its YAML as work_queue, found None"),
        ({"work_queue": ""}, "as work_queue, found ''"),
        ({"work_queue": 7}, "as work_queue, found 7"),
        ({"work_queue": {"name": "q"}}, "stream q has no subjects"),
        ({"work_queue": QUEUE | {"subject": "q.>"}}, "subject: no such field"),
        ({"nats_conn_id": None}, "expected text as nats_conn_id, found None"),
        ({"nats_conn_id": 7}, "expected text as nats_conn_id, found 7"),
    ],
)
def test_a_queue_or_connection_that_is_none_is_refused_when_the_dag_is_parsed(
    operator: Callable[..., object], arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        operator(**arguments)
    operator()


@pytest.mark.parametrize(
    ("operator", "arguments", "problem"),
    [
        (PUBLISH, {"jobs": "abc"}, "expected jobs as a list or an iterator, found str"),
        (PUBLISH, {"jobs": {"id": 1}}, "found dict: put a single job into a list"),
        (PUBLISH, {"jobs": None}, "found NoneType"),
        (CANCEL, {"jobs": 7}, "found int"),
        (PUBLISH, {"subject": ""}, "expected text as subject, found ''"),
        (PUBLISH, {"subject": 7}, "expected text as subject, found 7"),
        (PUBLISH, {"wait_timeout": 60}, "expected a timedelta above 0, such as timedelta.*as wait_timeout, found 60"),
        (REDRIVE, {"wait_timeout": "1h"}, "as wait_timeout, found '1h'"),
        (REDRIVE, {"wait_timeout": timedelta()}, "as wait_timeout, found datetime.timedelta"),
        (PUBLISH, {"max_dead": -1}, "expected a whole number of at least 0 as max_dead, found -1"),
        (PUBLISH, {"max_cancelled": "3"}, "as max_cancelled, found '3'"),
        (PUBLISH, {"max_vanished": 1.5}, "as max_vanished, found 1.5"),
        (PUBLISH, {"min_completed": 0}, "expected a whole number of at least 1 as min_completed, found 0"),
        (PUBLISH, {"wait_for_completion": "no"}, "expected True or False as wait_for_completion.*found 'no'"),
        (PUBLISH, {"cancel_on_kill": "false"}, "as cancel_on_kill"),
        (PUBLISH, {"deferrable": 1}, "as deferrable"),
        (REDRIVE, {"dry_run": "false"}, "expected True or False as dry_run, which takes no template, found 'false'"),
        (REDRIVE, {"dry_run": TEMPLATE}, "as dry_run"),
        (PROVISION, {"dry_run": "false"}, "as dry_run"),
        (PROVISION, {"migrate": "no"}, "as migrate"),
        (DEAD_LETTERS, {"min_count": 0}, "expected a whole number of at least 1 as min_count, found 0"),
        (DEAD_LETTERS, {"min_count": "2"}, "as min_count, found '2'"),
        (DEAD_LETTERS, {"deferrable": "no"}, "as deferrable"),
        (DRAINED, {"nothing_dead": "no"}, "as nothing_dead"),
        (REPORT, {"directory": ""}, "expected text as directory"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_dag_is_parsed(
    operator: Callable[..., object], arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        operator(**arguments)


@pytest.mark.parametrize("value", [TEMPLATE, {**QUEUE, "name": TEMPLATE}, Path("queue.yaml"), "queue.yaml"])
def test_a_template_or_the_path_of_a_queue_is_read_by_the_task(value: Any) -> None:
    PROVISION(work_queue=value, nats_conn_id=TEMPLATE)
    PUBLISH(work_queue=value, jobs=TEMPLATE, subject=TEMPLATE)


def test_sequences_to_cancel_are_checked_when_the_dag_is_parsed() -> None:
    with pytest.raises(SelectionError, match="expected stream sequences"):
        JetStreamCancelOperator(task_id="cancel", work_queue="queue.yaml", sequences="first")


def test_a_range_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(SelectionError, match=r"expected at most 10,000,000 stream sequences, found \[1, 10000000001\]"):
        JetStreamCancelOperator(task_id="cancel", work_queue="queue.yaml", sequences=[[1, 10_000_000_001]])


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


@pytest.mark.parametrize(("operator", "error"), [(REDRIVE, RedriveRequestError), (DEAD_LETTERS, SelectionError)])
def test_a_census_is_a_flag_or_a_template(operator: Callable[..., Any], error: type[Exception]) -> None:
    assert "census" in operator(census=TEMPLATE).template_fields
    for flag in (True, False, "true", "False", ""):
        operator(census=flag)
    with pytest.raises(error, match="expected true or false for census, found 'perhaps'"):
        operator(census="perhaps")


def test_spark_takes_no_census() -> None:
    with pytest.raises(RedriveRequestError, match='expected no census with engine="spark"'):
        REDRIVE(engine="spark", census=True)


def test_the_trigger_gets_the_census_of_its_sensor() -> None:
    polling = {"nats_conn_id": "n", "work_queue": QUEUE, "poll_interval": 1.0, "deferred_at": 0.0}
    trigger = DEAD_LETTERS(census="true").polling_trigger(polling)
    assert trigger.serialize()[1]["census"] is True


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


@pytest.mark.parametrize("value", [TEMPLATE, {**OTHER, "name": TEMPLATE}, Path("queue.yaml"), "queue.yaml"])
def test_the_target_and_the_key_may_be_templates(value: Any) -> None:
    operator = REDRIVE(target_queue=value, subject=TEMPLATE, order_key=TEMPLATE)
    assert {"target_queue", "order_key"} <= set(operator.template_fields)
    REDRIVE(target_queue=OTHER, subject=TEMPLATE)
