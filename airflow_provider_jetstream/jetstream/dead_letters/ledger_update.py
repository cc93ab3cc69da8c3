"""Brings the ledger of a queue up to date: compares the jobs that are gone with the evidence of their ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import compress, islice
from random import randrange
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.audit.ledger_checkpoint import (
    LedgerCheckpoint,
    read_checkpoint,
    write_checkpoint,
)
from airflow_provider_jetstream.jetstream.client.bulk_read import first_since
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stored_sequences, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import companion_filter, reserved_subjects
from airflow_provider_jetstream.jetstream.dead_letters.end_coverage import EndCoverage
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import read_index
from airflow_provider_jetstream.jetstream.dead_letters.index_ranges import IndexRanges
from airflow_provider_jetstream.jetstream.dead_letters.ledger import Ledger, jobs_without_copy, with_findings
from airflow_provider_jetstream.jetstream.dead_letters.ledger_evidence import EndEvidence
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.archive import ArchiveReader
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet
    from airflow_provider_jetstream.jetstream.dead_letters.classifier import Classifier
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# The event about a job that ended just now is stored a moment after the job is gone.
_PAUSES = (0.1, 0.4, 1.5)
# Jobs that one scan reads one by one, where it has to; the next one goes on.
_MOST_READ = 5_000
# A checkpoint is renewed before the audit's own age limit removes it, and after so much was read.
_RENEWED_AFTER = timedelta(days=1)
_MUCH_READ = 100


async def account(
    connection: Connection,
    context: ScanContext,
    snapshot: QueueSnapshot,
    index: EntryIndex,
    archive: ArchiveReader | None,
    classifier: Classifier,
    *,
    ranges: IndexRanges | None = None,
    persist: bool = True,
) -> Ledger:
    """Bring the ledger of a queue up to date.

    :param index: the entries of the dead letter queue
    :param archive: the archive; without one the ledger is empty, since no job that is gone could be brought back
    :param classifier: decides about jobs of which the server says that they were deleted in flight
    :param ranges: the jobs of the index as an earlier call has left them
    :param persist: whether to record in the audit how far it has come
    """
    state = snapshot.state
    if archive is None or int(state["messages"]) >= int(state["last_seq"]):
        return Ledger(last=int(state["last_seq"]))
    parts = (connection, context, snapshot, index, ranges or IndexRanges(), archive, classifier)
    return await _Accounting(*parts, persist=persist).run()


class _Accounting:
    def __init__(
        self,
        connection: Connection,
        context: ScanContext,
        snapshot: QueueSnapshot,
        index: EntryIndex,
        ranges: IndexRanges,
        archive: ArchiveReader,
        classifier: Classifier,
        *,
        persist: bool,
    ) -> None:
        self._connection = connection
        self._persist = persist
        self._context = context
        self._snapshot = snapshot
        self._index = index
        self._ranges = ranges
        self._archive = archive
        # A job that vanished is in doubt, whether or not a scan lists it.
        self._classifier = replace(classifier, vanished=False)
        self._events = context.events
        self._audit = context.audit["config"]["name"] if context.audit else None
        self._evidence = EndEvidence(connection, snapshot, context.dead_letter_queue["config"]["name"])
        self._checkpoint: LedgerCheckpoint | None = None
        self._coverage = EndCoverage(snapshot, snapshot.companions.get(context.events or ""), None)
        self._in_index = self._with_entries = self._copied = SequenceRanges()
        # The sequence below which evidence may be gone.
        self._unproved_below = 0
        self._unread = SequenceRanges()

    async def run(self) -> Ledger:
        snapshot = self._snapshot
        if self._audit and self._audit not in snapshot.empty_companions:
            self._checkpoint = await read_checkpoint(self._connection, self._audit, snapshot.queue, snapshot.created)
        if (checkpoint := self._checkpoint) and self._nothing_new(checkpoint):
            return await self._ledger(Ledger(checkpoint.unaccounted, checkpoint.unknown, last=checkpoint.last))
        state = snapshot.state
        if self._checkpoint and self._checkpoint.last > state["last_seq"]:
            # Another scan may have been faster.
            state = (await stream_info(self._connection, snapshot.queue))["state"]
        await self._ranges.update(self._index, snapshot.created_at)
        self._in_index, self._with_entries = self._ranges.known, self._ranges.ended
        self._copied = self._ranges.copied
        # Before the evidence: what is gone now has left its evidence by then.
        stored = await stored_sequences(self._connection, snapshot.queue, state)
        last, streams = int(state["last_seq"]), await self._streams()
        opened, unaccounted, unknown = await self._continue(last, streams)
        await self._read(streams)
        opened |= SequenceRanges.of(self._evidence.reopened)
        gone = await self._without_evidence(opened - SequenceRanges.of(self._evidence.ended), stored)
        ended = SequenceRanges.of(self._evidence.ended)
        if self._evidence.unread:
            # An event that was left may be about any of them.
            self._unread |= gone
        else:
            jobs, unproved, others = await self._divide(gone)
            unaccounted |= jobs
            unknown |= unproved
            opened -= others
        unaccounted -= ended | self._with_entries
        unknown -= ended | (await jobs_without_copy(self._archive, last) if unknown else unknown)
        opened = (opened | SequenceRanges.of(self._evidence.reopened)) - ended - unaccounted - unknown
        if self._persist:
            await self._record(state, streams, (opened, unaccounted, unknown))
        return await self._ledger(Ledger(unaccounted, unknown, self._unread, last))

    def _nothing_new(self, checkpoint: LedgerCheckpoint) -> bool:
        """Return whether no job has left since a checkpoint, and nothing was stored about those unaccounted."""
        state, companions = self._snapshot.state, self._snapshot.companions
        if (checkpoint.last, checkpoint.messages) != (state["last_seq"], state["messages"]):
            return False
        if checkpoint.consumers != self._coverage.sampled():
            return False
        read_to = {self._events: checkpoint.events_to, self._audit: checkpoint.revision}
        has_news = any(name and companions[name]["state"]["last_seq"] > last for name, last in read_to.items())
        return not checkpoint.unaccounted or not (has_news or len(self._index))

    async def _ledger(self, ledger: Ledger) -> Ledger:
        unproved = self._coverage.unproved_consumers(self._completing())
        unread = self._evidence.unread
        return await with_findings(ledger, self._archive, self._context, unproved, unread, self._copied)

    async def _streams(self) -> dict[str, Mapping[str, Any]]:
        """Read the STREAM.INFO of the events stream and the audit, those that exist."""
        listed = {
            info["config"]["name"]: info
            for info in await list_streams(self._connection, companion_filter(self._snapshot.queue))
        }
        names = [name for name in (self._events, self._audit) if name]
        return {name: listed.get(name) or await stream_info(self._connection, name) for name in names}

    async def _continue(
        self, last: int, streams: Mapping[str, Mapping[str, Any]]
    ) -> tuple[SequenceRanges, SequenceRanges, SequenceRanges]:
        """Return where the last scan left the ledger: the open jobs, those unaccounted and those of unknown end."""
        checkpoint, events, empty = self._checkpoint, streams.get(self._events or ""), SequenceRanges()
        self._coverage = EndCoverage(self._snapshot, events, checkpoint)
        if checkpoint and checkpoint.last > last:
            # The server has lost jobs that it had stored, and gives their sequences to others.
            return empty, empty, SequenceRanges.between(1, last)
        if checkpoint:
            self._evidence.audit_to = checkpoint.audit_to
            if events and checkpoint.events_created == events["created"]:
                self._evidence.events_to = checkpoint.events_to
        since = self._coverage.complete_since()
        if events and since > self._snapshot.created_at:
            self._unproved_below = await self._archive.first_job_since(since) or last + 1
        if checkpoint is None:
            await self._skip_to(await self._archive.first_time(), streams)
            jobs = SequenceRanges.between(1, last) - await jobs_without_copy(self._archive, last)
            return jobs | self._copied, empty, empty
        new = SequenceRanges.between(checkpoint.last + 1, last)
        return checkpoint.open | new, checkpoint.unaccounted, checkpoint.unknown

    async def _skip_to(self, moment: datetime | None, streams: Mapping[str, Mapping[str, Any]]) -> None:
        """Leave out what was stored before the first job of which there is a copy."""
        if moment and (events := streams.get(self._events or "")):
            self._evidence.events_to = await first_since(self._connection, events, moment) - 1
        if moment and (audit := streams.get(self._audit or "")):
            self._evidence.audit_to = await first_since(self._connection, audit, moment) - 1

    async def _read(self, streams: Mapping[str, Mapping[str, Any]]) -> None:
        # A job that was requeued in place ends after the audit's record of that.
        if self._audit:
            await self._evidence.read_audit(streams[self._audit])
        if self._events:
            await self._evidence.read_events(streams[self._events])

    async def _read_later_entries(self) -> None:
        """Read the entries about jobs that ended just before the index was read."""
        later = await read_index(
            self._connection,
            self._evidence.dead_letter_queue,
            *(self._snapshot.queue, self._snapshot.created, self._index.read_to + 1),
        )
        self._evidence.ended.update(later.jobs_with_ends(self._snapshot.created_at))

    async def _without_evidence(self, opened: SequenceRanges, stored: SequenceSet) -> SequenceRanges:
        """Return those of the open jobs that are gone without evidence; looks again, since it may come a bit later."""
        gone = opened & await self._missing(stored, opened)
        gone -= self._with_entries
        # Their entries say that they used up their deliveries, or were deleted in flight, and may be wrong about that.
        if in_doubt := list(gone & self._in_index):
            jobs = [(sequence, self._index.entries_of(sequence)) for sequence in in_doubt]
            results = await self._classifier.classify_all(jobs)
            gone -= SequenceRanges.of(job.sequence for job in results if not _is_open(job))
        for pause in _PAUSES:
            if not gone or self._evidence.unread:
                break
            await sleep(pause)
            await self._read(await self._streams())
            await self._read_later_entries()
            gone -= SequenceRanges.of(self._evidence.ended)
        return gone

    async def _missing(self, stored: SequenceSet, opened: SequenceRanges) -> SequenceRanges:
        """Return a set that holds those of the open jobs that are gone, and none of those that are stored."""
        below = SequenceRanges.between(1, stored.first - 1)
        if stored.exact:
            return below | SequenceRanges.of(stored.deleted)
        # Too many are deleted for one answer. What is yet to be delivered is stored, or looked at later.
        consumers = self._snapshot.consumers.values()
        horizon = min((consumer.delivered for consumer in consumers if consumer.pending), default=stored.last)
        rest = (opened & SequenceRanges.between(stored.first, horizon)) - self._in_index
        # The jobs that no consumer takes may be many, and are read again by each scan: others have their turn.
        skipped = randrange(max(1, rest.count - _MOST_READ + 1))  # noqa: S311
        chosen = list(islice(rest, skipped, skipped + _MOST_READ))

        async def is_gone(sequence: int) -> bool:
            return await get_message(self._connection, self._snapshot.queue, sequence) is None

        gone = await map_concurrently(is_gone, chosen)
        return below | SequenceRanges.of(compress(chosen, gone))

    async def _divide(self, gone: SequenceRanges) -> tuple[SequenceRanges, SequenceRanges, SequenceRanges]:
        """Divide jobs that are gone without evidence: unaccounted, unproved, and messages that were no jobs."""
        empty, unproved = SequenceRanges(), gone & SequenceRanges.between(1, self._unproved_below - 1)
        if not (gone := gone - unproved):
            return empty, unproved, empty
        if self._audit and self._context.handlers:
            handled = SequenceRanges.of(await self._evidence.jobs_with_removed_entries(self._audit))
            gone, others = gone - handled, gone & handled
        else:
            others = empty
        unproved_consumers = self._coverage.unproved_consumers(self._completing())
        if unproved_consumers == self._snapshot.consumers.keys():
            return empty, unproved | gone, others
        subjects = self._snapshot.config.get("subjects") or []
        reserved = [
            reserved.subjects
            for reserved in reserved_subjects(self._snapshot.queue)
            if covered_by_any(subjects, reserved.subjects)
        ]
        if not reserved and not unproved_consumers:
            return gone, unproved, others
        chosen = list(islice(gone, _MOST_READ))
        self._unread |= gone - SequenceRanges.of(chosen)
        jobs: list[int] = []
        of_unproved: list[int] = []
        no_jobs: list[int] = []
        for sequence, copy in zip(chosen, await map_concurrently(self._archive.find, chosen), strict=True):
            consumer = self._snapshot.consumer_for(copy.subject) if copy else None
            if (copy and covered_by_any(reserved, copy.subject)) or (copy is None and reserved):
                # A marker or a schedule, of which the archive has no copy.
                no_jobs.append(sequence)
            elif consumer.name in unproved_consumers if consumer else unproved_consumers:
                of_unproved.append(sequence)
            else:
                jobs.append(sequence)
        return SequenceRanges.of(jobs), unproved | SequenceRanges.of(of_unproved), others | SequenceRanges.of(no_jobs)

    def _completing(self) -> set[str]:
        return self._evidence.completing | set(self._checkpoint.completing if self._checkpoint else ())

    async def _record(
        self,
        state: Mapping[str, Any],
        streams: Mapping[str, Mapping[str, Any]],
        sets: tuple[SequenceRanges, SequenceRanges, SequenceRanges],
    ) -> None:
        """Store a checkpoint, unless hardly anything has changed."""
        if self._audit is None:
            return
        before, events = self._checkpoint, streams.get(self._events or "")
        opened, unaccounted, unknown = sets
        checkpoint = LedgerCheckpoint(
            stream=self._snapshot.queue,
            created=self._snapshot.created,
            last=state["last_seq"],
            messages=-1 if self._evidence.unread or self._unread else state["messages"],
            events_created=events["created"] if events else "",
            events_to=self._evidence.events_to,
            audit_to=self._evidence.audit_to,
            open=opened,
            unaccounted=unaccounted,
            unknown=unknown,
            consumers=self._coverage.sampled(),
            completing=tuple(sorted(self._completing())),
        )
        is_as_before = before is not None and (
            checkpoint.messages >= 0
            and (checkpoint.last, checkpoint.messages) == (before.last, before.messages)
            and (checkpoint.unaccounted, checkpoint.consumers) == (before.unaccounted, before.consumers)
            and self._evidence.events_read + self._evidence.audit_read < _MUCH_READ
            and self._snapshot.taken_at - before.at < _RENEWED_AFTER
        )
        if not is_as_before:
            await write_checkpoint(self._connection, streams[self._audit], checkpoint)


def _is_open(job: DeadLetter | NotDead) -> bool:
    """Return whether the entries of a job that is gone leave open how it ended."""
    return isinstance(job, NotDead) and job.status in (Status.SPURIOUS, Status.GONE, Status.VANISHED)
