"""What Airflow's users expect of a sensor, in each mode, without a server."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk import DAG, BaseSensorOperator

from airflow_provider_jetstream.airflow_compat import AirflowFailException, AirflowSensorTimeout, AirflowSkipException
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import NotFoundError, UnreachableError
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from testbed.deferral import TaskDeferred

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

QUEUE: dict[str, Any] = {"name": "q", "subjects": ["q"], "dead_letters": "q-dead", "events": "q-events"}
CURSOR = {
    "queue": "q",
    "created": "2026-01-01T00:00:00Z",
    "events": "q-events",
    "events_from": 1,
    "dead_letters": None,
    "dead_letters_from": 1,
}
CLASSES: dict[type[BaseSensorOperator], dict[str, Any]] = {
    JetStreamDeadLetterSensor: {"work_queue": QUEUE},
    JetStreamJobsSensor: {"handle": {"cursor": CURSOR, "sequences": [[1, 2]]}},
    JetStreamQueueDrainedSensor: {"work_queue": QUEUE},
}
EACH = pytest.mark.parametrize("cls", CLASSES)
MODES = pytest.mark.parametrize("mode", [{"deferrable": True}, {"deferrable": False}], ids=["deferrable", "poke"])


def sensor(cls: type[BaseSensorOperator], **arguments: Any) -> BaseSensorOperator:
    return cls(**{"task_id": "sensor", **CLASSES[cls], **arguments})


@EACH
def test_it_is_a_sensor_of_airflow_and_takes_all_arguments_of_one(cls: type[BaseSensorOperator]) -> None:
    arguments = {
        "poke_interval": timedelta(seconds=7),
        "timeout": 90,
        "soft_fail": True,
        "mode": "reschedule",
        "exponential_backoff": True,
        "max_wait": 30,
        "silent_fail": True,
    }
    made = sensor(cls, **arguments, deferrable=False)
    assert isinstance(made, BaseSensorOperator)
    assert made.reschedule
    assert (made.poke_interval, made.timeout, made.max_wait) == (7, 90, timedelta(seconds=30))
    assert (made.soft_fail, made.exponential_backoff, made.silent_fail, made.never_fail) == (True, True, True, False)


@EACH
def test_arguments_come_from_the_dag_and_from_partial_too(cls: type[BaseSensorOperator]) -> None:
    with DAG("d", default_args={"timeout": 30, "mode": "reschedule", "nats_conn_id": "other"}, schedule=None):
        made: Any = sensor(cls)
        ((name, value),) = CLASSES[cls].items()
        mapped = cls.partial(task_id="mapped", soft_fail=True, poke_interval=5).expand(**{name: [value]})
    assert (made.timeout, made.mode, made.nats_conn_id) == (30, "reschedule", "other")
    assert mapped.partial_kwargs["soft_fail"] is True


@EACH
@MODES
def test_what_can_never_be_awaited_fails_with_soft_fail_and_is_skipped_with_never_fail(
    cls: type[BaseSensorOperator], mode: dict[str, Any], mocker: MockerFixture
) -> None:
    mocker.patch.object(JetStreamHook, "blocking", side_effect=NotFoundError("no such stream"))
    with pytest.raises(AirflowFailException, match="no such stream"):
        sensor(cls, soft_fail=True, **mode).execute({})
    with pytest.raises(AirflowSkipException):
        sensor(cls, never_fail=True, **mode).execute({})


@EACH
def test_a_server_that_is_away_ends_a_poke_unless_it_fails_silently(
    cls: type[BaseSensorOperator], mocker: MockerFixture
) -> None:
    mocker.patch.object(JetStreamHook, "blocking", side_effect=UnreachableError("away"))
    if cls is not JetStreamQueueDrainedSensor:
        # The sensor of drained queues polls on in any case.
        with pytest.raises(UnreachableError):
            sensor(cls, deferrable=False).execute({})
        with pytest.raises(UnreachableError):
            sensor(cls, deferrable=True).execute({})
    with pytest.raises(AirflowSensorTimeout):
        sensor(cls, deferrable=False, silent_fail=True, timeout=0, poke_interval=0).execute({})
    with pytest.raises(TaskDeferred):
        sensor(cls, deferrable=True, silent_fail=True).execute({})


def test_a_sensor_of_jobs_whose_trigger_ends_at_its_time_limit_isnt_tried_again(mocker: MockerFixture) -> None:
    mocker.patch.object(JetStreamHook, "blocking", side_effect=UnreachableError("away"))
    report = {"completed": 0, "dead": 0, "cancelled": 0, "unaccounted": 0, "awaited": 2}
    event = {
        "status": "timeout",
        "limited_by": "timeout",
        "missing": [[1, 2]],
        "handle": CLASSES[JetStreamJobsSensor]["handle"],
        "summary": {},
        "report": report,
    }
    for soft, expected in ((False, AirflowSensorTimeout), (True, AirflowSkipException)):
        made = sensor(JetStreamJobsSensor, deferrable=True, timeout=90, soft_fail=soft)
        with pytest.raises(expected):
            made.resume_execution("execute_complete", {"event": event}, {})
