"""One bulk redrive, as Spark's driver runs it: scans the queue, runs the Spark jobs, reports."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.utils import is_remote

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
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
from airflow_provider_jetstream.spark.bulk_redrive.driver_supervision import (
    DriverScan,
    DriverSupervision,
    frame_problem,
    require_no_handler,
    scan_queue,
    still_dead,
)
from airflow_provider_jetstream.spark.bulk_redrive.task import (
    CANCELLED,
    NEEDS_RESCAN,
    OUTCOME_DDL,
    PACKED_ENTRIES,
    RedriveTask,
    add_outcomes,
    add_previews,
    sequences_with,
    used_columns,
)
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue, pack_table, parallel_tasks, task_count
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA, SEQUENCE
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.spark.bulk_redrive.driver_supervision import DriverScan


# Each has up to 256 requests in flight, and the server drops its whole queue of API requests at ten thousand.
MOST_TASKS = 32
# Letters a second that a task does easily, and compared with which the burst at its start is small.
_RATE_PER_TASK = 50
_TICK = 0.2


def tasks_for(session: SparkSession, letters: int, *, rate: float | None, requested: int | None) -> int:
    """Return among how many tasks letters are divided.

    :param rate: letters a second of all tasks, which then have to run at the same time
    :param requested: the most tasks, where the user limits them
    """
    at_a_time = min(parallel_tasks(session), MOST_TASKS)
    if rate is not None:
        return min(requested or at_a_time, at_a_time, max(1, int(rate // _RATE_PER_TASK)))
    return requested or min(MOST_TASKS // at_a_time * at_a_time, task_count(session, letters))


def rate_per_task(rate: float, tasks: int) -> float:
    """Return the rate of each of several tasks: as many whole letters in ten seconds as all of them may have."""
    return rate if tasks == 1 else 10 * rate // tasks / 10


def partition_letters(letters: DataFrame, columns: Sequence[str], jobs: pa.Table, tasks: int) -> DataFrame:
    """Divide a frame's rows by ranges of sequences, and add the entries about them.

    :param columns: the frame's columns that are used
    :param jobs: the jobs' entries, a row per job
    :return: the rows in the order of the jobs; those of a task begin with one that has only the entries of its letters,
        packed, in the column ``PACKED_ENTRIES``
    """
    # By bounds that are known here: Spark would evaluate the frame twice to find its own.
    known = jobs.column(SEQUENCE).to_numpy()
    bounds = sorted({int(known[len(known) * task // tasks]) for task in range(1, tasks)}) if len(known) else []
    edges = [0, *np.searchsorted(known, bounds).tolist(), len(known)]
    slices = [jobs.slice(low, high - low) for low, high in pairwise(edges) if high > low]
    # Not a value per row: Spark would have to serialise, to shuffle and to join as many rows again.
    firsts = pa.array([jobs_of_task.column(SEQUENCE)[0].as_py() for jobs_of_task in slices], pa.int64())
    entries = pa.table({SEQUENCE: firsts, PACKED_ENTRIES: pa.array(map(pack_table, slices), pa.binary())})
    entry_rows = letters.sparkSession.createDataFrame(entries)
    rows = letters.select(*columns).unionByName(entry_rows, allowMissingColumns=True)
    task = f.expr(f"size(filter(array({', '.join(f'{bound}L' for bound in bounds)}), bound -> bound <= {SEQUENCE}))")
    by_range = rows.repartitionById(len(bounds) + 1, task.cast("int")) if bounds else rows.coalesce(1)
    return by_range.sortWithinPartitions(f.col(PACKED_ENTRIES).isNull(), SEQUENCE)


def run_watched(rows: DataFrame, task: RedriveTask, tick: Callable[[Callable[[], None]], None]) -> pa.Table:
    """Run the job, and return the outcomes of all letters.

    :param tick: called a few times a second with a function that stops the job
    :raises RedriveError: Spark gave up, or the job was stopped
    """
    session, tag = rows.sparkSession, f"redrive-{uuid4().hex}"

    def run_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return task.run(batches)

    def run_job() -> pa.Table:
        if is_remote():
            session.addTag(tag)
        else:
            # For this thread only; the thread in which Spark serves the result inherits a job group, but no tag.
            session.sparkContext.setJobGroup(tag, f"redrive {task.request.run}", interruptOnCancel=True)
        return rows.mapInArrow(run_task, OUTCOME_DDL).toArrow()

    def stop() -> None:
        if is_remote():
            session.interruptTag(tag)
        else:
            session.sparkContext.cancelJobGroup(tag)

    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(run_job)
        try:
            while not job.done():
                time.sleep(_TICK)
                tick(stop)
        finally:
            if not job.done():
                stop()
        try:
            return job.result()
        except (PySparkException, Py4JError) as error:
            # Which of the two it is depends on how Spark collects the result.
            cause = str(error).partition("\n\tat ")[0]
            raise RedriveError(
                f"Spark gave up the redrive {task.request.run}: {cause}; the letters done so far are done, and running"
                " it again under the same key resumes it"
            ) from error


class WaveRows:
    """The rows of a frame, wave after wave in the order of the letters.

    :param options: connection options of the data source
    :param letters: the frame
    :param selection: of the request
    :raises SparkOptionError: a row has no sequence
    """

    def __init__(self, options: Mapping[str, str], letters: DataFrame, selection: Selection) -> None:
        self._options = options
        self._letters = letters
        self._selection = selection
        found = letters.select(SEQUENCE).distinct().toArrow().column(SEQUENCE)
        if found.null_count:
            raise SparkOptionError(f"expected a {SEQUENCE} in every row, found null: drop rows that are no letters")
        self._rows = SequenceRanges.of(np.sort(found.to_numpy()).tolist())
        self._tried = SequenceRanges()

    def add_outcomes(self, outcomes: pa.Table) -> None:
        """Note which letters a job has tried, whatever became of them."""
        is_open = pc.is_in(outcomes.column("outcome"), pa.array([CANCELLED, NEEDS_RESCAN]))
        tried = outcomes.filter(pc.invert(is_open)).column("sequence").to_pylist()
        self._tried |= SequenceRanges.of(sorted({sequence for sequence in tried if sequence}))

    def next(self, scan: DriverScan, supervision: DriverSupervision) -> tuple[DataFrame, pa.Table] | None:
        """Return the rows that the wave takes now, and the scan's jobs among them; ``None`` where it takes none."""
        report, size = supervision.report, supervision.remaining
        done = self._tried | SequenceRanges.of(sorted({*report.redriven, *report.parked}))
        rows = (self._rows & SequenceRanges.between(0, supervision.until)) - done
        again = supervision.brought_again() - done
        if again:
            # Some of them may have been parked since.
            found = run_on_own_connection(
                self._options, lambda connection: still_dead(connection, scan, list(again), self._selection)
            )
            again = SequenceRanges.of(sorted(found))
        chosen = list(rows | again)[:size]
        if not chosen:
            return None
        jobs = scan.jobs.filter(pc.is_in(scan.jobs.column(SEQUENCE), pa.array(chosen, pa.int64())))
        return self._rows_of([sequence for sequence in chosen if sequence not in again]).unionByName(
            self._frame([sequence for sequence in chosen if sequence in again]), allowMissingColumns=True
        ), jobs

    def _rows_of(self, sequences: list[int]) -> DataFrame:
        return self._letters.join(self._frame(sequences), SEQUENCE, "left_semi")

    def _frame(self, sequences: list[int]) -> DataFrame:
        return self._letters.sparkSession.createDataFrame([(sequence,) for sequence in sequences], f"{SEQUENCE} bigint")


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


