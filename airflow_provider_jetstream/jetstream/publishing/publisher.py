"""Publishes jobs in one call: sends them, and records what the task has published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.publishing.outbox import Outbox
from airflow_provider_jetstream.jetstream.publishing.publication import Publication, stream_info_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobIdSource
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


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
    outbox = Outbox(connection, rate=rate, room_timeout=room_timeout, destination=publication.destination)
    async with publication:
        report = await outbox.send(publication.prepare(jobs, subject, job_id), publication, publication.save_progress)
    await publication.conclude(report, outbox)
    report.raise_for_failures()
    return report
