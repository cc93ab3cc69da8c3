"""Reads what :mod:`~airflow_provider_jetstream.jetstream.dead_letters.classify` decides by, many jobs at a time.

The job is read first, then everything else: what ends a job is stored before the job leaves the queue. What few jobs
need is read once the rules ask for it. A :class:`ScanContext` is what is known of the queue before: plain values that
another process can use.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import AckMetric
from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.concurrency import (
    MAX_CONCURRENT,
    gather,
    map_concurrently,
    pause_if_due,
)
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stream_info
from airflow_provider_jetstream.jetstream.client.streams import (
    Streams,
    first_since,
    get_message,
    last_message,
    next_message,
    read_range,
)
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    ACK_METRIC,
    companion_filter,
    completion_subject,
    handled_filter,
    handled_subject,
    job_completion_filter,
    letter_audit_subject,
    manifest_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.classify import acknowledgement_window, classify
from airflow_provider_jetstream.jetstream.dead_letters.end_order import ServerTimes
from airflow_provider_jetstream.jetstream.dead_letters.entry import ADVISORIES, Entry, EntryKind, stored_entries
from airflow_provider_jetstream.jetstream.dead_letters.job_facts import JobFacts, QueueFacts, Unread
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, task_key_of
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.evidence import event_of, proves_nothing
from airflow_provider_jetstream.jetstream.origin import is_task_key
from airflow_provider_jetstream.jetstream.publishing.manifest_record import parse_manifest_record
from airflow_provider_jetstream.jetstream.queue.finding import Risk
from airflow_provider_jetstream.jetstream.queue.preconditions import queue_findings
from airflow_provider_jetstream.jetstream.queue.server_uptime import server_up_since
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
    from datetime import datetime
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.handlers import DeadLetterHandler
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    # A job's stream sequence, and the entries about it.
    Job: TypeAlias = tuple[int, tuple[Entry, ...]]


@dataclass(frozen=True, slots=True)
class ScanContext:
    """A queue as a scan found it.

    :param queue: the work queue
    :param snapshot: its stream, companions and consumers
    :param with_unaccounted: whether an unaccounted job with a copy counts as a dead letter
    :param handlers: the consumers of the dead letter queue that remove entries by acknowledging them
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the dead letter queue doesn't exist
    """

    queue: WorkQueue
    snapshot: QueueSnapshot
    with_unaccounted: bool
    handlers: tuple[DeadLetterHandler, ...] = ()

    def __post_init__(self) -> None:
        name = require_dead_letters(self.queue).name
        if name not in self.snapshot.companions:
            raise NotFoundError(
                f"expected stream {name} on the server, found none: provision the queue first, or check the name"
            )

    @property
    def dead_letter_queue(self) -> Mapping[str, Any]:
        """The server's STREAM.INFO of the dead letter queue."""
        return self.snapshot.companions[require_dead_letters(self.queue).name]

    @property
    def handler_names(self) -> tuple[str, ...]:
        """The names of the handlers."""
        return tuple(handler.name for handler in self.handlers)

    @property
    def audit(self) -> Mapping[str, Any] | None:
        """The server's STREAM.INFO of the audit, if it exists."""
        audit = self.queue.audit
        return self.snapshot.companions.get(audit.name) if audit else None

    @property
    def events(self) -> str | None:
        """The stream of completions, if it exists."""
        events = self.queue.events
        return events.name if events and events.name in self.snapshot.companions else None

    def archive_reader(self, connection: Connection, snapshot: QueueSnapshot) -> ArchiveReader | None:
        """Return a reader of the archive as a snapshot found it; ``None`` where there is none."""
        archive = self.queue.archive
        info = snapshot.companions.get(archive.name) if archive else None
        return ArchiveReader.from_info(connection, info, snapshot.info) if info else None

    def findings(
        self, index: EntryIndex, *, perhaps_handled: int = 0, uncertain: Sequence[Finding] = ()
    ) -> tuple[Finding, ...]:
        """Return what is to be known of the queue.

        :param index: the entries of the dead letter queue
        :param perhaps_handled: how many dead jobs a handler may have handled
        :param uncertain: why dead letters are uncertain
        """
        findings = queue_findings(
            self.snapshot,
            self.queue,
            handlers=self.handler_names,
            unreadable=index.unreadable,
            other_domain=index.of_other_domain,
        )
        if perhaps_handled:
            name = self.dead_letter_queue["config"]["name"]
            text = (
                f"whether {perhaps_handled} dead jobs without an entry are handled isn't known, since entries of"
                f" {name} were removed while nothing stored copies of them: they count as uncertain; find out, and"
                " redrive by their sequences those that aren't"
            )
            findings += (Risk("perhaps-handled", text),)
        return (*findings, *uncertain)

    async def reader(
        self,
        connection: Connection,
        index: EntryIndex,
        *,
        archive: ArchiveReader | None,
        audit: AuditLog | None,
        inconsistent_consumers: Collection[str] = (),
        orphans: Collection[int] = (),
        acknowledged: Mapping[int, datetime] | None = None,
    ) -> FactReader:
        """Return what reads the facts about some jobs, and has them decided.

        :param index: the entries about these jobs
        :param orphans: jobs without entries that may be dead letters
        :param acknowledged: when the jobs' last ack metrics were stored, where that was read before
        """
        name, letters = self.snapshot.queue, self.dead_letter_queue["config"]["name"]
        subjects = (self.audit["config"].get("subjects") or []) if self.audit else []
        return FactReader(
            connection,
            QueueFacts(
                self.snapshot,
                connection.domain,
                inconsistent_consumers,
                with_unaccounted=self.with_unaccounted,
                has_handlers=bool(self.handlers),
            ),
            letters,
            acknowledgements=await self._acknowledgements(connection, archive, index, orphans, acknowledged),
            origins=LetterOrigins(connection, name, self.events),
            events=self.events,
            archive=archive,
            audit=audit,
            reports=self.audit["config"]["name"]
            if self.audit and covered_by_any(subjects, handled_filter(name))
            else None,
        )

    async def _acknowledgements(
        self,
        connection: Connection,
        archive: ArchiveReader | None,
        index: EntryIndex,
        orphans: Collection[int],
        known: Mapping[int, datetime] | None,
    ) -> Acknowledgements:
        sequences = (
            {sequence for sequence, _ in index.jobs()} if self.with_unaccounted else {*index.deleted_in_flight()}
        )
        sequences.update(orphans)
        first = await archive.find(min(sequences)) if archive and sequences and known is None else None
        since = first.stored_at if first and first.time else self.snapshot.created_at
        return Acknowledgements(connection, self.events, self.snapshot.queue, sequences, since, known)


