"""The hook: the operations of tasks on JetStream, blocking or awaited."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from airflow.sdk import BaseHook

from airflow_provider_jetstream.hooks.connection_settings import cached_settings, settings_from
from airflow_provider_jetstream.hooks.event_loop import require_no_event_loop
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.pool import shared_connection
from airflow_provider_jetstream.jetstream.dead_letters.find import (
    Findings,
    Summary,
    find_dead_letters,
    summarise_dead_letters,
)
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.inspection.drained import DrainReport, check_drained
from airflow_provider_jetstream.jetstream.provisioning.apply import plan, provision
from airflow_provider_jetstream.jetstream.publishing.publisher import publish
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE, Preview, preview
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.jetstream.units import parse_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.cancellation.cancel import CancelReport
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
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

    Every blocking method has an awaitable twin whose name starts with ``a``: the blocking one opens a connection of its
    own, the awaitable one uses the event loop's shared connection. The queue argument is a
    :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or the path of its YAML file.
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

        :raises ConnectionSettingsError: it can't be used
        """
        connection = self.get_connection(self.nats_conn_id)
        return settings_from(connection, connection.extra_dejson)

    async def asettings(self) -> ConnectionSettings:
        """Do what :meth:`settings` does, awaited, with one lookup in 30 seconds for the whole event loop."""
        return await cached_settings(self.nats_conn_id)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Connection]:
        """Use the event loop's one connection with these settings.

        :raises JetStreamProviderError: it can't be opened
        """
        async with shared_connection(await self.asettings()) as connection:
            yield connection

    def plan(self, queue: QueueSource, *, migrate: bool = False) -> Plan:
        """Plan what :meth:`provision` would do; change nothing.

        :param migrate: whether consumers may hand jobs over to others
        :return: the steps, those that the server would refuse included
        :raises ServerTooOldError: the declaration needs a feature that the server lacks
        """
        return self.blocking(plan, WorkQueue.load(queue), migrate=migrate)

    async def aplan(self, queue: QueueSource, *, migrate: bool = False) -> Plan:
        """Do what :meth:`plan` does, awaited."""
        return await self._awaited(plan, WorkQueue.load(queue), migrate=migrate)

    def provision(self, queue: QueueSource, *, migrate: bool = False) -> Plan:
        """Create or update a queue's streams and consumers.

        :param migrate: whether consumers may hand jobs over to others
        :return: the steps that were applied
        :raises DriftError: what exists differs in a way that no update can change
        """
        return self.blocking(provision, WorkQueue.load(queue), migrate=migrate)

    async def aprovision(self, queue: QueueSource, *, migrate: bool = False) -> Plan:
        """Do what :meth:`provision` does, awaited."""
        return await self._awaited(provision, WorkQueue.load(queue), migrate=migrate)

    def publish(
        self,
        jobs: Iterable[object],
        *,
        subject: str | None = None,
        origin: Origin | None = None,
        queue: QueueSource | None = None,
        rate: float | None = None,
        room_timeout: timedelta | float = 0.0,
    ) -> PublishReport:
        """Publish jobs and make sure that all are stored.

        :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
        :param subject: the subject of jobs that name none
        :param origin: the publishing task; makes ids that stay the same when the task is tried again
        :param queue: needed for partitions and scheduled jobs, and for jobs that hold only the key of their origin
        :param rate: jobs per second at most; as fast as possible where absent
        :param room_timeout: how long a full queue (``discard: new``) may store no job before the jobs that it refuses
            are given up; a number is seconds
        :return: the outcome of every job
        :raises PublishError: some jobs aren't known to be stored; carries the report
        """
        room = parse_seconds(room_timeout)
        return self.blocking(
            publish, _optional_queue(queue), jobs, subject=subject, origin=origin, rate=rate, room_timeout=room
        )

    async def apublish(
        self,
        jobs: Iterable[object],
        *,
        subject: str | None = None,
        origin: Origin | None = None,
        queue: QueueSource | None = None,
        rate: float | None = None,
        room_timeout: timedelta | float = 0.0,
    ) -> PublishReport:
        """Do what :meth:`publish` does, awaited."""
        room = parse_seconds(room_timeout)
        return await self._awaited(
            publish, _optional_queue(queue), jobs, subject=subject, origin=origin, rate=rate, room_timeout=room
        )

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
        return self.blocking(cancel, WorkQueue.load(queue), job_id, why, by)

    async def acancel(
        self, queue: QueueSource, job_id: str, why: str | None = None, by: str | None = None
    ) -> CancelReport:
        """Do what :meth:`cancel` does, awaited."""
        return await self._awaited(cancel, WorkQueue.load(queue), job_id, why, by)

    def check_drained(
        self, queue: QueueSource, consumers: Sequence[str] | None = None, *, nothing_dead: bool = False
    ) -> DrainReport:
        """Check whether a queue is drained: nothing pending, nothing in flight.

        :param consumers: names of the consumers to check; all, and jobs that no consumer takes, where absent
        :param nothing_dead: count dead letters in circulation too
        :raises NotFoundError: the queue or one of the consumers doesn't exist
        """
        return self.blocking(check_drained, WorkQueue.load(queue), consumers, nothing_dead=nothing_dead)

    async def acheck_drained(
        self, queue: QueueSource, consumers: Sequence[str] | None = None, *, nothing_dead: bool = False
    ) -> DrainReport:
        """Do what :meth:`check_drained` does, awaited."""
        return await self._awaited(check_drained, WorkQueue.load(queue), consumers, nothing_dead=nothing_dead)

    def discover_queue(self, name: str) -> WorkQueue:
        """Read the declaration of a queue from its streams on the server.

        :param name: the stream of the queue
        :return: the queue; its ``to_yaml()`` is the text of a file with the declaration
        :raises NotFoundError: there is no such stream
        :raises QueueDeclarationError: it is no work queue, or has no dead letter queue
        """
        return self.blocking(discover_queue, name)

    async def adiscover_queue(self, name: str) -> WorkQueue:
        """Do what :meth:`discover_queue` does, awaited."""
        return await self._awaited(discover_queue, name)

    def find_dead_letters(
        self, queue: QueueSource, selection: SelectionSource | None = None, *, census: bool = False
    ) -> Findings:
        """Find dead letters and hold all of them in memory; see :meth:`scan_dead_letters` for many.

        :param selection: which dead letters; all in circulation where absent
        :param census: whether to pause consumers until nothing of them is in flight, so that more letters are certain
        :return: the proved dead letters, and the DLQ entries about other jobs
        :raises SelectionError: the selection isn't understood
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(find_dead_letters, WorkQueue.load(queue), Selection.of(selection), census=census)

    async def afind_dead_letters(
        self, queue: QueueSource, selection: SelectionSource | None = None, *, census: bool = False
    ) -> Findings:
        """Do what :meth:`find_dead_letters` does, awaited."""
        return await self._awaited(find_dead_letters, WorkQueue.load(queue), Selection.of(selection), census=census)

    def scan_dead_letters(
        self,
        queue: QueueSource,
        selection: SelectionSource | None = None,
        group_by: Iterable[GroupField] = (),
        *,
        census: bool = False,
    ) -> Summary:
        """Count dead letters without holding them, and preserve the bodies of those that are seen for the first time.

        :param selection: which dead letters; all in circulation where absent
        :param group_by: the fields that letters of a group share
        :param census: whether to pause consumers until nothing of them is in flight, so that more letters are certain
        :return: counts, sequences as ranges, and groups with their ages
        :raises SelectionError: the selection isn't understood, or letters can't be grouped by one of the fields
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(
            summarise_dead_letters, WorkQueue.load(queue), Selection.of(selection), group_by, census=census
        )

    async def ascan_dead_letters(
        self,
        queue: QueueSource,
        selection: SelectionSource | None = None,
        group_by: Iterable[GroupField] = (),
        *,
        census: bool = False,
    ) -> Summary:
        """Do what :meth:`scan_dead_letters` does, awaited."""
        select = Selection.of(selection)
        return await self._awaited(summarise_dead_letters, WorkQueue.load(queue), select, group_by, census=census)

    def redrive(self, queue: QueueSource, request: RedriveRequest | None = None) -> RedriveReport:
        """Bring dead letters back as jobs with fresh deliveries.

        :param request: which letters, and how; all in circulation, unchanged, where absent
        :return: the report, which names letters that failed too
        :raises RedriveRequestError: the request isn't possible here; nothing was done
        :raises DeadLetterGoneError: a requested sequence is no dead letter (any more); nothing was done
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(redrive_dead_letters, WorkQueue.load(queue), request)

    async def aredrive(self, queue: QueueSource, request: RedriveRequest | None = None) -> RedriveReport:
        """Do what :meth:`redrive` does, awaited."""
        return await self._awaited(redrive_dead_letters, WorkQueue.load(queue), request)

    def preview_redrive(
        self, queue: QueueSource, request: RedriveRequest | None = None, group_by: Sequence[GroupField] = BY_CAUSE
    ) -> Preview:
        """Count what :meth:`redrive` would do; change nothing.

        :param group_by: the fields that letters of a group share
        :raises RedriveRequestError: the request isn't possible here
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(preview, WorkQueue.load(queue), request or RedriveRequest(), group_by)

    async def apreview_redrive(
        self, queue: QueueSource, request: RedriveRequest | None = None, group_by: Sequence[GroupField] = BY_CAUSE
    ) -> Preview:
        """Do what :meth:`preview_redrive` does, awaited."""
        return await self._awaited(preview, WorkQueue.load(queue), request or RedriveRequest(), group_by)

    def test_connection(self) -> tuple[bool, str]:
        """Connect once, for the button in the UI.

        :return: whether it works, and a sentence that says what was found or what is wrong
        """
        try:
            return True, self.blocking(_describe)
        except JetStreamProviderError as error:
            return False, str(error)

    def blocking(
        self,
        operation: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Open a connection, await an operation on it, and close it.

        :param operation: a coroutine function whose first parameter is the open connection
        :raises EventLoopError: an event loop is running in this thread; use the awaitable twin
        """
        require_no_event_loop()
        settings = self.settings()

        async def run() -> _Result:
            async with connect(settings) as connection:
                return await operation(connection, *args, **kwargs)

        return asyncio.run(run())

    async def _awaited(
        self,
        operation: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        async with self.shared() as connection:
            return await operation(connection, *args, **kwargs)


def _optional_queue(queue: QueueSource | None) -> WorkQueue | None:
    return None if queue is None else WorkQueue.load(queue)


async def _describe(connection: Connection) -> str:
    version = ".".join(map(str, connection.server_version))
    return f"Connected to nats-server {version} with JetStream (API level {connection.api_level})."
