"""The hook: the operations of tasks on JetStream, blocking or awaited.

Arguments are checked before a connection is opened.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.connection_form import CONNECTION_FIELDS, FIELD_BEHAVIOUR
from airflow_provider_jetstream.hooks.connected_hook import ConnectedHook, awaitable, blocking, call
from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.dead_letters.group import BY_CAUSE, group_fields
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JobError, RedriveRequestError
from airflow_provider_jetstream.jetstream.waiting.policy import FAIL
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    DEFAULT_RECONCILE,
    DEFAULT_WAIT,
    WAIT_FIELDS,
    check_flags,
    check_optional_text,
    check_text,
    check_wait_limits,
    parse_number,
    parse_time_limit,
    parse_wait_limits,
)
from airflow_provider_jetstream.tasks.context import call_origin
from airflow_provider_jetstream.tasks.jobs import check_subject, require_jobs
from airflow_provider_jetstream.tasks.queue_source import load_queue


def form_widgets() -> dict[str, Any]:
    """Return the fields; a number is text there.

    :raises ImportError: nothing is there that shows a form
    """
    from flask_appbuilder.fieldwidgets import BS3PasswordFieldWidget, BS3TextFieldWidget
    from wtforms import BooleanField, PasswordField, StringField
    from wtforms.validators import Optional

    widgets: dict[str, Any] = {}
    for name, field in CONNECTION_FIELDS.items():
        schema = field["schema"]
        default = schema.get("default")
        texts = {"description": field["description"], "default": None if default is None else str(default)}
        if "boolean" in schema["type"]:
            widgets[name] = BooleanField(field["label"], validators=[Optional()], **texts)
        elif schema.get("format") == "password":
            widget = BS3PasswordFieldWidget()
            widgets[name] = PasswordField(field["label"], validators=[Optional()], widget=widget, **texts)
        else:
            widgets[name] = StringField(field["label"], validators=[Optional()], widget=BS3TextFieldWidget(), **texts)
    return widgets


def publication_limits(
    jobs: object, subject: object, origin: object, rate: object, room_timeout: object
) -> tuple[float | None, float]:
    """Check what is to be published, and return the rate, and the seconds for which a full queue is borne.

    :raises ArgumentError: an argument can't be used
    :raises JobError: ``jobs`` holds no jobs, or a limit can't be used
    """
    require_jobs(jobs)
    check_subject(subject)
    if origin is not None and not isinstance(origin, runtime.Origin):
        raise ArgumentError(f"expected an Origin as origin, found {origin!r}: leave it out in a task")
    jobs_a_second = parse_number("rate", rate, float, JobError)
    runtime.check_rate(jobs_a_second)
    return jobs_a_second, parse_time_limit("room_timeout", room_timeout)


def single_job_id(job_id: object) -> str:
    """Return the id of a job.

    :raises JobError: it is none, or several
    """
    if isinstance(job_id, bool) or not isinstance(job_id, str | int) or not str(job_id).strip():
        raise JobError(f"expected the id of a job as job_id, found {job_id!r}: name one job")
    return str(job_id)


def optional_text(name: str, text: str | None) -> str | None:
    """Return text, or ``None``.

    :raises ArgumentError: it is neither
    """
    check_optional_text(**{name: text})
    return text


def flag(name: str, value: object) -> bool:
    """Return ``True`` or ``False``.

    :raises ArgumentError: it is neither
    """
    check_flags(**{name: value})
    return value is True


def optional_request(request: object) -> RedriveRequest | None:
    """Return a request for a redrive, or ``None``.

    :raises RedriveRequestError: it is neither
    """
    if request is not None and not isinstance(request, runtime.RedriveRequest):
        raise RedriveRequestError(
            f"expected a RedriveRequest as request, found {request!r}: make one, such as"
            ' RedriveRequest(Selection(consumer="mail"))'
        )
    return request


def stream_name(name: object) -> str:
    """Return the name of a stream.

    :raises ArgumentError: it is none
    """
    check_text(name=name)
    if problem := "it has a dot" if "." in str(name) else subject_problem(str(name), wildcards=False):
        raise ArgumentError(f"expected the name of a stream as name, found {name!r}: {problem}; correct it")
    return str(name)


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import timedelta

    from airflow_provider_jetstream.hooks.connected_hook import Operation
    from airflow_provider_jetstream.jetstream.cancellation.cancel import CancelReport
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.account import JobAccount
    from airflow_provider_jetstream.jetstream.dead_letters.diagnose import Diagnosis
    from airflow_provider_jetstream.jetstream.dead_letters.find import Findings, Summary
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.inspection.drained import DrainReport
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.provisioning.plan import Plan
    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.preview import Preview
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.jetstream.waiting.job_reports import JobReport, JobReportSource
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

    SelectionSource: TypeAlias = Selection | Mapping[str, Any]


class JetStreamHook(ConnectedHook):
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

    @blocking
    def plan(self, queue: QueueSource, *, drain: bool = False, park_dead: bool = False) -> Operation[Plan]:
        """Plan what :meth:`provision` would do; change nothing.

        :param drain: whether a change of filters waits until the jobs that would get another consumer are done, and
            parks those that are dead
        :param park_dead: whether dead letters that a new consumer would run again are parked first
        :return: the steps, those that the server would refuse included
        :raises ServerTooOldError: the declaration needs a feature that the server lacks
        """
        return call(runtime.plan, load_queue(queue), **_provisioning_flags(drain, park_dead))

    aplan = awaitable(plan)

    @blocking
    def provision(self, queue: QueueSource, *, drain: bool = False, park_dead: bool = False) -> Operation[Plan]:
        """Create or update a queue's streams and consumers.

        :param drain: whether a change of filters waits until the jobs that would get another consumer are done, and
            parks those that are dead
        :param park_dead: whether dead letters that a new consumer would run again are parked first
        :return: the steps that were applied
        :raises DriftError: what exists differs in a way that no update can change
        """
        return call(runtime.provision, load_queue(queue), **_provisioning_flags(drain, park_dead))

    aprovision = awaitable(provision)

    @blocking
    def check_drained(
        self, queue: QueueSource, consumers: Sequence[str] | None = None, *, nothing_dead: bool = False
    ) -> Operation[DrainReport]:
        """Check whether a queue is drained: nothing pending, nothing in flight.

        :param consumers: names of the consumers to check; all, and jobs that no consumer takes, where absent
        :param nothing_dead: count dead letters in circulation too
        :raises NotFoundError: the queue or one of the consumers doesn't exist
        """
        return call(
            runtime.check_drained,
            load_queue(queue),
            runtime.chosen_consumers(consumers),
            nothing_dead=flag("nothing_dead", nothing_dead),
        )

    acheck_drained = awaitable(check_drained)

    @blocking
    def discover_queue(self, name: str) -> Operation[WorkQueue]:
        """Read the declaration of a queue from its streams on the server.

        :param name: the stream of the queue
        :return: the queue; its ``to_yaml()`` is the text of a file with the declaration
        :raises NotFoundError: there is no such stream
        :raises QueueDeclarationError: it is no work queue, or has no dead letter queue
        """
        return call(runtime.discover_queue, stream_name(name))

    adiscover_queue = awaitable(discover_queue)

    @blocking
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
    ) -> Operation[PublishReport]:
        """Publish jobs and make sure that all are stored.

        :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
        :param subject: the subject of jobs that name none
        :param origin: the publishing task; where absent, the one that runs this code, if any does. Its tries publish
            the same jobs once, where they make the same calls in the same order
        :param job_id: for jobs without an id of their own: a field of the JSON body, or a function that returns the id
            of each job
        :param queue: needed for partitions and scheduled jobs, and for jobs that hold only the key of their origin
        :param rate: jobs per second at most; as fast as possible where absent
        :param room_timeout: how long a full queue (``discard: new``) may store no job before the jobs that it refuses
            are given up; a number is seconds
        :return: the outcome of every job; where the queue declares events, its ``handle`` is what waits take
        :raises PublishError: some jobs aren't known to be stored; carries the report
        """
        rate, room = publication_limits(jobs, subject, origin, rate, room_timeout)
        origin = origin or call_origin()
        return call(
            runtime.publish_with_handle,
            _optional_queue(queue),
            jobs,
            subject=subject,
            origin=origin,
            job_id=job_id,
            rate=rate,
            room_timeout=room,
        )

    apublish = awaitable(publish)

    def job_reports(self, reports: object, *, states: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return the reports on the jobs that a task has awaited, a dict for each job.

        :param reports: the XCom ``job_reports`` of that task, which also a failed task has; or what it returned with
            ``returns="jobs"``, or one item of that; or a list of these
        :param states: the wanted ones of ``completed``, ``dead``, ``cancelled``, ``unaccounted`` and ``awaited``; all
            where absent
        :raises ArgumentError: it is none of these
        :raises JobReportsGoneError: the events stream doesn't store a part of them any more
        """
        source = runtime.JobReportSource(reports)
        found = self.blocking(_read_reports, source, states) if source.has_parts else source.held(states)
        return [report.as_json() for report in found]

    async def ajob_reports(self, reports: object, *, states: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Do what :meth:`job_reports` does, awaited."""
        source = runtime.JobReportSource(reports)
        found = await self.awaited(_read_reports, source, states) if source.has_parts else source.held(states)
        return [report.as_json() for report in found]

    @blocking
    def cancel(
        self, queue: QueueSource, job_id: str, why: str | None = None, by: str | None = None
    ) -> Operation[CancelReport]:
        """Cancel the stored jobs of an id, and schedules of such jobs.

        Workers obey of their own accord, before they start a job or while it runs. Jobs that are published later under
        the same id aren't cancelled.

        :param job_id: the jobs' id
        :param why: a reason for people
        :param by: the person or program that cancels
        :raises QueueDeclarationError: the queue declares no events stream, which stores cancellations
        :raises NotFoundError: the queue or its events stream doesn't exist
        """
        return call(
            runtime.cancel, load_queue(queue), single_job_id(job_id), optional_text("why", why), optional_text("by", by)
        )

    acancel = awaitable(cancel)

    @blocking
    def wait(
        self,
        handle: object,
        *,
        max_dead: int | None = 0,
        max_cancelled: int | None = 0,
        max_unaccounted: int | None = 0,
        min_completed: int | None = None,
        wait_timeout: timedelta | float | str = DEFAULT_WAIT,
        reconcile: timedelta | float | str = DEFAULT_RECONCILE,
        on_stall: str = FAIL,
        cancel_on_failure: bool = False,
    ) -> Operation[WaitReport]:
        """Wait until jobs that were published elsewhere have ended; occupies the worker slot of its task meanwhile.

        :param handle: the handle on the jobs, or what has it as ``handle``: the result of a publishing task, or the
            report of :meth:`publish`
        :param max_dead: dead letters to tolerate; ``None`` for any number
        :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
        :param max_unaccounted: jobs to tolerate that are gone without evidence of their end; ``None`` for any number
        :param min_completed: how many jobs have to complete, however the others end; not together with the three above
        :param wait_timeout: how long to wait: a duration or seconds
        :param reconcile: how long the queue has to be gone, or a job without a consumer that delivers it, until that is
            reported
        :param on_stall: ``fail`` to end the wait with an error then, ``wait`` to go on with a warning
        :param cancel_on_failure: cancel the jobs that haven't ended when the wait fails
        :return: how the jobs ended
        :raises ArgumentError: an argument can't be used
        :raises TerminalError: more jobs became dead letters, were cancelled or are unaccounted for than tolerated
        :raises JobsStalledError: no consumer delivers one of the jobs
        :raises DeadlineError: jobs haven't ended within ``wait_timeout``
        """
        options = _options(locals())
        return call(runtime.wait_by_handle, runtime.JobsHandle.of(handle), **options)

    await_ = awaitable(wait)

    @blocking
    def find_dead_letters(
        self, queue: QueueSource, selection: SelectionSource | None = None, *, count_under_pause: bool = False
    ) -> Operation[Findings]:
        """Find dead letters and hold all of them in memory; see :meth:`scan_dead_letters` for many.

        :param selection: which dead letters; all in circulation where absent
        :param count_under_pause: pause consumers until nothing is in flight, so that more letters are certain
        :return: the proved dead letters, and the DLQ entries about other jobs
        :raises SelectionError: the selection isn't understood
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return call(
            runtime.find_dead_letters,
            load_queue(queue),
            runtime.Selection.of(selection),
            count_under_pause=flag("count_under_pause", count_under_pause),
        )

    afind_dead_letters = awaitable(find_dead_letters)

    @blocking
    def diagnose_dead_letters(
        self, queue: QueueSource, selection: SelectionSource | None = None
    ) -> Operation[Diagnosis]:
        """Say what dead letters died of, whether that is still so, and what to do about it.

        :param selection: which dead letters; all in circulation where absent
        :raises SelectionError: the selection isn't understood
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return call(runtime.diagnose_dead_letters, load_queue(queue), runtime.Selection.of(selection))

    adiagnose_dead_letters = awaitable(diagnose_dead_letters)

    @blocking
    def scan_dead_letters(
        self,
        queue: QueueSource,
        selection: SelectionSource | None = None,
        group_by: Iterable[GroupField] = (),
        *,
        count_under_pause: bool = False,
    ) -> Operation[Summary]:
        """Count dead letters without holding them, and preserve the bodies of those that are seen for the first time.

        :param selection: which dead letters; all in circulation where absent
        :param group_by: the fields that letters of a group share
        :param count_under_pause: pause consumers until nothing is in flight, so that more letters are certain
        :return: counts, sequences as ranges, and groups with their ages
        :raises SelectionError: the selection isn't understood, or letters can't be grouped by one of the fields
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return call(
            runtime.summarise_dead_letters,
            load_queue(queue),
            runtime.Selection.of(selection),
            group_fields(group_by),
            count_under_pause=flag("count_under_pause", count_under_pause),
        )

    ascan_dead_letters = awaitable(scan_dead_letters)

    @blocking
    def account(self, queue: QueueSource) -> Operation[JobAccount]:
        """Find the jobs that are gone without evidence of their end; what is settled isn't read again.

        :return: counts, and the jobs as ranges of sequences; its ``as_json()`` fits an XCom
        :raises NotFoundError: the queue doesn't exist
        """
        return call(runtime.account_for_jobs, load_queue(queue))

    aaccount = awaitable(account)

    @blocking
    def redrive(self, queue: QueueSource, request: RedriveRequest | None = None) -> Operation[RedriveReport]:
        """Bring dead letters back as jobs with fresh deliveries.

        :param request: which letters, and how; all in circulation, unchanged, where absent
        :return: the report, which names letters that failed too
        :raises RedriveRequestError: the request isn't possible here; nothing was done
        :raises DeadLetterGoneError: a requested sequence is no dead letter (any more); nothing was done
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return call(runtime.redrive_dead_letters, load_queue(queue), optional_request(request))

    aredrive = awaitable(redrive)

    @blocking
    def preview_redrive(
        self, queue: QueueSource, request: RedriveRequest | None = None, group_by: Sequence[GroupField] = BY_CAUSE
    ) -> Operation[Preview]:
        """Count what :meth:`redrive` would do; change nothing.

        :param request: which letters, and how; all in circulation, unchanged, where absent
        :param group_by: the fields that letters of a group share
        :raises RedriveRequestError: the request isn't possible here
        :raises NotFoundError: the queue or its dead letter queue doesn't exist
        """
        return call(
            runtime.preview,
            load_queue(queue),
            optional_request(request) or runtime.RedriveRequest(),
            group_fields(group_by),
        )

    apreview_redrive = awaitable(preview_redrive)


def _provisioning_flags(drain: bool, park_dead: bool) -> dict[str, bool]:  # noqa: FBT001
    return {"drain": flag("drain", drain), "park_dead": flag("park_dead", park_dead)}


def _optional_queue(queue: QueueSource | None) -> WorkQueue | None:
    return None if queue is None else load_queue(queue)


async def _read_reports(
    connection: Connection, source: JobReportSource, states: Collection[str] | None
) -> list[JobReport]:
    return [report async for report in source.read(connection, states)]


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of a wait, and return those of :func:`wait_by_handle`."""
    fields = {name: values[name] for name in WAIT_FIELDS}
    check_wait_limits(fields)
    check_flags(cancel_on_failure=values["cancel_on_failure"])
    limits = parse_wait_limits(fields)
    time_limit, cancels = limits.timeout.total_seconds(), values["cancel_on_failure"]
    return {"policy": limits.policy, "time_limit": time_limit, "cancel_on_failure": cancels, **asdict(limits.stalls)}
