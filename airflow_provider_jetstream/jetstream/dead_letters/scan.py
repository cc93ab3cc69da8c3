"""Finds a queue's dead letters: every one of them, and nothing else.

In this order: make the server publish the advisories that are due, read the dead letter queue, compare its entries with
the consumers' numbers, and prove each letter.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.client.concurrency import in_order, sleep
from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences, stream_info
from airflow_provider_jetstream.jetstream.client.streams import Streams, find_exact_streams
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.account import unaccounted_jobs
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.end_order import late_end_risks, unclear_end_risks
from airflow_provider_jetstream.jetstream.dead_letters.entry import HIGHEST_JOB, EntryParser
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex, read_index
from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
from airflow_provider_jetstream.jetstream.dead_letters.handlers import add_removed_entries, read_handlers
from airflow_provider_jetstream.jetstream.dead_letters.job_facts import Unread
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import (
    REMOVAL_DELAY,
    Reconciliation,
    jobs_without_entry,
    name_passed_jobs,
    reconcile,
)
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Page, Status
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, UnreachableError
from airflow_provider_jetstream.jetstream.queue.preconditions import queue_findings, require_no_refusal
from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot, refresh_snapshot, take_snapshot
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.facts import FactReader, Job
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

PAGE = 250
# Of jobs on the average: as many are held in memory at once.
_PAGE_BYTES = 8 << 20
# For so long the consumers' states count as current.
FRESH_SECONDS = 0.2
_ATTEMPTS = 5
# How often entries and numbers are read that don't agree.
COMPARISONS = 3
# Which streams can be read in batches takes a list of all streams, so it pays only with many entries.
_FEW_ENTRIES = 500
_COMPARED = 64


@dataclass(slots=True)
class Scan:
    """A scan of a queue's dead letters; make it with :meth:`begin`.

    :param queue: the work queue
    :param context: what the letters are classified by
    :param snapshot: stream, companions and consumers; refreshed once they aren't current any more
    :param index: the entries of the dead letter queue
    :param reconciliation: how the entries differ from the consumers' numbers
    :param risks: what could be lost with the queue as it is, and what isn't possible or known, a sentence each
    :param audit: the record of redrives, if it exists
    :param archive: the archive, if it exists
    :param loaded_at: when the snapshot was taken, in seconds of the monotonic clock
    :param dismissed: how many jobs with entries were no dead letters, by status
    """

    connection: Connection
    queue: WorkQueue
    context: ScanContext
    snapshot: QueueSnapshot
    index: EntryIndex
    reconciliation: Reconciliation
    risks: tuple[Finding, ...]
    audit: AuditLog | None
    archive: ArchiveReader | None
    loaded_at: float
    _reader: FactReader
    _reconnects: int
    dismissed: Counter[Status] = field(default_factory=Counter)
    _newly_handled: list[LetterRecord] = field(default_factory=list)
    _is_whole: bool = True
    _named: frozenset[int] = frozenset()
    # Disputed jobs that no selection names.
    _disputed: frozenset[int] = frozenset()
    # How often the connection had been restored when the entries were those of the index.
    _entries_as_of: int = field(init=False)
    # By the monotonic clock: the snapshot was taken before.
    _answered_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._entries_as_of = self._reconnects
        self._answered_at = time.monotonic()

    @property
    def now(self) -> datetime:
        """The time by the server's clock, or a moment before, to which the ages of letters refer."""
        return self.snapshot.taken_at + timedelta(seconds=time.monotonic() - self._answered_at)

    @classmethod
    async def begin(
        cls,
        connection: Connection,
        queue: WorkQueue,
        *,
        unaccounted: bool = False,
        count_under_pause: bool = False,
        since: Scan | None = None,
    ) -> Scan:
        """Read the queue as a whole.

        :param unaccounted: whether an unaccounted job with a copy counts as a dead letter
        :param count_under_pause: whether to pause consumers for a moment so that more is certain; needs an event loop
        :param since: an earlier scan, which began as a whole; entries that it has read aren't read again
        :raises QueueDeclarationError: the queue declares no dead letter queue
        :raises NotFoundError: the work queue or its dead letter queue doesn't exist
        :raises UnsuitableQueueError: its dead letters can't be told from other jobs
        :raises ServerTooOldError: a count under a pause needs nats-server 2.11
        """
        scan = await cls._begin(
            connection, queue, unaccounted=unaccounted, count_under_pause=count_under_pause, since=since
        )
        for _ in range(COMPARISONS - 1):
            if not any(scan.reconciliation.unnamed.values()):
                break
            await sleep(REMOVAL_DELAY)
            before, scan = (
                scan,
                await cls._begin(
                    connection, queue, unaccounted=unaccounted, count_under_pause=count_under_pause, since=scan
                ),
            )
            if scan.confirms(before):
                break
        numbers, findings = scan.reconciliation, len(scan.reconciliation.findings)
        if any(numbers.unnamed.values()):
            passed = await name_passed_jobs(scan.connection, scan.snapshot, scan.index, numbers)
            scan._reader.update(passed=passed)  # noqa: SLF001
            scan.risks += tuple(numbers.findings[findings:])
        return scan

    @classmethod
    async def _begin(
        cls, connection: Connection, queue: WorkQueue, *, unaccounted: bool, count_under_pause: bool, since: Scan | None
    ) -> Scan:
        """Read the queue once, and compare its entries with the numbers that were read before them."""
        dead_letter_queue, loaded_at = require_dead_letters(queue).name, time.monotonic()
        reconnects = connection.reconnects
        snapshot = await take_snapshot(connection, queue, count_under_pause=count_under_pause)
        context = ScanContext(queue, snapshot, unaccounted)
        require_no_refusal(queue.name, queue_findings(snapshot, queue))
        many = context.dead_letter_queue["state"]["messages"] > _FEW_ENTRIES
        if many:
            connection = await find_exact_streams(connection, {snapshot.queue, *snapshot.companions})
        read = None if since is None else (since.index, since.context, since._reconnects)  # noqa: SLF001
        index = await _current_index(connection, dead_letter_queue, context, read)
        # Read after the index: what a handler acknowledged before, it has delivered now.
        handlers = await read_handlers(connection, context.dead_letter_queue["config"], queue.name)
        context = replace(context, handlers=handlers)
        removed = (connection, snapshot, context.dead_letter_queue, context.audit, handlers, index)
        unknown_below = await add_removed_entries(*removed)
        audit = AuditLog.from_snapshot(connection, queue, snapshot)
        records = None if audit is None or audit.stream in snapshot.empty_companions else audit
        reconciliation = await reconcile(connection, snapshot, index, records)
        reconciliation.leave_open(unknown_below)
        archive = context.archive_reader(connection, snapshot)
        reader = await context.reader(
            *(connection, index),
            archive=archive,
            audit=audit,
            inconsistent_consumers=reconciliation.inconsistent_consumers,
            orphans=reconciliation.orphans,
        )
        risks = context.findings(
            index, perhaps_handled=len(reconciliation.perhaps_handled), uncertain=reconciliation.findings
        )
        return cls(
            *(connection, queue, context, snapshot, index, reconciliation, risks),
            *(audit, archive, loaded_at, reader, reconnects),
        )

    @classmethod
    async def for_partition(
        cls, connection: Connection, context: ScanContext, index: EntryIndex, reconciliation: Reconciliation
    ) -> Scan:
        """Continue with some jobs of a scan that began in another process; :meth:`pages` returns only these.

        :param index: the entries about these jobs
        :param reconciliation: as orphans those of these jobs that have no entry, and the inconsistent consumers
        """
        loaded_at, reconnects = time.monotonic(), connection.reconnects
        # Jobs that match no consumer are among the orphans.
        context = replace(context, snapshot=replace(context.snapshot, unconsumed={}))
        queue, snapshot = context.queue, context.snapshot
        audit = AuditLog.from_snapshot(connection, queue, snapshot)
        archive = await ArchiveReader.open(connection, queue, snapshot.info)
        reader = await context.reader(
            *(connection, index),
            archive=archive,
            audit=audit,
            inconsistent_consumers=reconciliation.inconsistent_consumers,
            orphans=reconciliation.orphans,
        )
        risks = context.findings(index)
        scan = cls(
            *(connection, queue, context, snapshot, index, reconciliation, risks),
            *(audit, archive, loaded_at, reader, reconnects),
        )
        scan._is_whole = False
        return scan

    def confirms(self, before: Scan) -> bool:
        """Count no more jobs that nothing names than an earlier scan does; return whether nothing has changed since."""
        self.reconciliation.believe_least(before.reconciliation)
        earlier, now = before.snapshot.consumers, self.snapshot.consumers
        return all(
            self.reconciliation.unnamed.get(name) == count and now[name].numbers == earlier[name].numbers
            for name, count in before.reconciliation.unnamed.items()
            if count
        )

    @property
    def dead_letter_queue(self) -> str:
        """The dead letter queue's stream."""
        return require_dead_letters(self.queue).name

    @property
    def uncertain(self) -> int:
        """How many more jobs may be dead."""
        return self.reconciliation.uncertain

    @property
    def undeliverable(self) -> int:
        """How many jobs match no consumer."""
        return sum(self.snapshot.unconsumed.values())

    async def pages(self, selection: Selection, after: int = 0, *, ahead: int = 0) -> AsyncGenerator[Page, None]:
        """Classify the jobs page by page, each page just before it is returned.

        :param after: only jobs of higher stream sequences
        :param ahead: how many more pages are classified meanwhile
        """
        without_entry = await self.without_entry(selection)
        self._disputed = frozenset(self.reconciliation.disputed).difference(without_entry)
        self._reader.update(disputed={*self.reconciliation.disputed} - self._named)
        found = {sequence for sequence in (*without_entry, *self._disputed) if sequence > after}
        others = sorted({*found, *await self.named_unaccounted(selection)})
        jobs = merge(self.index.jobs(after), ((sequence, ()) for sequence in others), key=itemgetter(0))
        wanted = selection.sequences
        async for page in self.classified(
            (job for job in jobs if wanted is None or job[0] in wanted), selection, ahead
        ):
            yield page

    def classified(self, jobs: Iterable[Job], selection: Selection, ahead: int = 0) -> AsyncGenerator[Page, None]:
        """Classify jobs, which are in order, as :meth:`pages` does."""
        self._reader.update(named=selection.sequences or ())
        remaining, state = iter(jobs), self.snapshot.state
        average = state["bytes"] // max(1, state["messages"])
        size = max(1, min(PAGE, _PAGE_BYTES // max(1, average)))
        batches = iter(lambda: list(islice(remaining, size)), [])
        return in_order((self._page(batch, selection, ahead) for batch in batches), ahead)

    async def named_unaccounted(self, selection: Selection) -> Iterable[int]:
        """Return the jobs that are gone without evidence of their end and whose sequences a selection names."""
        if not selection.sequences or not selection.names_unaccounted or not self._is_whole:
            return ()
        numbers, since = self.reconciliation, self.snapshot.created_at
        certain = {*numbers.orphans, *numbers.perhaps_handled, *numbers.disputed}
        named = [job for job in selection.sequences if not (job in certain or self.index.has_end(job, since))]
        stored = await stored_sequences(self.connection, self.snapshot.queue, self.snapshot.state)
        if all(stored.exact and (job in stored or job > stored.last) for job in named):
            return ()
        unaccounted = await unaccounted_jobs(self.connection, self.queue, self.snapshot)
        found = {job for job in named if job in unaccounted}
        self._reader.update(unaccounted={*self._reader.queue.unaccounted, *found})
        return (job for job in found if job not in self.index)

    async def record_handled(self) -> None:
        """Record the handled jobs of the last page that the audit doesn't have yet."""
        records, self._newly_handled = self._newly_handled, []
        if self.audit and records:
            error: JetStreamProviderError | None
            try:
                error = next((error for error in await self.audit.write(records) if error), None)
            except JetStreamProviderError as denial:
                error = denial
            if error:
                log.warning(
                    "Which letters of %s are handled couldn't be recorded, and won't be known once the handler's"
                    " consumer is deleted or created anew: %s",
                    *(self.queue.name, error),
                )

    async def letters(self, selection: Selection | None = None, after: int = 0) -> AsyncGenerator[DeadLetter, None]:
        """Return the dead letters one by one, in the order of the jobs.

        :param selection: which; all in circulation where absent
        :param after: only jobs of higher stream sequences
        """
        async for page in self.pages(selection or Selection(), after):
            for letter in page.letters:
                yield letter

    async def classify_again(
        self, letters: Sequence[DeadLetter], *, refresh: bool = False
    ) -> list[DeadLetter | NotDead]:
        """Classify letters of :meth:`pages` once more, since time has passed.

        :param refresh: whether to read the consumers' states again, however young those of the scan are
        """
        return await self.classify([letter.sequence for letter in letters], refresh=refresh)

    async def classify(self, sequences: Sequence[int], *, refresh: bool = False) -> list[DeadLetter | NotDead]:
        """Classify jobs by their stream sequences, with or without entries.

        :param refresh: whether to read the consumers' states again, however young those of the scan are
        """
        reconnected = self.connection.reconnects != self._reconnects
        if refresh or reconnected or time.monotonic() - self.loaded_at > FRESH_SECONDS:
            await self._refresh(reconnected=reconnected)
        return await self._classify_all([(sequence, self.index.entries_of(sequence)) for sequence in sequences])

    async def _classify_all(self, jobs: Sequence[Job]) -> list[DeadLetter | NotDead]:
        """Classify jobs, once more if the connection was lost meanwhile, as where the server restarted."""
        if not self._is_whole:
            # Numbers say nothing about a part of the entries: the process that began the scan finds out.
            return await self._reader.classify(jobs)
        for _ in range(_ATTEMPTS):
            if self.connection.reconnects != self._reconnects:
                await self._refresh(reconnected=True)
            reconnects = self._reconnects
            results = await self._reader.classify(jobs)
            if self.connection.reconnects == reconnects:
                return results
        raise UnreachableError(f"the connection was lost {_ATTEMPTS} times while letters were proved: try again")

    async def unchanged(self, entries: Sequence[int]) -> Sequence[int]:
        """Return those of some entries that the dead letter queue stores as they were read, or that are removed.

        None, where the queue has lost entries since: a server that loses its power gives their sequences to others.
        """
        reconnects = self.connection.reconnects
        if entries and reconnects != self._entries_as_of:
            if await self._has_lost_entries():
                return ()
            self._entries_as_of = reconnects
        return entries

    async def _has_lost_entries(self) -> bool:
        """Compare the last entry that is still stored with the index: those before it were stored before it."""
        read, name = self.context.dead_letter_queue, self.dead_letter_queue
        info, last = await stream_info(self.connection, name), int(read["state"]["last_seq"])
        first = max(1, int(info["state"]["first_seq"]))
        if info["created"] != read["created"] or int(info["state"]["last_seq"]) < last:
            return True
        parser = EntryParser(self.snapshot.queue, self.snapshot.created, self.connection.domain)
        while self._is_whole and last >= first:
            sequences = range(max(first, last - _COMPARED + 1), last + 1)
            messages = await Streams(self.connection).get_many(name, sequences)
            for message in filter(None, reversed(messages.values())):
                if job := parser.parse(message) if parser.is_entry(message.subject) else None:
                    known = ((entry.sequence, entry.recorded_at) for entry in self.index.entries_of(job[0]))
                    return (job[1].sequence, job[1].recorded_at) not in known
            last = sequences[0] - 1
        return False

    async def _refresh(self, *, reconnected: bool) -> None:
        reconnects, self.loaded_at = self.connection.reconnects, time.monotonic()
        if reconnected and self.index.read_to and not await self.unchanged([self.index.read_to]):
            raise UnreachableError(
                f"expected the entries in {self.dead_letter_queue} that were read before the connection was lost, found"
                " others, as where the server has lost its power: try again"
            )
        snapshot = None if reconnected else await refresh_snapshot(self.connection, self.snapshot)
        self.snapshot = snapshot or await take_snapshot(self.connection, self.queue)
        self._answered_at = time.monotonic()
        self._reader.update(snapshot=self.snapshot)
        if snapshot is None:
            # The server may have forgotten deaths whose advisories it had published, or a consumer was reset.
            reconciliation = await reconcile(self.connection, self.snapshot, self.index, self.audit)
            # Of what died since, the index has no entries.
            reconciliation.believe_least(self.reconciliation)
            self.reconciliation.unnamed = reconciliation.unnamed
            self.reconciliation.uncertain = reconciliation.uncertain + len(self.reconciliation.perhaps_handled)
            # A consumer may have been changed meanwhile.
            self.reconciliation.disputed = reconciliation.disputed
            self._reader.update(
                inconsistent_consumers=reconciliation.inconsistent_consumers,
                disputed={*reconciliation.disputed} - self._named,
                up_since=Unread.UP_SINCE,
            )
        # Only now: another page that is classified meanwhile doesn't rely on what was read before.
        self._reconnects = reconnects

    async def _page(self, batch: Sequence[Job], selection: Selection, ahead: int) -> Page:
        letters: list[DeadLetter] = []
        dismissed: list[NotDead] = []
        for result in await self._classify_all(batch):
            has_ended = isinstance(result, NotDead) and result.status is Status.COMPLETED
            if result.sequence in self._disputed and not has_ended:
                # The numbers count it as uncertain.
                continue
            if isinstance(result, NotDead):
                dismissed.append(result)
            elif result.death.reason == Reason.UNDELIVERABLE and not selection.selects_undeliverable:
                # Its entries are about another message of its sequence, or state no death.
                dismissed.append(NotDead(result.sequence, Status.STALE, result.entries, None, stored=True))
            else:
                letters.append(result)
        self.dismissed.update(job.status for job in dismissed)
        self.risks += late_end_risks(dismissed, self.snapshot, self.risks)
        self.risks += unclear_end_risks(dismissed, self.snapshot, self.risks)
        handled = [_handled_record(job.handled) for job in dismissed if job.handled]
        self._newly_handled = [*(self._newly_handled if ahead else ()), *handled]
        now = self.now
        return Page(tuple(letter for letter in letters if selection.matches(letter, now)), tuple(dismissed))

    async def acknowledgements(self) -> dict[int, datetime]:
        """Return when the last ack metrics of jobs were stored, as far as that matters; for another process."""
        return dict(await self._reader.acknowledgements.times())

    async def without_entry(self, selection: Selection) -> array[int]:
        """Return the stream sequences of jobs without an entry that a selection may include.

        These are the orphans, and jobs that match no consumer where those are selected.
        """
        # Jobs that a selection names stay what they are while they are redriven.
        self._named |= selection.sequences or frozenset()
        return await jobs_without_entry(self.connection, self.snapshot, self.index, self.reconciliation, selection)


def _handled_record(letter: DeadLetter) -> LetterRecord:
    """Return the audit's record of a letter that a handler has handled."""
    death = letter.death
    return LetterRecord(
        stream=death.stream,
        created=death.created,
        sequence=letter.sequence,
        stored_at=letter.time,
        job_id=readable_text(letter.job_id)[:200],
        action="handled",
        subject=readable_text(letter.subject),
        consumer=death.consumer,
        redrives=letter.redrives,
        reason=death.reason.value,
        died_at=death.died_at,
        fingerprint=death.fingerprint,
    )


async def _current_index(
    connection: Connection, dead_letter_queue: str, now: ScanContext, read: tuple[EntryIndex, ScanContext, int] | None
) -> EntryIndex:
    """Return the entries up to a snapshot.

    :param read: what an earlier scan has read, its context, and how often the connection had been restored before it
    """
    index = await _continued(connection, now, *read) if read else None
    if index is None:
        state, created = now.dead_letter_queue["state"], now.snapshot.created
        span = max(1, state["first_seq"]), state["last_seq"]
        index = await read_index(connection, dead_letter_queue, now.queue.name, created, *span)
    return index


async def _continued(
    connection: Connection, now: ScanContext, index: EntryIndex, before: ScanContext, reconnects: int
) -> EntryIndex | None:
    """Add new entries to an index, and drop the removed ones.

    :param now: up to whose snapshot to read
    :param index: the entries up to the earlier snapshot; nothing continues it where this is cut off
    :param before: of the earlier scan
    :param reconnects: how often the connection had been restored before the earlier scan
    :return: the same index; ``None`` where all entries have to be read
    """
    start, index.read_to = index.read_to + 1, HIGHEST_JOB
    # A server that was away may have lost its last entries, and given their sequences to others.
    if connection.reconnects != reconnects or before.snapshot.created != now.snapshot.created or before.handlers:
        return None
    earlier, letters = before.dead_letter_queue, now.dead_letter_queue
    old, new = earlier["state"], letters["state"]
    if earlier["created"] != letters["created"] or not start - 1 == old["last_seq"] <= new["last_seq"]:
        return None
    parser = EntryParser(now.snapshot.queue, now.snapshot.created, connection.domain)
    first, name = max(start, new["first_seq"]), letters["config"]["name"]
    async for _ in index.read(connection, name, parser, first, new["last_seq"]):
        pass
    if new["messages"] - old["messages"] != new["last_seq"] - old["last_seq"]:
        stored = await stored_sequences(connection, name)
        if not stored.exact:
            index.read_to = HIGHEST_JOB
            return None
        index.drop_missing(stored)
    return index
