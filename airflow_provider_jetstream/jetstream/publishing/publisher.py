"""Publishes jobs with a bounded number in flight and reports the fate of each.

At least once with deduplication: a job counts as stored only when the server has acknowledged it. A job without an
answer is sent again under the same id, and reported by its index if it stays unanswered.
"""

from __future__ import annotations

import logging
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, JobError, NotFoundError
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import AdvisedJobs
from airflow_provider_jetstream.jetstream.publishing.job import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.publish_log import PublishLog
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.publishing.sender import JobSender
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

logger = logging.getLogger(__name__)


async def publish(
    connection: Connection,
    queue: WorkQueue | None,
    jobs: Iterable[object],
    *,
    subject: str | None = None,
    origin: Origin | None = None,
    rate: float | None = None,
    room_timeout: float = 0.0,
) -> PublishReport:
    """Publish jobs and make sure that all of them are stored.

    :param queue: where the jobs go; without it, subjects have no partitions, jobs have no schedules, and jobs of an
        origin name it in full
    :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task; its jobs have the same ids when the task is tried again
    :param rate: jobs per second at most; as fast as possible where absent
    :param room_timeout: how many seconds a full queue (``discard: new``) may store no job before the jobs that it
        refuses are given up
    :return: the fate of every job
    :raises JobError: a job can't be published as it is; the jobs before it may be stored
    :raises PublishError: some jobs aren't known to be stored; carries the report
    """
    log = PublishLog(connection, queue, origin) if queue and queue.events and origin else None
    info = await _stream_info(connection, queue) if queue and log else None
    by_key = bool(log and info and await _announced(log, info))
    limit = SizeLimit.of(queue, info["config"] if info else None) if queue else None
    prepared = prepare_jobs(
        jobs, subject=subject, origin=origin, batch=uuid4().hex, queue=queue, by_key=by_key, limit=limit
    )
    advised = AdvisedJobs.of(queue)
    report = await publish_prepared(connection, advised.collect(prepared), rate=rate, room_timeout=room_timeout)
    report.advised = advised.sequences(report)
    if log and by_key:
        await _conclude(log, report)
    report.raise_for_failures()
    return report


async def publish_prepared(
    connection: Connection,
    jobs: Iterable[OutgoingJob],
    *,
    window: int = 512,
    ack_timeout: float = 5.0,
    attempts: int = 3,
    stored_sequence: Callable[[int, OutgoingJob], int | None] = lambda _index, _job: None,
    rate: float | None = None,
    room_timeout: float = 0.0,
    stopped: Callable[[], bool] = lambda: False,
) -> PublishReport:
    """Publish jobs that have their subjects, ids and headers.

    :param jobs: read only as fast as the window allows
    :param window: the largest number of unacknowledged jobs
    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: the largest number of times that a job is sent
    :param stored_sequence: returns the stream sequence of a job that is known to be stored, and isn't sent again
    :param rate: jobs per second at most; as fast as possible where absent
    :param room_timeout: how many seconds a full queue may store no job before the jobs that it refuses are given up
    :param stopped: returns whether to stop; the jobs that aren't sent by then are missing in the report
    :return: the report, which includes the jobs that failed; nothing is raised for them
    :raises JobError: the rate isn't above 0
    :raises UnreachableError: the connection was closed before anything was sent
    """
    check_rate(rate)
    # After a lost connection, all jobs in flight arrive at once: no more than those of a second.
    in_flight = window if rate is None else min(window, max(2, ceil(rate)))
    sender = JobSender(connection, in_flight, ack_timeout, attempts, RateLimiter(rate), room_timeout, stopped)
    await sender.open()
    try:
        for index, job in enumerate(jobs):
            if stopped():
                break
            if sequence := stored_sequence(index, job):
                sender.report.add_stored(sequence, scheduled=job.scheduled)
            else:
                await sender.send(index, job)
        await sender.finish()
    finally:
        await sender.close()
    return sender.report


async def _announced(log: PublishLog, info: Mapping[str, Any]) -> bool:
    try:
        return await log.announce(info)
    except JetStreamProviderError as error:
        logger.warning("The task's record couldn't be stored, so its jobs name the task as far as it fits: %s", error)
        return False


async def _conclude(log: PublishLog, report: PublishReport) -> None:
    try:
        await log.conclude(report)
    except JetStreamProviderError as error:
        # Not raised, since the jobs are stored. The record stays open, and covers all jobs that it may be about.
        logger.warning("What the task has published couldn't be recorded: %s", error)


async def _stream_info(connection: Connection, queue: WorkQueue) -> dict[str, Any] | None:
    try:
        return await stream_info(connection, queue.name)
    except NotFoundError:
        # The error of publishing says more: it names the job and its subject.
        return None


def check_rate(rate: float | None) -> None:
    """Refuse a rate that isn't above 0.

    :raises JobError: it isn't
    """
    if rate is not None and not (isfinite(rate) and rate > 0):
        raise JobError(f"expected a rate above 0 jobs a second, found {rate}: leave it out for all speed")
