"""The driver of a bulk redrive: scans the queue, runs the Spark job, reports."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.audit.intent import no_audit
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, RedriveError, RedriveRequestError, TransientError
from airflow_provider_jetstream.jetstream.redrive.preview import Preview
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive.driver_lease import driver_lease
from airflow_provider_jetstream.spark.bulk_redrive.driver_recovery import recover_letters
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import (
    DriverScan,
    audit_log,
    begin_run,
    frame_problem,
    require_no_handler,
    scan_queue,
)
from airflow_provider_jetstream.spark.bulk_redrive.entry_cleanup import remove_finished_entries
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import CANCELLED, add_outcomes, add_previews
from airflow_provider_jetstream.spark.bulk_redrive.rows import used_columns
from airflow_provider_jetstream.spark.bulk_redrive.spark_job import (
    MOST_TASKS,
    partition_letters,
    rate_per_task,
    run_watched,
    tasks_for,
)
from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA, SEQUENCE
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.audit.log import RunRecord
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
# How often the queue is scanned again because it was changed, or the server crashed, since the last scan.
_SCANS = 5
_UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a bulk redrive.

    :param done: about how many letters have a record in the audit
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
    stopped: Callable[[], bool] = lambda: False,
    tasks: int | None = None,
) -> RedriveReport:
    """Redrive the dead letters of a frame.

    :param letters: which ones, by the column ``sequence``; with ``subject``, ``body`` and ``headers`` for what they
        become, unless ``repaired`` is false
    :param queue: the work queue, with its dead letter queue; a name is looked up on the server
    :param request: how; the frame selects and repairs, so sequences and a transform are refused
    :param connection: connection options of the data source, or the value of its option ``connection``; the environment
        where absent
    :param progress: called every five seconds
    :param stopped: called a few times a second; once it returns true, the remaining letters stay where they are
    :param tasks: the number of tasks, up to 32; at a rate, no more than run at the same time
    :return: the report, which includes the letters that failed; nothing is raised for them
    :raises SparkOptionError: the frame or the request is invalid; nothing was done
    :raises RedriveRequestError: the queue doesn't allow what is requested; nothing was done
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises LeaseHeldError: another operation changes the queue's letters; nothing was done
    :raises RedriveError: Spark gave up; the letters done so far are done, and the redrive can be run again
    """
    return _Run(session, letters, queue, request, connection, progress, stopped, tasks).redrive()


def preview_letters(
    session: SparkSession,
    letters: DataFrame,
    queue: WorkQueue | Mapping[str, Any] | Path | str,
    request: RedriveRequest | None = None,
    connection: Mapping[str, str] | str | None = None,
    *,
    tasks: int | None = None,
) -> Preview:
    """Return what :func:`redrive_letters` would do with the same arguments; change nothing.

    :raises SparkOptionError: and the other errors of :func:`redrive_letters`
    """
    return _Run(session, letters, queue, request, connection, lambda _: None, lambda: False, tasks).preview()


class _Run:
    def __init__(
        self,
        session: SparkSession,
        letters: DataFrame,
        queue: Any,
        request: RedriveRequest | None,
        connection: Mapping[str, str] | str | None,
        progress: Callable[[Progress], None],
        stopped: Callable[[], bool],
        tasks: int | None,
    ) -> None:
        self._session = session
        self._columns = used_columns(letters.schema, frozenset(LETTER_SCHEMA.names))
        self._letters = letters
        self._queue = queue
        self._options = {"connection": connection} if isinstance(connection, str) else dict(connection or {})
        self._request = _check_request(request or RedriveRequest(), tasks)
        self._progress = progress
        self._stopped = stopped
        self._tasks = tasks
        self._start = self._last_progress = time.monotonic()
        self._stopping = False
        self._audit_start = 0
        self._lease: Lease | None = None
        self._set_aside: Mapping[int, str] = {}

    def redrive(self) -> RedriveReport:
        self._queue = run_on_own_connection(self._options, lambda connection: load_queue(connection, self._queue))
        with driver_lease(self._options, self._queue, self._request, self._stopped) as self._lease:
            scan = self._scan()
            require_no_handler(scan)
            if scan.choice.protocol != Protocol.IN_PLACE:
                return self._redrive(scan)
        # It takes the lease, and scans the queue, by itself.
        return self._redrive_in_place(scan)

    def _redrive(self, scan: DriverScan) -> RedriveReport:
        report, first_scan, lease = RedriveReport(), scan, self._lease
        if scan.scan.audit is None or lease is None:
            raise no_audit(scan.scan.queue.name)
        record = run_on_own_connection(
            self._options, lambda connection: begin_run(connection, first_scan, self._request, report, lease.token)
        )
        self._audit_start = record.from_sequence + report.resumed
        self._set_aside = run_on_own_connection(
            self._options, lambda connection: recover_letters(connection, first_scan, self._request, report, lease)
        )
        letters = self._letters
        for _ in range(_SCANS):
            to_rescan = self._run_job(scan, record, letters, report)
            if not to_rescan or report.cancelled:
                break
            log.warning("%d letters are scanned again: the queue or its server changed", len(to_rescan))
            rows = self._session.createDataFrame([(sequence,) for sequence in to_rescan], f"{SEQUENCE} bigint")
            letters, scan = letters.join(rows, SEQUENCE, "left_semi"), self._scan()
            require_no_handler(scan)
        else:
            for sequence in to_rescan:
                report.add_failure(sequence, "the queue, a consumer or the server changed at every scan; run it again")
        self._finish(scan, record, report)
        if self._set_aside or report.failures or report.cancelled:
            lease.leave_open()
        return report

    def preview(self) -> Preview:
        for _ in range(_SCANS):
            scan = self._scan()
            preview = Preview(
                scan.choice.protocol,
                scan.choice.guarantee,
                uncertain=scan.scan.uncertain,
                undeliverable=scan.scan.undeliverable,
                risks=scan.scan.risks,
            )
            task, tasks = self._task(scan, dry_run=True)
            rows = partition_letters(self._letters, self._columns, scan.jobs, tasks)
            if add_previews(preview, run_watched(rows, task, lambda _: None)):
                return preview
        raise RedriveError(f"the queue, a consumer or the server changed at every one of {_SCANS} scans")

    def _scan(self) -> DriverScan:
        scan = self._scan_with(self._request)
        if scan.choice.protocol == Protocol.IN_PLACE and (problem := frame_problem(self._options, self._letters, scan)):
            if self._request.protocol == Protocol.IN_PLACE:
                raise RedriveRequestError(
                    f"expected all letters of the queue without changes, found otherwise: {problem}; use another"
                    " protocol"
                )
            # A limit of redrives, even a meaningless one, needs copies.
            scan = self._scan_with(replace(self._request, max_redrives=_UNLIMITED))
        choice = scan.choice
        log.info(
            "Redriving %s by %s (%s): %s",
            *(scan.scan.queue.name, choice.protocol.value, choice.reason, choice.guarantee),
        )
        return scan

    def _scan_with(self, request: RedriveRequest) -> DriverScan:
        return run_on_own_connection(self._options, lambda connection: scan_queue(connection, self._queue, request))

    def _redrive_in_place(self, scan: DriverScan) -> RedriveReport:
        async def redrive_all() -> RedriveReport:
            request = replace(self._request, protocol=Protocol.IN_PLACE)
            async with connect(socket_settings(self._options)) as connection:
                return await redrive_dead_letters(connection, scan.scan.queue, request, stopped=self._stopped)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, redrive_all()).result()

    @property
    def _token(self) -> int | None:
        return self._lease.token if self._lease else None

    def _task(self, scan: DriverScan, *, dry_run: bool = False) -> tuple[RedriveTask, int]:
        """Return what each task does, and how many tasks there are."""
        rate = self._request.rate
        tasks = tasks_for(self._session, scan.jobs.num_rows, rate=rate, requested=self._tasks)
        task = RedriveTask(
            options=self._options,
            server_info=scan.server_info,
            context=scan.scan.context,
            inconsistent_consumers=frozenset(scan.scan.reconciliation.inconsistent_consumers),
            acknowledged=scan.acknowledged,
            request=self._request,
            protocol=scan.choice.protocol,
            rate=None if rate is None or dry_run else rate_per_task(rate, tasks),
            lease_token=self._token,
            set_aside=self._set_aside,
            dry_run=dry_run,
        )
        return task, tasks

    def _run_job(
        self, scan: DriverScan, record: RunRecord, letters: DataFrame, report: RedriveReport
    ) -> frozenset[int]:
        """Run one Spark job; return the letters that need another scan of the queue."""
        report.protocol, report.guarantee = scan.choice.protocol, scan.choice.guarantee
        report.uncertain = scan.scan.uncertain
        report.undeliverable, report.risks = scan.scan.undeliverable, scan.scan.risks
        task, tasks = self._task(scan)
        rows = partition_letters(letters, self._columns, scan.jobs, tasks)
        try:
            outcomes = run_watched(rows, task, lambda _: self._tick(scan, record))
        except RedriveError:
            if not self._stopping:
                raise
            report.cancelled = True
            return frozenset()
        return add_outcomes(report, outcomes)

    def _tick(self, scan: DriverScan, record: RunRecord) -> None:
        if not self._stopping and self._stopped():
            self._stopping = True
            # Tasks read the record before each window of letters.
            self._record(scan, record.model_copy(update={"report": {CANCELLED: True}}))
        if time.monotonic() - self._last_progress > _PROGRESS_SECONDS:
            self._last_progress = time.monotonic()
            self._progress(Progress(self._done(scan), scan.jobs.num_rows, self._last_progress - self._start))

    def _done(self, scan: DriverScan) -> int:
        if scan.scan.audit is None:
            return 0
        stream = scan.scan.audit.stream

        async def last_sequence(connection: BlockingConnection) -> int:
            return int((await stream_info(connection, stream))["state"]["last_seq"])

        # Intents and renewals of the lease are few beside the records of letters.
        stored: int = run_on_own_connection(self._options, last_sequence) - self._audit_start
        return int(max(0, min(stored, scan.jobs.num_rows)))

    def _record(self, scan: DriverScan, record: RunRecord) -> None:
        run_on_own_connection(
            self._options, lambda connection: audit_log(connection, scan, self._token).record_progress(record)
        )

    def _finish(self, scan: DriverScan, record: RunRecord, report: RedriveReport) -> None:
        log.info(
            "Redrove %s: %d letters redriven, %d parked, %d failed, %d no longer dead letters",
            *(scan.scan.queue.name, len(report.redriven), len(report.parked), report.failures, len(report.gone)),
        )
        report.entries_left += remove_finished_entries(self._options, scan.scan, report.redriven)
        finished = not report.cancelled and not report.failures and not self._request.keep_open
        content = report.as_json() | ({CANCELLED: True} if report.cancelled else {})
        try:
            self._record(scan, record.model_copy(update={"report": content, "finished": finished}))
        except (ApiError, TransientError) as error:
            log.warning("The end of the redrive couldn't be recorded: %s", error)


def _check_request(request: RedriveRequest, tasks: int | None) -> RedriveRequest:
    """Check a request for a frame's letters, and give it a run key."""
    if request.transform is not None:
        raise SparkOptionError("expected repairs in the frame, found a transform in the request: leave it out")
    if request.selection.sequences is not None:
        raise SparkOptionError("expected letters by the frame's rows, found sequences in the request: leave them out")
    if request.target is not None or request.order_key is not None:
        name = "order_key" if request.target is None else "target"
        raise SparkOptionError(
            f"expected a redrive to the letters' own queue in any order, found {name}: Spark's tasks redrive beside"
            " each other and check one queue only; redrive without Spark"
        )
    if tasks is not None and not 1 <= tasks <= MOST_TASKS:
        raise SparkOptionError(f"expected from 1 to {MOST_TASKS} tasks, found tasks {tasks}")
    return request if request.run else replace(request, run=uuid4().hex)
