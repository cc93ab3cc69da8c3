"""The times in a job's headers: how long an attempt may take, and until when one may be started."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.contract import JOB_DEADLINE, JOB_EXPIRES
from airflow_provider_jetstream.jetstream.limits import TIME
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.publishing.job import redrives_of
from airflow_provider_jetstream.jetstream.units import parse_seconds, short_text
from airflow_provider_jetstream.worker.errors import JobExpiredError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.delivery import Delivery

log = logging.getLogger("jetstream.worker")

_CLOCK_SECONDS: Final = 60.0


def attempt_seconds(job: Delivery, worker_deadline: float | None) -> float | None:
    """Return the time limit of an attempt: the shorter of ``Job-Deadline`` and the worker's; ``None`` for no limit."""
    text = job.headers.get(JOB_DEADLINE)
    if text is None:
        return worker_deadline
    try:
        job_deadline = parse_seconds(text)
    except ValueError:
        job_deadline = 0
    if not job_deadline:
        _log_ignored(job, JOB_DEADLINE, 'seconds or a duration such as "5m", more than 0', text)
        return worker_deadline
    return job_deadline if worker_deadline is None else min(job_deadline, worker_deadline)


class QueueClock:
    """The time by a queue's server: this machine's clock may be off by days. It is asked once a minute at most."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self._queue = queue
        self._clock: ServerClock | None = None
        self._reading = asyncio.Lock()

    async def now(self) -> datetime:
        """Return the time.

        :raises JetStreamProviderError: the server doesn't tell it
        """
        async with self._reading:
            if self._clock is None or time.monotonic() - self._clock.read_at > _CLOCK_SECONDS:
                self._clock = await ServerClock.read(self._connection, self._queue)
            return self._clock.now()


def check_expiry(job: Delivery, stored_at: datetime, now: datetime) -> None:
    """Refuse a job after the time in its ``Job-Expires`` header, unless it was redriven after that time.

    :param now: by the server's clock
    :raises JobExpiredError: the job has expired
    """
    text = job.headers.get(JOB_EXPIRES)
    if text is None:
        return
    try:
        expires = datetime.fromisoformat(short_text(text, TIME))
    except ValueError:
        _log_ignored(job, JOB_EXPIRES, 'a time such as "2026-11-21T09:00:00Z"', text)
        return
    if expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    redriven_later = redrives_of(job.headers.items()) > 0 and stored_at >= expires
    if not redriven_later and now >= expires:
        raise JobExpiredError(f"the job expired at {expires.isoformat()}, before this attempt was started")


def _log_ignored(job: Delivery, header: str, expected: str, found: str) -> None:
    log.warning(
        "job %s, header %s is ignored: expected %s, found %s", job.shown_id, header, expected, shown_value(found)
    )
