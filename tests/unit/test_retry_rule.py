"""When a job certainly waits: the rule alone, by which a job is retried or given up."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.advisories import ReportedAttempt
from airflow_provider_jetstream.jetstream.retries import MARGIN, WaitFacts, why_refused

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.retries import Asked

NOW = datetime(2026, 11, 21, 9, tzinfo=UTC)
SECOND = timedelta(seconds=1)
ATTEMPT = ReportedAttempt(
    timestamp=NOW,
    stream="jobs",
    consumer="worker",
    stream_seq=7,
    deliveries=2,
    failed=True,
    requested_at=NOW - 60 * SECOND,
    waits_until=NOW + 600 * SECOND,
    ack_wait=900,
)
CONFIG = {"ack_wait": 30 * 10**9, "backoff": [30 * 10**9, 900 * 10**9], "max_deliver": 5}


def consumer(**config: Any) -> dict[str, Any]:
    return {"created": (NOW - 3_600 * SECOND).isoformat(), "config": CONFIG | config}


FACTS = WaitFacts(
    stored_at=NOW - 600 * SECOND,
    attempt=ATTEMPT,
    attempt_at=NOW - 30 * SECOND,
    consumer=consumer(),
    up_since=NOW - 3_600 * SECOND,
    now=NOW,
)


def attempt(**fields: Any) -> WaitFacts:
    return replace(FACTS, attempt=ATTEMPT.model_copy(update=fields))


@pytest.mark.parametrize(
    "facts",
    [
        FACTS,
        attempt(waits_until=NOW + MARGIN + SECOND),
        attempt(deliveries=4),
        replace(FACTS, consumer=consumer(backoff=None, ack_wait=900 * 10**9)),
        replace(FACTS, consumer=consumer(max_deliver=-1)),
    ],
)
@pytest.mark.parametrize("asked", ["retry", "give_up"])
def test_a_job_waits_as_long_as_its_worker_knew(facts: WaitFacts, asked: Asked) -> None:
    assert why_refused(facts, asked) is None


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (replace(FACTS, stored_at=None), "it isn't stored"),
        (replace(FACTS, attempt=None), "no worker has stored"),
        (replace(FACTS, stored_at=NOW), "no worker has stored"),
        (attempt(failed=False), "has not failed"),
        (attempt(waits_until=None), "didn't store until when"),
        (attempt(requested_at=None), "didn't store until when"),
        (attempt(ack_wait=None), "didn't store until when"),
        (attempt(ack_wait=30), "ack wait or backoff was changed"),
        (attempt(deliveries=1), "ack wait or backoff was changed"),
        (attempt(deliveries=5), "was the last one"),
        (replace(FACTS, consumer=None), "deleted or created again"),
        (replace(FACTS, consumer=consumer() | {"created": NOW.isoformat()}), "deleted or created again"),
        (replace(FACTS, up_since=None), "it isn't known whether the server was restarted"),
        # Between the delivery and the message of its worker.
        (replace(FACTS, up_since=NOW - 45 * SECOND), "may have been restarted"),
        (attempt(waits_until=NOW + MARGIN), "delivered again in 5 s"),
        (attempt(waits_until=NOW - SECOND), "the next one may be running"),
        (attempt(asked="retry", asked_by="ann"), "ann asked that it be retried"),
    ],
)
@pytest.mark.parametrize("asked", ["retry", "give_up"])
def test_anything_else_may_run(facts: WaitFacts, found: str, asked: Asked) -> None:
    assert found in (why_refused(facts, asked) or "")


def test_only_giving_up_can_be_repeated() -> None:
    given_up = attempt(asked="give_up", asked_by="ann")
    assert why_refused(given_up, "give_up") is None
    assert "ann asked that it be given up" in (why_refused(given_up, "retry") or "")
