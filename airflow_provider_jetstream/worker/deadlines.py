"""When a job has to be done: the deadline of an attempt, and the time after which it isn't wanted any more."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.contract import JOB_DEADLINE, JOB_EXPIRES, REDRIVE_COUNT
from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.worker.errors import JobExpiredError

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker.delivery import Delivery

log = logging.getLogger("jetstream.worker")


def attempt_seconds(job: Delivery, most: float | None) -> float | None:
    """Tell how long an attempt may take.

    :param job: the job; its header ``Job-Deadline`` may be shorter than the worker's own limit
    :param most: the worker's own, in seconds
    :return: seconds; ``None`` for any time
    """
    text = job.headers.get(JOB_DEADLINE)
    if text is None:
        return most
    try:
        own = parse_seconds(text)
    except ValueError:
        own = 0
    if not own:
        told = 'expected seconds or a duration such as "5m", more than none'
        log.warning("job %s, header %s is passed over: %s, found %r", job.id, JOB_DEADLINE, told, text)
        return most
    return own if most is None else min(own, most)


def check_expiry(job: Delivery, stored_at: datetime) -> None:
    """Refuse a job that isn't wanted any more.

    :param job: the job; its header ``Job-Expires`` is a time in the form of RFC 3339
    :param stored_at: when the job was stored; one that was redriven after it had expired is wanted again
    :raises JobExpiredError: its time is over
    """
    text = job.headers.get(JOB_EXPIRES)
    if text is None:
        return
    try:
        expires = datetime.fromisoformat(text.strip())
    except ValueError:
        log.warning(
            'job %s, header %s is passed over: expected a time such as "2026-11-21T09:00:00Z", found %r',
            job.id,
            JOB_EXPIRES,
            text,
        )
        return
    if expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    redriven = REDRIVE_COUNT in job.headers and stored_at >= expires
    if not redriven and datetime.now(UTC) >= expires:
        raise JobExpiredError(f"the job expired at {expires.isoformat()}, before this attempt was started")