# Any publisher can write as many keys as it likes.
_MAX_KEYS = 100_000


class LetterOrigins:
    """The tasks that published a queue's jobs; each key is looked up once.

    :param queue: the work queue
    :param events: the stream of the tasks' records, if it exists
    """

    def __init__(self, connection: Connection, queue: str, events: str | None) -> None:
        self._connection = connection
        self._queue = queue
        self._events = events
        self._known: dict[str, Origin] = {}
        self._requested: set[str] = set()

    async def resolve(self, keys: Iterable[str]) -> Mapping[str, Origin]:
        """Return the tasks of keys; a key whose task isn't known is left out."""
        # What isn't a key could be as long as a message, and isn't to be remembered.
        requested = set(filter(is_task_key, keys))
        origins = {key: self._known[key] for key in requested & self._known.keys()}
        if missing := requested - self._requested:
            origins |= await resolve_origins(self._connection, self._queue, self._events, missing)
            if len(self._requested) > _MAX_KEYS:
                self._known, self._requested = {}, set()
            self._known |= origins
            self._requested |= requested
        return origins

    async def add_to(self, results: Sequence[DeadLetter | NotDead]) -> list[DeadLetter | NotDead]:
        """Return letters with their origins. Letters with an origin, and jobs that are no letters, stay as they are."""
        keys = [
            (task_key_of(result.headers) or "") if isinstance(result, DeadLetter) and result.origin is None else ""
            for result in results
        ]
        origins = await self.resolve(key for key in keys if key)
        return [
            replace(result, origin=origins[key]) if isinstance(result, DeadLetter) and key in origins else result
            for result, key in zip(results, keys, strict=True)
        ]


async def resolve_origins(
    connection: Connection, queue_name: str, events_stream: str | None, keys: Iterable[str]
) -> dict[str, Origin]:
    """Return the task of each key whose record is stored, by one request for each different key.

    A key is the digest of the task's four names, so a record that somebody else stored under it can't name another
    task.

    :param events_stream: the stream that stores the records of the queue, if there is one
    :param keys: values of the header ``Airflow-Task``, whatever their publishers wrote
    :raises ApiError: the server refused
    :raises TransientError: the server can't be reached
    """
    if events_stream is None:
        return {}
    # What isn't a key could be a wildcard, or no token at all.
    requested = sorted({key for key in keys if is_task_key(key)})

    async def resolve(key: str) -> Origin | None:
        try:
            message = await last_message(connection, events_stream, manifest_subject(queue_name, key))
        except NotFoundError:
            return None
        record = parse_manifest_record(message.data) if message else None
        origin = record.origin if record else None
        return origin if origin and origin.key == key else None

    origins = zip(requested, await map_concurrently(resolve, requested), strict=True)
    return {key: origin for key, origin in origins if origin}


