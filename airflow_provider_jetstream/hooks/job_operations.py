"""The hook's operations on jobs: publish, cancel, and what became of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.connected_hook import ConnectedHook
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel
from airflow_provider_jetstream.jetstream.waiting.handle import publish_with_handle
from airflow_provider_jetstream.jetstream.waiting.stored_reports import JobReportSource
from airflow_provider_jetstream.tasks.call_origin import call_origin
from airflow_provider_jetstream.tasks.hook_arguments import optional_text, publication_limits, single_job_id
from airflow_provider_jetstream.tasks.queue_source import load_queue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.cancellation.cancel import CancelReport
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobIdSource
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.jetstream.waiting.job_report import JobReport


class JobOperations(ConnectedHook):
    """Publishes jobs, cancels them, and reports on each."""

    def publish(
        self,
        jobs: Iterable[object],
        *,
        subject: str | None = None,
        origin: Origin | None = None,
        job_id: JobIdSource | None = None,
        queue: QueueSource | None = None,
        rate: float | None = None,
        room_timeout: timedelta | float = 0.0,
    ) -> PublishReport:
        """Publish jobs and make sure that all are stored.

        :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
        :param subject: the subject of jobs that name none
        :param origin: the publishing task; where absent, the one that runs this code, if any does. Its tries publish
            the same jobs once, where they make the same calls in the same order
        :param job_id: where the ids of jobs are that have none of their own: a field of the body that is a JSON object,
            or what returns the id of each job
        :param queue: needed for partitions and scheduled jobs, and for jobs that hold only the key of their origin
        :param rate: jobs per second at most; as fast as possible where absent
        :param room_timeout: how long a full queue (``discard: new``) may store no job before the jobs that it refuses
            are given up; a number is seconds
        :return: the outcome of every job; where the queue declares events, its ``handle`` is what waits take
        :raises PublishError: some jobs aren't known to be stored; carries the report
        """
        rate, room = publication_limits(jobs, subject, origin, rate, room_timeout)
        origin = origin or call_origin()
        return self.blocking(
            publish_with_handle,
            _optional_queue(queue),
            jobs,
            subject=subject,
            origin=origin,
            job_id=job_id,
            rate=rate,
            room_timeout=room,
        )

    async def apublish(
        self,
        jobs: Iterable[object],
        *,
        subject: str | None = None,
        origin: Origin | None = None,
        job_id: JobIdSource | None = None,
        queue: QueueSource | None = None,
        rate: float | None = None,
        room_timeout: timedelta | float = 0.0,
    ) -> PublishReport:
        """Do what :meth:`publish` does, awaited."""
        rate, room = publication_limits(jobs, subject, origin, rate, room_timeout)
        origin = origin or call_origin()
        return await self.awaited(
            publish_with_handle,
            _optional_queue(queue),
            jobs,
            subject=subject,
            origin=origin,
            job_id=job_id,
            rate=rate,
            room_timeout=room,
        )

    def job_reports(self, reports: object, *, states: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return the reports on the jobs that a task has awaited, a dict for each job.

        :param reports: the XCom ``job_reports`` of that task, which also a failed task has; or what it returned with
            ``returns="jobs"``, or one item of that; or a list of these
        :param states: the wanted ones of ``completed``, ``dead``, ``cancelled``, ``vanished`` and ``awaited``; all
            where absent
        :raises ArgumentError: it is none of these
        :raises JobReportsGoneError: the events stream doesn't store a part of them any more
        """
        source = JobReportSource(reports)
        found = self.blocking(_read_reports, source, states) if source.has_parts else source.held(states)
        return [report.as_json() for report in found]

    async def ajob_reports(self, reports: object, *, states: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Do what :meth:`job_reports` does, awaited."""
        source = JobReportSource(reports)
        found = await self.awaited(_read_reports, source, states) if source.has_parts else source.held(states)
        return [report.as_json() for report in found]

    def cancel(self, queue: QueueSource, job_id: str, why: str | None = None, by: str | None = None) -> CancelReport:
        """Cancel the stored jobs of an id, and schedules of such jobs.

        Workers obey of their own accord, before they start a job or while it runs. Jobs that are published later under
        the same id aren't cancelled.

        :param job_id: the jobs' id
        :param why: a reason for people
        :param by: the person or program that cancels
        :raises QueueDeclarationError: the queue declares no events stream, which stores cancellations
        :raises NotFoundError: the queue or its events stream doesn't exist
        """
        return self.blocking(
            cancel, load_queue(queue), single_job_id(job_id), optional_text("why", why), optional_text("by", by)
        )

    async def acancel(
        self, queue: QueueSource, job_id: str, why: str | None = None, by: str | None = None
    ) -> CancelReport:
        """Do what :meth:`cancel` does, awaited."""
        return await self.awaited(
            cancel, load_queue(queue), single_job_id(job_id), optional_text("why", why), optional_text("by", by)
        )


def _optional_queue(queue: QueueSource | None) -> WorkQueue | None:
    return None if queue is None else load_queue(queue)


async def _read_reports(
    connection: Connection, source: JobReportSource, states: Collection[str] | None
) -> list[JobReport]:
    return [report async for report in source.read(connection, states)]
