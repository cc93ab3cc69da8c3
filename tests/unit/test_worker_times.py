from __future__ import annotations

from datetime import UTC, datetime, timedelta
from multiprocessing.reduction import ForkingPickler

import pytest

from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.worker import Delivery
from airflow_provider_jetstream.worker.errors import JobExpiredError, RetryLaterError
from airflow_provider_jetstream.worker.executor import attempt_seconds, check_expiry
from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy

SECOND = 1_000_000_000
STEPS = RedeliveryPolicy.of({"ack_wait": SECOND, "backoff": [SECOND, 5 * SECOND, 30 * SECOND], "max_deliver": 6})
PLAIN = RedeliveryPolicy.of({"ack_wait": 20 * SECOND, "max_deliver": -1})
NOW = datetime.now(UTC)


def job(**headers: str) -> Delivery:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Delivery("1", "orders.new", b"", named, 1, 1)


@pytest.mark.parametrize(("attempt", "patience"), [(1, 1), (2, 5), (3, 30), (4, 30), (9, 30)])
def test_the_server_waits_as_long_as_the_backoff_of_the_delivery(attempt: int, patience: float) -> None:
    assert STEPS.ack_wait_seconds(attempt) == patience
    assert PLAIN.ack_wait_seconds(attempt) == 20


@pytest.mark.parametrize(("attempt", "step"), [(1, 1), (2, 5), (3, 30), (5, 30)])
def test_what_is_sent_makes_the_wait_the_backoff_and_up_to_a_fifth_more(attempt: int, step: int) -> None:
    sent = [STEPS.backoff_delay(attempt) or 0 for _ in range(200)]
    # The server adds this delivery's backoff less the first.
    waits = [(delay + step * SECOND - SECOND) / SECOND for delay in sent]
    assert step <= min(waits) < step * 1.05
    assert step * 1.15 < max(waits) <= step * 1.2


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 2), (2, 2), (3, 120), (3, 0.5)])
def test_a_wait_of_its_own_is_exact_whatever_the_backoff(attempt: int, seconds: float) -> None:
    sent = STEPS.nak_delay(seconds, attempt)
    assert sent is not None
    assert sent / SECOND + STEPS.ack_wait_seconds(attempt) - 1 == pytest.approx(seconds)
    assert PLAIN.nak_delay(seconds, attempt) == seconds * SECOND


def test_a_delay_of_nothing_is_never_sent_for_a_wait() -> None:
    assert STEPS.nak_delay(4, 2) == 1


def test_without_backoff_and_on_the_last_delivery_nothing_is_waited_for() -> None:
    assert PLAIN.backoff_delay(1) is None
    assert STEPS.backoff_delay(6) is None
    assert STEPS.nak_delay(60, 6) is None
    assert STEPS.nak_delay(0, 1) is None
    assert [STEPS.is_last(attempt) for attempt in (5, 6, 7)] == [False, True, True]
    assert not PLAIN.is_last(1_000)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(2, 2), (0.5, 0.5), ("2", 2), (" 0.5 ", 0.5), ("2m", 120), ("1h30m", 5400), (timedelta(minutes=1), 60), (0, 0)],
)
def test_a_number_is_seconds_and_text_may_have_units(value: object, seconds: float) -> None:
    assert parse_seconds(value) == seconds


@pytest.mark.parametrize(
    "value", [-1, "-1", "soon", "", None, True, float("nan"), float("inf"), "1e3", timedelta(seconds=-1)]
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_seconds(value)


def test_an_error_that_says_when_survives_its_way_out_of_a_process() -> None:
    error = ForkingPickler.loads(ForkingPickler.dumps(RetryLaterError("2m", "busy")))
    assert (error.seconds, str(error)) == (120, "busy")
    assert str(RetryLaterError(90)) == "to be tried again after 90 s"
    with pytest.raises(ValueError, match="expected a duration"):
        RetryLaterError("later")


@pytest.mark.parametrize(
    ("header", "own", "found"),
    [
        (None, None, None),
        (None, 5, 5),
        ("3", None, 3),
        ("3s", 5, 3),
        ("1h", 5, 5),
        ("never", 5, 5),
        ("-1", None, None),
        ("0", 5, 5),
    ],
)
def test_the_shorter_deadline_counts(header: str | None, own: float | None, found: float | None) -> None:
    assert attempt_seconds(job() if header is None else job(Job_Deadline=header), own) == found


@pytest.mark.parametrize("past", ["2020-01-01T00:00:00Z", "2020-01-01T00:00:00+02:00", "2020-01-01T00:00:00.123456789"])
def test_a_job_that_is_over_is_refused(past: str) -> None:
    with pytest.raises(JobExpiredError, match="the job expired at 2020-01-01"):
        check_expiry(job(Job_Expires=past), NOW)


def test_a_job_that_is_not_over_or_says_nothing_clear_is_not_refused() -> None:
    check_expiry(job(), NOW)
    check_expiry(job(Job_Expires=(NOW + timedelta(hours=1)).isoformat()), NOW)
    check_expiry(job(Job_Expires="soon"), NOW)


def test_a_job_that_was_redriven_after_it_was_over_is_wanted_again() -> None:
    expires = NOW - timedelta(minutes=1)
    redriven = job(Job_Expires=expires.isoformat(), Redrive_Count="1")
    check_expiry(redriven, NOW)
    with pytest.raises(JobExpiredError):
        check_expiry(redriven, NOW - timedelta(minutes=2))
