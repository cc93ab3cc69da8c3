"""The message that is stored in place of a job that has a schedule."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import Headers, first, is_servers
from airflow_provider_jetstream.jetstream.contract import (
    MSG_ID,
    SCHEDULED_MSG_ID,
    due_subject,
    schedule_once_subject,
    schedule_repeated_subject,
)
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.publishing.schedules import (
    ONCE_LEVEL,
    REPEATED_LEVEL,
    TARGET,
    schedule_headers,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


def scheduled_job(index: int, job: OutgoingJob, queue: WorkQueue | None) -> OutgoingJob:
    """Return the message of which the server makes a job.

    :raises JobError: its schedule isn't one, or the queue has none
    """
    at, delay, every = job.job.at, job.job.delay, job.job.every
    if sum(value is not None for value in (at, delay, every)) > 1:
        raise JobError(f"job {index} has several of at, delay and every: keep one")
    if queue is None:
        raise JobError(f"job {index} has a schedule: pass the queue too, which declares the stream of schedules")
    if not queue.schedules:
        raise JobError(f"job {index} has a schedule, and {queue.name} takes none: declare schedules: true")
    job_id, headers = job.job_id, dict(job.headers)
    try:
        schedule = schedule_headers(at, delay, every, job.job.time_zone, now=datetime.now(UTC))
    except (ValueError, OverflowError) as error:
        raise JobError(f"job {index}: {error}") from None
    if every is None:
        subject, level = schedule_once_subject(queue.name, job_id, job.message_id), ONCE_LEVEL
        headers[SCHEDULED_MSG_ID] = job.message_id
    else:
        if job.key.given_id is None:
            raise JobError(
                f"job {index} has a repeating schedule: give it an id, by which it can be replaced or cancelled"
            )
        subject, level = schedule_repeated_subject(queue.name, job_id), REPEATED_LEVEL
        # Its subject identifies it. With a message id, the server would drop a changed schedule as a duplicate.
        del headers[MSG_ID]
    scheduled = headers | schedule | {TARGET: due_subject(queue.name, job.subject)}
    return replace(job, subject=subject, headers=scheduled, api_level=level, schedules=queue.schedules.name)


def moved_headers(due: Headers, made_id: str) -> Headers:
    """Return the headers with which a job that is due is stored in its queue.

    :param due: those of the message that is due, or of its schedule
    :param made_id: its message id where its schedule states none
    """
    own = [(name, value) for name, value in due.items() if not is_servers(name) and name != SCHEDULED_MSG_ID]
    return Headers([*own, (MSG_ID, first(due.items(), SCHEDULED_MSG_ID) or made_id)])
