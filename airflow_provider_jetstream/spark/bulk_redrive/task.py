"""One task of a bulk redrive: the core's facts, rules and steps, over a connection of its own.

A task doesn't know whether an earlier attempt did part of its work, or another attempt is doing it at this moment: the
protocols make that harmless, and what another attempt did counts as done by the same run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.intent import IntentLog, no_audit, read_open_intents
from airflow_provider_jetstream.jetstream.audit.lease import SharedLease
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import RunRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.contract import run_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.queue.snapshot import refresh_snapshot
from airflow_provider_jetstream.jetstream.redrive.operation import log_waiting
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE, Preview, preview_letter
from airflow_provider_jetstream.jetstream.redrive.recovery import recover_letters
from airflow_provider_jetstream.jetstream.redrive.redriven_job import CopyLimit
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.jetstream.redrive.target import RedriveTarget
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import CANCELLED, Outcomes
from airflow_provider_jetstream.spark.bulk_redrive.rows import TaskJob, read_windows
from airflow_provider_jetstream.spark.connections import blocking_connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.audit.intent import OpenIntent
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.facts import FactReader
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest

_WINDOW = 500
_BYTES_PER_WINDOW = 16 << 20
# The same as in a redrive without Spark.
_SNAPSHOT_SECONDS = 0.2
_LOOK_SECONDS = 1.0
_EXCLUDED = "the request's selection excludes it"
_PARKED = "it is parked; select parked to bring it back"
_REPEATED = "the frame has another row for it, which counts"
_OTHER_STREAM = (
    "expected a letter of this stream, created {}, found one of a stream created {}: the queue was created anew, or the"
    " row is of another queue; read its letters again"
)


@dataclass(frozen=True)
class RedriveTask:
    """What every task of a bulk redrive does; pickled and sent to executors.

    :param options: connection options of the data source
    :param server_info: the INFO of the server that the driver was connected to
    :param context: of the driver's scan
    :param inconsistent_consumers: consumers that hold more jobs than the advisories account for
    :param acknowledged: when the ack metrics of jobs were stored, where that matters
    :param request: with the key of the run
    :param rate: letters a second of one task
    :param lease_token: the token of the lease that the driver holds
    :param set_aside: letters of which an earlier redrive may have stored a new job, and why that isn't known
    :param wave: the wave of the redrive, where it has waves
    :param dry_run: whether to report only what would be done
    """

    options: Mapping[str, str]
    server_info: Mapping[str, Any]
    context: ScanContext
    inconsistent_consumers: frozenset[str]
    acknowledged: Mapping[int, datetime]
    request: RedriveRequest
    protocol: Protocol
    rate: float | None
    lease_token: int | None = None
    set_aside: Mapping[int, str] = field(default_factory=dict)
    wave: int | None = None
    dry_run: bool = False

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Redrive the letters of a partition, and return their outcomes.

        :param batches: rows of :func:`~.spark_job.partition_letters`
        :raises LeaseLostError: somebody else has the lease; the letters done so far are done
        :raises TransientError: the connection broke; the letters done so far are done
        """
        with blocking_connection(self.options) as connection:
            run = _TaskRun(self, connection)
            for window in read_windows(batches, self._window()):
                yield run.redrive_window(window)
            yield run.finish()

    def _window(self) -> int:
        """Return how many letters are held at once: fewer where jobs are large."""
        state = self.context.snapshot.state
        job_size = state["bytes"] / max(1, state["messages"])
        return max(1, min(_WINDOW, int(_BYTES_PER_WINDOW / max(1.0, job_size))))


