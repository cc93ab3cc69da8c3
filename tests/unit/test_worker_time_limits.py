from __future__ import annotations

from datetime import UTC, datetime, timedelta
from multiprocessing.reduction import ForkingPickler

import pytest

from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.worker import Delivery
from airflow_provider_jetstream.worker.acknowledgement import RedeliveryPolicy
from airflow_provider_jetstream.worker.errors import JobExpiredError, RetryLaterError
from airflow_provider_jetstream.worker.executor import attempt_seconds, check_expiry

SECOND = 1_000_000_000
STEPS = RedeliveryPolicy.of({"ack_wait": SECOND, "backoff": [SECOND, 5 * SECOND, 30 * SECOND], "max_deliver": 6})
PLAIN = RedeliveryPolicy.of({"ack_wait": 20 * SECOND, "max_deliver": -1})
NOW = datetime.now(UTC)


def job(**headers: str) -> Delivery:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Delivery("1", "orders.new", b"", named, 1, 1)


@pytest.mark.parametrize(("attempt", "step"), [(1, 1), (2, 5), (3, 30), (5, 30)])
def test_the_nak_delay_leads_to_the_backoff_and_up_to_a_fifth_more(attempt: int, step: int) -> None:
    delays = [STEPS.backoff_delay(attempt) or 0 for _ in range(200)]
    # The server adds this delivery's backoff less the first.
    waits = [(delay + step * SECOND - SECOND) / SECOND for delay in delays]
    assert step <= min(waits) < step * 1.05
    assert step * 1.15 < max(waits) <= step * 1.2


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 2), (2, 2), (3, 120), (3, 0.5)])
def test_a_requested_delay_is_exact_whatever_the_backoff(attempt: int, seconds: float) -> None:
    delay = STEPS.nak_delay(seconds, attempt)
    assert delay is not None
    assert delay / SECOND + STEPS.ack_wait_seconds(attempt) - 1 == pytest.approx(seconds)
    assert PLAIN.nak_delay(seconds, attempt) == seconds * SECOND


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(2, 2), (0.5, 0.5), ("2", 2), (" 0.5 ", 0.5), ("2m", 120), ("1h30m", 5400), (timedelta(minutes=1), 60), (0, 0)],
)
def test_a_number_is_seconds_and_text_may_have_units(value: object, seconds: float) -> None:
    assert parse_seconds(value) == seconds


def test_a_retry_later_error_can_be_pickled() -> None:
    error = ForkingPickler.loads(ForkingPickler.dumps(RetryLaterError("2m", "busy")))
    assert (error.seconds, str(error)) == (120, "busy")
    assert str(RetryLaterError(90)) == "to be tried again after 90 s"
    with pytest.raises(ValueError, match="expected a duration"):
        RetryLaterError("later")


@pytest.mark.parametrize(
    ("header", "worker_deadline", "expected"),
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
def test_the_shorter_deadline_counts(header: str | None, worker_deadline: float | None, expected: float | None) -> None:
    assert attempt_seconds(job() if header is None else job(Job_Deadline=header), worker_deadline) == expected


@pytest.mark.parametrize("past", ["2020-01-01T00:00:00Z", "2020-01-01T00:00:00+02:00", "2020-01-01T00:00:00.123456789"])
def test_an_expired_job_is_refused(past: str) -> None:
    with pytest.raises(JobExpiredError, match="the job expired at 2020-01-01"):
        check_expiry(job(Job_Expires=past), NOW, NOW)
