"""The operator that brings dead letters back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.find import group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import ApiError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor, take_cursor
from airflow_provider_jetstream.operators.spark_redrive import SPARK, SparkRedrivingOperator, refuse_beside_spark
from airflow_provider_jetstream.tasks.error_mapping import terminal_errors_fail
from airflow_provider_jetstream.tasks.identity import run_key, who_of
from airflow_provider_jetstream.tasks.redrive_request import redrive_request
from airflow_provider_jetstream.tasks.template_values import require_rendered, selection_as_json, templated
from airflow_provider_jetstream.tasks.xcom import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField
    from airflow_provider_jetstream.jetstream.redrive.repair import Transform
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

_PARTS = ("select", "sequences", "subject", "transform", "rate", "protocol", "max_redrives", "why")


class JetStreamRedriveOperator(SparkRedrivingOperator):
    """Bring dead letters back as jobs with fresh deliveries; succeed when all are, or when the jobs have ended.

    Running it again at any time is safe. Where the queue has an audit, a retry goes on where the try before stopped,
    and waits for the jobs of all tries; so does a task that failed and is cleared, while one that ended begins anew. A
    task that is killed finishes the letters in hand and leaves the others where they are; with ``engine="spark"`` it
    ends its Spark application at once, and the next try finds how far each letter came.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param select: which dead letters, as a :class:`~airflow_provider_jetstream.jetstream.Selection`, its
        dict, or the text of one; all in circulation where absent
    :param sequences: the same as ``sequences`` in ``select``: stream sequences, as numbers or as pairs of first and
        last, which is how the sensor gives them. One that is no dead letter fails the task before anything is done
    :param subject: where the jobs go, a subject of the same queue; each where it was where absent
    :param transform: a function that takes a :class:`~airflow_provider_jetstream.jetstream.DeadLetter` and
        returns a :class:`~airflow_provider_jetstream.jetstream.Repair`, or ``None`` for no change
    :param rate: letters a second at most; as fast as possible where absent
    :param protocol: ``auto``, ``copy``, ``atomic`` or ``in_place``
    :param max_redrives: letters redriven so often before are parked instead; 0 parks all
    :param why: a reason, for the audit and for parked letters
    :param dry_run: tell what would be done, and change nothing
    :param group_by: what a dry run groups letters by: any of reason, error_class, fingerprint, traceback_digest,
        error_place, subject, consumer, dag_id, run_id, task_id
    :param engine: ``python`` redrives in the task's own process; ``spark`` has a Spark application do it, for dead
        letters by the hundred thousand. With Spark neither ``sequences`` nor ``transform`` are taken
    :param repair: for Spark, in place of ``transform``: a function that takes a ``DataFrame`` of letters and returns
        those that are to be redriven, with ``subject``, ``body`` and ``headers`` changed as wanted
    :param letters: for Spark: where a report kept the letters (``kept`` of its result); looked for where absent
    :param directory: for Spark: where it may keep letters and repaired ones, shared by driver and executors
    :param spark_conn_id: the Airflow connection of type ``spark``; Spark runs on this machine where the default one
        doesn't exist
    :param spark_conf: further properties of Spark; ``spark.jetstream.…`` says how executors elsewhere find NATS
    :param wait_for_completion: wait until every redriven job ended
    :param max_dead: redriven jobs that may die again; ``None`` for any number
    :param max_cancelled: cancelled jobs to put up with; ``None`` for any number
    :param wait_timeout: how long to wait
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: counts, and sequences as ranges; of a dry run counts, groups and a sample
    :raises SelectionError: the selection isn't understood
    :raises RedriveOrderError: another argument can't be used, or not together with others
    """

    template_fields: Sequence[str] = (
        "work_queue",
        "select",
        "sequences",
        "subject",
        "rate",
        "protocol",
        "max_redrives",
        "why",
        "nats_conn_id",
        *SparkRedrivingOperator.spark_fields,
    )
    ui_color = "#f5e6d9"
    # Only where there is an audit: a retry would find the letters gone and succeed, whatever became of the jobs.
    retry_goes_on_waiting = False

    def __init__(
        self,
        *,
        select: Selection | Mapping[str, Any] | str | None = None,
        sequences: Sequence[int] | Sequence[Sequence[int]] | str | None = None,
        subject: str | None = None,
        transform: Transform | None = None,
        rate: float | str | None = None,
        protocol: Protocol | str = Protocol.AUTO,
        max_redrives: int | str | None = None,
        why: str | None = None,
        dry_run: bool = False,
        group_by: Iterable[GroupField] = BY_CAUSE,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.select = selection_as_json(select) if isinstance(select, Selection) else select
        self.sequences = sequences
        self.subject = subject
        self.transform = transform
        self.rate = rate
        self.protocol = protocol.value if isinstance(protocol, Protocol) else protocol
        self.max_redrives = max_redrives
        self.why = why
        # Every operator has a method of the name dry_run.
        self.only_preview = dry_run
        self.group_by = group_fields(group_by)
        self._asked = tuple(name for name in ("select", "sequences") if getattr(self, name) is not None)
        self._killed = False
        if self.engine == SPARK:
            refuse_beside_spark(self.transform, self.group_by, self.select, self.sequences)
        visible = {name: getattr(self, name) for name in _PARTS}
        redrive_request(**{name: None if templated(value) else value for name, value in visible.items()})

    def execute(self, context: Context) -> dict[str, Any]:
        """Redrive, and wait if asked to.

        :param context: the task's context
        :return: the result of the task
        :raises AirflowFailException: a letter that was asked for is gone, what is asked for isn't possible, or too many
            redriven jobs died
        :raises RedriveError: some letters stayed where they were
        """
        with terminal_errors_fail():
            queue = WorkQueue.load(self.work_queue)
            order = replace(self._order(), who=who_of(context), run=run_key(context))
            hook = JetStreamHook(self.nats_conn_id)
            if self.only_preview:
                if self.engine == SPARK:
                    return self._tell_preview(self.preview_on_spark(context, queue, order))
                return self._tell_preview(hook.preview_redrive(queue, order, self.group_by).as_json())
            if self.engine == SPARK:
                mark, told, awaited = self._redrive_with_spark(hook, context, queue, order)
                ended = hook.blocking(self._wait, queue, order, mark, awaited) if mark else None
            else:
                mark, told, awaited, ended = hook.blocking(self._redrive, queue, order)
        summary = told | {"run": order.run if self.retry_goes_on_waiting else None}
        if mark is None:
            return plain(summary)
        if ended is None:
            self.defer_waiting(mark, awaited, summary)
        return self.conclude(summary, ended.as_json())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Go on after the trigger.

        :param context: the task's context
        :param event: what the trigger found
        :return: the result of the task
        :raises AirflowFailException: too many jobs died, or waiting was impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        self.retry_goes_on_waiting = bool(event and event.get("summary", {}).get("run"))
        if self.retry_goes_on_waiting and event and event["status"] == "ended":
            JetStreamHook(self.nats_conn_id).blocking(self._end, WorkQueue.load(self.work_queue), run_key(context))
        return super().execute_complete(context, event)

    def on_kill(self) -> None:
        """Leave what isn't begun where it is; called while :meth:`execute` runs, wherever that is."""
        self._killed = True
        super().on_kill()

    def _order(self) -> RedriveRequest:
        for name in self._asked:
            require_rendered(name, getattr(self, name))
        return redrive_request(**{name: getattr(self, name) for name in _PARTS})

    async def _redrive(
        self, connection: Connection, queue: WorkQueue, order: RedriveRequest
    ) -> tuple[Cursor | None, dict[str, Any], set[int], WaitReport | None]:
        mark = await self._mark(connection, queue)
        report = await redrive_dead_letters(
            connection,
            queue,
            replace(order, keep_open=mark is not None),
            stopped=lambda: self._killed,
        )
        told = report.as_json()
        self._tell(told | {"guarantee": report.guarantee})
        report.raise_for_failures()
        awaited = report.awaited()
        if mark is None:
            return None, told, awaited, None
        mark = _since(mark, told)
        return mark, told, awaited, await self._wait(connection, queue, order, mark, awaited)

    def _redrive_with_spark(
        self, hook: JetStreamHook, context: Context, queue: WorkQueue, order: RedriveRequest
    ) -> tuple[Cursor | None, dict[str, Any], set[int]]:
        mark = hook.blocking(self._mark, queue)
        told, awaited, problem = self.redrive_on_spark(context, queue, replace(order, keep_open=mark is not None))
        self._tell(told)
        if problem:
            raise RedriveError(problem)
        del told["guarantee"]
        return mark and _since(mark, told), told, awaited

    async def _mark(self, connection: Connection, queue: WorkQueue) -> Cursor | None:
        mark = await take_cursor(connection, queue) if self.wait_for_completion else None
        self.retry_goes_on_waiting = await self._audit(connection, queue) is not None
        return mark

    async def _wait(
        self, connection: Connection, queue: WorkQueue, order: RedriveRequest, mark: Cursor, awaited: set[int]
    ) -> WaitReport | None:
        ended = await self.wait_inline(connection, mark, awaited)
        if ended:
            await self._end(connection, queue, str(order.run))
        return ended

    async def _audit(self, connection: Connection, queue: WorkQueue) -> AuditLog | None:
        if queue.audit is None:
            return None
        return await AuditLog.open(connection, queue, (await stream_info(connection, queue.name))["created"])

    async def _end(self, connection: Connection, queue: WorkQueue, run: str) -> None:
        try:
            if audit := await self._audit(connection, queue):
                await audit.finish(run)
        except (ApiError, TransientError) as error:
            self.log.warning(
                "The end of the redrive couldn't be recorded, a cleared task would go on with it: %s", error
            )

    def _tell(self, told: Mapping[str, Any]) -> None:
        if not (told["redriven"] or told["parked"] or told["failed"]):
            self.log.info("No dead letter of this selection was found; there is nothing to redrive")
        self.log.info(
            "%d dead letters redriven (%d by earlier tries), %d parked, %d failed, %d were gone; protocol %s: %s",
            *(told[name] for name in ("redriven", "resumed", "parked", "failed", "gone", "protocol", "guarantee")),
        )
        for sequence, reason in told["failures"].items():
            self.log.error("Dead letter %s stays where it is: %s", sequence, reason)
        self._warn(told)

    def _tell_preview(self, told: dict[str, Any]) -> dict[str, Any]:
        self.log.info(
            "A redrive would bring back %d dead letters, park %d and fail for %d; protocol %s: %s",
            *(told[name] for name in ("redriven", "parked", "failed", "protocol", "guarantee")),
        )
        for group in told["groups"]:
            named = zip(self.group_by, group["group"], strict=True)
            self.log.info("%d of %s", group["count"], ", ".join(f"{name} {value or '-'}" for name, value in named))
        for letter in told["sample"]:
            self.log.info("For example %s", json.dumps(letter))
        for sequence, reason in told["failures"].items():
            self.log.warning("Dead letter %s would stay where it is: %s", sequence, reason)
        self._warn(told)
        return plain(told)

    def _warn(self, told: Mapping[str, Any]) -> None:
        if told["uncertain"]:
            self.log.warning("%d more dead letters can't be told yet; a later redrive finds them", told["uncertain"])
        if told["undeliverable"]:
            self.log.warning("%d jobs are taken by no consumer; select reason undeliverable", told["undeliverable"])
        for risk in told["risks"]:
            self.log.warning("%s", risk)


def _since(mark: Cursor, told: Mapping[str, Any]) -> Cursor:
    # An earlier try redrove some, and they may have ended before this one took its mark.
    return mark.from_start() if told["resumed"] else mark
