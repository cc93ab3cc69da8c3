"""One task of a bulk redrive: the core's facts, rules and steps, over a connection of its own.

A task doesn't know whether an earlier attempt did part of its work, or another attempt is doing it at this moment: the
protocols make that harmless, and what another attempt did counts as done by the same run.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.intent import IntentLog, no_audit, read_open_intents
from airflow_provider_jetstream.jetstream.audit.lease import SharedLease
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import RunRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.contract import run_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.group import BY_CAUSE
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.queue.snapshot import refresh_snapshot
from airflow_provider_jetstream.jetstream.redrive.operation import log_waiting
from airflow_provider_jetstream.jetstream.redrive.preview import Preview, preview_letter
from airflow_provider_jetstream.jetstream.redrive.protocol import RedriveTarget
from airflow_provider_jetstream.jetstream.redrive.recovery import recover_letters
from airflow_provider_jetstream.jetstream.redrive.redriven_job import CopyLimit
from airflow_provider_jetstream.jetstream.redrive.repair import ORIGIN_HEADERS, UNCHANGED, Repair
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.spark.connections import blocking_connection
from airflow_provider_jetstream.spark.dead_letters.scanned_jobs import unpack_part
from airflow_provider_jetstream.spark.dead_letters.schema import (
    BODY,
    HEADERS,
    PROBLEM,
    REPAIRED,
    SEQUENCE,
    STREAM_CREATED,
    SUBJECT,
    as_valid_text,
)
from airflow_provider_jetstream.spark.errors import RepairContractError, SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from pyspark.sql.types import StructType

    from airflow_provider_jetstream.jetstream.audit.intent import OpenIntent
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.facts import FactReader, ScanContext
    from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest


# One value a row: a packed :class:`Outcome`.
OUTCOME_DDL: Final = "outcome binary"
_OUTCOME: Final = pa.schema([("outcome", pa.binary())])
# Marks in the record of a run that its tasks are to stop.
CANCELLED: Final = "cancelled"


@dataclass(slots=True)
class Outcome:
    """What a task did with some letters, or would do.

    :param report: what became of them
    :param cancelled: letters that weren't tried, since the run was stopped before
    :param to_rescan: letters of which only another scan of the whole queue can prove that they are dead
    :param preview: of all letters of the task
    """

    report: RedriveReport = field(default_factory=RedriveReport)
    cancelled: list[int] = field(default_factory=list)
    to_rescan: list[int] = field(default_factory=list)
    preview: Preview | None = None

    def batch(self) -> pa.RecordBatch:
        """Return it as a row, for :func:`read_outcomes`."""
        return pa.RecordBatch.from_arrays([pa.array([pickle.dumps(self)], pa.binary())], schema=_OUTCOME)


def read_outcomes(rows: pa.Table) -> list[Outcome]:
    """Return what all tasks did, in the order of the letters."""
    # Tasks run the driver's own code.
    return [pickle.loads(value) for value in rows.column("outcome").to_pylist()]  # noqa: S301


# The column of a task's first row, with the packed entries of the task's letters.
PACKED_ENTRIES: Final = "packed_entries"

_TYPES: Final = {
    SEQUENCE: ("bigint", "int"),
    SUBJECT: ("string",),
    BODY: ("binary", "string"),
    HEADERS: ("array<struct<key:string,value:string>>",),
    REPAIRED: ("boolean",),
    STREAM_CREATED: ("string",),
}


def read_windows(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[tuple[list[RequestedLetter], EntryIndex]]:
    """Read a partition of :func:`~.driver.partition_letters`, ``size`` letters at a time, with the entries about them.

    :raises SparkOptionError: a row has no sequence
    """
    entries = EntryIndex()
    for batch in batches:
        packed = batch.column(PACKED_ENTRIES)
        if packed.null_count < len(packed):
            entries, _ = unpack_part(packed.drop_null()[0].as_py())
        rows = batch.filter(packed.is_null()).drop_columns([PACKED_ENTRIES])
        for start in range(0, rows.num_rows, size):
            yield [RequestedLetter.from_row(row) for row in rows.slice(start, size).to_pylist()], entries


def used_columns(schema: StructType, known: frozenset[str]) -> tuple[str, ...]:
    """Return the columns of a frame that a redrive uses.

    :param known: columns of letters that are allowed and not used
    :raises SparkOptionError: the sequence is missing, or a column is unknown or of another type
    """
    names = schema.fieldNames()
    if SEQUENCE not in names:
        raise SparkOptionError(
            f"expected a column {SEQUENCE} with the letters' stream sequences, found {', '.join(names) or 'none'}: take"
            " the letters as read_letters returns them"
        )
    for column in schema.fields:
        kinds = _TYPES.get(column.name)
        if column.name == PROBLEM:
            raise SparkOptionError(
                f"expected letters that were checked, found the column {PROBLEM} of a repair's files: read them with"
                " read_repaired, which checks them"
            )
        if kinds is None and column.name not in known:
            raise SparkOptionError(
                f"expected columns among {', '.join(_TYPES)} and those of the letters, found {column.name}: a redrive"
                " wouldn't use it; drop it"
            )
        if kinds is not None and column.dataType.simpleString() not in kinds:
            raise SparkOptionError(
                f"expected the column {column.name} as {' or '.join(kinds)}, found"
                f" {column.dataType.simpleString()}: cast it"
            )
    return tuple(name for name in _TYPES if name in names)


@dataclass(frozen=True, slots=True)
class RequestedLetter:
    """A frame's row: a letter, and what the job becomes; ``None`` leaves a part as it is.

    :param sequence: the letter's stream sequence
    :param headers: all headers
    :param created: when the letter's stream was created, in the server's own text; ``None`` where the frame doesn't say
    """

    sequence: int
    subject: str | None = None
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] | None = None
    created: str | None = None

    @classmethod
    def from_row(cls, values: Mapping[str, Any]) -> RequestedLetter:
        """Convert the used columns of a row.

        :raises SparkOptionError: the sequence is null
        """
        if values[SEQUENCE] is None:
            raise SparkOptionError(f"expected a {SEQUENCE} in every row, found null: drop rows that are no letters")
        created = values.get(STREAM_CREATED)
        if values.get(REPAIRED) is False:
            return cls(values[SEQUENCE], created=created)
        body, headers = values.get(BODY), values.get(HEADERS)
        return cls(
            values[SEQUENCE],
            values.get(SUBJECT),
            body.encode() if isinstance(body, str) else body,
            None if headers is None else tuple((pair["key"] or "", pair["value"] or "") for pair in headers),
            created,
        )

    def repair(self, letter: DeadLetter) -> Repair | None:
        """Return what changes compared with the stored letter; ``None`` where nothing does.

        :raises RepairContractError: a new text has U+FFFD in place of bytes that a frame can't hold
        """
        body = UNCHANGED if self.body is None or self.body == letter.body else self.body
        subject = None if self.subject in (None, as_valid_text(letter.subject)) else self.subject
        if subject is not None and _has_lost_bytes(subject, (letter.subject,)):
            raise _lost_bytes("subject", subject)
        headers = {} if self.headers is None else self._changed_headers(letter)
        if body is UNCHANGED and subject is None and not headers:
            return None
        return Repair(body, headers, subject)

    def _changed_headers(self, letter: DeadLetter) -> dict[str, tuple[str, ...] | None]:
        """Compare headers by name, without those that only the server or a redrive sets."""
        own = [pair for pair in letter.headers if _is_own(pair[0])]
        stored = _by_name(own)
        requested = _by_name(_as_stored([pair for pair in self.headers or () if _is_own(pair[0])], own))
        changed: dict[str, tuple[str, ...] | None] = {}
        for name in dict.fromkeys((*requested, *stored)):
            if requested.get(name, []) == stored.get(name, []):
                continue
            for value in requested.get(name, ()):
                if value not in stored.get(name, ()) and _has_lost_bytes(
                    value, (text for pair in own for text in pair)
                ):
                    raise _lost_bytes(f"header {as_valid_text(name)}", value)
            changed[name] = tuple(requested[name]) if name in requested else None
        return changed


def _is_own(name: str) -> bool:
    return bool(name) and not is_servers(name) and name not in ORIGIN_HEADERS


def _as_stored(requested: Sequence[tuple[str, str]], stored: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Give names and values that a frame shows with U+FFFD the bytes with which they are stored."""
    names: dict[str, str] = {}
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, value in stored:
        names.setdefault(as_valid_text(name), name)
        pairs.setdefault((as_valid_text(name), as_valid_text(value)), []).append((name, value))
    found: list[tuple[str, str]] = []
    for name, value in requested:
        # Two of them may look the same: then they are taken in order.
        same = pairs.get((name, value), [(names.get(name, name), value)])
        found.append(same.pop(0) if len(same) > 1 else same[0])
    return found


