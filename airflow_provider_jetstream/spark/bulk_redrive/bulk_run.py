"""One bulk redrive, as Spark's driver runs it: scans the queue, runs the Spark jobs, reports."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    LeaseLostError,
    RedriveError,
    RedriveRequestError,
)
from airflow_provider_jetstream.jetstream.redrive.operation import log_waiting
from airflow_provider_jetstream.jetstream.redrive.preview import Preview
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import (
    DriverScan,
    checked_request,
    frame_problem,
    require_no_handler,
    scan_queue,
)
from airflow_provider_jetstream.spark.bulk_redrive.driver_supervision import DriverSupervision
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import CANCELLED, add_outcomes, add_previews, sequences_with
from airflow_provider_jetstream.spark.bulk_redrive.rows import used_columns
from airflow_provider_jetstream.spark.bulk_redrive.spark_job import (
    partition_letters,
    rate_per_task,
    run_watched,
    tasks_for,
)
from airflow_provider_jetstream.spark.bulk_redrive.task import RedriveTask
from airflow_provider_jetstream.spark.bulk_redrive.wave_rows import WaveRows
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA, SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport

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
    :param waiting: until when the tasks may wait at this moment, and what for; empty where they don't
    """

    done: int
    letters: int
    seconds: float
    waiting: str = ""


