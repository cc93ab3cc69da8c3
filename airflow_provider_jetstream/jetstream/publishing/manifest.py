"""The manifest: what one task has published, stored in the events stream, with an entry for each job.

The server forgets message ids after the stream's ``duplicate_window``, which Airflow's default ``retry_delay`` exceeds.
The record of a manifest is stored before a task publishes, again as publishing goes on, and afterwards. It is closed
once the task has nothing more to do: then a task that is cleared publishes new jobs, while a retry publishes only what
isn't stored.

An entry is a row of 32 bytes: the 16 of the message id, the first 8 of the SHA-256 of the body, and the sequence,
big-endian. The highest bit of the sequence is set where it isn't known whether the message of that sequence was the
job, and the next one where the sequence is that of a schedule, which another stream than the queue has. The record
holds the last rows; those before are a document, of parts of up to 4,096 rows, to which the record has the references.
Nobody else can add a row.
"""

from __future__ import annotations

import sys
import time
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from contextlib import suppress
from dataclasses import dataclass, replace
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from pydantic import TypeAdapter

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.documents import DocumentName, DocumentWriter, read_parts
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
from airflow_provider_jetstream.jetstream.origin import DIGEST_BYTES, TaskTry, digest_of
from airflow_provider_jetstream.jetstream.publishing.job import BODY_DIGEST_BYTES
from airflow_provider_jetstream.jetstream.publishing.manifest_record import (
    ManifestRecord,
    StoredRecord,
    TaskRecord,
    remove_unneeded_manifests,
)
from airflow_provider_jetstream.jetstream.publishing.report import SCHEDULED, index_runs
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs, find_stored_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.documents import DocumentPart
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.batch import Batch
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# For the page: many publishers at once scatter a task's jobs over more runs than a record should hold.
_MAX_RUNS = 5_000
# Seconds after which the jobs of a slow source are recorded, though they fill no part.
_SAVE_INTERVAL = 10.0
# Most tasks spare the request for records that nothing needs any more; the others examine as many as these leave.
_REMOVAL_INTERVAL = 32

# How many other runs of one name a manifest can name.
_MAX_FURTHER_RUNS: Final = 8
# What :meth:`TaskTry.follows` returns at least for a try of the same run; less after a clear.
_SAME_START: Final = 2

ROW_BYTES: Final = 32
# In the sequence of a row: it isn't known whether the message that has the id of the job was the job.
UNVERIFIED: Final = 1 << 63
_KEY_BYTES: Final = DIGEST_BYTES + BODY_DIGEST_BYTES
_PART_ROWS: Final = 4_096
# The rows that a line of a part has in base64.
_LINE_ROWS: Final = 16
_INLINE_ROWS: Final = 256
# The other fields of a record, with what the server adds to a message.
_RECORD_RESERVE: Final = 2_048
# A number, and a reference to a part, in the text of a record.
_NUMBER_BYTES: Final = 12
_REFERENCE_BYTES: Final = 72
_LINES: Final = TypeAdapter(list[str])


def _record_under(connection: Connection, queue: WorkQueue, key: str) -> TaskRecord:
    return TaskRecord(connection, queue.name, str(queue.events.name if queue.events else ""), key)


async def _remove_unneeded(connection: Connection, queue: WorkQueue, record: TaskRecord) -> None:
    if record.stored and record.stored.sequence % _REMOVAL_INTERVAL == 0:
        with suppress(ApiError, TransientError):
            await remove_unneeded_manifests(connection, queue)


