"""How long tasks are deferred, and the arguments about jobs that nobody works on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk.bases.sensor import BaseSensorOperator

from airflow_provider_jetstream.airflow_compat import AirflowSensorTimeout
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import ArgumentError, DeadlineError
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from airflow_provider_jetstream.tasks import context
from airflow_provider_jetstream.tasks.context import EXECUTION_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

HANDLE = {
    "cursor": {
        "queue": "q",
        "created": "2026-01-01T00:00:00Z",
        "events": "e",
        "events_from": 1,
        "dead_letters": None,
        "dead_letters_from": 1,
    }
}


def operator_with(seconds: float | None) -> Any:
    return SimpleNamespace(execution_timeout=None if seconds is None else timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("execution_timeout", "started_ago", "expected", "argument"),
    [
        (None, 100, 60, "wait_timeout"),
        (600, 0, 60, "wait_timeout"),
        (50, 0, 50, EXECUTION_TIMEOUT),
        # A task that was deferred before, or waited inline, has used some of it.
        (100, 70, 30, EXECUTION_TIMEOUT),
        (100, 30, 60, "wait_timeout"),
        (100, 5_000, 1, EXECUTION_TIMEOUT),
    ],
)
def test_the_earlier_of_a_time_limit_and_what_is_left_of_the_execution_timeout(
    monkeypatch: pytest.MonkeyPatch, execution_timeout: float | None, started_ago: float, expected: float, argument: str
) -> None:
    started = datetime.now(UTC) - timedelta(seconds=started_ago)
    task_context = {"ti": SimpleNamespace(start_date=started)}
    monkeypatch.setattr(context, "get_current_context", lambda: task_context)
    limit = context.deferral_limit(operator_with(execution_timeout), timedelta(seconds=60), "wait_timeout")
    assert limit.argument == argument
    assert limit.left.total_seconds() == pytest.approx(expected, abs=10)


@pytest.mark.parametrize(
    ("execution_timeout", "expected"),
    [(5.0, DeadlineError), (None, AirflowSensorTimeout), (900.0, AirflowSensorTimeout)],
)
def test_a_sensor_whose_execution_timeout_ends_its_deferral_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, execution_timeout: float | None, expected: type[Exception]
) -> None:
    def resume(*_: object) -> None:
        raise AirflowSensorTimeout("timeout")

    monkeypatch.setattr(BaseSensorOperator, "resume_execution", resume)
    limit = None if execution_timeout is None else timedelta(seconds=execution_timeout)
    sensor = JetStreamQueueDrainedSensor(
        task_id="t", work_queue={"name": "q", "subjects": ["q"]}, timeout=600, execution_timeout=limit
    )
    with pytest.raises(expected):
        sensor.resume_execution("__fail__", {}, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_stall": "maybe"}, "expected on_stall to be 'fail' or 'wait', found 'maybe'"),
        ({"on_stall": None}, "expected on_stall to be 'fail' or 'wait', found None"),
        ({"reconcile": 0}, "reconcile"),
        ({"reconcile": -1}, "reconcile"),
        ({"reconcile": "soon"}, "reconcile"),
        ({"reconcile": None}, "reconcile"),
        ({"reconcile": float("nan")}, "reconcile"),
        ({"max_dead": -1}, "max_dead"),
        ({"min_completed": 0}, "min_completed"),
        ({"cancel_on_failure": "false"}, "expected True or False as cancel_on_failure"),
        ({"handle": 7}, "expected the handle of published jobs"),
        ({"handle": {}}, "expected the handle of published jobs"),
        ({"handle": None}, "expected the handle of published jobs"),
    ],
)
@pytest.mark.parametrize("build", [lambda **given: JetStreamJobsSensor(task_id="t", **given), JetStreamHook().wait])
def test_wrong_arguments_of_waits_by_handle_are_refused_at_once(
    build: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(**{"handle": HANDLE, **arguments})


def test_a_wait_by_handle_without_any_time_is_refused() -> None:
    with pytest.raises(ArgumentError, match="wait_timeout"):
        JetStreamHook().wait(HANDLE, wait_timeout=0)


def test_templates_are_left_to_the_task() -> None:
    JetStreamJobsSensor(
        task_id="t",
        handle="{{ ti.xcom_pull('publish') }}",
        reconcile="{{ params.reconcile }}",
        on_stall="{{ params.on_stall }}",
        max_dead="{{ params.dead }}",
    )
