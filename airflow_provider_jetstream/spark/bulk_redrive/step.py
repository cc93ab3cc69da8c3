"""A step of a redrive whose letters are redriven by Spark's tasks; all else is the core's (``redrive/redrive.py``).

The step runs on an event loop of its own; what needs Spark runs in threads beside it. The tasks share the lease's
token: they read whether it lasts, and the server refuses what they record once somebody else has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.utils import is_remote

from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    LeaseLostError,
    NotFoundError,
    RedriveError,
    RedriveRequestError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.redrive.operation import log_waiting
from airflow_provider_jetstream.jetstream.redrive.protocol import choose_protocol
from airflow_provider_jetstream.jetstream.redrive.redrive import RedriveStep
from airflow_provider_jetstream.jetstream.redrive.redriven_job import require_room_for_all
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.spark.bulk_redrive.task import (
    CANCELLED,
    OUTCOME_DDL,
    PACKED_ENTRIES,
    RedriveTask,
    read_outcomes,
)
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.scanned_jobs import ScannedJobs, parallel_tasks, task_count
from airflow_provider_jetstream.spark.dead_letters.schema import CHANGEABLE, REPAIRED, SEQUENCE, STREAM_CREATED
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.audit.intent import IntentLog
    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.redrive.next_letters import NextLetters
    from airflow_provider_jetstream.jetstream.redrive.operation import Operation
    from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, RedriveTarget
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.spark.bulk_redrive.task import Outcome

log = logging.getLogger(__name__)

# Each has up to 256 requests in flight, and the server drops its whole queue of API requests at ten thousand.
MOST_TASKS = 32
# How often the queue is scanned again because it was changed, or the server crashed, since the last scan.
SCANS = 5
# Letters a second that a task does easily, and compared with which the burst at its start is small.
_RATE_PER_TASK = 50
_TICK = 0.2
_PROGRESS_SECONDS = 5.0
# Jobs that are no longer dead letters may be missing from a frame; with more of them the letters are copied.
_MOST_MISSING = 10_000
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


def partition_letters(letters: DataFrame, columns: Sequence[str], jobs: ScannedJobs, tasks: int) -> DataFrame:
    """Divide a frame's rows by ranges of sequences, and add the entries about them.

    :param columns: the frame's columns that are used
    :return: the rows in the order of the jobs; those of a task begin with one that has only the entries of its letters,
        packed, in the column ``PACKED_ENTRIES``
    """
    # By bounds that are known here: Spark would evaluate the frame twice to find its own.
    known = jobs.sequences
    bounds = sorted({int(known[len(known) * task // tasks]) for task in range(1, tasks)}) if len(known) else []
    edges = [0, *(bisect_left(known, bound) for bound in bounds), len(known)]
    parts = [(low, high) for low, high in pairwise(edges) if high > low]
    # Not a value per row: Spark would have to serialise, to shuffle and to join as many rows again.
    firsts = pa.array([known[low] for low, _ in parts], pa.int64())
    packed = pa.array([jobs.part(low, high) for low, high in parts], pa.binary())
    entry_rows = letters.sparkSession.createDataFrame(pa.table({SEQUENCE: firsts, PACKED_ENTRIES: packed}))
    rows = letters.select(*columns).unionByName(entry_rows, allowMissingColumns=True)
    task = f.expr(f"size(filter(array({', '.join(f'{bound}L' for bound in bounds)}), bound -> bound <= {SEQUENCE}))")
    by_range = rows.repartitionById(len(bounds) + 1, task.cast("int")) if bounds else rows.coalesce(1)
    return by_range.sortWithinPartitions(f.col(PACKED_ENTRIES).isNull(), SEQUENCE)


async def run_watched(
    rows: DataFrame, task: RedriveTask, tick: Callable[[], Awaitable[None]] | None = None
) -> list[Outcome]:
    """Run the job, and return the outcomes of all letters.

    :param tick: called a few times a second; what it raises stops the job
    :raises RedriveError: Spark gave up, or the job was stopped
    """
    session, tag = rows.sparkSession, f"redrive-{uuid4().hex}"

    def run_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return task.run(batches)

    def run_job() -> list[Outcome]:
        if is_remote():
            session.addTag(tag)
        else:
            # For this thread only; the thread in which Spark serves the result inherits a job group, but no tag.
            session.sparkContext.setJobGroup(tag, f"redrive {task.request.run}", interruptOnCancel=True)
        return read_outcomes(rows.mapInArrow(run_task, OUTCOME_DDL).toArrow())

    def stop() -> None:
        if is_remote():
            session.interruptTag(tag)
        else:
            session.sparkContext.cancelJobGroup(tag)

    job = asyncio.create_task(asyncio.to_thread(run_job))
    try:
        while not job.done():
            await asyncio.wait({job}, timeout=_TICK)
            if tick:
                await tick()
    except BaseException:
        stop()
        # The job ends before the lease is released; what one of its tasks records after that is refused.
        await asyncio.wait({job})
        raise
    try:
        return job.result()
    except (PySparkException, Py4JError) as error:
        # Which of the two it is depends on how Spark collects the result.
        cause = str(error).partition("\n\tat ")[0]
        raise RedriveError(
            f"Spark gave up the redrive {task.request.run}: {cause}; the letters done so far are done, and running"
            " it again under the same key resumes it"
        ) from error


@dataclass(slots=True)
class BulkFrame:
    """The letters of a bulk redrive, and how they are divided among tasks.

    :param options: connection options of the data source
    :param letters: the frame, or what is left of it
    :param columns: the frame's columns that are used
    :param tasks: the most tasks, where the user limits them
    :param progress: called every five seconds
    :param began: when the redrive began, in seconds of the monotonic clock
    :param known: about how many letters the queue has
    :param rows: with waves: the sequences of all rows, once they have been read
    :param tried: the letters that tasks have tried, whatever became of them
    :param entries: the entries whose removal was tried
    """

    session: SparkSession
    options: Mapping[str, str]
    letters: DataFrame
    columns: tuple[str, ...]
    tasks: int | None
    progress: Callable[[Progress], None]
    began: float = field(default_factory=time.monotonic)
    known: int = 0
    rows: SequenceRanges | None = None
    tried: SequenceRanges = field(default_factory=SequenceRanges)
    entries: SequenceRanges = field(default_factory=SequenceRanges)

    def report_progress(self, done: int, waiting: str) -> None:
        """Tell the caller how many letters are done, and what is waited for."""
        self.progress(Progress(min(done, self.known), self.known, time.monotonic() - self.began, waiting))

    def rows_of(self, sequences: Collection[int]) -> DataFrame:
        """Return the frame's rows of some letters."""
        return self.letters.join(self.sequence_frame(sequences), SEQUENCE, "left_semi")

    def sequence_frame(self, sequences: Collection[int]) -> DataFrame:
        """Return a frame with nothing but sequences."""
        return self.session.createDataFrame([(sequence,) for sequence in sequences], f"{SEQUENCE} bigint")

    def sequences(self) -> SequenceRanges:
        """Return the sequences of all rows.

        :raises SparkOptionError: a row has no sequence
        """
        found = self.letters.select(SEQUENCE).distinct().toArrow().column(SEQUENCE)
        if found.null_count:
            raise SparkOptionError(f"expected a {SEQUENCE} in every row, found null: drop rows that are no letters")
        return SequenceRanges.of(np.sort(found.to_numpy()).tolist())

    async def choose(self, request: RedriveRequest, scan: Scan, api_level: int) -> ProtocolChoice:
        """Return how the letters are brought back: in place only where the frame has all of them, unchanged.

        :raises RedriveRequestError: the request isn't possible for this queue, or for this frame
        """
        choose = partial(
            choose_protocol, snapshot=scan.snapshot, api_level=api_level, handlers=scan.context.handler_names
        )
        choice = choose(request)
        if choice.protocol == Protocol.IN_PLACE and (problem := await self._problem(scan)):
            if request.protocol == Protocol.IN_PLACE:
                raise RedriveRequestError(
                    f"expected all letters of the queue without changes, found otherwise: {problem}; use another"
                    " protocol"
                )
            # A limit of redrives, even a meaningless one, needs copies.
            choice = choose(replace(request, max_redrives=_UNLIMITED))
        return choice

    async def _problem(self, scan: Scan) -> str:
        """Return why a redrive in place isn't what the frame requests; empty where it is."""
        if await asyncio.to_thread(self._has_repairs):
            return "the frame has repaired rows, or doesn't say that they aren't"
        if await asyncio.to_thread(self._has_rows_of_another_stream, scan.snapshot.created):
            return "the frame has letters of another stream, or of one that was created anew since"
        jobs = await ScannedJobs.of_scan(scan, Selection())
        missing = await asyncio.to_thread(self._missing, jobs)
        if len(missing) > _MOST_MISSING or await still_dead(scan, missing, Selection()):
            return "the frame leaves dead letters out"
        return ""

    def _has_repairs(self) -> bool:
        if REPAIRED not in self.letters.columns:
            return bool(set(self.letters.columns) & set(CHANGEABLE))
        return not self.letters.where(f.expr(f"coalesce({REPAIRED}, true)")).isEmpty()

    def _has_rows_of_another_stream(self, created: str) -> bool:
        if STREAM_CREATED not in self.letters.columns:
            return False
        return not self.letters.where(f.col(STREAM_CREATED) != created).isEmpty()

    def _missing(self, jobs: ScannedJobs) -> list[int]:
        """Return the jobs that the frame leaves out; one more than the limit at most."""
        known = self.session.createDataFrame(pa.table({SEQUENCE: pa.array(jobs.sequences, pa.int64())}))
        rows = known.join(self.letters.select(SEQUENCE), SEQUENCE, "left_anti").limit(_MOST_MISSING + 1).collect()
        return [row[0] for row in rows]

    def take_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Note which letters a job has tried; the next one takes the others."""
        reports = [outcome.report for outcome in outcomes]
        tried = (chain(report.redriven, report.parked, report.failed, report.gone) for report in reports)
        self.tried |= SequenceRanges.of({*chain.from_iterable(tried)})
        if self.rows is None:
            self.letters = self.rows_of([*chain(*((*outcome.cancelled, *outcome.to_rescan) for outcome in outcomes))])

    async def task(
        self,
        scan: Scan,
        jobs: int,
        request: RedriveRequest,
        server_info: Mapping[str, Any],
        protocol: Protocol,
        **fields: Any,
    ) -> tuple[RedriveTask, int]:
        """Return what each task does, and how many tasks there are.

        :param jobs: how many letters there are
        :param server_info: of the server when the scan began
        """
        tasks = tasks_for(self.session, jobs, rate=request.rate, requested=self.tasks)
        acknowledged = await scan.acknowledgements()
        inconsistent = frozenset(scan.reconciliation.inconsistent_consumers)
        task = RedriveTask(
            *(self.options, server_info, scan.context, inconsistent, acknowledged, request, protocol),
            rate=None if request.rate is None else rate_per_task(request.rate, tasks),
            **fields,
        )
        return task, tasks


def require_no_handler(scan: Scan) -> None:
    """Refuse to redrive where a handler of the dead letter queue could get the same letters at the same time.

    Spark's tasks don't claim entries.

    :raises RedriveRequestError: the dead letter queue has a handler; nothing was done
    """
    if scan.context.handlers:
        raise RedriveRequestError(
            f"expected a dead letter queue without handlers, found {scan.dead_letter_queue} with"
            f" its consumer {', '.join(scan.context.handler_names)}: a bulk redrive doesn't claim letters, so both"
            " could do the same ones; redrive without Spark, which claims each letter first"
        )


async def scanned_jobs(scan: Scan, request: RedriveRequest, *, is_copied: bool) -> ScannedJobs:
    """Return the jobs of a scan that may be selected.

    :param is_copied: whether there has to be room for their copies
    :raises RedriveRequestError: the queue might drop jobs for the copies, or the dead letter queue entries
    """
    jobs = await ScannedJobs.of_scan(scan, request.selection)
    if is_copied:
        parked_in = None if request.max_redrives is None else scan.dead_letter_queue
        require_room_for_all(scan.snapshot, len(jobs), scan.connection.max_payload, parked_in)
    return jobs


async def still_dead(scan: Scan, sequences: Sequence[int], selection: Selection) -> list[int]:
    """Return which of some jobs are dead letters of a selection."""
    jobs = await scan.classify(sequences)
    return [job.sequence for job in jobs if isinstance(job, DeadLetter) and selection.matches(job, scan.now)]


async def read_server_info(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the INFO of the server to which tasks connect."""

    async def read(connection: BlockingConnection) -> dict[str, Any]:
        return dict(connection.socket.server_info)

    return await asyncio.to_thread(run_on_own_connection, options, read)