# Before other tasks of the event loop may run.
_JUDGED_AT_ONCE = 32
# Acknowledgements of jobs are read together whose times are so near.
_NEAR = timedelta(minutes=1)


class FactReader:
    """Reads the facts about the jobs of one queue, and has them decided.

    :param queue: what is known of the queue
    :param dead_letter_queue: the dead letter queue's stream
    :param acknowledgements: the ack metrics of jobs that are gone, or have no entry
    :param origins: the tasks that published jobs
    :param events: the stream of completions, if it exists
    :param archive: the archive, if it exists
    :param audit: the audit, if it exists
    :param reports: the stream of handlers' reports, if it exists
    """

    def __init__(
        self,
        connection: Connection,
        queue: QueueFacts,
        dead_letter_queue: str,
        *,
        acknowledgements: Acknowledgements,
        origins: LetterOrigins,
        events: str | None = None,
        archive: ArchiveReader | None = None,
        audit: AuditLog | None = None,
        reports: str | None = None,
    ) -> None:
        self.queue = queue
        self.acknowledgements = acknowledgements
        self._connection = connection
        self._streams = Streams(connection)
        self._dead_letter_queue = dead_letter_queue
        self._origins = origins
        self._events = events
        self._archive = archive
        self._audit = audit
        self._reports = reports
        self._read_more: Mapping[Unread, Callable[[list[JobFacts]], Awaitable[None]]] = {
            Unread.ENDS: self._read_ends,
            Unread.FOREIGN_END: partial(self._read_each, self._read_foreign_end),
            Unread.NEAR_ACKNOWLEDGEMENTS: self._read_near_acknowledgements,
            Unread.ACKNOWLEDGEMENT: self._read_acknowledgements,
            Unread.ARCHIVED: partial(self._read_each, self._read_archived),
            Unread.RECORDS: self._read_records,
            Unread.TERMINATION: partial(self._read_each, self._read_termination),
            Unread.NEW_JOB: partial(self._read_each, self._read_new_job),
            Unread.REMOVED_ENTRIES: partial(self._read_each, self._read_removed_entries),
            Unread.UP_SINCE: self._read_up_since,
        }

    def update(self, **changes: Any) -> None:
        """Change what is known of the queue; the fields are those of :class:`~.job_facts.QueueFacts`."""
        self.queue = replace(self.queue, **changes)

    async def classify(self, jobs: Sequence[Job]) -> list[DeadLetter | NotDead]:
        """Decide what jobs are.

        :param jobs: stream sequences in order, and the entries about each
        """
        decided: list[DeadLetter | NotDead] = []
        for start in range(0, len(jobs), MAX_CONCURRENT):
            facts = await self._read(jobs[start : start + MAX_CONCURRENT])
            decided += await self._origins.add_to(await self._decide(facts))
        return decided

    async def _decide(self, jobs: Sequence[JobFacts]) -> list[DeadLetter | NotDead]:
        decided: dict[int, DeadLetter | NotDead] = {}
        remaining: Sequence[JobFacts] = jobs
        while remaining:
            unread: dict[Unread, list[JobFacts]] = {}
            for start in range(0, len(remaining), _JUDGED_AT_ONCE):
                some = remaining[start : start + _JUDGED_AT_ONCE]
                for job, said in zip(some, classify(some, self.queue), strict=True):
                    if isinstance(said, Unread):
                        unread.setdefault(said, []).append(job)
                    else:
                        decided[job.sequence] = said
                await pause_if_due()
            for fact, undecided in unread.items():
                await self._read_more[fact](undecided)
            remaining = [job for undecided in unread.values() for job in undecided]
        return [decided[job.sequence] for job in jobs]

    async def _read(self, jobs: Sequence[Job]) -> list[JobFacts]:
        """Read what decides about nearly every job."""
        empty = await self._empty_streams()
        has_reports = (
            self._reports is not None
            and self._reports not in empty
            and await next_message(self._connection, self._reports, 1, handled_filter(self.queue.snapshot.queue))
            is not None
        )
        # What ends a job is stored before the job is removed, so the others are read after it.
        stored = await self._streams.get_many(self.queue.snapshot.queue, [sequence for sequence, _ in jobs])
        facts = [JobFacts(*job) for job in jobs]
        for job in facts:
            job.stored = stored[job.sequence]
        gone = [job for job in facts if job.stored is None]
        # A job that is gone may have ended, and its end been stored, after the streams were found empty.
        reads = [
            self._read_ends(gone if self._events in empty else facts),
            self._read_audit(gone if self._audit and self._audit.stream in empty else facts),
            self._read_records([job for job in facts if _records(job.entries)]),
        ]
        if has_reports and self._reports:
            reads.append(self._read_reports(self._reports, facts))
        for failure in await gather(reads):
            if failure:
                raise failure
        return facts

    async def _read_reports(self, stream: str, jobs: Sequence[JobFacts]) -> None:
        reports = await self._last(stream, [self._handled_subject(job.sequence) for job in jobs])
        for job, report in zip(jobs, reports, strict=True):
            job.reported_at = report.stored_at if report else None

    def _handled_subject(self, sequence: int) -> str:
        return handled_subject(self.queue.snapshot.queue, sequence)

    async def _empty_streams(self) -> frozenset[str]:
        """Return which of the events stream and the audit hold no message now, so that nothing can be read from them.

        One request for a batch in place of two per job. Only streams that were empty in the snapshot are asked for:
        most never are. What the snapshot says is too old to rely on: another redrive may have recorded jobs since.
        """
        snapshot = self.queue.snapshot
        candidates = snapshot.empty_companions & {self._events, self._audit.stream if self._audit else None}
        if not candidates:
            return frozenset()
        infos = await list_streams(self._connection, companion_filter(snapshot.queue))
        return frozenset({info["config"]["name"] for info in infos if not info["state"]["messages"]} & candidates)

    async def _last(self, stream: str, subjects: Sequence[str]) -> list[StoredMessage | None]:
        """Return the last message of each subject that is what the subject is for."""
        read = await self._streams.last_many(stream, subjects)
        others = [subject for subject, message in read.items() if message and proves_nothing(message)]
        read |= zip(
            others, await map_concurrently(partial(last_message, self._connection, stream), others), strict=True
        )
        return [read[subject] for subject in subjects]

    async def _read_ends(self, jobs: Sequence[JobFacts]) -> None:
        if not self._events:
            return
        snapshot, wanted = self.queue.snapshot, list[tuple[JobFacts, dict[str, StoredMessage | None], str]]()
        for job in jobs:
            # The archive's copy of a job that is gone names another consumer, perhaps, than its entries.
            known = job.stored or (None if isinstance(job.archived, Unread) else job.archived)
            consumer = snapshot.consumer_for(known.subject) if known else None
            names = {entry.consumer: 0 for entry in job.entries if entry.consumer}
            if consumer:
                names[consumer.name] = 0
            known_ends = job.ends = dict(job.ends or {})
            wanted += [(job, known_ends, name) for name in names if name not in known_ends]
        subjects = [completion_subject(snapshot.queue, name, job.sequence) for job, _, name in wanted]
        ends = await self._last(self._events, subjects)
        for (_, known_ends, name), end in zip(wanted, ends, strict=True):
            known_ends[name] = end

    async def _read_audit(self, jobs: Sequence[JobFacts]) -> None:
        if audit := self._audit:
            subjects = [letter_audit_subject(audit.queue, job.sequence) for job in jobs]
            records = await self._last(audit.stream, subjects)
            for job, record in zip(jobs, records, strict=True):
                job.record = audit.record_of(record)

    async def _read_records(self, jobs: Sequence[JobFacts]) -> None:
        entries = sorted({entry for job in jobs for entry in _records(job.entries)})
        messages = await self._streams.get_many(self._dead_letter_queue, entries)
        for job in jobs:
            job.records = {entry: messages[entry] for entry in _records(job.entries)}

    async def _read_each(self, read: Callable[[JobFacts], Coroutine[Any, Any, None]], jobs: Sequence[JobFacts]) -> None:
        await map_concurrently(read, jobs)

    async def _read_foreign_end(self, job: JobFacts) -> None:
        end = None
        if self._events:
            subject = job_completion_filter(self.queue.snapshot.queue, job.sequence)
            end = await last_message(self._connection, self._events, subject)
        job.foreign_end = end.stored_at if end else None

    async def _read_archived(self, job: JobFacts) -> None:
        snapshot, until = self.queue.snapshot, None
        # A job that is gone was stored before it died: a later copy is of a job that got its sequence since.
        if job.stored is None and job.sequence not in self.queue.unaccounted:
            stated = [entry.recorded_at for entry in job.entries if entry.recorded_at >= snapshot.created_at]
            until = max(stated) + ServerTimes.of(snapshot).skew if stated else None
        job.archived = await self._archive.find(job.sequence) if self._archive else None
        if self._archive and until and (job.archived is None or job.archived.stored_at > until):
            job.is_given_again = job.archived is not None
            job.archived = await self._archive.find(job.sequence, until)

    async def _read_termination(self, job: JobFacts) -> None:
        last = max(entry.sequence for entry in job.entries if entry.kind == EntryKind.TERMINATION)
        job.termination = await get_message(self._connection, self._dead_letter_queue, last)

    async def _read_new_job(self, job: JobFacts) -> None:
        queue, record = self.queue.snapshot.queue, job.record
        sequence = (record.new_sequence if record else None) or 0
        message, last = await get_message(self._connection, queue, sequence), sequence
        if message is None:
            last = int((await stream_info(self._connection, queue))["state"]["last_seq"])
            if last >= sequence and self._archive:
                message = await self._archive.find(sequence)
        job.new_job = message, last, self._archive is not None

    async def _read_removed_entries(self, job: JobFacts) -> None:
        entries = [entry.sequence for entry in stored_entries(job.entries)]
        stored = await self._streams.get_many(self._dead_letter_queue, sorted(entries))
        job.has_removed_entries = None in stored.values()

    async def _read_near_acknowledgements(self, jobs: Sequence[JobFacts]) -> None:
        windows = {job.sequence: window for job in jobs if (window := acknowledgement_window(job, self.queue))}
        found = await self.acknowledgements.within(windows)
        for job in jobs:
            job.near_acknowledgements = found.get(job.sequence, ())

    async def _read_acknowledgements(self, jobs: Sequence[JobFacts]) -> None:
        times = await self.acknowledgements.times()
        for job in jobs:
            job.acknowledged_at = times.get(job.sequence)

    async def _read_up_since(self, _: object) -> None:
        audit, snapshot = self._audit, self.queue.snapshot
        since = await server_up_since(self._connection, snapshot.companions[audit.stream]) if audit else None
        self.update(up_since=since)