class NamedTask:
    """The record that names a task by its key, where the manifest of what it publishes has another key, or is none."""

    def __init__(self, connection: Connection, queue: WorkQueue, origin: Origin) -> None:
        self._connection, self._queue = connection, queue
        self._origin = replace(origin, idempotency_key=None, operation=None, is_further_run=False)
        self._record = _record_under(connection, queue, origin.key)
        self._opened = False

    async def announce(self, info: Mapping[str, Any]) -> int | None:
        """Store the record before anything is published, and return its sequence; ``None`` where none can be stored.

        :param info: the work queue's STREAM.INFO, read before anything is published
        """
        record = ManifestRecord.new(self._queue.name, info, self._origin)
        if (is_first := await self._record.begin(record)) is not False:
            self._opened = bool(is_first)
            return self._record.position if is_first else None

        def reopened(earlier: ManifestRecord | None) -> ManifestRecord | None:
            if earlier is None:
                self._opened = True
                return record
            is_manifest = bool(earlier.rows or earlier.parts) and earlier.created == record.created
            # An open one belongs to an operator of the same task, a closed one with jobs to another call.
            self._opened = earlier.closed and not is_manifest
            if earlier.closed and is_manifest:
                return earlier.model_copy(update={"last_job": None})
            return earlier.followed_by(record, number=earlier.round) if earlier.closed else None

        stored = await self._record.update(reopened)
        return stored.sequence if stored else None

    async def conclude(self, report: PublishReport) -> None:
        """Record what was published after :meth:`announce`."""
        if not self._record.stored:
            return
        closed = {"closed": True, "published": report.job_count} if self._opened else {}
        seen = self._record.stored.record
        await self._record.update(lambda stored: (stored or seen).with_published(report).model_copy(update=closed))
        await self._record.remove_older()
        await _remove_unneeded(self._connection, self._queue, self._record)


