"""The core's loop of a redrive in Spark's driver: it scans, leases, recovers, records, and obeys what people ask.

It runs on an event loop of its own, in another thread; what needs Spark runs in the caller's thread, to which Spark's
job groups and a notebook belong. The tasks share the lease's token: they read whether it lasts, and the server refuses
what they record once somebody else has it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.intent import IntentLog, no_audit
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    LeaseLostError,
    NotFoundError,
    RedriveRequestError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.redrive.operation import Operation, redrive_lease
from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, choose_protocol
from airflow_provider_jetstream.jetstream.redrive.recovery import recover
from airflow_provider_jetstream.jetstream.redrive.redrive import rule_of, run_redrive
from airflow_provider_jetstream.jetstream.redrive.redriven_job import require_room_for_all
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.spark.bulk_redrive.task import CANCELLED
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import load_queue, scanned_jobs
from airflow_provider_jetstream.spark.dead_letters.schema import CHANGEABLE, REPAIRED, SEQUENCE, STREAM_CREATED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.next_letters import NextLetters
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest


# Jobs that are no longer dead letters may be missing from a frame; with more of them the letters are copied.
_MOST_MISSING = 10_000


@dataclass(frozen=True, slots=True)
class DriverScan:
    """The driver's scan of a queue.

    :param scan: the scan of the whole queue; its connection is closed
    :param acknowledged: when the ack metrics of jobs were stored, where that matters
    :param server_info: the INFO of the server that the driver was connected to
    :param jobs: the jobs' entries, a row per job
    """

    scan: Scan
    choice: ProtocolChoice
    acknowledged: Mapping[int, datetime]
    server_info: Mapping[str, Any]
    jobs: pa.Table


async def scan_queue(connection: BlockingConnection, queue: Any, request: RedriveRequest) -> DriverScan:
    """Scan a whole queue; a name is looked up on the server.

    :raises RedriveRequestError: the queue doesn't allow what is requested
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    if request.count_under_pause:
        raise RedriveRequestError("expected no count under a pause of a bulk redrive, found one: redrive without Spark")
    declared = await load_queue(connection, queue)
    streams = [declared, declared.archive, declared.audit, declared.events, declared.dead_letters]
    await connection.discover_capabilities(stream.name for stream in streams if stream)
    scan = await Scan.begin(connection, declared, unaccounted=request.selection.unaccounted)
    if scan.audit is None:
        raise no_audit(declared.name)
    choice = choose_protocol(request, scan.snapshot, connection.api_level, scan.context.handler_names)
    jobs = await scanned_jobs(scan, request.selection)
    if choice.protocol != Protocol.IN_PLACE:
        parked_in = None if request.max_redrives is None else scan.dead_letter_queue
        require_room_for_all(scan.snapshot, jobs.num_rows, connection.max_payload, parked_in)
    reader = await scan.context.reader(
        connection,
        scan.index,
        archive=scan.archive,
        audit=scan.audit,
        inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
        orphans=scan.reconciliation.orphans,
    )
    acknowledged = dict(await reader.acknowledgements.times())
    server_info = dict(connection.socket.server_info)
    return DriverScan(scan, choice, acknowledged, server_info, jobs)


def require_no_handler(scan: DriverScan) -> None:
    """Refuse to redrive where a handler of the dead letter queue could get the same letters at the same time.

    Spark's tasks don't claim entries.

    :raises RedriveRequestError: the dead letter queue has a handler; nothing was done
    """
    context = scan.scan.context
    if context.handlers:
        raise RedriveRequestError(
            f"expected a dead letter queue without handlers, found {context.dead_letter_queue['config']['name']} with"
            f" its consumer {', '.join(context.handler_names)}: a bulk redrive doesn't claim letters, so both could do"
            " the same ones; redrive without Spark, which claims each letter first"
        )


def frame_problem(options: Mapping[str, str], letters: DataFrame, scan: DriverScan) -> str:
    """Return why a redrive in place isn't what a frame requests; empty where it is.

    :param options: connection options of the data source
    """
    if _has_repairs(letters):
        return "the frame has repaired rows, or doesn't say that they aren't"
    if _has_rows_of_another_stream(letters, scan):
        return "the frame has letters of another stream, or of one that was created anew since"
    missing = _missing_jobs(letters, scan)
    incomplete: bool = run_on_own_connection(options, lambda connection: _any_dead(connection, scan, missing))
    return "the frame leaves dead letters out" if incomplete else ""


def _has_repairs(letters: DataFrame) -> bool:
    if REPAIRED not in letters.columns:
        return bool(set(letters.columns) & set(CHANGEABLE))
    return not letters.where(f.expr(f"coalesce({REPAIRED}, true)")).isEmpty()


def _has_rows_of_another_stream(letters: DataFrame, scan: DriverScan) -> bool:
    if STREAM_CREATED not in letters.columns:
        return False
    return not letters.where(f.col(STREAM_CREATED) != scan.scan.snapshot.created).isEmpty()