def _records(entries: Sequence[Entry]) -> list[int]:
    """Return the sequences of the entries that hold a job's copy."""
    return [entry.sequence for entry in stored_entries(entries) if entry.kind not in ADVISORIES]


class Acknowledgements:
    """The ack metrics of some jobs, read once they are needed.

    :param events: the stream that stores them, if any does
    :param queue: the work queue
    :param sequences: the jobs' stream sequences
    :param since: when the first of the jobs was stored, or earlier
    :param known: when the last one of each job was stored, where that was read before
    """

    def __init__(
        self,
        connection: Connection,
        events: str | None,
        queue: str,
        sequences: Collection[int],
        since: datetime,
        known: Mapping[int, datetime] | None = None,
    ) -> None:
        self._connection = connection
        self._events = events
        self._queue = queue
        self._subject = f"{ACK_METRIC}.{queue}.*"
        self._sequences = frozenset(sequences)
        self._since = since
        self._times = known if events and sequences else known or {}
        self._reading = asyncio.Lock()

    async def times(self) -> Mapping[int, datetime]:
        """Return the time of each job's last ack metric by stream sequence; jobs without one are left out."""
        async with self._reading:
            if self._times is None:
                info = await stream_info(self._connection, str(self._events))
                start = await first_since(self._connection, info, self._since)
                self._times = {sequence: at async for sequence, at in self._read(start) if sequence in self._sequences}
        return self._times

    async def within(self, windows: Mapping[int, tuple[datetime, datetime]]) -> dict[int, list[datetime]]:
        """Return when the ack metrics of jobs were stored, each as far as that was between two times.

        :param windows: the two times by the job's stream sequence; those that are near are read together
        """
        found: dict[int, list[datetime]] = {}
        if self._events is None or not windows:
            return found
        info = await stream_info(self._connection, self._events)
        parts: list[list[datetime]] = []
        for start, stop in sorted(windows.values()):
            if parts and start <= parts[-1][1] + _NEAR:
                parts[-1][1] = max(stop, parts[-1][1])
            else:
                parts.append([start, stop])
        for start, stop in parts:
            async for sequence, at in self._read(await first_since(self._connection, info, start)):
                if at > stop:
                    break
                if sequence in windows:
                    found.setdefault(sequence, []).append(at)
        return found

    async def _read(self, start: int) -> AsyncGenerator[tuple[int, datetime]]:
        async for message in read_range(self._connection, str(self._events), self._subject, start):
            metric = event_of(message, self._queue, self._connection.domain)
            if isinstance(metric, AckMetric):
                yield metric.stream_seq, message.stored_at