class BulkRedrive:
    """One bulk redrive, from the scan to the report.

    :param patience: for how many seconds jobs and people are awaited at one go; see :meth:`redrive`
    :param redriving: the other arguments of :func:`~airflow_provider_jetstream.spark.redrive_letters`
    """

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
        patience: float = math.inf,
    ) -> None:
        self._session = session
        self._columns = used_columns(letters.schema, frozenset(LETTER_SCHEMA.names))
        self._letters = letters
        self._queue = queue
        self._options = {"connection": connection} if isinstance(connection, str) else dict(connection or {})
        self._request = checked_request(request or RedriveRequest(), tasks)
        self._progress = progress
        self._stopped = stopped
        self._tasks = tasks
        self._patience = patience
        self._start = self._last_progress = time.monotonic()
        self._is_cancelling = False
        self._set_aside: Mapping[int, str] = {}
        self._supervision: DriverSupervision
        self._in_place: DriverScan | None = None
        # What is left of the frame: None for all of it.
        self._left: list[int] | None = None
        self._wave_rows: WaveRows | None = None
        self._entries_left = 0
        self._waiting, self._waits_until = "", self._start

    def redrive(self) -> RedriveReport:
        """Redrive until it is over, or jobs or people would have to be awaited for longer."""
        self._queue = run_on_own_connection(self._options, lambda connection: load_queue(connection, self._queue))
        self._supervision = DriverSupervision(self._options, self._queue, self._request, self._stopped)
        self._supervision.run(self._step, self._patience)
        # It takes the lease, and scans the queue, by itself.
        return self._redrive_in_place(self._in_place) if self._in_place else self._supervision.report

    def _step(self) -> None:
        """Redrive the letters of a wave, or all of them; under the lease."""
        supervision = self._supervision
        scan = self._scan()
        require_no_handler(scan)
        if scan.choice.protocol == Protocol.IN_PLACE:
            self._in_place = scan
            return
        try:
            self._set_aside = supervision.begin(scan)
            if supervision.may_redrive:
                self._redrive(scan)
        except LeaseLostError:
            raise
        except JetStreamProviderError as error:
            supervision.fail(error)
            raise

    def _redrive(self, scan: DriverScan) -> None:
        report = self._supervision.report
        self._is_cancelling = False
        while (rows := self._next_rows(scan)) is not None:
            scan = self._redrive_rows(scan, *rows)
            if report.cancelled or self._wave_rows is None:
                break
        self._finish(scan, report)
        if self._supervision.lease and (self._set_aside or report.failures or report.cancelled):
            self._supervision.lease.leave_open()

    def _next_rows(self, scan: DriverScan) -> tuple[DataFrame, pa.Table] | None:
        """Return the rows to be redriven next, and the jobs of the scan among which they are; ``None`` at the end."""
        if self._request.waves:
            self._wave_rows = self._wave_rows or WaveRows(self._options, self._letters, self._request.selection)
            return self._wave_rows.next(scan, self._supervision)
        if self._left is None:
            return self._letters, scan.jobs
        rows = self._session.createDataFrame([(sequence,) for sequence in self._left], f"{SEQUENCE} bigint")
        return self._letters.join(rows, SEQUENCE, "left_semi"), scan.jobs

    def _redrive_rows(self, scan: DriverScan, letters: DataFrame, jobs: pa.Table) -> DriverScan:
        """Redrive rows of the frame; return the last scan."""
        report = self._supervision.report
        for _ in range(_SCANS):
            to_rescan = self._run_job(scan, letters, jobs, report)
            if not to_rescan or report.cancelled:
                break
            log.warning("%d letters are scanned again: the queue or its server changed", len(to_rescan))
            rows = self._session.createDataFrame([(sequence,) for sequence in to_rescan], f"{SEQUENCE} bigint")
            letters, scan = letters.join(rows, SEQUENCE, "left_semi"), self._scan()
            jobs = scan.jobs
            require_no_handler(scan)
        else:
            for sequence in to_rescan:
                report.add_failure(sequence, "the queue, a consumer or the server changed at every scan; run it again")
        return scan

    def preview(self) -> Preview:
        """Return what :meth:`redrive` would do; change nothing."""
        for _ in range(_SCANS):
            scan = self._scan()
            preview = Preview(
                scan.choice.protocol,
                scan.choice.guarantee,
                uncertain=scan.scan.uncertain,
                undeliverable=scan.scan.undeliverable,
                risks=scan.scan.risks,
            )
            task, tasks = self._task(scan, scan.jobs.num_rows, dry_run=True)
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
        def report_progress(report: RedriveReport) -> None:
            seconds = time.monotonic() - self._start
            self._progress(Progress(len(report.redriven), scan.jobs.num_rows, seconds, report.waiting))

        async def redrive_all() -> RedriveReport:
            request = replace(self._request, protocol=Protocol.IN_PLACE)
            async with connect(socket_settings(self._options)) as connection:
                return await redrive_dead_letters(
                    connection, scan.scan.queue, request, progress=report_progress, stopped=self._stopped
                )

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, redrive_all()).result()

    def _task(self, scan: DriverScan, jobs: int, *, dry_run: bool = False) -> tuple[RedriveTask, int]:
        """Return what each task does, and how many tasks there are."""
        rate, supervision = self._request.rate, None if dry_run else self._supervision
        tasks = tasks_for(self._session, jobs, rate=rate, requested=self._tasks)
        task = RedriveTask(
            options=self._options,
            server_info=scan.server_info,
            context=scan.scan.context,
            inconsistent_consumers=frozenset(scan.scan.reconciliation.inconsistent_consumers),
            acknowledged=scan.acknowledged,
            request=self._request,
            protocol=scan.choice.protocol,
            rate=None if rate is None or supervision is None else rate_per_task(rate, tasks),
            lease_token=supervision.lease.token if supervision and supervision.lease else None,
            set_aside=self._set_aside,
            wave=supervision.wave if supervision else None,
            dry_run=dry_run,
        )
        return task, tasks

    def _run_job(self, scan: DriverScan, letters: DataFrame, jobs: pa.Table, report: RedriveReport) -> frozenset[int]:
        """Run one Spark job; return the letters that need another scan of the queue.

        :param jobs: those of the scan among which the letters are
        """
        report.protocol, report.guarantee = scan.choice.protocol, scan.choice.guarantee
        report.uncertain = scan.scan.uncertain
        report.undeliverable, report.risks = scan.scan.undeliverable, scan.scan.risks
        task, tasks = self._task(scan, jobs.num_rows)
        rows = partition_letters(letters, self._columns, jobs, tasks)
        self._note_wait(scan)
        try:
            outcomes = run_watched(rows, task, lambda _: self._tick(scan))
        except RedriveError:
            if not self._is_cancelling:
                raise
            report.cancelled = True
            return frozenset()
        if self._wave_rows is not None:
            self._wave_rows.add_outcomes(outcomes)
        self._left = sequences_with(outcomes, CANCELLED)
        return add_outcomes(report, outcomes)

    def _tick(self, scan: DriverScan) -> None:
        if not self._is_cancelling and self._supervision.stopped():
            self._is_cancelling = True
            self._supervision.cancel_tasks()
        if time.monotonic() - self._last_progress > _PROGRESS_SECONDS:
            self._report_progress(scan)

    def _note_wait(self, scan: DriverScan) -> None:
        """Say until when tasks wait for slow workers, where the last letters died a moment ago."""
        now, consumers = scan.scan.snapshot.taken_at, scan.scan.snapshot.consumers
        died_at = scan.scan.index.last_recorded()
        until = max((died_at[name] + consumers[name].max_ack_wait for name in died_at.keys() & consumers), default=now)
        if until > now:
            self._waits_until = time.monotonic() + (until - now).total_seconds()
            self._waiting = log_waiting(scan.scan.queue.name, until)
            self._report_progress(scan)

    def _report_progress(self, scan: DriverScan) -> None:
        self._last_progress = time.monotonic()
        if self._last_progress >= self._waits_until:
            self._waiting = ""
        done = min(self._supervision.record_progress(), scan.jobs.num_rows)
        self._progress(Progress(done, scan.jobs.num_rows, self._last_progress - self._start, self._waiting))

    def _finish(self, scan: DriverScan, report: RedriveReport) -> None:
        # Those of earlier waves that can't be removed are counted once more.
        left = self._supervision.remove_entries(scan)
        report.entries_left += left - self._entries_left
        self._entries_left = left
        self._supervision.end_step()