class Manifest:
    """The manifest of one task, or of one idempotency key.

    :param origin: the task, whose tries have one manifest; or the program that publishes for its key

    :ivar known: the jobs that are stored already
    :ivar unrecorded_from: the first sequence of the queue that a job of the manifest may have which isn't in it
    """

    def __init__(self, connection: Connection, queue: WorkQueue, origin: Origin) -> None:
        self._connection = connection
        self._queue = queue
        self._origin = origin
        self._record = self._first = _record_under(connection, queue, origin.manifest_key)
        self._is_shared = origin.idempotency_key is not None
        self._rows = self._new_rows("")
        self.known = StoredJobs()
        self._begun: ManifestRecord | None = None
        self._is_of_other_runs = False
        self._takes_extra = False
        self.unrecorded_from = 1
        self._save_at = time.monotonic() + _SAVE_INTERVAL

    @property
    def position(self) -> int:
        """The sequence in the events stream of its record."""
        return self._record.position

    def _new_rows(self, created: str) -> _Rows:
        return _Rows(self._connection, self._queue, self._document(created))

    def _document(self, created: str) -> DocumentName:
        events = str(self._queue.events.name if self._queue.events else "")
        return DocumentName(events, self._queue.name, "jobs", self._record.key, created)

    # Whether this try goes on with the jobs of an earlier one.

    async def begin(
        self,
        info: Mapping[str, Any],
        cursor: Mapping[str, Any] | None = None,
        *,
        have_ended: Callable[[ManifestRecord], Awaitable[bool]] | None = None,
    ) -> ManifestRecord | None:
        """Store the record for a task that begins to publish, or read the one of an earlier try.

        :param info: the work queue's STREAM.INFO, read before anything is published
        :param cursor: where the ends of jobs that are published from now on will be found
        :param have_ended: returns whether all jobs of a manifest have ended for which waiting is over
        :return: the record; ``None`` where the events stream captures no such records
        """
        record = ManifestRecord.new(self._queue.name, info, self._origin, cursor)
        is_first = await self._record.begin(record)
        if is_first is None:
            return None
        self.unrecorded_from = record.queue_from
        self._rows = self._new_rows(record.created)
        self._begun = record if is_first else await self._resumed(record, have_ended)
        return self._begun

    async def _resumed(
        self, record: ManifestRecord, have_ended: Callable[[ManifestRecord], Awaitable[bool]] | None
    ) -> ManifestRecord:
        """Store the record of this try behind that of the one before it, and read which jobs are stored.

        :param record: the one that a first try would store
        """
        stored, is_own = await self._find_own(record.created)
        if is_own:
            record = record.model_copy(update={"is_further_run": self._origin.is_further_run})
        else:
            record, stored = await self._begin_further_run(record, stored), None
        self._rows = self._new_rows(record.created)
        before = stored.record if stored and stored.record.created == record.created else None
        # All of its jobs have ended by now, though its waiting was over before.
        ended_at = before.began_at if before and before.over and have_ended and await have_ended(before) else None
        continued: ManifestRecord | None = None

        def next_round(earlier: ManifestRecord | None) -> ManifestRecord | None:
            nonlocal continued
            if earlier is None:
                return record
            is_retry = self._origin.max_tries is not None and earlier.max_tries == self._origin.max_tries
            # Otherwise the task was cleared.
            is_open = not (earlier.closed or ended_at == earlier.began_at)
            if earlier.created == record.created and (self._is_shared or is_retry or is_open):
                continued = earlier
                return earlier.resumed_by(record)
            return earlier.followed_by(record, number=earlier.round + 1)

        self._record.stored = stored
        stored = await self._record.update(next_round)
        if continued is not None:
            self._is_of_other_runs = self._is_shared and continued.closed
            # Runs of one idempotency key may publish at the same time.
            first = continued.queue_from if self._is_shared else continued.unrecorded_from
            self.unrecorded_from = min(record.queue_from, first or record.queue_from)
            await self._read_known(continued)
            if continued.max_tries != record.max_tries:
                self.known.forget_unverified()
        return stored.record if stored else record

    async def _read_known(self, earlier: ManifestRecord) -> None:
        """Read which jobs earlier tries have stored: from the rows, and by a search where these don't have all.

        :param earlier: the record as the try before this one left it
        """
        known, search_from = self.known, earlier.unrecorded_from
        known.salts, known.of_any_task = earlier.salts, self._is_shared
        # Other calls of the task, and other runs of its name, have jobs with its key too.
        known.task_key = None if earlier.shares_task_key else self._origin.key
        # The events stream keeps the record of a key for its max_age after the last run, and so must its rows be kept.
        self._rows.resume(earlier, renews_parts=self._is_shared)
        async for part in read_rows(self._connection, self._document(earlier.created), earlier):
            if part is None:
                # The events stream has forgotten it.
                search_from = earlier.queue_from
                continue
            for digest, body_digest, sequence in _unpacked(part):
                if sequence >= UNVERIFIED:
                    known.add_unverified(digest, sequence - UNVERIFIED)
                elif not sequence or not known.add(digest, body_digest, sequence):
                    continue
                if self._is_shared:
                    self._rows.add(digest, body_digest, sequence)
        if search_from is not None:
            # Also within the duplicate window: a server that was restarted has forgotten the ids of jobs that are done.
            events_from = earlier.position("events_from") or 1
            await find_stored_jobs(
                self._connection, self._queue, known, queue_from=search_from, events_from=events_from
            )

    async def _find_own(self, created: str | None = None) -> tuple[StoredRecord | None, bool]:
        """Find the manifest of the run among those of all runs of its name.

        :param created: when the queue's stream was created; manifests about an earlier one are anybody's
        :return: the manifest, and true; or that of the first run, and false where none is the run's
        """
        first = await self._first.read()
        attempt, earlier = self._origin.attempt, first.record.attempt if first else None
        if first is None or attempt is None or earlier is None or self._is_shared:
            return first, True
        if created not in (None, first.record.created):
            return first, True
        found = [first]
        if self._is_followed(first.record) < _SAME_START:
            runs = [replace(self._origin, run=run, is_further_run=True) for run in first.record.further_runs]
            records = [_record_under(self._connection, self._queue, origin.manifest_key) for origin in runs]
            others = await map_concurrently(TaskRecord.read, records)
            found += [stored for stored in others if stored and stored.record.created == first.record.created]

        def likelihood(stored: StoredRecord) -> tuple[int, bool, int, datetime]:
            noted = stored.record.attempt or TaskTry()
            is_same_version = noted.dag_version is not None and noted.dag_version == attempt.dag_version
            return self._is_followed(stored.record), is_same_version, noted.number or 0, stored.record.began_at

        likeliest = max(found, key=likelihood)
        if not self._is_followed(likeliest.record):
            return first, False
        if likeliest is not first:
            self._become_further_run(likeliest.record.run or "")
        return likeliest, True

    def _is_followed(self, earlier: ManifestRecord) -> int:
        """Return how surely a manifest is one that this try goes on with."""
        if self._origin.attempt is None or earlier.attempt is None:
            return _SAME_START
        tries, earlier_tries = self._origin.max_tries, earlier.max_tries
        raised_tries = tries is not None and earlier_tries is not None and tries > earlier_tries
        return self._origin.attempt.follows(earlier.attempt, raised_tries=raised_tries)

    async def _begin_further_run(self, record: ManifestRecord, first: StoredRecord | None) -> ManifestRecord:
        """Note in the manifest of the first run that another run of its name has one of its own."""
        mark, attempt = record.run, self._origin.attempt
        runs = [first.record.run, *first.record.further_runs] if first else []
        if mark is None or mark in runs:
            # ``dag.test()`` gives a run that is made again the same start.
            mark = f"{mark or ''}/{attempt.try_id if attempt and attempt.try_id else uuid4().hex}"

        def noted(stored: ManifestRecord | None) -> ManifestRecord | None:
            if stored is None or mark in stored.further_runs:
                return None
            return stored.model_copy(update={"further_runs": [*stored.further_runs, mark][-_MAX_FURTHER_RUNS:]})

        self._first.stored = first
        await self._first.update(noted)
        self._become_further_run(mark)
        return record.model_copy(update={"run": mark, "is_further_run": True})

    def _become_further_run(self, mark: str) -> None:
        self._origin = replace(self._origin, run=mark, is_further_run=True)
        self._record = _record_under(self._connection, self._queue, self._origin.manifest_key)

    # What is known of jobs that are about to be sent.

    def are_new(self, first: int, batch: Batch) -> bool:
        """Note jobs that are about to be sent; return ``False``, with nothing noted, where one may be stored."""
        if self.known.is_empty:
            self._rows.note_batch(first, batch)
        return self.known.is_empty

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job that is about to be sent; ``None`` where it isn't known to be stored.

        :raises JobError: its given id is stored with another body
        """
        sequence = self.known.sequence_of(index, job)
        if not self.known.is_recorded(job):
            self._rows.note(index, job)
        return sequence

    def note(self, index: int, job: OutgoingJob) -> None:
        """Note a job that is stored, though it wasn't sent."""
        self._rows.note(index, job)

    def note_unverified(self, job: OutgoingJob, sequence: int) -> None:
        """Note that it isn't known whether a job was the message that has its message id, so that no try sends it."""
        if digest := digest_of(job.message_id):
            self._rows.add(digest, job.body_digest, sequence | UNVERIFIED | (SCHEDULED if job.scheduled else 0))

    @property
    def salts(self) -> Sequence[str]:
        """Texts that make other message ids for jobs whose own ids somebody else has taken, the latest last."""
        return self._begun.salts if self._begun else ()

    async def add_salt(self) -> str:
        """Note what makes other message ids from now on, so that a later try finds jobs under them.

        :raises JetStreamProviderError: it isn't known to be noted
        """
        salt = token_urlsafe(16)

        def with_salt(record: ManifestRecord) -> ManifestRecord | None:
            return None if salt in record.salts else record.model_copy(update={"salts": [*record.salts, salt]})

        await self._change(with_salt)
        if self._begun is None or self._record.stored is None or salt not in self._record.stored.record.salts:
            raise TransientError("the task was cleared while this try of it went on: it publishes nothing more")
        self._begun = self._begun.model_copy(update={"salts": self._record.stored.record.salts})
        return salt

    def extra(self) -> array[int]:
        """Return the sequences of jobs that an earlier try has stored and that :meth:`sequence_of` wasn't asked for.

        What other runs with the task's idempotency key have published isn't this run's, and schedules aren't in the
        queue.
        """
        if self._is_of_other_runs:
            return array("Q")
        extra = self.known.extra()
        for digest, body_digest, sequence in self.known.not_listed():
            if sequence < SCHEDULED:
                extra.append(sequence)
            if not self._takes_extra:
                self._rows.add(digest, body_digest, sequence)
        self._takes_extra = True
        return extra

    # What is recorded.

    async def _change(self, change: Callable[[ManifestRecord], ManifestRecord | None]) -> None:
        """Change the record, unless the task was cleared while this try, which Airflow has given up, went on."""
        last_seen, begun = self._record.stored.record if self._record.stored else None, self._begun

        def changed(stored: ManifestRecord | None) -> ManifestRecord | None:
            if stored and begun and (stored.created, stored.round) != (begun.created, begun.round):
                return None
            record = stored or last_seen
            return change(record) if record else None

        await self._record.update(changed)

    @property
    def is_due(self) -> bool:
        """Whether the stored jobs may fill a part, or none were recorded for long."""
        return self._rows.may_fill_part or time.monotonic() >= self._save_at

    async def save_progress(self, report: PublishReport) -> None:
        """Record the jobs that are stored by now, where they fill a part, or none were recorded for long."""
        is_due = time.monotonic() >= self._save_at
        if not self._record.stored or not self.is_due:
            return
        try:
            if await self._rows.take(report, only_full=not is_due) or is_due:
                self._save_at = time.monotonic() + _SAVE_INTERVAL
                await self._change(self._rows.recorded)
                await self._record.remove_older()
        except (ApiError, TransientError):
            # The server is away: what is stored meanwhile is recorded later.
            self._save_at = time.monotonic() + _SAVE_INTERVAL
            self._rows.postpone()

    async def record_stored(self, report: PublishReport) -> None:
        """Record which jobs are stored; needs :meth:`begin` first."""
        await self._rows.take(report)
        await self._change(lambda record: self._recorded(record, report))

    async def close(self, report: PublishReport | None = None) -> None:
        """Record that the task has nothing more to do, and remove records that nothing needs any more.

        :param report: the fate of its jobs, where :meth:`record_stored` hasn't recorded it
        """

        def closed(record: ManifestRecord) -> ManifestRecord:
            if report:
                record = self._recorded(record, report)
            elif record.runs is None:
                # Without runs, which jobs the task has isn't known.
                record = record.model_copy(update={"last_job": None})
            return record.model_copy(update={"closed": True, "over": False, "runs": None})

        await self._conclude(closed, report)

    async def mark_over(self) -> None:
        """Record that waiting is over for good although jobs may still run: a clear waits for them again."""
        await self._conclude(lambda record: record.model_copy(update={"over": True}))

    async def _conclude(
        self, change: Callable[[ManifestRecord], ManifestRecord], report: PublishReport | None = None
    ) -> None:
        """Change the record of the run, if it has one, unless it is closed already."""
        if not self._record.stored:
            # Another process has begun it.
            stored, is_own = await self._find_own()
            if not is_own:
                return
            self._record.stored = stored
        if report:
            await self._rows.take(report)
        # Before the record is closed, since a task that is killed after that would publish all its jobs again.
        await _remove_unneeded(self._connection, self._queue, self._record)
        await self._change(lambda record: None if record.closed else change(record))
        await self._record.remove_older()

    def _recorded(self, record: ManifestRecord, report: PublishReport) -> ManifestRecord:
        """Return a record with what a call has published."""
        runs = index_runs(report.queue_sequences())
        is_known = all(failure.certain for failure in report.failures)
        # A try that Airflow has given up goes on beside the one that has begun since.
        is_latest = self._begun is not None and record.begun_by == self._begun.begun_by
        count = len(self.known) + self._rows.added if self._is_shared else report.job_count
        outcome = {"runs": runs if len(runs) <= min(_MAX_RUNS, self._rows.max_runs) else None, "published": count}
        recorded = self._rows.recorded(record.with_published(report))
        has_all = (self._takes_extra and self.known.are_named) or not self.known.may_have_others
        is_complete = is_known and is_latest and has_all and not self._rows.overflows
        complete = {"unrecorded_from": None} if is_complete else {}
        return recorded.model_copy(update={**outcome, **complete})


