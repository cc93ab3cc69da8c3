"""A bulk redrive from the driver's side: look, divide, watch, report."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, RedriveError, RedriveRequestError, TransientError
from airflow_provider_jetstream.jetstream.redrive.preview import Preview
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import DriverScan, audit_log, begin_run, scan_queue
from airflow_provider_jetstream.spark.bulk_redrive.entry_cleanup import remove_finished_entries
from airflow_provider_jetstream.spark.bulk_redrive.in_place_check import any_dead, missing, repaired
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import CANCELLED, add_outcomes, add_previews
from airflow_provider_jetstream.spark.bulk_redrive.rows import used_columns
from airflow_provider_jetstream.spark.bulk_redrive.spark_job import (
    MOST_TASKS,
    partition_letters,
    run_watched,
    tasks_for,
)
from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA, SEQUENCE
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.audit.log import RunRecord
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
# How often the queue is looked at again because it was changed, or the server crashed, meanwhile.
_LOOKS = 5
_MANY = 2**31


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a bulk redrive is.

    :param done: letters that the audit tells of; 0 where there is no audit
    :param letters: about how many the queue has
    :param seconds: since the job began
    """

    done: int
    letters: int
    seconds: float


def redrive_letters(
    session: SparkSession,
    letters: DataFrame,
    queue: WorkQueue | Mapping[str, Any] | Path | str,
    request: RedriveRequest | None = None,
    connection: Mapping[str, str] | str | None = None,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
    tasks: int | None = None,
) -> RedriveReport:
    """Bring the dead letters of a frame back, as they are in it.

    :param session: Spark
    :param letters: which ones, by the column ``sequence``; with ``subject``, ``body`` and ``headers`` for what they
        become, unless ``repaired`` is false
    :param queue: the work queue, with its dead letter queue; a name is looked up on the server
    :param order: how; the frame selects and repairs, so that neither sequences nor a transform are taken
    :param connection: options of the data source that say where and as whom, or the name that its option
        ``connection`` takes; the environment where absent
    :param progress: called every five seconds
    :param stopped: asked a few times a second whether to leave the rest where it is
    :param tasks: among how many tasks the letters are divided, up to 32; at a rate, no more than run at the same time
    :return: the report, also of letters that failed; nothing is raised for them
    :raises SparkOptionError: the frame or the order can't be used; nothing was done
    :raises RedriveOrderError: what is asked for isn't possible here; nothing was done
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises RedriveError: Spark gave up; whatever was done is done, and it can be run again
    """
    return _Run(session, letters, queue, request, connection, progress, is_stopped, tasks).redrive()


def preview_letters(
    session: SparkSession,
    letters: DataFrame,
    queue: WorkQueue | Mapping[str, Any] | Path | str,
    request: RedriveRequest | None = None,
    connection: Mapping[str, str] | str | None = None,
    *,
    tasks: int | None = None,
) -> Preview:
    """Tell what :func:`redrive_letters` would do; change nothing.

    :param session: Spark
    :param letters: which ones, and what they become
    :param queue: the work queue
    :param order: how
    :param connection: where and as whom
    :param tasks: among how many tasks the letters are divided
    :return: the preview
    :raises SparkOptionError: and the others of :func:`redrive_letters`
    """
    return _Run(session, letters, queue, request, connection, lambda _: None, lambda: False, tasks).preview()