class _TaskRun:
    def __init__(self, task: RedriveTask, connection: BlockingConnection) -> None:
        self._task = task
        self._connection = connection
        self._queue = task.context.queue
        self._snapshot = task.context.snapshot
        self._refreshed_at = time.monotonic()
        self._rate_limiter = RateLimiter(task.rate)
        self._preview = Preview(task.protocol, "")
        self._cancelled = False
        # Whether only another scan of the whole queue can prove what is dead.
        self._needs_rescan = _has_restarted(task.server_info, connection.socket.server_info)
        self._audit = AuditLog.from_snapshot(connection, self._queue, self._snapshot)
        if self._audit and task.lease_token is not None:
            fence = SharedLease(connection, self._audit.stream, self._queue.name, task.lease_token)
            self._audit = self._audit.fenced(fence)
        self._reader: FactReader = connection.run(self._make_reader())
        # What an earlier attempt was about to store.
        self._opened: dict[int, list[OpenIntent]] = {}
        self._intents: IntentLog | None = None
        if self._audit and not task.dry_run:
            self._intents = IntentLog(connection, self._audit, f"{task.request.run}-{_partition()}")
            self._opened = connection.run(self._read_opened(self._intents))

    async def _read_opened(self, intents: IntentLog) -> dict[int, list[OpenIntent]]:
        since = self._task.lease_token or 1
        opened = await read_open_intents(self._connection, intents.audit, since, intents.operation)
        sequences = (found.sequence for found_for_letter in opened.values() for found in found_for_letter)
        intents.leave_open(sequences)
        return opened

    async def _make_reader(self) -> FactReader:
        streams = [self._queue, self._queue.archive, self._queue.audit, self._queue.events, self._queue.dead_letters]
        await self._connection.discover_capabilities(stream.name for stream in streams if stream)
        archive = await ArchiveReader.open(self._connection, self._queue, self._snapshot.info)
        return await self._task.context.reader(
            self._connection,
            EntryIndex(),
            archive=archive,
            audit=self._audit,
            inconsistent_consumers=self._task.inconsistent_consumers,
            acknowledged=self._task.acknowledged,
        )

    def redrive_window(self, window: list[TaskJob]) -> pa.RecordBatch:
        """Redrive a window of letters, as many at a time as the rate allows."""
        outcomes = Outcomes()
        # The last row of a letter counts.
        by_sequence = {job.row.sequence: job for job in window}
        remaining: list[TaskJob] = []
        for job in window:
            if by_sequence[job.row.sequence] is not job:
                outcomes.add_failure(job.row.sequence, _REPEATED)
            elif job.row.created not in (None, self._snapshot.created):
                # Its sequence is another job's.
                problem = _OTHER_STREAM.format(self._snapshot.created, job.row.created)
                outcomes.add_failure(job.row.sequence, problem)
            else:
                remaining.append(job)
        while remaining:
            batch = remaining[: self._rate_limiter.batch_size(_WINDOW)]
            del remaining[: len(batch)]
            if (delay := self._rate_limiter.delay(len(batch))) > 0:
                time.sleep(delay)
            self._connection.run(self._refresh())
            if self._cancelled or self._needs_rescan:
                sequences = (job.row.sequence for job in (*batch, *remaining))
                outcomes.add_unprocessed(sequences, cancelled=self._cancelled)
                break
            self._redrive_batch(batch, outcomes)
        return outcomes.batch()

    def finish(self) -> pa.RecordBatch:
        """Return the outcomes that are known only at the end."""
        outcomes = Outcomes()
        if self._task.dry_run:
            outcomes.add_preview(self._preview)
        return outcomes.batch()

    async def _refresh(self) -> None:
        """Read whether the run is cancelled, and the queue's snapshot where that is too old."""
        await self._refresh_cancelled()
        if time.monotonic() - self._refreshed_at > _SNAPSHOT_SECONDS:
            await self._refresh_snapshot()

    async def _refresh_cancelled(self) -> None:
        if self._audit and not self._task.dry_run and self._task.request.run:
            subject = run_audit_subject(self._queue.name, self._task.request.run)
            if message := await last_message(self._connection, self._audit.stream, subject):
                self._cancelled = bool(RunRecord.model_validate_json(message.data).report.get(CANCELLED))

    async def _refresh_snapshot(self) -> None:
        self._refreshed_at = time.monotonic()
        snapshot = await refresh_snapshot(self._connection, self._snapshot)
        if snapshot is None:
            self._needs_rescan = True
        else:
            self._snapshot = snapshot
            self._reader.update(snapshot=snapshot)

    def _redrive_batch(self, batch: list[TaskJob], outcomes: Outcomes) -> None:
        results = self._connection.run(self._classify(batch))
        ready_at = max((result.ready_at for result in results if isinstance(result, DeadLetter)), default=None)
        if not self._task.dry_run and ready_at and self._wait_until(ready_at):
            self._connection.run(self._refresh_snapshot())
            if self._cancelled or self._needs_rescan:
                outcomes.add_unprocessed((job.row.sequence for job in batch), cancelled=self._cancelled)
                return
            results = self._connection.run(self._classify(batch))
        letters = [
            result for result in results if isinstance(result, DeadLetter) and self._is_selected(result, outcomes)
        ]
        dismissed = [result for result in results if isinstance(result, NotDead)]
        rows = {job.row.sequence: job.row for job in batch}
        request = replace(self._task.request, transform=lambda letter: rows[letter.sequence].repair(letter))
        if self._task.dry_run:
            limit = CopyLimit.of(self._connection, self._snapshot.config)
            target = RedriveTarget(self._queue, self._snapshot)
            for letter in letters:
                self._connection.run(preview_letter(self._preview, request, letter, target, BY_CAUSE, limit))
            return
        if self._intents is None:
            raise no_audit(self._queue.name)
        self._rate_limiter.consume(len(letters))
        report = RedriveReport()
        # The driver removes all entries at the end.
        steps = Steps(
            *(self._connection, self._queue, self._snapshot, request, self._intents, report),
            removes_entries=False,
        )
        steps.records.wave = self._task.wave
        self._connection.run(self._run_steps(steps, report, letters, dismissed))
        self._rate_limiter.record_stored(len(letters))
        outcomes.add_report(report)
        if self._connection.broken:
            # Spark retries the task, which finds out how far each letter came.
            raise self._connection.broken

    def _wait_until(self, moment: datetime) -> bool:
        """Wait until no slow worker can have one of the jobs, or the run is cancelled; return whether it waited.

        :param moment: by the server's clock
        """
        if moment <= self._snapshot.taken_at:
            return False
        clock: ServerClock = self._connection.run(ServerClock.read(self._connection, self._queue.name))
        if clock.seconds_until(moment) <= 0:
            return False
        log_waiting(self._queue.name, moment)
        while (seconds := clock.seconds_until(moment)) > 0 and not self._cancelled:
            time.sleep(min(seconds, _LOOK_SECONDS))
            self._connection.run(self._refresh_cancelled())
        return True

    async def _classify(self, batch: list[TaskJob]) -> list[DeadLetter | NotDead]:
        return await self._reader.classify([(job.row.sequence, job.entries) for job in batch])

    def _is_selected(self, letter: DeadLetter, outcomes: Outcomes) -> bool:
        selection = self._task.request.selection
        if selection.matches(letter, self._snapshot.taken_at):
            return True
        parked = letter.parked is not None and not selection.parked
        outcomes.add_failure(letter.sequence, _PARKED if parked else _EXCLUDED)
        return False

    async def _run_steps(
        self, steps: Steps, report: RedriveReport, letters: list[DeadLetter], dismissed: list[NotDead]
    ) -> None:
        if audit := self._audit:
            redriven = [job.sequence for job in dismissed if job.status == Status.REDRIVEN]
            for record in await map_concurrently(audit.last_record, redriven):
                if record and record.run == self._task.request.run:
                    # By an earlier attempt of this task, or by another one at this moment.
                    if record.action == "parked":
                        report.add_parked(record.sequence)
                    else:
                        report.add_redriven(record.sequence, record.new_sequence or record.sequence, record.new_stream)
        await steps.clean_up(dismissed)
        steps.set_aside = self._task.set_aside
        if begun := [letter for letter in letters if letter.sequence in self._opened]:
            context = self._task.context
            recovered = await recover_letters(self._connection, context, steps, self._opened, begun)
            steps.set_aside = {**steps.set_aside, **recovered.unknown}
            done = {letter.sequence for letter, _ in recovered.stored}
            done |= {letter.sequence for letter in recovered.repeatable}
            letters = [
                letter for letter in letters if letter.sequence not in done or letter.sequence in steps.set_aside
            ]
        await steps.redrive(letters)


def _partition() -> int:
    """Return the number of the task's partition, which all attempts of a task have in common."""
    context = TaskContext.get()
    return int(context.partitionId()) if context else 0


def _has_restarted(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the driver's server has restarted since; it may have forgotten deaths then."""
    address = ("server_name", "host", "port")
    return all(before.get(key) == now.get(key) for key in address) and before["server_id"] != now["server_id"]
