"""The hook: the operations of tasks on JetStream, blocking or awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.connection_form import FIELD_BEHAVIOUR
from airflow_provider_jetstream.hooks.connection_widgets import form_widgets
from airflow_provider_jetstream.hooks.job_operations import JobOperations
from airflow_provider_jetstream.hooks.job_waits import JobWaits
from airflow_provider_jetstream.jetstream.dead_letters.account import JobAccount, account_for_jobs
from airflow_provider_jetstream.jetstream.dead_letters.diagnose import Diagnosis, diagnose_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.find import (
    Findings,
    Summary,
    find_dead_letters,
    summarise_dead_letters,
)
from airflow_provider_jetstream.jetstream.dead_letters.group import group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.inspection.drained import DrainReport, check_drained, chosen_consumers
from airflow_provider_jetstream.jetstream.provisioning.apply import plan, provision
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE, Preview, preview
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.tasks.hook_arguments import flag, optional_request, stream_name
from airflow_provider_jetstream.tasks.queue_source import load_queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.provisioning.plan import Plan
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport

    SelectionSource: TypeAlias = Selection | Mapping[str, Any]


class JetStreamHook(JobOperations, JobWaits):
    """Work queues and dead letters of the NATS servers behind an Airflow connection of type ``nats``.

    Every blocking method has an awaitable twin whose name starts with ``a``: the blocking one opens a connection of its
    own, the awaitable one uses the event loop's shared connection. The queue argument is a
    :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or the path of its YAML file.
    """

    @classmethod
    def get_connection_form_widgets(cls) -> dict[str, Any]:
        """Return the fields of the connection's form for Airflow 3.1; newer ones read the provider's metadata."""
        return form_widgets()

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Return what the form does with the fields of every connection, for Airflow 3.1."""
        return {name.replace("-", "_"): value for name, value in FIELD_BEHAVIOUR.items()}

    def plan(self, queue: QueueSource, *, migrate: bool = False, park_dead: bool = False) -> Plan:
        """Plan what :meth:`provision` would do; change nothing.

        :param migrate: whether consumers may hand jobs over to others
        :param park_dead: whether dead letters that a new consumer would run again are parked first
        :return: the steps, those that the server would refuse included
        :raises ServerTooOldError: the declaration needs a feature that the server lacks
        """
        return self.blocking(plan, load_queue(queue), **_provisioning_flags(migrate, park_dead))

    async def aplan(self, queue: QueueSource, *, migrate: bool = False, park_dead: bool = False) -> Plan:
        """Do what :meth:`plan` does, awaited."""
        return await self.awaited(plan, load_queue(queue), **_provisioning_flags(migrate, park_dead))

    def provision(self, queue: QueueSource, *, migrate: bool = False, park_dead: bool = False) -> Plan:
        """Create or update a queue's streams and consumers.

        :param migrate: whether consumers may hand jobs over to others
        :param park_dead: whether dead letters that a new consumer would run again are parked first
        :return: the steps that were applied
        :raises DriftError: what exists differs in a way that no update can change
        """
        return self.blocking(provision, load_queue(queue), **_provisioning_flags(migrate, park_dead))

    async def aprovision(self, queue: QueueSource, *, migrate: bool = False, park_dead: bool = False) -> Plan:
        """Do what :meth:`provision` does, awaited."""
        return await self.awaited(provision, load_queue(queue), **_provisioning_flags(migrate, park_dead))

    def check_drained(
        self, queue: QueueSource, consumers: Sequence[str] | None = None, *, nothing_dead: bool = False
    ) -> DrainReport:
        """Check whether a queue is drained: nothing pending, nothing in flight.

        :param consumers: names of the consumers to check; all, and jobs that no consumer takes, where absent
        :param nothing_dead: count dead letters in circulation too
        :raises NotFoundError: the queue or one of the consumers doesn't exist
        """
        return self.blocking(
            check_drained,
            load_queue(queue),
            chosen_consumers(consumers),
            nothing_dead=flag("nothing_dead", nothing_dead),
        )

    async def acheck_drained(
        self, queue: QueueSource, consumers: Sequence[str] | None = None, *, nothing_dead: bool = False
    ) -> DrainReport:
        """Do what :meth:`check_drained` does, awaited."""
        return await self.awaited(
            check_drained,
            load_queue(queue),
            chosen_consumers(consumers),
            nothing_dead=flag("nothing_dead", nothing_dead),
        )

    def discover_queue(self, name: str) -> WorkQueue:
        """Read the declaration of a queue from its streams on the server.

        :param name: the stream of the queue
        :return: the queue; its ``to_yaml()`` is the text of a file with the declaration
        :raises NotFoundError: there is no such stream
        :raises QueueDeclarationError: it is no work queue, or has no dead letter queue
        """
        return self.blocking(discover_queue, stream_name(name))

    async def adiscover_queue(self, name: str) -> WorkQueue:
        """Do what :meth:`discover_queue` does, awaited."""
        return await self.awaited(discover_queue, stream_name(name))

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
        return self.blocking(
            find_dead_letters, load_queue(queue), Selection.of(selection), census=flag("census", census)
        )

    async def afind_dead_letters(
        self, queue: QueueSource, selection: SelectionSource | None = None, *, census: bool = False
    ) -> Findings:
        """Do what :meth:`find_dead_letters` does, awaited."""
        return await self.awaited(
            find_dead_letters, load_queue(queue), Selection.of(selection), census=flag("census", census)
        )

    def diagnose_dead_letters(self, queue: QueueSource, selection: SelectionSource | None = None) -> Diagnosis:
        """Say what dead letters died of, whether that is still so, and what to do about it.

        :param selection: which dead letters; all in circulation where absent
        :raises SelectionError: the selection isn't understood
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(diagnose_dead_letters, load_queue(queue), Selection.of(selection))

    async def adiagnose_dead_letters(self, queue: QueueSource, selection: SelectionSource | None = None) -> Diagnosis:
        """Do what :meth:`diagnose_dead_letters` does, awaited."""
        return await self.awaited(diagnose_dead_letters, load_queue(queue), Selection.of(selection))

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
            summarise_dead_letters,
            load_queue(queue),
            Selection.of(selection),
            group_fields(group_by),
            census=flag("census", census),
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
        return await self.awaited(
            summarise_dead_letters, load_queue(queue), select, group_fields(group_by), census=flag("census", census)
        )

    def account(self, queue: QueueSource) -> JobAccount:
        """Find the jobs that are gone without evidence of their end; what is settled isn't read again.

        :return: counts, and the jobs as ranges of sequences; its ``as_json()`` fits an XCom
        :raises NotFoundError: the queue doesn't exist
        """
        return self.blocking(account_for_jobs, load_queue(queue))

    async def aaccount(self, queue: QueueSource) -> JobAccount:
        """Do what :meth:`account` does, awaited."""
        return await self.awaited(account_for_jobs, load_queue(queue))

    def redrive(self, queue: QueueSource, request: RedriveRequest | None = None) -> RedriveReport:
        """Bring dead letters back as jobs with fresh deliveries.

        :param request: which letters, and how; all in circulation, unchanged, where absent
        :return: the report, which names letters that failed too
        :raises RedriveRequestError: the request isn't possible here; nothing was done
        :raises DeadLetterGoneError: a requested sequence is no dead letter (any more); nothing was done
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(redrive_dead_letters, load_queue(queue), optional_request(request))

    async def aredrive(self, queue: QueueSource, request: RedriveRequest | None = None) -> RedriveReport:
        """Do what :meth:`redrive` does, awaited."""
        return await self.awaited(redrive_dead_letters, load_queue(queue), optional_request(request))

    def preview_redrive(
        self, queue: QueueSource, request: RedriveRequest | None = None, group_by: Sequence[GroupField] = BY_CAUSE
    ) -> Preview:
        """Count what :meth:`redrive` would do; change nothing.

        :param request: which letters, and how; all in circulation, unchanged, where absent
        :param group_by: the fields that letters of a group share
        :raises RedriveRequestError: the request isn't possible here
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return self.blocking(
            preview, load_queue(queue), optional_request(request) or RedriveRequest(), group_fields(group_by)
        )

    async def apreview_redrive(
        self, queue: QueueSource, request: RedriveRequest | None = None, group_by: Sequence[GroupField] = BY_CAUSE
    ) -> Preview:
        """Do what :meth:`preview_redrive` does, awaited."""
        return await self.awaited(
            preview, load_queue(queue), optional_request(request) or RedriveRequest(), group_fields(group_by)
        )


def _provisioning_flags(migrate: bool, park_dead: bool) -> dict[str, bool]:  # noqa: FBT001
    return {"migrate": flag("migrate", migrate), "park_dead": flag("park_dead", park_dead)}