class BulkStep(RedriveStep):
    """A step whose letters are those of a frame, which Spark's tasks redrive.

    :param frame: the letters
    :param server_info: the INFO of the server before the scan
    """

    # The repairs are in the frame: a letter isn't stored once more without its own.
    can_repeat = False

    def __init__(
        self,
        frame: BulkFrame,
        server_info: Mapping[str, Any],
        operation: Operation,
        rule: NextLetters,
        scan: Scan,
        intents: IntentLog,
    ) -> None:
        super().__init__(operation, rule, scan, intents)
        self._frame = frame
        self._server_info = server_info
        self._jobs: ScannedJobs
        self._lease: Lease
        self._is_cancelling = False
        self._reported_at = time.monotonic()
        self._waiting, self._waits_until = "", self._reported_at
        self._read_to = 0

    @property
    def leaves_open(self) -> bool:
        """Whether letters may have intents whose outcome isn't known, those of tasks included."""
        return bool(super().leaves_open or self.steps.set_aside or self.report.failures or self.report.cancelled)

    async def choose(self, request: RedriveRequest, target: RedriveTarget) -> ProtocolChoice:
        """Return how the letters are brought back.

        :raises RedriveRequestError: the request isn't possible for this queue, or for this frame
        """
        require_no_handler(self.scan)
        choice = await self._frame.choose(request, self.scan, self.operation.connection.api_level)
        self._jobs = await scanned_jobs(self.scan, request, is_copied=choice.protocol != Protocol.IN_PLACE)
        self._frame.known = len(self._jobs)
        return choice

    async def begin(self, lease: Lease) -> None:
        """Add to the report what earlier tries did, and finish what redrives began that were cut off."""
        await super().begin(lease)
        self._lease = lease
        await self._let_tasks_run(runs=True)

    async def redrive_selected(self) -> None:
        """Redrive the rows of the frame, or as many of them as a wave takes."""
        operation, report, frame = self.operation, self.report, self._frame
        operation.counted = len(report.redriven), len(report.parked)
        self._read_to = (await stream_info(operation.connection, self._intents.audit.stream))["state"]["last_seq"]
        try:
            if not operation.request.waves:
                await self._redrive_rows(frame.letters, self._jobs)
            else:
                while not report.cancelled and (rows := await self._next_of_wave()):
                    await self._redrive_rows(*rows)
        finally:
            operation.counted = None
        await self._add_finished_entries()

    async def _next_of_wave(self) -> tuple[DataFrame, ScannedJobs] | None:
        """Return the rows that the wave takes now, in the order of the letters; ``None`` where it takes none."""
        frame, report, record = self._frame, self.report, self.operation.record
        if frame.rows is None:
            frame.rows = await asyncio.to_thread(frame.sequences)
        done = frame.tried | SequenceRanges.of(sorted({*report.redriven, *report.parked}))
        rows = (frame.rows & SequenceRanges.between(0, record.until if record else 0)) - done
        again = self._rule.brought_again() - done
        if again:
            # Some of them may have been parked since.
            found = await still_dead(self.scan, list(again), self.operation.request.selection)
            again = SequenceRanges.of(sorted(found))
        chosen = list(rows | again)[: self._rule.remaining]
        if not chosen:
            return None
        first_time = frame.rows_of([sequence for sequence in chosen if sequence not in again])
        once_more = frame.sequence_frame([sequence for sequence in chosen if sequence in again])
        return first_time.unionByName(once_more, allowMissingColumns=True), self._jobs.among(frozenset(chosen))

    async def _redrive_rows(self, letters: DataFrame, jobs: ScannedJobs) -> None:
        """Redrive rows of the frame; scan the queue again where it has changed meanwhile."""
        to_rescan: frozenset[int] = frozenset()
        for _ in range(SCANS):
            to_rescan = await self._run_job(letters, jobs)
            if not to_rescan or self.report.cancelled:
                return
            log.warning("%d letters are scanned again: the queue or its server changed", len(to_rescan))
            letters = letters.join(self._frame.sequence_frame(to_rescan), SEQUENCE, "left_semi")
            jobs = await self._scan_again()
        for sequence in to_rescan:
            why = "the queue, a consumer or the server changed at every scan; run it again"
            self.report.add_failure(sequence, why)
        # A wave takes others in their place.
        self._frame.tried |= SequenceRanges.of(sorted(to_rescan))

    async def _scan_again(self) -> ScannedJobs:
        operation, audit = self.operation, self.scan.audit
        # What the last scan has read can't be compared with it any more.
        await self.steps.remove_entries()
        self._server_info = await read_server_info(self._frame.options)
        unaccounted = operation.request.selection.unaccounted
        self.scan = await Scan.begin(operation.connection, operation.queue, unaccounted=unaccounted)
        # The lease fences what is recorded.
        self.scan.audit = audit
        require_no_handler(self.scan)
        self.describe()
        self._jobs = await scanned_jobs(self.scan, operation.request, is_copied=True)
        self._frame.known = len(self._jobs)
        return self._jobs

    async def _run_job(self, letters: DataFrame, jobs: ScannedJobs) -> frozenset[int]:
        """Run one Spark job; return the letters that need another scan of the queue."""
        frame, report, wave = self._frame, self.report, self.operation.wave
        task, tasks = await frame.task(
            *(self.scan, len(jobs), self.operation.request, self._server_info, report.protocol),
            lease_token=self._lease.token,
            set_aside=self.steps.set_aside,
            wave=wave.number if wave else None,
        )
        rows = await asyncio.to_thread(partition_letters, letters, frame.columns, jobs, tasks)
        await self._note_wait()
        try:
            outcomes = await run_watched(rows, task, self._tick)
        except RedriveError:
            if not self._is_cancelling:
                raise
            report.cancelled = True
            return frozenset()
        frame.take_outcomes(outcomes)
        for outcome in outcomes:
            report.add(outcome.report)
            report.cancelled |= bool(outcome.cancelled)
        return frozenset(chain.from_iterable(outcome.to_rescan for outcome in outcomes))

    async def _tick(self) -> None:
        if not self._is_cancelling and self.operation.stopped():
            self._is_cancelling = True
            await self._let_tasks_run(runs=False)
        if time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
            await self._report_progress()

    async def _let_tasks_run(self, *, runs: bool) -> None:
        """Have the tasks stop before their next letters, or take back that they were to stop.

        :raises ApiError: the audit refused that
        :raises TransientError: it isn't known to be recorded
        """
        # Tasks read the record of the run before each window of letters.
        record = self.operation.run_record
        if record and runs == (CANCELLED in record.report):
            report = {name: value for name, value in record.report.items() if name != CANCELLED}
            record = record.model_copy(update={"report": report if runs else {**report, CANCELLED: True}})
            await self._intents.audit.record_progress(record)
            self.operation.run_record = record

    async def _note_wait(self) -> None:
        """Say until when tasks wait for slow workers, where the last letters died a moment ago."""
        now, consumers = self.scan.snapshot.taken_at, self.scan.snapshot.consumers
        died_at = self.scan.index.last_recorded()
        until = max((died_at[name] + consumers[name].max_ack_wait for name in died_at.keys() & consumers), default=now)
        if until > now:
            self._waits_until = time.monotonic() + (until - now).total_seconds()
            self._waiting = log_waiting(self.scan.queue.name, until)
            await self._report_progress()

    async def _report_progress(self) -> None:
        """Count in the audit what the tasks have done so far; record and report that."""
        operation, audit, now = self.operation, self._intents.audit, time.monotonic()
        self._reported_at, self._waiting = now, self._waiting if now < self._waits_until else ""
        redriven, parked = operation.counted or (0, 0)
        try:
            last = (await stream_info(operation.connection, audit.stream))["state"]["last_seq"]
            async for letter in audit.letters_of_run(str(operation.request.run), self._read_to + 1):
                parked, redriven = parked + (letter.action == "parked"), redriven + (letter.action != "parked")
            self._read_to, operation.counted = last, (redriven, parked)
            await operation.save(RedriveState.RUNNING)
        except (ApiError, LeaseLostError, TransientError) as error:
            log.warning("The progress of the redrive couldn't be recorded: %s", error)
        self._frame.report_progress(redriven + parked, self._waiting)

    async def _add_finished_entries(self) -> None:
        """Have the entries of redriven letters removed, of which tasks remove none."""
        scan, frame = self.scan, self._frame
        redriven = SequenceRanges.of(sorted(self.report.redriven))
        jobs = (entries for job, entries in scan.index.jobs() if job in redriven)
        entries = SequenceRanges.of(sorted(entry.sequence for entries in jobs for entry in entries)) - frame.entries
        # Those that can't be removed are counted once, whatever comes next.
        frame.entries |= entries
        try:
            info = await stream_info(self.operation.connection, scan.dead_letter_queue)
        except (ApiError, NotFoundError, TransientError) as error:
            log.warning("Finished entries of %s stay until the next redrive: %s", scan.dead_letter_queue, error)
            self.report.entries_left += entries.count
            return
        # One that was created anew counts from 1 again: its entries are about other letters.
        if datetime.fromisoformat(info["created"]) <= scan.snapshot.taken_at:
            await self.steps.add_entries(list(entries))
