"""The hook: everything that tasks do with JetStream, blocking or awaited."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar
from uuid import uuid4

from airflow.providers.common.compat.sdk import BaseHook

from airflow_provider_jetstream.hooks.connection_cache import cached_connection
from airflow_provider_jetstream.hooks.connection_settings import settings_of
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel
from airflow_provider_jetstream.jetstream.client.connection import Connection, connect
from airflow_provider_jetstream.jetstream.client.pool import shared_connection
from airflow_provider_jetstream.jetstream.dead_letters.find import Findings, Summary, find_dead_letters, summarise
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import EventLoopError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.publishing.job import prepare
from airflow_provider_jetstream.jetstream.publishing.publisher import publish
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE, Preview, preview
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.cancellation.cancel import CancelReport
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.provisioning.plan import Plan
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport

    SelectionSource: TypeAlias = Selection | Mapping[str, Any]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class JetStreamHook(BaseHook):
    """Work queues and dead letters of the NATS servers behind an Airflow connection of type ``nats``.

    Every method that blocks has an awaitable twin whose name starts with ``a``. The queue argument is a
    :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or the path of its YAML file.

    :param nats_conn_id: the Airflow connection
    """

    conn_name_attr = "nats_conn_id"
    default_conn_name = "nats_default"
    conn_type = "nats"
    hook_name = "NATS JetStream"

    def __init__(self, nats_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.nats_conn_id = nats_conn_id

    def settings(self) -> ConnectionSettings:
        """Read the Airflow connection.

        :return: the settings of the NATS connection
        :raises ConnectionSettingsError: if it can't be used
        """
        connection = self.get_connection(self.nats_conn_id)
        return settings_of(connection, connection.extra_dejson)

    async def asettings(self) -> ConnectionSettings:
        """Read the Airflow connection without blocking, once in a while for all who ask in the same event loop.

        :return: the settings of the NATS connection
        :raises ConnectionSettingsError: if it can't be used
        """
        return await cached_connection(self.nats_conn_id)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Connection]:
        """Use the event loop's one connection with these settings.

        :return: the connection
        :raises JetStreamProviderError: if it can't be opened
        """
        async with shared_connection(await self.asettings()) as connection:
            yield connection

    def provision(self, queue: QueueSource) -> Plan:
        """Bring a queue's streams and consumers into being.

        :param queue: the queue
        :return: what was done
        :raises DriftError: what exists differs in a way that no update can mend
        """
        return self.blocking(provision, WorkQueue.load(queue))

    async def aprovision(self, queue: QueueSource) -> Plan:
        """Do what :meth:`provision` does, awaited."""
        async with self.shared() as connection:
            return await provision(connection, WorkQueue.load(queue))

    def publish(
        self,
        jobs: Iterable[object],
        *,
        subject: str | None = None,
        origin: Origin | None = None,
        queue: QueueSource | None = None,
    ) -> PublishReport:
        """Publish jobs and make sure that all are stored.

        :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
        :param subject: the subject of jobs that name none
        :param origin: the publishing task; makes ids that stay the same when the task is tried again
        :param queue: the queue; needed for partitions and for jobs that are to be made later
        :return: the fate of every job
        :raises PublishError: some jobs aren't known to be stored; carries the report
        """
        return self.blocking(_publish, jobs, subject, origin, None if queue is None else WorkQueue.load(queue))

    async def apublish(
        self,
        jobs: Iterable[object],
        *,
        subject: str | None = None,
        origin: Origin | None = None,
        queue: QueueSource | None = None,
    ) -> PublishReport:
        """Do what :meth:`publish` does, awaited."""
        async with self.shared() as connection:
            return await _publish(connection, jobs, subject, origin, None if queue is None else WorkQueue.load(queue))

    def cancel(self, queue: QueueSource, job_id: str, why: str | None = None, by: str | None = None) -> CancelReport:
        """Cancel the jobs of an id that are stored now, and schedules of such jobs.

        Workers obey of their own accord, before they start a job or while it runs.

        :param queue: the queue
        :param job_id: the jobs' id: their header ``Job-Id``
        :param why: a reason for people
        :param by: who wants it
        :return: what was done
        :raises QueueDeclarationError: the queue declares no events that would take it
        :raises NotFoundError: the queue or its events don't exist
        """
        return self.blocking(cancel, WorkQueue.load(queue), job_id, why, by)

    async def acancel(
        self, queue: QueueSource, job_id: str, why: str | None = None, by: str | None = None
    ) -> CancelReport:
        """Do what :meth:`cancel` does, awaited."""
        async with self.shared() as connection:
            return await cancel(connection, WorkQueue.load(queue), job_id, why, by)

    def find_dead_letters(self, queue: QueueSource, selection: SelectionSource | None = None) -> Findings:
        """Look for dead letters and hold all of them; see :meth:`scan_dead_letters` for many.

        :param queue: the queue
        :param selection: which dead letters; all in circulation where absent
        :return: those beyond doubt, and what the dead letter queue holds about other jobs
        :raises SelectionError: the selection isn't understood
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(find_dead_letters, WorkQueue.load(queue), Selection.of(selection))

    async def afind_dead_letters(self, queue: QueueSource, selection: SelectionSource | None = None) -> Findings:
        """Do what :meth:`find_dead_letters` does, awaited."""
        async with self.shared() as connection:
            return await find_dead_letters(connection, WorkQueue.load(queue), Selection.of(selection))

    def scan_dead_letters(
        self, queue: QueueSource, selection: SelectionSource | None = None, group_by: Iterable[GroupField] = ()
    ) -> Summary:
        """Count dead letters without holding them, and keep the bodies of those that are seen for the first time.

        :param queue: the queue
        :param selection: which dead letters; all in circulation where absent
        :param group_by: what letters of a group share
        :return: counts, sequences as ranges, and groups with their ages
        :raises SelectionError: the selection isn't understood, or letters can't be grouped by that
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(summarise, WorkQueue.load(queue), Selection.of(selection), group_by)

    async def ascan_dead_letters(
        self, queue: QueueSource, selection: SelectionSource | None = None, group_by: Iterable[GroupField] = ()
    ) -> Summary:
        """Do what :meth:`scan_dead_letters` does, awaited."""
        async with self.shared() as connection:
            return await summarise(connection, WorkQueue.load(queue), Selection.of(selection), group_by)

    def redrive(self, queue: QueueSource, order: RedriveRequest | None = None) -> RedriveReport:
        """Bring dead letters back as jobs with fresh deliveries.

        :param queue: the queue
        :param order: which letters, and how; all in circulation, as they were, where absent
        :return: the report, also of letters that failed
        :raises RedriveOrderError: what is asked for isn't possible here; nothing was done
        :raises DeadLetterGoneError: a sequence that was asked for is no dead letter (any more); nothing was done
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(redrive_dead_letters, WorkQueue.load(queue), order)

    async def aredrive(self, queue: QueueSource, order: RedriveRequest | None = None) -> RedriveReport:
        """Do what :meth:`redrive` does, awaited."""
        async with self.shared() as connection:
            return await redrive_dead_letters(connection, WorkQueue.load(queue), order)

    def preview_redrive(
        self, queue: QueueSource, order: RedriveRequest | None = None, group_by: Sequence[GroupField] = BY_CAUSE
    ) -> Preview:
        """Tell what :meth:`redrive` would do; change nothing.

        :param queue: the queue
        :param order: what it would be asked to do
        :param group_by: what letters of a group share
        :return: the preview
        :raises RedriveOrderError: what is asked for isn't possible here
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(preview, WorkQueue.load(queue), order or RedriveRequest(), group_by)

    async def apreview_redrive(
        self, queue: QueueSource, order: RedriveRequest | None = None, group_by: Sequence[GroupField] = BY_CAUSE
    ) -> Preview:
        """Do what :meth:`preview_redrive` does, awaited."""
        async with self.shared() as connection:
            return await preview(connection, WorkQueue.load(queue), order or RedriveRequest(), group_by)

    def test_connection(self) -> tuple[bool, str]:
        """Connect once, for the button in the UI.

        :return: whether it works, and what was found or what is wrong
        """
        try:
            return True, self.blocking(_describe)
        except JetStreamProviderError as error:
            return False, str(error)

    def blocking(
        self,
        work: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Open a connection, await something that takes it first, and close it.

        :param work: a coroutine function whose first parameter is the open connection
        :param args: its other arguments
        :param kwargs: its keyword arguments
        :return: what it returns
        :raises EventLoopError: an event loop is running in this thread; use the awaitable twin
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(_with_connection(self.settings(), work, *args, **kwargs))
        raise EventLoopError(
            "expected no running event loop, found one: a blocking call would stop it; await the method of the same"
            ' name that starts with "a" (aprovision, apublish, …)'
        )


async def _with_connection(
    settings: ConnectionSettings,
    work: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> _Result:
    async with connect(settings) as connection:
        return await work(connection, *args, **kwargs)


async def _publish(
    connection: Connection,
    jobs: Iterable[object],
    subject: str | None,
    origin: Origin | None,
    queue: WorkQueue | None,
) -> PublishReport:
    prepared = prepare(jobs, subject=subject, origin=origin, batch=uuid4().hex, queue=queue)
    report = await publish(connection, prepared)
    report.raise_for_failures()
    return report


async def _describe(connection: Connection) -> str:
    version = ".".join(map(str, connection.server_version))
    return f"Connected to nats-server {version} with JetStream (API level {connection.api_level})."
