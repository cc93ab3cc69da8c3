"""Publishes jobs with a bounded number in flight and reports the fate of each.

At least once with deduplication: a job counts as stored only when the server has acknowledged it. A job without an
answer is sent again under the same id, and reported by its index if it stays unanswered.
"""

from __future__ import annotations

from functools import partial
from math import ceil, isfinite
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.publishing.job_in_flight import SendingLimits
from airflow_provider_jetstream.jetstream.publishing.job_reader import JobReader
from airflow_provider_jetstream.jetstream.publishing.known_jobs import NothingKnown
from airflow_provider_jetstream.jetstream.publishing.publication import Publication, stream_info_of
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.publishing.sender import JobSender

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Callable, Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobIdSource
    from airflow_provider_jetstream.jetstream.publishing.known_jobs import KnownJobs
    from airflow_provider_jetstream.jetstream.publishing.report import Destination, PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_NOTHING_KNOWN: Final = NothingKnown()


async def publish(
    connection: Connection,
    queue: WorkQueue | None,
    jobs: Iterable[object] | AsyncIterable[object],
    *,
    subject: str | None = None,
    origin: Origin | None = None,
    job_id: JobIdSource | None = None,
    rate: float | None = None,
    room_timeout: float = 0.0,
) -> PublishReport:
    """Publish jobs and make sure that all of them are stored.

    :param queue: where the jobs go; without it, subjects have no partitions, jobs have no schedules, and jobs of an
        origin name it in full
    :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task; its jobs have the same ids when the task is tried again. With ``max_tries``, the
        queue's events keep a manifest of them: a retry stores nothing twice, however late it comes
    :param job_id: where the ids of jobs are that have none of their own: a field of the body that is a JSON object, or
        what returns the id of each job
    :param rate: jobs per second at most; as fast as possible where absent
    :param room_timeout: how many seconds a full queue (``discard: new``) may store no job before the jobs that it
        refuses are given up
    :return: the fate of every job
    :raises JobError: a job can't be published as it is; the jobs before it may be stored
    :raises PublishError: some jobs aren't known to be stored; carries the report
    """
    info = await stream_info_of(connection, queue) if queue and queue.events and origin else None
    resumes = origin is not None and origin.max_tries is not None
    publication = await Publication.begin(connection, queue, origin, info=info, resumes=resumes)
    send = partial(
        publish_prepared, connection, rate=rate, room_timeout=room_timeout, destination=publication.destination
    )
    async with publication:
        report = await send(
            publication.prepare(jobs, subject, job_id), known=publication, progress=publication.save_progress
        )
    await publication.conclude(report, send)
    report.raise_for_failures()
    return report


async def publish_prepared(
    connection: Connection,
    jobs: Iterable[OutgoingJob],
    *,
    window: int = 1024,
    ack_timeout: float = 5.0,
    attempts: int = 3,
    known: KnownJobs = _NOTHING_KNOWN,
    rate: float | None = None,
    room_timeout: float = 0.0,
    away_timeout: float = 60.0,
    destination: Destination | None = None,
    progress: Callable[[PublishReport], Awaitable[None]] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> PublishReport:
    """Publish jobs that have their subjects, ids and headers.

    :param jobs: read in a thread of their own, since their source may block, and about a window ahead at most
    :param window: the largest number of unacknowledged jobs
    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: the largest number of times that a job is sent
    :param known: the jobs that are known to be stored, and aren't sent again; unless it verifies them, what the server
        calls duplicates is believed
    :param rate: jobs per second at most; as fast as possible where absent
    :param room_timeout: how many seconds a full queue may store no job before the jobs that it refuses are given up
    :param away_timeout: how many seconds the server may say that it can't store a job just now
    :param destination: the queue's stream; a job that another one stores is a failure, and ends publishing
    :param progress: awaited after the jobs that were sent together
    :param stopped: returns whether to stop; the jobs that aren't sent by then are missing in the report
    :return: the report, which includes the jobs that failed, and what the source raised; nothing is raised for either
    :raises JobError: the rate isn't above 0
    :raises UnreachableError: the connection was closed before anything was sent
    """
    check_rate(rate)
    # After a lost connection, all jobs in flight arrive at once: no more than those of a second.
    in_flight = window if rate is None else min(window, max(2, ceil(rate)))
    limits = SendingLimits(ack_timeout, attempts, away_timeout, room_timeout)
    sender = JobSender(connection, in_flight, limits, RateLimiter(rate), stopped)
    sender.report.destination = destination
    async with sender, JobReader(jobs, in_flight) as reader:
        await sender.send_each(reader, known, progress or _no_progress)
    if not known.verifies:
        for repeated in sender.report.repeated:
            sender.report.add_verified(repeated)
        sender.report.repeated = []
    return sender.report


async def _no_progress(_: PublishReport) -> None:
    pass


def check_rate(rate: float | None) -> None:
    """Refuse a rate that isn't above 0.

    :raises JobError: it isn't
    """
    if rate is not None and not (isfinite(rate) and rate > 0):
        raise JobError(f"expected a rate above 0 jobs a second, found {rate}: leave it out for all speed")