class _Rows:
    """The rows that a try adds to a manifest: in parts, and the last of them in its record."""

    def __init__(self, connection: Connection, queue: WorkQueue, name: DocumentName) -> None:
        self._writer = DocumentWriter(connection, name)
        limit = connection.max_payload
        if queue.events and (queue.events.max_msg_size or 0) > 0:
            limit = min(limit, queue.events.max_msg_size or limit)
        self._record_bytes = max(0, limit - _RECORD_RESERVE)
        # Base64 makes four bytes of three, and a record may get the rows of two tries at once.
        self._inline_bytes = min(_INLINE_ROWS, self._record_bytes // ROW_BYTES // 4) * ROW_BYTES
        self._earlier: list[DocumentPart] = []
        self._replaced: set[DocumentPart] = set()
        self._inline = bytearray()
        # Those of the record as this try stored it last.
        self._recorded: set[bytes] = set()
        # The jobs that aren't known to be stored yet.
        self._noted: list[_NotedBatch] = []
        self._fills_at = _PART_ROWS
        self.added = 0

    @property
    def overflows(self) -> bool:
        """Whether no record that the events stream takes can name the parts: its messages are too small."""
        references = _REFERENCE_BYTES * (len(self._earlier) + len(self._writer.parts))
        return references + 2 * len(self._inline) > max(self._record_bytes, ROW_BYTES)

    @property
    def max_runs(self) -> int:
        """How many ranges of jobs a record may name besides."""
        return self._record_bytes // (8 * _NUMBER_BYTES)

    @property
    def may_fill_part(self) -> bool:
        """Whether enough jobs were noted to fill a part once they are stored."""
        return self._noted_jobs >= self._fills_at

    def postpone(self) -> None:
        """Store no part until as many further jobs were noted."""
        self._fills_at = self._noted_jobs + _PART_ROWS

    @property
    def _noted_jobs(self) -> int:
        return sum([len(batch.bodies) for batch in self._noted])

    def resume(self, record: ManifestRecord, *, renews_parts: bool = False) -> None:
        """Go on with the rows of an earlier try.

        :param renews_parts: whether its rows will be added again, so that their parts stay as long as the record
        """
        self._replaced = set(record.parts) if renews_parts else set()
        self._earlier = [] if renews_parts else list(record.parts)
        rows = _decoded(record.rows) or b""
        self._recorded = set(_split(rows))
        self._inline = bytearray() if renews_parts else bytearray(rows)

    def note_batch(self, first: int, batch: Batch) -> None:
        """Note jobs that are about to be sent."""
        if batch.single:
            self.note(first, batch.single)
        else:
            self._noted.append(_NotedBatch(first, *batch.row_columns()))

    def note(self, index: int, job: OutgoingJob) -> None:
        """Note a job that is about to be sent."""
        if digest := digest_of(job.message_id):
            self._noted.append(_NotedBatch(index, array("Q", digest), array("Q", job.body_digest)))

    def add(self, digest: bytes, body_digest: bytes, sequence: int) -> None:
        """Add a job that an earlier try has stored."""
        self._inline += digest + body_digest[:BODY_DIGEST_BYTES] + sequence.to_bytes(8)

    async def take(self, report: PublishReport, *, only_full: bool = False) -> bool:
        """Add the noted jobs that are stored by now, and store the rows that don't fit into the record as parts.

        :param only_full: whether to store full parts only
        :return: whether a part was stored
        """
        sequences, waiting = report.sequences, list[_NotedBatch]()
        for batch in self._noted:
            stored_rows = batch.rows(sequences, report.scheduled)
            if only_full and len(stored_rows) < len(batch.bodies) * ROW_BYTES:
                waiting.append(batch)
                continue
            self._inline += stored_rows
            self.added += len(stored_rows) // ROW_BYTES
            waiting += batch.unfinished(sequences)
        self._noted = waiting
        self.postpone()
        stored, part_bytes = False, _PART_ROWS * ROW_BYTES
        while len(self._inline) >= part_bytes or (not only_full and len(self._inline) > self._inline_bytes):
            part, line_bytes = self._inline[:part_bytes], _LINE_ROWS * ROW_BYTES
            lines = (part[start : start + line_bytes] for start in range(0, len(part), line_bytes))
            await self._writer.add(b64encode(line).decode() for line in lines)
            await self._writer.finish()
            del self._inline[:part_bytes]
            stored = True
        return stored

    def recorded(self, record: ManifestRecord) -> ManifestRecord:
        """Return a record with the rows, including the rows of other runs with the same idempotency key."""
        for row in _split(_decoded(record.rows) or b""):
            if row not in self._recorded:
                self._recorded.add(row)
                self._inline += row
        self._earlier += {*record.parts} - {*self._earlier} - {*self._writer.parts} - self._replaced
        self._recorded = set(_split(self._inline))
        if self.overflows:
            # A retry searches for the jobs.
            return record.model_copy(update={"rows": "", "parts": [], "unrecorded_from": record.queue_from})
        parts = sorted({*self._earlier, *self._writer.parts})
        return record.model_copy(update={"rows": b64encode(self._inline).decode(), "parts": parts})


@dataclass(frozen=True, slots=True)
class _NotedBatch:
    """Jobs that follow each other; one that has a schedule is by itself.

    :param ids: message ids, as two numbers each
    :param bodies: the beginnings of the digests of bodies
    """

    first: int
    ids: array[int]
    bodies: array[int]

    def rows(self, sequences: array[int], scheduled: AbstractSet[int]) -> bytes:
        """Return the rows of the jobs that are stored."""
        count = len(self.bodies)
        stored = sequences[self.first : self.first + count]
        stored.extend([0] * (count - len(stored)))
        if count == 1 and self.first in scheduled:
            stored[0] |= SCHEDULED
        if sys.byteorder == "little":
            stored.byteswap()
        rows = array("Q", bytes(ROW_BYTES * count))
        rows[::4], rows[1::4], rows[2::4], rows[3::4] = self.ids[::2], self.ids[1::2], self.bodies, stored
        return rows.tobytes() if 0 not in stored else b"".join(row for row in _split(rows.tobytes()) if any(row[-8:]))

    def unfinished(self, sequences: array[int]) -> Iterator[_NotedBatch]:
        """Yield each job that isn't stored."""
        stored = sequences[self.first : self.first + len(self.bodies)]
        if len(stored) == len(self.bodies) and 0 not in stored:
            return
        for place in range(len(self.bodies)):
            if place >= len(stored) or not stored[place]:
                yield _NotedBatch(self.first + place, self.ids[2 * place : 2 * place + 2], self.bodies[place:][:1])


def _split(rows: bytes | bytearray) -> Iterator[bytes]:
    return (bytes(rows[start : start + ROW_BYTES]) for start in range(0, len(rows) - ROW_BYTES + 1, ROW_BYTES))


def _unpacked(rows: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield message id, body digest and sequence of each row."""
    return (
        (row[:DIGEST_BYTES], row[DIGEST_BYTES:_KEY_BYTES], int.from_bytes(row[_KEY_BYTES:])) for row in _split(rows)
    )


def _decoded(text: str) -> bytes | None:
    """Return rows in base64; ``None`` where the text holds no whole rows."""
    try:
        rows = b64decode(text, validate=True)
    except (Base64Error, ValueError):
        return None
    return rows if len(rows) % ROW_BYTES == 0 else None


async def read_rows(
    connection: Connection, name: DocumentName, record: ManifestRecord
) -> AsyncGenerator[bytes | None, None]:
    """Yield the rows of a manifest, part by part, then its record's rows; ``None`` for a part that is gone."""
    async for lines in read_parts(connection, name, record.parts, _LINES):
        decoded = [_decoded(line) for line in lines or ()]
        rows = b"".join(filter(None, decoded))
        yield None if lines is None or None in decoded else rows
    yield _decoded(record.rows) or b""


async def read_manifest_sequences(connection: Connection, events: str, queue: str, key: str) -> array[int] | None:
    """Return the stream sequences of the jobs in a manifest; ``None`` where not all are known.

    Schedules are left out: they are in another stream.
    """
    stored = await TaskRecord(connection, queue, events, key).read()
    if stored is None or stored.record.unrecorded_from is not None:
        # A try was cut off, or its jobs don't fit.
        return None
    sequences = array("Q")
    name = DocumentName(events, queue, "jobs", key, stored.record.created)
    async for rows in read_rows(connection, name, stored.record):
        if rows is None:
            return None
        sequences.extend(sequence for _, _, sequence in _unpacked(rows) if 0 < sequence < SCHEDULED)
    return sequences
