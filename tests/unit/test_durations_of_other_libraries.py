"""Durations of pendulum, pandas, NumPy and dateutil, wherever a duration is taken."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pendulum
import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Consumer,
    Job,
    RedriveRequest,
    Selection,
    StopWhen,
    WorkQueue,
)
from airflow_provider_jetstream.jetstream.units import parse_duration, parse_seconds
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger
from airflow_provider_jetstream.worker import RetryLaterError, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

# Libraries without types.
pd: Any = import_module("pandas")
relativedelta: Any = import_module("dateutil.relativedelta").relativedelta

QUEUE: dict[str, Any] = {
    "name": "spans",
    "subjects": ["spans.>"],
    "dead_letters": "spans_dlq",
    "events": "spans_events",
    "schedules": True,
    "consumers": [{"name": "w", "filter_subject": "spans.>", "max_deliver": 3}],
}
FIVE_MINUTES = 300_000_000_000

TAKERS: dict[str, Callable[[Any], object]] = {
    "Job(delay)": lambda span: JetStreamPublishOperator(
        task_id="a", work_queue=QUEUE, jobs=[Job(1, delay=span, subject="spans.a")]
    ),
    "Job(every)": lambda span: JetStreamPublishOperator(
        task_id="a", work_queue=QUEUE, jobs=[Job(1, every=span, id="a", subject="spans.a")]
    ),
    "room_timeout": lambda span: JetStreamPublishOperator(
        task_id="a", work_queue=QUEUE, jobs=[1], subject="spans.a", room_timeout=span
    ),
    "wait_timeout": lambda span: JetStreamPublishOperator(
        task_id="a", work_queue=QUEUE, jobs=[1], subject="spans.a", wait_for_completion=True, wait_timeout=span
    ),
    "defer_after": lambda span: JetStreamPublishOperator(
        task_id="a", work_queue=QUEUE, jobs=[1], subject="spans.a", wait_for_completion=True, defer_after=span
    ),
    "lease_timeout": lambda span: JetStreamRedriveOperator(task_id="a", work_queue=QUEUE, lease_timeout=span),
    "stop_when": lambda span: JetStreamRedriveOperator(
        task_id="a", work_queue=QUEUE, waves=[1, "rest"], stop_when={"within": span}
    ),
    "consume": lambda span: JetStreamConsumeOperator(
        task_id="a", work_queue=QUEUE, consumer="w", handler=lambda job: None, wait_timeout=span
    ),
    "older_than of a sensor": lambda span: JetStreamDeadLetterSensor(task_id="a", work_queue=QUEUE, older_than=span),
    "older_than of a trigger": lambda span: DeadLetterTrigger(
        nats_conn_id="nats_default", work_queue=QUEUE, older_than=span, deferred_at=0.0
    ),
    "ack_wait": lambda span: Consumer(name="w", max_deliver=3, ack_wait=span).ack_wait,
    "backoff": lambda span: Consumer(name="w", max_deliver=3, backoff=[span]).backoff[0],
    "duplicate_window": lambda span: WorkQueue(**QUEUE | {"duplicate_window": span}).duplicate_window,
    "Selection": lambda span: Selection(older_than=span).older_than,
    "RedriveRequest": lambda span: RedriveRequest(lease_timeout=span).lease_seconds * 10**9,
    "StopWhen": lambda span: (StopWhen(within=span).within_seconds or 0) * 10**9,
    "RetryLaterError": lambda span: RetryLaterError(span).seconds * 10**9,
    "Worker": lambda span: Worker(QUEUE, "w", _handle, ConnectionSettings(), grace=span, deadline=span),
    "parse_seconds": lambda span: parse_seconds(span) * 10**9,
}
SPANS: dict[str, Any] = {
    "timedelta": timedelta(minutes=5),
    "pendulum.duration": pendulum.duration(minutes=5),
    "an interval of pendulum": pendulum.datetime(2026, 1, 1, 0, 5) - pendulum.datetime(2026, 1, 1),
    "pandas": pd.Timedelta("5min"),
    "pandas in whole seconds": pd.Timedelta("5min").as_unit("s"),
}


def _handle(job: object) -> None:
    pass


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS.keys())
@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS.keys())
def test_a_duration_of_a_class_that_inherits_from_timedelta_is_as_long(take: Any, span: Any) -> None:
    taken = take(span)
    if isinstance(taken, int | float):
        assert taken == FIVE_MINUTES


@pytest.mark.parametrize(
    "span",
    [
        pendulum.duration(weeks=1, microseconds=3),
        pendulum.duration(days=400, microseconds=1),
        pendulum.datetime(2026, 6, 2) - pendulum.datetime(2024, 1, 1),
        pd.Timedelta(days=400, microseconds=1),
    ],
)
def test_no_microsecond_is_lost(span: timedelta) -> None:
    plain = timedelta(span.days, span.seconds, span.microseconds)
    assert parse_duration(span) == parse_duration(plain) == plain // timedelta(microseconds=1) * 1_000


def test_a_duration_above_0_is_never_no_limit() -> None:
    assert parse_duration(pd.Timedelta(1, unit="ns")) == 1


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (pendulum.duration(months=1), "years and months have no fixed length; use days"),
        (pendulum.duration(years=1, days=3), "years and months have no fixed length; use days"),
        (relativedelta(months=1), "years and months have no fixed length; use days"),
        (relativedelta(minutes=5), "use a timedelta with the same days, hours and seconds"),
        (np.timedelta64(5, "m"), r"use a timedelta, such as value\.astype"),
        (pendulum.duration(minutes=-5), "found Duration"),
        (pd.NaT, "found NaT"),
    ],
)
def test_what_is_no_duration_is_refused_with_what_to_use(span: Any, said: str) -> None:
    for parse in (parse_duration, parse_seconds):
        with pytest.raises(ValueError, match=said):
            parse(span)
    for name in ("ack_wait", "RedriveRequest", "wait_timeout", "Job(delay)"):
        with pytest.raises(ValueError, match=said):
            TAKERS[name](span)
