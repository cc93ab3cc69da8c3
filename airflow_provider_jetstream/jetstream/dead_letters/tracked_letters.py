"""The dead letters of a queue, kept current: a refresh reads what has changed since the last one.

What a letter is depends on the entries about it, on its job in the queue, on its consumer's numbers, and on what is
stored about its end in events and audit. Streams tell by their sequences and counts what was added and removed, and a
consumer's numbers how many of its jobs are dead; so a refresh classifies only the jobs of which something has changed,
and counts the others as before. Where a stream or a consumer isn't the one of the last refresh, moved back or was cut
off, where the numbers contradict what is known, and where more has changed than a proof of all letters reads, a
refresh says that it can't tell: then only a proof of all letters can.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import AckMetric
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.concurrency import pause_if_due, sleep
from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences
from airflow_provider_jetstream.jetstream.client.streams import find_exact_streams, read_bulk, read_range
from airflow_provider_jetstream.jetstream.contract import (
    completion_filter,
    handled_filter,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.end_order import LATE_ENDS
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryParser
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.find import REPORTED_RANGES, Summary
from airflow_provider_jetstream.jetstream.dead_letters.handlers import read_handlers
from airflow_provider_jetstream.jetstream.dead_letters.preservation import BodyPreserver, StoredCopies
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import REMOVAL_DELAY, KnownDeaths, compare_known
from airflow_provider_jetstream.jetstream.dead_letters.scan import COMPARISONS, Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter, Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, LetterTable
from airflow_provider_jetstream.jetstream.evidence import event_of, proves_nothing
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter
from airflow_provider_jetstream.jetstream.queue.preconditions import queue_findings, require_no_refusal
from airflow_provider_jetstream.jetstream.queue.snapshot import moved_back, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.status import Page
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


# More new messages, or jobs that may have changed, than these are read ahead.
_FEW = 4


class TrackedLetters:
    """All dead letters of a queue, proved once and kept current since; make it with :meth:`prove`.

    :param scan: the scan that proves all letters
    """

    def __init__(self, connection: Connection, scan: Scan) -> None:
        self.table = LetterTable()
        self.proved_at = time.monotonic()
        self._scan = scan
        self._reconnects = connection.reconnects
        self._is_current = True
        self._preserver = BodyPreserver(connection, scan)
        # Of the entries that are read: how many are stored, and jobs that weren't classified since.
        self._stored_entries = int(scan.context.dead_letter_queue["state"]["messages"])
        self._unclassified: set[int] = set()
        self._settled = {name: consumer.settled for name, consumer in scan.snapshot.consumers.items()}
        # Jobs with entries that are no dead letters: those that are stored may yet become some.
        self._open: dict[int, NotDead] = {}
        self._ended: dict[int, Status] = {}
        self._dismissed: Counter[Status] = Counter()

    @classmethod
    async def prove(
        cls,
        connection: Connection,
        queue: WorkQueue,
        *,
        unaccounted: bool = False,
        in_background: bool = False,
    ) -> TrackedLetters:
        """Read the queue as a whole and prove each letter; copy the bodies of those that have no copy yet.

        :param unaccounted: whether an unaccounted job with a copy counts as a dead letter
        :param in_background: whether to leave half of the time to others
        :raises JetStreamProviderError: as :func:`~.find.summarise_dead_letters` does
        """
        scan = await Scan.begin(connection, queue, unaccounted=unaccounted)
        tracked = cls(connection, scan)
        worked = time.thread_time()
        async for page in scan.pages(EveryLetter(unaccounted=unaccounted)):
            await tracked._take(page)
            await sleep(time.thread_time() - worked if in_background else 0)
            worked = time.thread_time()
        # The copies of a first refresh are as many as the letters.
        await tracked._read_entries(scan.connection, scan.snapshot, tracked._preserver.copies.last)
        return tracked

    @property
    def created(self) -> str:
        """When the work queue's stream was created: another one of its name has other letters."""
        return str(self._scan.snapshot.created)

    async def refresh(self, connection: Connection) -> bool:
        """Bring the letters up to date.

        :return: whether that was possible; where it wasn't, only a new proof can say more
        """
        if connection.reconnects != self._reconnects or not self._is_current:
            return False
        # A refresh that is cut off has read what the next one wouldn't read again.
        self._is_current = False
        is_current = await self._read_changes(connection)
        for _ in range(COMPARISONS - 1):
            if not is_current or not any(self._scan.reconciliation.unnamed.values()):
                break
            before = self._scan
            await sleep(REMOVAL_DELAY)
            is_current = await self._read_changes(connection)
            if is_current and self._scan.confirms(before):
                break
        self._is_current = is_current
        return self._is_current and connection.reconnects == self._reconnects

    async def _read_changes(self, connection: Connection) -> bool:
        queue, before = self._scan.queue, self._scan.snapshot
        snapshot, context = await take_snapshot(connection, queue), self._scan.context
        letters = snapshot.companions.get(self._scan.dead_letter_queue)
        if letters is None or has_gap(before, snapshot, self._scan.index.read_to, self._scan.dead_letter_queue):
            return False
        context = replace(context, snapshot=snapshot)
        require_no_refusal(queue.name, queue_findings(snapshot, queue))
        if context.handlers or await read_handlers(connection, letters["config"], queue.name):
            # What a handler acknowledged is found by the copies of all entries.
            return False
        view = connection
        if new_messages(before, context, self._scan.index.read_to) > _FEW or len(self._open) > _FEW:
            view = await find_exact_streams(connection, {queue.name, *snapshot.companions})
        evidence = await jobs_with_evidence(view, before, snapshot, context, len(self.table) + len(self._open))
        if evidence is None:
            return False
        changed = await self.table.known(evidence) | (evidence & self._ended.keys()) | self._open.keys()
        await self._read_entries(view, snapshot, letters["state"]["last_seq"])
        if self._stored_entries != letters["state"]["messages"] and not await self._drop_removed(view):
            return False
        self._stored_entries = letters["state"]["messages"]
        changed |= self._unclassified
        self._unclassified = set()
        changed |= await self.table.stored_below(snapshot.state["first_seq"])
        self._begin_scan(view, snapshot)
        await self._classify(view, changed)
        known = await _known_deaths(self.table, self._open.values(), self._settled, snapshot)
        await self._classify(view, await _new_orphans(view, snapshot, known, self._settled, self._scan.index))
        if not await self._agrees(connection, view, snapshot):
            return False
        for name, consumer in snapshot.consumers.items():
            self._settled[name] = max(self._settled[name], consumer.settled)
        return True

    @property
    def now(self) -> datetime:
        """The time by the server's clock, to which the ages of letters refer."""
        return self._scan.now

    async def summary(self, selection: Selection, group_by: tuple[GroupField, ...]) -> Summary:
        """Count the letters of a selection as of the last refresh; see :func:`~.find.summarise_dead_letters`.

        :param selection: by the fields of the table, without sequences
        """
        scan, now = self._scan, self.now
        query = LetterQuery.of(selection, now)
        groups = await self.table.groups(query, group_by)
        ranges, ranges_left_out = await self.table.ranges(query, REPORTED_RANGES)
        summary = Summary(now, group_by, groups=groups, ranges=ranges, ranges_left_out=ranges_left_out)
        summary.dead = sum(group.count for group in groups.values())
        summary.uncertain, summary.undeliverable = scan.uncertain, scan.undeliverable
        summary.dismissed = {status.value: count for status, count in sorted(self._dismissed.items()) if count}
        summary.risks, summary.preserved = scan.risks, self._preserver.preserved
        return summary

    async def counted(self, selection: Selection, group_by: tuple[GroupField, ...]) -> Summary:
        """Count the letters of a selection as of the last refresh, without their sequences."""
        now = self.now
        return Summary(now, group_by, groups=await self.table.groups(LetterQuery.of(selection, now), group_by))

    async def _read_entries(self, connection: Connection, snapshot: QueueSnapshot, stop: int) -> None:
        """Read the entries up to one; a copy of a letter that was proved repeats what is known of it."""
        scan, name = self._scan, self._scan.dead_letter_queue
        first = snapshot.companions[name]["state"]["first_seq"]
        parser = EntryParser(scan.queue.name, snapshot.created, connection.domain)
        copies, self._preserver.copies = self._preserver.copies, StoredCopies()
        start, copied = max(scan.index.read_to + 1, first), set[int]()
        async for entry in copies.read_with(connection, scan.index, name, parser, start, stop):
            self._stored_entries += 1
            if entry.job:
                (copied if entry.is_own_copy else self._unclassified).add(entry.job)
        self._unclassified |= copied - await self.table.known(copied)

    async def _drop_removed(self, connection: Connection) -> bool:
        """Forget the entries that were removed; return whether it is known which."""
        stored = await stored_sequences(connection, self._scan.dead_letter_queue)
        if stored.exact:
            self._unclassified |= self._scan.index.drop_missing(stored)
        return stored.exact

    def _begin_scan(self, connection: Connection, snapshot: QueueSnapshot) -> None:
        """Continue the scan with the present numbers."""
        scan = self._scan
        self._scan = replace(
            scan,
            connection=connection,
            context=replace(scan.context, snapshot=snapshot),
            snapshot=snapshot,
            audit=AuditLog.from_snapshot(connection, scan.queue, snapshot),
            archive=scan.context.archive_reader(connection, snapshot),
            loaded_at=time.monotonic(),
            risks=self._late_ends(),
        )
        self._preserver.continue_with(self._scan)

    async def _classify(self, connection: Connection, changed: Iterable[int]) -> None:
        jobs = [(job, self._scan.index.entries_of(job)) for job in sorted(changed)]
        if not jobs:
            return
        scan, some = self._scan, EntryIndex()
        for job, entries in jobs:
            for entry in entries:
                some.add(job, entry)
        reader = await scan.context.reader(
            *(connection, some),
            archive=scan.archive,
            audit=scan.audit,
            orphans=[job for job, entries in jobs if not entries],
        )
        self._scan = replace(scan, _reader=reader)
        self._preserver.continue_with(self._scan)
        selection = EveryLetter(unaccounted=scan.context.with_unaccounted)
        async for page in self._scan.classified(jobs, selection):
            await self._take(page)
            await sleep(0)

    async def _take(self, page: Page) -> None:
        """Record what the jobs of a page are now."""
        await self._scan.record_handled()
        await self._preserver.preserve(page.letters)
        await pause_if_due()
        for sequence in (*(letter.sequence for letter in page.letters), *(job.sequence for job in page.dismissed)):
            known = self._open.pop(sequence, None)
            if status := known.status if known else self._ended.pop(sequence, None):
                self._dismissed[status] -= 1
        await self.table.change(page.letters, self._scan.snapshot, {job.sequence for job in page.dismissed})
        for job in page.dismissed:
            if not job.entries and not job.stored:
                # It was acknowledged just before.
                continue
            self._dismissed[job.status] += 1
            if job.stored and job.consumer in self._scan.snapshot.consumers:
                self._open[job.sequence] = job
            else:
                self._ended[job.sequence] = job.status

    async def _agrees(self, connection: Connection, view: Connection, snapshot: QueueSnapshot) -> bool:
        """Compare what is known with the consumers' numbers; return whether they agree."""
        known = await _known_deaths(self.table, self._open.values(), self._settled, snapshot)
        counts = [(known.jobs[name], consumer.dead) for name, consumer in snapshot.consumers.items()]
        if any(dead is not None and dead < jobs for jobs, dead in counts):
            stored = await stored_sequences(connection, snapshot.queue, snapshot.state)
            if not stored.exact:
                return False
            gone = await self.table.stored_below(stored.first) | await self.table.stored_among(stored.deleted)
            if not gone:
                return False
            await self._classify(view, gone)
            known = await _known_deaths(self.table, self._open.values(), self._settled, snapshot)
        reconciliation = await compare_known(connection, snapshot, known)
        findings = self._scan.context.findings(self._scan.index, uncertain=reconciliation.findings)
        self._scan = replace(self._scan, reconciliation=reconciliation, risks=(*findings, *self._late_ends()))
        return not reconciliation.inconsistent_consumers

    def _late_ends(self) -> tuple[Finding, ...]:
        """Return what was found of late ends: they are known of jobs that may be read only once."""
        return tuple(risk for risk in self._scan.risks if risk.name == LATE_ENDS)


