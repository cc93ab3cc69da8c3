"""The operator that redrives dead letters."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from airflow_provider_jetstream.jetstream.dead_letters.group import BY_CAUSE, group_fields
from airflow_provider_jetstream.jetstream.errors import DeadlineError, RedriveError, RedriveRequestError
from airflow_provider_jetstream.operators.waved_redrive import (
    SPARK,
    WavedRedriveOperator,
    refuse_beside_spark,
    refuse_target_and_order,
)
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    WAIT_ARGUMENTS,
    check_flags,
    check_optional_text,
    check_shared_arguments,
    check_text,
    is_templated,
    refuse_limits_without_wait,
    require_rendered,
    selection_as_written,
)
from airflow_provider_jetstream.tasks.context import audit_identity, fail_on_terminal_errors, json_result, task_key
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import (
    declared_queue,
    load_queue,
    require_dead_letter_queue,
    require_events,
)
from airflow_provider_jetstream.tasks.redrives import AUTO, log_preview, redrive_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.repair import Transform
    from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.tasks.argument_types import (
        AwaitedPythonRedrive,
        AwaitedSparkRedrive,
        Count,
        Duration,
        Flag,
        Number,
        PartialRedrive,
        Patch,
        PythonRedrive,
        Queue,
        Selected,
        Sequences,
        SparkRedrive,
        Text,
        TolerantPythonRedrive,
        TolerantSparkRedrive,
        WavedRedriveArguments,
    )
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

_REQUEST_FIELDS = (
    "select",
    "sequences",
    "subject",
    "transform",
    "rate",
    "protocol",
    "max_redrives",
    "why",
    "lease_timeout",
    "count_under_pause",
    "target_queue",
    "order_key",
    "patch",
    "discard",
    "without_copy",
    "undo",
    *WavedRedriveOperator.wave_fields,
)

# Arguments without which more letters would be redriven, or to another place, or in another order, or at all.
_NEEDED = ("select", "sequences", "subject", "target_queue", "order_key", "patch", "discard", "undo")


class JetStreamRedriveOperator(WavedRedriveOperator):
    """Bring dead letters back as jobs with fresh deliveries; succeed when all are back, or when the jobs have ended.

    Or drop them with ``discard=True``, and bring dropped ones back with ``undo``.

    Running it again at any time is safe. Where the queue has an audit, a retry continues the redrive of the try before
    and waits for the jobs of all tries; so does a task that failed and is cleared, while one that succeeded begins
    anew. A task that is killed finishes the letters that it has begun and leaves the others where they are; with
    ``engine="spark"`` it ends its Spark application at once, and the next try finds the progress of each letter.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param select: which dead letters, as a :class:`~airflow_provider_jetstream.jetstream.Selection`, its
        dict, or the text of one; all in circulation where absent
    :param sequences: the same as ``sequences`` in ``select``: stream sequences, as numbers or as pairs of first and
        last, the form of the sensor's result. One that is no dead letter fails the task before anything is done
    :param subject: the subject of the redriven jobs, one of the queue that gets them; each job's own where absent
    :param transform: a function that takes a :class:`~airflow_provider_jetstream.jetstream.DeadLetter` and
        returns a :class:`~airflow_provider_jetstream.jetstream.Repair`, or ``None`` for no change
    :param rate: letters a second at most; as fast as possible where absent
    :param protocol: ``auto``, ``copy`` or ``in_place``
    :param max_redrives: letters that were redriven so often are parked instead; 0 parks all
    :param why: a reason, for the audit and for parked letters
    :param target_queue: the work queue that gets the new jobs, in any form of ``work_queue``; the same one where
        absent. It needs ``subject``, a subject of that queue, or a ``transform`` that names one
    :param order_key: where each letter states its key: ``header:<name>``, ``subject:<number of the token>`` or
        ``body:<field>``. The task redrives letters of a key one after the other, each once the job before it has
        completed, and waits for that itself, for ``wait_timeout`` at most
    :param patch: operations by RFC 6902 on the letters' JSON bodies, in place of ``transform``: a list, or JSON text
    :param discard: drop the letters instead: recorded in the audit, from which ``undo`` brings them back; with
        ``"by_policy"`` those that ``dead_letters.keep`` of the queue keeps no longer
    :param without_copy: with ``discard``: drop also letters of which no copy would be stored, which nothing brings back
    :param undo: the id of a redrive (``redrive`` of its result): the letters that it discarded come back, parked; with
        ``sequences`` only these
    :param lease_timeout: how long to wait for another task or program that changes the queue's dead letters: a duration
        or seconds; a minute where absent. One that was killed counts for half a minute
    :param count_under_pause: pause the consumers first until nothing is in flight, for their ack wait and half a minute
        at most, so that letters of a queue that is never idle are certain; needs nats-server 2.11
    :param dry_run: count what would be done, and change nothing
    :param group_by: the fields by which a dry run groups letters: any of reason, error_class, fingerprint,
        traceback_digest, error_place, subject, consumer, dag_id, run_id, task_id
    :param engine: ``python`` redrives in the task's own process; ``spark`` runs a Spark application, for dead
        letters by the hundred thousand. Spark takes none of ``sequences``, ``transform``, ``target_queue``,
        ``order_key`` and ``patch``
    :param repair: for Spark, in place of ``transform``: a function that takes a ``DataFrame`` of letters and returns
        the letters to redrive, with ``subject``, ``body`` and ``headers`` changed as needed
    :param letters: for Spark: the folder in which a report stored the letters (``kept`` of its result); the queue is
        scanned where absent
    :param directory: for Spark: a folder for letters and repaired letters, shared by driver and executors
    :param spark_conn_id: the Airflow connection of type ``spark``; Spark runs on this machine where the default one
        doesn't exist
    :param spark_conf: further properties of Spark; ``spark.jetstream.…`` says how executors elsewhere find NATS
    :param waves: how many letters each wave brings back, such as ``[10, 100, "rest"]``, with a gate after each
    :param stop_when: the share of a wave's jobs that may die again, or a rule as a dict; see docs/redrive.md
    :param wait_for_completion: wait until every redriven job ended
    :param max_dead: redriven jobs that may die again; ``None`` for any number
    :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
    :param wait_timeout: how long to wait: a duration or seconds
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: counts, and sequences as ranges; after a dry run counts, groups and a sample
    :raises SelectionError: the selection isn't understood
    :raises RedriveRequestError: another argument can't be used, or not together with the others
    """

    template_fields: Sequence[str] = (
        "work_queue",
        *(name for name in _REQUEST_FIELDS if name != "transform"),
        "nats_conn_id",
        *WAIT_ARGUMENTS,
        *WavedRedriveOperator.spark_fields,
    )
    ui_color = "#f5e6d9"
    # Letters of a key are awaited one after the other, and wait_timeout limits that too.
    limits_of_waiting = tuple(name for name in WAIT_ARGUMENTS if name != "wait_timeout")

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls,
            *,
            task_id: str,
            work_queue: Queue = ...,
            **options: Unpack[PartialRedrive],
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    else:

        @classmethod
        def partial(cls, **kwargs: Any) -> OperatorPartial:
            """Begin a mapped task, and check the arguments that its instances share."""
            check_shared_arguments(cls, kwargs, ("work_queue",))
            return super().partial(**kwargs)

    @overload
    def __init__(
        self,
        *,
        task_id: str,
        work_queue: Queue,
        engine: Literal["python"] = ...,
        wait_for_completion: Literal[False] = ...,
        **options: Unpack[PythonRedrive],
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        task_id: str,
        work_queue: Queue,
        engine: Literal["python"] = ...,
        wait_for_completion: bool = ...,
        **options: Unpack[TolerantPythonRedrive],
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        task_id: str,
        work_queue: Queue,
        engine: Literal["python"] = ...,
        wait_for_completion: bool = ...,
        min_completed: Count,
        **options: Unpack[AwaitedPythonRedrive],
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        task_id: str,
        work_queue: Queue,
        engine: Literal["spark"],
        wait_for_completion: Literal[False] = ...,
        **options: Unpack[SparkRedrive],
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        task_id: str,
        work_queue: Queue,
        engine: Literal["spark"],
        wait_for_completion: bool = ...,
        **options: Unpack[TolerantSparkRedrive],
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        task_id: str,
        work_queue: Queue,
        engine: Literal["spark"],
        wait_for_completion: bool = ...,
        min_completed: Count,
        **options: Unpack[AwaitedSparkRedrive],
    ) -> None: ...

    def __init__(  # noqa: PLR0913 - each is an argument of its own in a DAG
        self,
        *,
        select: Selected | None = None,
        sequences: Sequences | None = None,
        subject: Text | None = None,
        transform: Transform | None = None,
        rate: Number | None = None,
        protocol: Protocol | Text = AUTO,
        max_redrives: Count | None = None,
        why: Text | None = None,
        lease_timeout: Duration | None = None,
        count_under_pause: Flag = False,
        target_queue: Queue | None = None,
        order_key: Text | None = None,
        patch: Patch | None = None,
        discard: Flag = False,
        without_copy: Flag = False,
        undo: Text | None = None,
        dry_run: bool = False,
        group_by: Iterable[GroupField] = BY_CAUSE,
        **kwargs: Unpack[WavedRedriveArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_flags(dry_run=dry_run)
        self.select = selection_as_written(select)
        self.sequences = sequences
        self.subject = subject
        self.transform = transform
        self.rate = rate
        self.protocol = str(protocol) if isinstance(protocol, str) else protocol
        self.max_redrives = max_redrives
        self.why = why
        self.lease_timeout = lease_timeout
        self.count_under_pause = count_under_pause
        self.target_queue: Any = target_queue
        self.order_key = order_key
        self.patch = patch if patch is None or not isinstance(patch, runtime.JsonPatch) else patch.text
        self.discard = discard
        self.without_copy = without_copy
        self.undo = undo
        check_optional_text(subject=subject, why=why, order_key=order_key, undo=undo)
        for name in ("subject", "order_key", "undo"):
            if getattr(self, name) is not None:
                check_text(**{name: getattr(self, name)})
        require_dead_letter_queue(self._known_queue)
        target = None if target_queue is None else declared_queue(target_queue, self, "target_queue")
        if self.wait_for_completion and (discard is True or discard == runtime.BY_POLICY or undo is not None):
            raise RedriveRequestError(
                "expected no wait_for_completion beside discard or undo, found it: they make no job to wait for"
            )
        if self.wait_for_completion:
            require_events(self._known_queue if target_queue is None else target)
        elif order_key is None and self.waves is None:
            refuse_limits_without_wait({"wait_timeout": self.wait_timeout})
        # Not named dry_run: every operator has a method of that name.
        self.only_preview = dry_run
        self.group_by = group_fields(group_by)
        self._needed_arguments = tuple(name for name in _NEEDED if getattr(self, name) not in (None, False))
        if self.engine == SPARK:
            refuse_beside_spark(
                self.transform, self.group_by, self.select, self.sequences, count_under_pause=self.count_under_pause
            )
            refuse_target_and_order(target_queue=target_queue, order_key=order_key, patch=patch)
            refuse_target_and_order(discard=discard, undo=undo)
        arguments = {name: getattr(self, name) for name in _REQUEST_FIELDS}
        # Without it, a target that is known would lack a subject.
        arguments["target_queue"] = None if is_templated(subject) else target
        redrive_request(**{name: None if is_templated(value) else value for name, value in arguments.items()})

    def execute(self, context: Context) -> TaskResult:
        """Redrive, and wait for the jobs if ``wait_for_completion`` is set.

        :raises AirflowFailException: a requested sequence is no dead letter, the request isn't possible, or more
            redriven jobs died than tolerated
        :raises LeaseHeldError: another task or program changes the queue's dead letters
        :raises RedriveError: some letters stayed where they were
        """
        with fail_on_terminal_errors():
            queue = load_queue(self.work_queue, self)
            self._limits(), self._parsed_defer_after()
            request = replace(self._request(), who=audit_identity(context), run=task_key(context))
            hook = hook_for(self.nats_conn_id)
            if self.only_preview:
                if self.engine == SPARK:
                    return log_preview(self.log, self.preview_on_spark(context, queue, request), self.group_by)
                preview = hook.preview_redrive(queue, request, self.group_by)
                return log_preview(self.log, preview.as_json(), self.group_by)
            if self.waves is not None and request.waves:
                return self.redrive_in_waves(hook, context, queue, request)
            if self.engine == SPARK:
                cursor, report, awaited = self._redrive_with_spark(hook, context, queue, request)
                ends = hook.blocking(self._wait, queue, request, cursor, awaited, report) if cursor else None
            else:
                report, ends = hook.blocking(self._redrive, queue, request)
        summary = report | {"run": request.run}
        if ends is None:
            self.note_work(summary)
            return json_result(summary)
        if isinstance(ends, runtime.JobsHandle):
            self.defer_waiting(ends, summary)
        return self.finish(summary, ends.as_json())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> TaskResult:
        """Resume after the trigger.

        :raises AirflowFailException: more jobs died than tolerated, or waiting was impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        with fail_on_terminal_errors():
            if self.is_in_waves(event):
                return self.execute(context)
            event = self._finished_event(context, event)
        return super().execute_complete(context, event)

    def _finished_event(self, context: Context, event: dict[str, Any] | None) -> dict[str, Any] | None:
        """Record the end of the redrive whose jobs the trigger has awaited, and return the event with it."""
        if event and event["status"] == "ended":
            finish = partial(
                runtime.finish_run, run=task_key(context), outcomes=runtime.RedriveOutcomes.of_wait(event["report"])
            )
            end = hook_for(self.nats_conn_id).blocking(finish, load_queue(self.work_queue, self))
            event = event | {"summary": event["summary"] | end}
        return event

    def on_kill(self) -> None:
        """Leave the letters that aren't begun where they are; called at any point of :meth:`execute`."""
        self._killed = True
        super().on_kill()

    def _request(self) -> RedriveRequest:
        for name in self._needed_arguments:
            require_rendered(name, getattr(self, name))
        arguments = {name: getattr(self, name) for name in _REQUEST_FIELDS}
        if self.target_queue is not None:
            arguments["target_queue"] = load_queue(self.target_queue, self, "target_queue")
        return redrive_request(**arguments)

    async def _redrive(
        self, connection: Connection, queue: WorkQueue, request: RedriveRequest
    ) -> tuple[dict[str, Any], WaitReport | JobsHandle | None]:
        cursor = await runtime.take_cursor(connection, request.target or queue) if self.wait_for_completion else None
        deadline = time.monotonic() + self._limits().timeout.total_seconds() if request.order_key else math.inf
        report = await runtime.redrive_dead_letters(
            connection,
            queue,
            replace(request, keep_open=cursor is not None),
            stopped=lambda: self._killed or time.monotonic() > deadline,
        )
        summary = report.as_json()
        runtime.send_redrive_metrics(queue.name, summary)
        self.log_redrive(summary | {"guarantee": report.guarantee})
        if report.cancelled and not self._killed:
            raise DeadlineError(
                f"expected the jobs of each key to complete one after the other within {self._limits().timeout}, found"
                f" letters that still wait for the job before them after {len(report.redriven)} were redriven: see"
                " whether workers take the jobs, or raise wait_timeout; running it again goes on"
            )
        report.raise_for_failures()
        if cursor is None:
            return summary, None
        cursor = _including_earlier_tries(cursor, summary)
        return summary, await self._wait(connection, queue, request, cursor, report.awaited_sequences(), summary)

    def _redrive_with_spark(
        self, hook: JetStreamHook, context: Context, queue: WorkQueue, request: RedriveRequest
    ) -> tuple[Cursor | None, dict[str, Any], set[int]]:
        cursor = hook.blocking(runtime.take_cursor, queue) if self.wait_for_completion else None
        summary, awaited, problem = self.redrive_on_spark(
            context, queue, replace(request, keep_open=cursor is not None)
        )
        self.log_redrive(summary)
        if problem:
            raise RedriveError(problem)
        del summary["guarantee"]
        return cursor and _including_earlier_tries(cursor, summary), summary, awaited

    async def _wait(
        self,
        connection: Connection,
        queue: WorkQueue,
        request: RedriveRequest,
        cursor: Cursor,
        awaited: set[int],
        summary: dict[str, Any],
    ) -> WaitReport | JobsHandle:
        ends = await self.wait_inline(
            connection, runtime.JobsHandle(cursor=cursor, sequences=runtime.sequence_ranges(awaited))
        )
        if not isinstance(ends, runtime.JobsHandle):
            summary |= await runtime.finish_run(
                connection, queue, str(request.run), runtime.RedriveOutcomes.of_wait(ends.as_json())
            )
        return ends


def _including_earlier_tries(cursor: Cursor, report: Mapping[str, Any]) -> Cursor:
    # An earlier try redrove some letters, and their jobs may have ended before this try took its cursor.
    return cursor.from_start() if report["resumed"] else cursor