def _missing_jobs(letters: DataFrame, scan: DriverScan) -> list[int]:
    """Find the jobs with entries that a frame leaves out; one more than the limit at most."""
    known = letters.sparkSession.createDataFrame(scan.jobs.select(["sequence"]))
    rows = known.join(letters.select(SEQUENCE), SEQUENCE, "left_anti").limit(_MOST_MISSING + 1).collect()
    return [row[0] for row in rows]


async def _any_dead(connection: BlockingConnection, driver_scan: DriverScan, sequences: Sequence[int]) -> bool:
    """Return whether any of the jobs is a dead letter in circulation, or there are too many to find out."""
    if len(sequences) > _MOST_MISSING:
        return True
    return bool(await still_dead(connection, driver_scan, sequences, Selection()))


async def still_dead(
    connection: BlockingConnection, driver_scan: DriverScan, sequences: Sequence[int], selection: Selection
) -> list[int]:
    """Return which of the jobs are dead letters of a selection."""
    scan = driver_scan.scan
    archive = await ArchiveReader.open(connection, scan.queue, scan.snapshot.info)
    audit = AuditLog.from_snapshot(connection, scan.queue, scan.snapshot)
    reader = await scan.context.reader(
        connection,
        scan.index,
        archive=archive,
        audit=audit,
        inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
    )
    results = await reader.classify([(sequence, scan.index.entries_of(sequence)) for sequence in sequences])
    return [
        result.sequence for result in results if isinstance(result, DeadLetter) and selection.matches(result, scan.now)
    ]