async def _known_deaths(
    table: LetterTable, open_jobs: Collection[NotDead], settled_before: Mapping[str, int], snapshot: QueueSnapshot
) -> KnownDeaths:
    """Count by consumer the jobs that are dead or may be dead.

    :param open_jobs: stored jobs with entries that are no dead letters
    :param settled_before: by consumer, up to which sequence its jobs were read
    """
    known, stored = KnownDeaths(), await table.stored_for()
    for name, consumer in snapshot.consumers.items():
        settled = max(consumer.settled, settled_before[name])
        of_consumer = [job for job in open_jobs if job.consumer == name]
        known.jobs[name] = stored.get(name, 0) + sum(job.sequence <= settled for job in of_consumer)
        if consumer.dead is None:
            known.above_settled[name] = await table.stored_above(name, consumer.settled)
        if consumer.up_since:
            known.disbelieved[name] = sum(job.status == Status.UNCERTAIN for job in of_consumer)
    return known


async def _new_orphans(
    connection: Connection,
    snapshot: QueueSnapshot,
    known: KnownDeaths,
    settled_before: Mapping[str, int],
    index: EntryIndex,
) -> set[int]:
    """Return the jobs without an entry that have died since the last refresh, as the consumers' numbers prove.

    Where a consumer has as many dead jobs as are known, none is searched for.
    """
    orphans: set[int] = set()
    for name, consumer in snapshot.consumers.items():
        start, stop = settled_before[name] + 1, consumer.settled
        if start > stop or consumer.dead == known.jobs[name]:
            continue
        for subject in consumer.filters:
            async for message in read_range(connection, snapshot.queue, subject, start, stop):
                if message.sequence not in index:
                    orphans.add(message.sequence)
    if orphans:
        await sleep(REMOVAL_DELAY)
    return orphans