class _Run:
    def __init__(
        self,
        session: SparkSession,
        letters: DataFrame,
        queue: Any,
        order: RedriveRequest | None,
        connection: Mapping[str, str] | str | None,
        progress: Callable[[Progress], None],
        stopped: Callable[[], bool],
        tasks: int | None,
    ) -> None:
        self._session = session
        self._columns = used_columns(letters.schema, frozenset(LETTER_SCHEMA.names))
        self._letters = letters
        self._queue = queue
        self._given = {"connection": connection} if isinstance(connection, str) else dict(connection or {})
        self._order = _checked(order or RedriveRequest(), tasks)
        self._progress = progress
        self._stopped = stopped
        self._tasks = tasks
        self._began = self._told_at = time.monotonic()
        self._told_to_stop = False
        self._at_first = 0

    def redrive(self) -> RedriveReport:
        found, record = self._look(), None
        report = RedriveReport()
        if found.choice.protocol == Protocol.IN_PLACE:
            return self._in_place(found)
        if found.scan.audit:
            looked = found
            record = run_on_own_connection(self._given, lambda over: begin_run(over, looked, self._order, report))
            self._at_first = record.from_sequence + report.resumed
        letters = self._letters
        for _ in range(_LOOKS):
            doubtful = self._job(found, record, letters, report)
            if not doubtful or report.cancelled:
                break
            log.warning("%d letters are looked at again: the queue or its server changed", len(doubtful))
            again = self._session.createDataFrame([(each,) for each in doubtful], f"{SEQUENCE} bigint")
            letters, found = letters.join(again, SEQUENCE, "left_semi"), self._look()
        else:
            for sequence in doubtful:
                report.add_failure(sequence, "the queue, a consumer or the server changed at every look; run it again")
        self._finish(found, record, report)
        return report

    def preview(self) -> Preview:
        for _ in range(_LOOKS):
            found = self._look()
            scan, choice = found.scan, found.choice
            preview = Preview(
                choice.protocol,
                choice.guarantee,
                uncertain=scan.reconciliation.uncertain,
                undeliverable=scan.undeliverable,
                risks=scan.risks,
            )
            share, tasks = self._share(found, dry=True)
            rows = partition_letters(self._letters, self._columns, found.jobs, tasks)
            if add_previews(preview, run_watched(rows, share, lambda _: None)):
                return preview
        raise RedriveError(f"the queue, a consumer or the server changed at every one of {_LOOKS} looks")

    def _look(self) -> DriverScan:
        found = run_on_own_connection(self._given, lambda over: scan_queue(over, self._queue, self._order))
        if found.choice.protocol == Protocol.IN_PLACE and (problem := self._in_place_problem(found)):
            if self._order.protocol == Protocol.IN_PLACE:
                raise RedriveRequestError(
                    f"expected all letters of the queue as they are, found otherwise: {problem}; use another protocol"
                )
            # As where anything else is asked for that only copies can do.
            beyond = replace(self._order, max_redrives=_MANY)
            found = run_on_own_connection(self._given, lambda over: scan_queue(over, self._queue, beyond))
        choice = found.choice
        log.info(
            "Redriving %s by %s (%s): %s",
            *(found.scan.queue.name, choice.protocol.value, choice.reason, choice.guarantee),
        )
        return found

    def _in_place_problem(self, found: DriverScan) -> str:
        """Say why a redrive in place isn't what the frame asks for."""
        if repaired(self._letters, self._columns):
            return "the frame has repaired rows, or doesn't say that they aren't"
        left_out = missing(self._letters, found)
        incomplete: bool = run_on_own_connection(self._given, lambda over: any_dead(over, found, left_out))
        return "the frame leaves dead letters out" if incomplete else ""

    def _in_place(self, found: DriverScan) -> RedriveReport:
        async def all_of_them() -> RedriveReport:
            order = replace(self._order, protocol=Protocol.IN_PLACE)
            async with connect(socket_settings(self._given).connection) as connection:
                return await redrive_dead_letters(connection, found.scan.queue, order, stopped=self._stopped)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, all_of_them()).result()

    def _share(self, found: DriverScan, *, dry: bool = False) -> tuple[RedriveTask, int]:
        rate, scan = self._order.rate, found.scan
        tasks = tasks_for(self._session, found.jobs.num_rows, rate=rate, asked=self._tasks)
        share = RedriveTask(
            options=self._given,
            server=found.server,
            context=scan.context,
            inconsistent_consumers=frozenset(scan.reconciliation.inconsistent_consumers),
            acknowledged=found.acknowledged,
            request=self._order,
            protocol=found.choice.protocol,
            rate=None if rate is None or dry else rate / tasks,
            audited=scan.audit is not None,
            dry_run=dry,
        )
        return share, tasks

    def _job(
        self, found: DriverScan, record: RunRecord | None, letters: DataFrame, report: RedriveReport
    ) -> frozenset[int]:
        scan = found.scan
        report.protocol, report.guarantee = found.choice.protocol, found.choice.guarantee
        report.uncertain, report.undeliverable, report.risks = (
            scan.reconciliation.uncertain,
            scan.undeliverable,
            scan.risks,
        )
        share, tasks = self._share(found)
        rows = partition_letters(letters, self._columns, found.jobs, tasks)
        try:
            told = run_watched(rows, share, lambda stop: self._tick(found, record, stop))
        except RedriveError:
            if not self._told_to_stop:
                raise
            report.cancelled = True
            return frozenset()
        return add_outcomes(report, told)

    def _tick(self, found: DriverScan, record: RunRecord | None, stop: Callable[[], None]) -> None:
        if not self._told_to_stop and self._stopped():
            self._told_to_stop = True
            if record is None:
                stop()
            else:
                self._write(found, record.model_copy(update={"report": {CANCELLED: True}}))
        if time.monotonic() - self._told_at > _PROGRESS_SECONDS:
            self._told_at = time.monotonic()
            self._progress(Progress(self._done(found), found.jobs.num_rows, self._told_at - self._began))

    def _done(self, found: DriverScan) -> int:
        if found.scan.audit is None:
            return 0
        stream = found.scan.audit.stream

        async def last(over: BlockingConnection) -> int:
            return int((await stream_info(over, stream))["state"]["last_seq"])

        return max(0, run_on_own_connection(self._given, last) - self._at_first)

    def _write(self, found: DriverScan, record: RunRecord) -> None:
        run_on_own_connection(self._given, lambda over: audit_log(over, found).record_progress(record))

    def _finish(self, found: DriverScan, record: RunRecord | None, report: RedriveReport) -> None:
        log.info(
            "Redrove %s: %d letters redriven, %d parked, %d stayed, %d were none",
            *(found.scan.queue.name, len(report.redriven), len(report.parked), report.failures, len(report.gone)),
        )
        if record is None:
            return
        report.entries_left += remove_finished_entries(self._given, found.scan, report.redriven)
        over = not report.cancelled and not report.failures and not self._order.keep_open
        told = report.as_json() | ({CANCELLED: True} if report.cancelled else {})
        try:
            self._write(found, record.model_copy(update={"report": told, "finished": over}))
        except (ApiError, TransientError) as error:
            log.warning("The end of the redrive couldn't be recorded: %s", error)


def _checked(order: RedriveRequest, tasks: int | None) -> RedriveRequest:
    if order.transform is not None:
        raise SparkOptionError("expected repairs in the frame, found a transform in the order: leave it out")
    if order.selection.sequences is not None:
        raise SparkOptionError("expected letters by the frame's rows, found sequences in the order: leave them out")
    if tasks is not None and not 1 <= tasks <= MOST_TASKS:
        raise SparkOptionError(f"expected from 1 to {MOST_TASKS} tasks, found tasks {tasks}")
    return order if order.run else replace(order, run=uuid4().hex)