log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class DriverSupervision:
    """One bulk redrive, run step by step; its other methods are for the steps.

    :param options: connection options of the data source
    :param request: with the redrive's key
    :param stopped: called a few times a second, from two threads
    :ivar report: what it has done so far
    :ivar lease: the queue's lease during a step; ``None`` where no audit could store it
    """

    def __init__(
        self, options: Mapping[str, str], queue: WorkQueue, request: RedriveRequest, stopped: Callable[[], bool]
    ) -> None:
        self.report = RedriveReport()
        self.lease: Lease | None = None
        self._options = options
        self._queue = queue
        self._request = request
        self._stopped = stopped
        self._is_interrupted = False
        # The steps that are to be run; None at the end.
        self._steps: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop
        self._connection: Connection
        self._operation: Operation
        self._rule: NextLetters
        self._audit: AuditLog
        self._read_to = 0
        self._redriven: set[int] = set()
        self._parked: set[int] = set()

    def run(self, step: Callable[[], None], patience: float = math.inf) -> None:
        """Run a redrive until it is over; each step in this thread.

        :param patience: for how many seconds jobs and people are awaited at one go
        :raises Exception: what a step raises
        """
        with ThreadPoolExecutor(1, "supervision of a redrive") as thread:
            running = thread.submit(asyncio.run, self._supervise(patience))
            try:
                while (ended := self._steps.get()) is not None:
                    try:
                        step()
                    except Exception as error:  # noqa: BLE001 - raised again below
                        ended.set_exception(error)
                    except BaseException:
                        ended.cancel()
                        raise
                    else:
                        ended.set_result(None)
            except BaseException:
                self._is_interrupted = True
                raise
            running.result()

    async def _supervise(self, patience: float) -> None:
        try:
            async with connect(socket_settings(self._options)) as connection:
                self._loop, self._connection = asyncio.get_running_loop(), connection
                self._operation = Operation(
                    *(connection, self._queue, self._request, self.report), stopped=self._caller_stops, engine="spark"
                )
                self._rule = rule_of(self._operation)
                await run_redrive(self._operation, self._rule, self._step, patience)
        finally:
            self._steps.put(None)

    async def _step(self) -> None:
        operation = self._operation
        arguments = (self._connection, self._queue, self._request, operation.stopped, "bulk redrive")
        async with redrive_lease(*arguments) as self.lease:
            ended: Future[None] = Future()
            self._steps.put(ended)
            await asyncio.wrap_future(ended)

    def _caller_stops(self) -> bool:
        return self._is_interrupted or self._stopped()

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stopped(self) -> bool:
        """Return whether no more letters may be redriven now, by the caller or by what a person asked."""
        return self._operation.stopped()

    @property
    def may_redrive(self) -> bool:
        """Whether letters may be redriven now, rather than jobs or people awaited."""
        return self._operation.may_redrive

    @property
    def wave(self) -> int | None:
        """The number of the wave that is redriven; ``None`` where there are no waves."""
        return self._operation.wave.number if self._operation.wave else None

    @property
    def remaining(self) -> int | None:
        """How many letters the wave still takes; ``None`` for all."""
        return self._rule.remaining

    @property
    def until(self) -> int:
        """The last stream sequence that was stored when the redrive began."""
        return self._operation.record.until if self._operation.record else 0

    def brought_again(self) -> SequenceRanges:
        """Return the jobs that died again in waves after which a person let the redrive go on."""
        return self._rule.brought_again()

    def begin(self, scan: DriverScan) -> Mapping[int, str]:
        """Begin the redrive, or go on with it; finish what redrives began that were cut off.

        What earlier tries did is added to the report.

        :return: the letters of which it isn't known whether they have new jobs, and why
        :raises RedriveRequestError: the queue has no audit
        :raises LeaseLostError: somebody else has the lease
        :raises RedriveError: it can't be recorded
        """
        return self._call(self._begin(scan))

    async def _begin(self, driver_scan: DriverScan) -> Mapping[int, str]:
        connection, scan, lease = self._connection, driver_scan.scan, self.lease
        audit = AuditLog.from_snapshot(connection, scan.queue, scan.snapshot)
        if audit is None or lease is None:
            raise no_audit(scan.queue.name)
        self._audit = audit = audit.fenced(lease)
        operation = self._operation
        await operation.begin(scan, audit, self._rule.begin_step)
        operation.counted = None
        self._read_to = (await stream_info(connection, audit.stream))["state"]["last_seq"]
        self._redriven, self._parked = set(self.report.redriven), set(self.report.parked)
        await self._let_tasks_run(runs=True)
        if not operation.may_redrive:
            return {}

        async def classify(sequences: list[int]) -> Sequence[DeadLetter | NotDead]:
            reader = await scan.context.reader(
                connection,
                scan.index,
                archive=await ArchiveReader.open(connection, scan.queue, scan.snapshot.info),
                audit=audit,
                inconsistent_consumers=scan.reconciliation.inconsistent_consumers,
            )
            return await reader.classify([(sequence, scan.index.entries_of(sequence)) for sequence in sequences])

        intents = IntentLog(connection, audit, lease.operation)
        steps = Steps(
            *(connection, scan.queue, scan.snapshot, self._request, intents, self.report), removes_entries=False
        )
        steps.records.wave = self.wave
        # The repairs are in the frame: a letter isn't stored once more without its own.
        await recover(connection, scan.context, classify, steps, intents, lease.open_since, can_repeat=False)
        lease.open_since = intents.open_since
        return steps.set_aside

    def cancel_tasks(self) -> None:
        """Have the tasks stop before their next letters.

        :raises ApiError: the audit refused that
        :raises TransientError: it isn't known to be recorded
        """
        self._call(self._let_tasks_run(runs=False))

    async def _let_tasks_run(self, *, runs: bool) -> None:
        # Tasks read the record of the run before each window of letters.
        record = self._operation.run_record
        if record and not (runs and CANCELLED not in record.report):
            report = {name: value for name, value in record.report.items() if name != CANCELLED}
            record = record.model_copy(update={"report": report if runs else {**report, CANCELLED: True}})
            await self._audit.record_progress(record)
            self._operation.run_record = record

    def record_progress(self) -> int:
        """Record how many letters have been handled so far; return that."""
        return self._call(self._record_progress())

    async def _record_progress(self) -> int:
        try:
            last = (await stream_info(self._connection, self._audit.stream))["state"]["last_seq"]
            async for letter in self._audit.letters_of_run(str(self._request.run), self._read_to + 1):
                (self._parked if letter.action == "parked" else self._redriven).add(letter.sequence)
            self._read_to = last
            self._operation.counted = len(self._redriven), len(self._parked)
            await self._operation.save(RedriveState.RUNNING)
        except (ApiError, LeaseLostError, TransientError) as error:
            log.warning("The progress of the redrive couldn't be recorded: %s", error)
        return len(self._redriven) + len(self._parked)

    def remove_entries(self, scan: DriverScan) -> int:
        """Remove the entries of redriven letters, of which tasks remove none; return how many stay."""
        return self._call(self._remove_entries(scan.scan))

    async def _remove_entries(self, scan: Scan) -> int:
        columns, redriven = scan.index.columns(), self.report.redriven
        finished = np.isin(np.array(columns.sequences, np.uint64), np.fromiter(redriven, np.uint64, len(redriven)))
        entries: list[int] = np.sort(np.array(columns.entries, np.uint64)[finished]).tolist()
        try:
            info = await stream_info(self._connection, scan.dead_letter_queue)
        except (ApiError, NotFoundError, TransientError) as error:
            log.warning("Finished entries of %s stay until the next redrive: %s", scan.dead_letter_queue, error)
            return len(entries)
        if datetime.fromisoformat(info["created"]) > scan.snapshot.taken_at:
            # It was created anew and counts from 1 again: its entries are about other letters.
            return 0
        unchanged = await scan.unchanged(entries)
        left = await remove_entries(self._connection, scan.queue, unchanged, info["config"])
        return left + len(entries) - len(unchanged)

    def end_step(self) -> None:
        """Record how the step ended.

        :raises LeaseLostError: somebody else has the lease
        """
        self._call(self._end_step())

    async def _end_step(self) -> None:
        self._operation.counted = None
        await self._operation.report_now(self._rule.end_step)

    def fail(self, error: Exception) -> None:
        """Record that the redrive ended with an error; nothing is raised where that isn't possible."""
        self._call(self._operation.fail(error))