# So many new messages are read in any case; more only where there are as many letters.
_MOST_MESSAGES = 1_000
_DIGITS = 19


def has_gap(before: QueueSnapshot, after: QueueSnapshot, read_to: int, dead_letter_queue: str) -> bool:
    """Return whether the later snapshot isn't the earlier one's continuation.

    :param read_to: the last sequence of the dead letter queue that was read
    """
    names = before.companions.keys()
    if before.created != after.created or before.config != after.config or names != after.companions.keys():
        return True
    letters = after.companions[dead_letter_queue]
    return (
        before.consumers.keys() != after.consumers.keys()
        or int(after.state["last_seq"]) < int(before.state["last_seq"])
        or int(letters["state"]["last_seq"]) < read_to
        or before.companions[dead_letter_queue]["config"] != letters["config"]
        or any(_is_another(before.companions[name], info) for name, info in after.companions.items())
        or any(_is_anew(before.consumers[name], consumer) for name, consumer in after.consumers.items())
    )


def _is_another(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    moved = int(after["state"]["last_seq"]) < int(before["state"]["last_seq"])
    return bool(before["created"] != after["created"] or moved)


def _is_anew(before: ConsumerState, after: ConsumerState) -> bool:
    if before.created != after.created or before.filters != after.filters or moved_back(before, after):
        return True
    # Another server, or the same one after a restart, may have forgotten what it had published.
    return bool(before.up_since and after.up_since and before.up_since != after.up_since)


def new_messages(before: QueueSnapshot, context: ScanContext, read_to: int) -> int:
    """Return how many messages dead letter queue, events and audit have stored since the earlier snapshot.

    :param context: of the later one
    :param read_to: the last sequence of the dead letter queue that was read
    """
    companions = context.snapshot.companions
    new = sum(
        companions[name]["state"]["last_seq"] - before.companions[name]["state"]["last_seq"]
        for name in {context.events, context.snapshot.audit} - {None}
        if name
    )
    return int(new + max(0, context.dead_letter_queue["state"]["last_seq"] - read_to))


async def jobs_with_evidence(
    connection: Connection, before: QueueSnapshot, after: QueueSnapshot, context: ScanContext, letters: int
) -> set[int] | None:
    """Return the jobs about which events or audit have stored something since the earlier snapshot.

    :param letters: how many letters are known
    :return: ``None`` where more is stored than a proof of all letters reads
    """
    most = max(_MOST_MESSAGES, letters)
    jobs: set[int] = set()
    for info in (after.companions.get(context.events or ""), context.audit):
        if info is None:
            continue
        name, last = info["config"]["name"], info["state"]["last_seq"]
        read_to = before.companions[name]["state"]["last_seq"]
        if last - read_to > most:
            return None
        if last > read_to:
            jobs |= await _jobs_in(connection, info, read_to + 1, after.queue)
    return jobs


async def _jobs_in(connection: Connection, info: Mapping[str, Any], start: int, queue: str) -> set[int]:
    completed, metrics = completion_filter(queue).removesuffix(">"), ack_metric_filter(queue).removesuffix("*")
    records, reports = letter_audit_subject(queue, 0).removesuffix("0"), handled_filter(queue).removesuffix("*")
    jobs: set[int] = set()
    async for message in read_bulk(connection, info, start):
        if message.subject.startswith((completed, records, reports)):
            if not proves_nothing(message):
                jobs.add(int(message.subject.rpartition(".")[2]))
        elif message.subject.startswith(metrics) and isinstance(metric := event_of(message, queue), AckMetric):
            jobs.add(metric.stream_seq)
    return jobs