def checked_request(request: RedriveRequest, tasks: int | None) -> RedriveRequest:
    """Return a request for a frame's letters, with a run key.

    :raises SparkOptionError: it has what only a redrive without Spark takes
    """
    if request.transform is not None or request.patch is not None:
        name = "transform" if request.patch is None else "patch"
        raise SparkOptionError(f"expected repairs in the frame, found a {name} in the request: leave it out")
    if request.selection.sequences is not None:
        raise SparkOptionError("expected letters by the frame's rows, found sequences in the request: leave them out")
    if request.target is not None or request.order_key is not None:
        name = "order_key" if request.target is None else "target"
        raise SparkOptionError(
            f"expected a redrive to the letters' own queue in any order, found {name}: Spark's tasks redrive beside"
            " each other and check one queue only; redrive without Spark"
        )
    if request.discard or request.undo:
        raise SparkOptionError(
            "expected letters to be redriven or parked, found discard or undo: do that without Spark"
        )
    if tasks is not None and not 1 <= tasks <= MOST_TASKS:
        raise SparkOptionError(f"expected from 1 to {MOST_TASKS} tasks, found tasks {tasks}")
    return request if request.run else replace(request, run=uuid4().hex)


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
    return BulkRedrive(session, letters, queue, request, connection, progress, stopped, tasks).redrive()


def redrive_next_letters(
    session: SparkSession,
    letters: DataFrame,
    queue: WorkQueue,
    request: RedriveRequest,
    connection: Mapping[str, str],
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> RedriveReport:
    """Redrive a request's next wave as :func:`redrive_letters` does, and return before its jobs have ended.

    :param request: with waves, and with a ``run`` under which it goes on
    :return: the report so far
    """
    arguments = (session, letters, queue, request, connection, progress, lambda: False, None)
    return BulkRedrive(*arguments, patience=0).redrive()


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

    :param letters: which ones, by the column ``sequence``
    :param queue: the work queue, with its dead letter queue; a name is looked up on the server
    :param request: how; the frame selects and repairs, so sequences and a transform are refused
    :param connection: connection options of the data source, or the value of its option ``connection``; the environment
        where absent
    :param tasks: the number of tasks, up to 32
    :raises SparkOptionError: and the other errors of :func:`redrive_letters`
    """
    return BulkRedrive(session, letters, queue, request, connection, lambda _: None, lambda: False, tasks).preview()