def _has_lost_bytes(text: str, stored: Iterable[str]) -> bool:
    return "\ufffd" in text and any(as_valid_text(found) != found for found in stored)


def _lost_bytes(part: str, text: str) -> RepairContractError:
    return RepairContractError(
        f"expected the {part} as it was or without bytes that aren't UTF-8, found {text[:80]!r}, where U+FFFD stands"
        " for such bytes: set it to text of your own, or leave it as it is"
    )


def _by_name(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return values


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

        :param batches: rows of :func:`~.driver.partition_letters`
        :raises LeaseLostError: somebody else has the lease; the letters done so far are done
        :raises TransientError: the connection broke; the letters done so far are done
        """
        with blocking_connection(self.options) as connection:
            run = _TaskRun(self, connection)
            for window in read_windows(batches, self._window()):
                yield run.redrive_window(*window).batch()
            if self.dry_run:
                yield Outcome(preview=run.preview).batch()

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
        self.preview = Preview(task.protocol, "")
        self._cancelled = False
        # Whether only another scan of the whole queue can prove what is dead.
        self._needs_rescan = _has_restarted(task.server_info, connection.socket.server_info)
        self._audit = AuditLog.from_snapshot(connection, self._queue, self._snapshot)
        if self._audit and task.lease_token is not None:
            fence = SharedLease(connection, self._audit.stream, self._queue.name, task.lease_token)
            self._audit = self._audit.fenced(fence)
        self._reader: FactReader = connection.run(self._make_reader())
        self._entries = EntryIndex()
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

    def redrive_window(self, window: list[RequestedLetter], entries: EntryIndex) -> Outcome:
        """Redrive a window of letters, as many at a time as the rate allows."""
        outcome, self._entries = Outcome(), entries
        # The last row of a letter counts.
        by_sequence = {row.sequence: row for row in window}
        remaining: list[RequestedLetter] = []
        for row in window:
            if by_sequence[row.sequence] is not row:
                outcome.report.add_failure(row.sequence, _REPEATED)
            elif row.created not in (None, self._snapshot.created):
                # Its sequence is another job's.
                outcome.report.add_failure(row.sequence, _OTHER_STREAM.format(self._snapshot.created, row.created))
            else:
                remaining.append(row)
        while remaining:
            batch = remaining[: self._rate_limiter.batch_size(_WINDOW)]
            del remaining[: len(batch)]
            if (delay := self._rate_limiter.delay(len(batch))) > 0:
                time.sleep(delay)
            self._connection.run(self._refresh())
            if self._cancelled or self._needs_rescan:
                self._leave([*batch, *remaining], outcome)
                break
            self._redrive_batch(batch, outcome)
        return outcome

    def _leave(self, rows: Sequence[RequestedLetter], outcome: Outcome) -> None:
        left = outcome.cancelled if self._cancelled else outcome.to_rescan
        left += (row.sequence for row in rows)

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

    def _redrive_batch(self, batch: list[RequestedLetter], outcome: Outcome) -> None:
        results = self._connection.run(self._classify(batch))
        ready_at = max((result.ready_at for result in results if isinstance(result, DeadLetter)), default=None)
        if not self._task.dry_run and ready_at and self._wait_until(ready_at):
            self._connection.run(self._refresh_snapshot())
            if self._cancelled or self._needs_rescan:
                self._leave(batch, outcome)
                return
            results = self._connection.run(self._classify(batch))
        letters = [
            result for result in results if isinstance(result, DeadLetter) and self._is_selected(result, outcome)
        ]
        dismissed = [result for result in results if isinstance(result, NotDead)]
        rows = {row.sequence: row for row in batch}
        request = replace(self._task.request, transform=lambda letter: rows[letter.sequence].repair(letter))
        if self._task.dry_run:
            limit = CopyLimit.of(self._connection, self._snapshot.config)
            target = RedriveTarget(self._queue, self._snapshot)
            for letter in letters:
                self._connection.run(preview_letter(self.preview, request, letter, target, BY_CAUSE, limit))
            return
        if self._intents is None:
            raise no_audit(self._queue.name)
        self._rate_limiter.consume(len(letters))
        # The driver removes all entries at the end.
        steps = Steps(
            *(self._connection, self._queue, self._snapshot, request, self._intents, outcome.report),
            removes_entries=False,
        )
        steps.records.wave = self._task.wave
        self._connection.run(self._run_steps(steps, outcome.report, letters, dismissed))
        self._rate_limiter.record_stored(len(letters))
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

    async def _classify(self, batch: list[RequestedLetter]) -> list[DeadLetter | NotDead]:
        return await self._reader.classify([(row.sequence, self._entries.entries_of(row.sequence)) for row in batch])

    def _is_selected(self, letter: DeadLetter, outcome: Outcome) -> bool:
        selection = self._task.request.selection
        if selection.matches(letter, self._snapshot.taken_at):
            return True
        parked = letter.parked is not None and not selection.parked
        outcome.report.add_failure(letter.sequence, _PARKED if parked else _EXCLUDED)
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
