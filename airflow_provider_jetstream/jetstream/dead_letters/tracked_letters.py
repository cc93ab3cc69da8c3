"""The dead letters of a queue from look to look: a look reads what has changed since the last one.

What a letter is depends on the entries about it, on its job in the queue, on its consumer's numbers, and on what is
stored about its end in events and audit. Streams tell by their sequences and counts what was added and removed, and a
consumer's numbers how many of its jobs are dead; so a look classifies only the jobs of which something has changed, and
counts the others as before. Where a stream or a consumer isn't the one of the last look, moved back or was cut off,
where the numbers contradict what is known, and where more has changed than a proof of all letters reads, a look says
that it can't tell: then only a proof of all letters can.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.client.readahead import read_ahead
from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences
from airflow_provider_jetstream.jetstream.dead_letters.dead_letter_handler import read_handlers
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.entry_parser import EntryParser
from airflow_provider_jetstream.jetstream.dead_letters.find import REPORTED_RANGES, Summary
from airflow_provider_jetstream.jetstream.dead_letters.late_ends import LATE_ENDS
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.letter_table import LetterTable, sequence_ranges
from airflow_provider_jetstream.jetstream.dead_letters.look_changes import has_gap, jobs_with_evidence, new_messages
from airflow_provider_jetstream.jetstream.dead_letters.preservation import BodyPreserver
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import (
    REMOVAL_DELAY,
    KnownDeaths,
    compare_known,
)
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter, Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.queue.gate import queue_findings, require_no_refusal
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.status import Page
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# Letters that are classified before other tasks of the event loop run.
_PAGE = 64
# More new messages, or jobs that may have changed, than these are read ahead.
_FEW = 4
# The ledger reads every entry's number: with many letters it is brought up to date less often.
_FEW_LETTERS = 5_000
_LEDGER_SECONDS = 30.0


class TrackedLetters:
    """All dead letters of a queue, proved once and kept current since; make it with :meth:`prove`.

    :param scan: the scan that proves all letters
    :param fields: the fields by which letters can be selected and grouped
    """

    def __init__(self, connection: Connection, scan: Scan, fields: Sequence[GroupField]) -> None:
        self.table = LetterTable(fields)
        self.proved_at = time.monotonic()
        self._scan = scan
        self._reconnects = connection.reconnects
        self._is_current = True
        self._preserver = BodyPreserver(connection, scan)
        self._settled = {name: consumer.settled for name, consumer in scan.snapshot.consumers.items()}
        # Jobs with entries that are no dead letters: those that are stored may yet become some.
        self._open: dict[int, NotDead] = {}
        self._ended: dict[int, Status] = {}
        self._dismissed: Counter[Status] = Counter()
        self._accounted_at = time.monotonic()

    @classmethod
    async def prove(
        cls,
        connection: Connection,
        queue: WorkQueue,
        fields: Sequence[GroupField] = (),
        *,
        vanished: bool = False,
        in_background: bool = False,
    ) -> TrackedLetters:
        """Read the queue as a whole and prove each letter; copy the bodies of those that have no copy yet.

        :param vanished: whether a job that vanished counts as a dead letter
        :param in_background: whether to leave half of the time to others
        :raises JetStreamProviderError: as :func:`~.find.summarise_dead_letters` does
        """
        scan = await Scan.begin(connection, queue, vanished=vanished, ahead=True)
        scan.page_size = _PAGE
        tracked = cls(connection, scan, fields)
        worked = time.thread_time()
        async for page in scan.pages(EveryLetter(vanished=vanished)):
            await tracked._take(page)
            await sleep(time.thread_time() - worked if in_background else 0)
            worked = time.thread_time()
        await scan.account()
        await tracked._preserver.release_archive()
        return tracked

    async def update(self, connection: Connection) -> bool:
        """Bring the letters up to date.

        :return: whether that was possible; where it wasn't, only a new proof can say more
        """
        if connection.reconnects != self._reconnects or not self._is_current:
            return False
        # A look that is cut off has read what the next one wouldn't read again.
        self._is_current = False
        self._is_current = await self._read_changes(connection)
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
        if new_messages(before, context) > _FEW or len(self._open) > _FEW:
            view = await read_ahead(connection, queue.name, queue.companion_names())
        evidence = await jobs_with_evidence(view, before, snapshot, context, len(self.table) + len(self._open))
        if evidence is None:
            return False
        changed = {job for job in evidence if self._knows(job)} | self._open.keys()
        entries = await self._read_entries(view, before, snapshot)
        if entries is None:
            return False
        changed |= entries
        changed.update(self.table.stored_below(snapshot.state["first_seq"]))
        self._begin_scan(view, snapshot)
        await self._classify(view, changed)
        await self._classify(view, await self._orphans(view, snapshot))
        if not await self._agrees(connection, view, snapshot):
            return False
        for name, consumer in snapshot.consumers.items():
            self._settled[name] = max(self._settled[name], consumer.settled)
        await self._account()
        return True

    async def summary(self, selection: Selection, group_by: tuple[GroupField, ...]) -> Summary:
        """Count the letters of a selection as of the last look; see :func:`~.find.summarise_dead_letters`.

        :param selection: by the fields of the table, without sequences
        """
        scan, now = self._scan, datetime.now(UTC)
        found = self.table.matching(selection, group_by, now)
        summary = Summary(now, group_by, groups=found.groups)
        summary.dead = sum(group.count for group in found.groups.values())
        summary.ranges, summary.ranges_left_out = await sequence_ranges(found.sequences, REPORTED_RANGES)
        summary.uncertain, summary.undeliverable = scan.uncertain, scan.undeliverable
        ledger = await scan.account()
        summary.set_unaccounted(list(ledger.unaccounted.pairs()))
        summary.dismissed = {status.value: count for status, count in sorted(self._dismissed.items()) if count}
        summary.risks, summary.preserved = scan.risks, self._preserver.preserved
        return summary

    def counted(self, selection: Selection, group_by: tuple[GroupField, ...]) -> Summary:
        """Count the letters of a selection as of the last look, without their sequences."""
        now = datetime.now(UTC)
        return Summary(now, group_by, groups=self.table.matching(selection, group_by, now).groups)

    def _knows(self, job: int) -> bool:
        return job in self.table or job in self._open or job in self._ended

    async def _read_entries(
        self, connection: Connection, before: QueueSnapshot, snapshot: QueueSnapshot
    ) -> set[int] | None:
        """Read the new entries; return the jobs of which entries were added or removed, ``None`` where unknown."""
        scan, name = self._scan, self._scan.dead_letter_queue
        state, stored_before = snapshot.companions[name]["state"], before.companions[name]["state"]["messages"]
        parser = EntryParser(scan.queue.name, snapshot.created, connection.domain)
        changed: set[int] = set()
        count = 0
        if state["last_seq"] > scan.index.read_to:
            start = max(scan.index.read_to + 1, state["first_seq"])
            async for entry, job in scan.index.read(connection, name, parser, start, state["last_seq"]):
                count += 1
                # A copy of a letter that was proved repeats what is known of it.
                if job and not (entry in self._preserver.copies and job in self.table):
                    changed.add(job)
                self._preserver.copies.discard(entry)
        if stored_before + count != state["messages"]:
            stored = await stored_sequences(connection, name)
            if not stored.exact:
                return None
            changed |= scan.index.drop_missing(stored)
        return changed

    async def _orphans(self, connection: Connection, snapshot: QueueSnapshot) -> set[int]:
        """Return the jobs without an entry that have died since the last look, as the consumers' numbers prove.

        Where a consumer has as many dead jobs as are known, none is looked for.
        """
        orphans: set[int] = set()
        known = self._known(snapshot)
        for name, consumer in snapshot.consumers.items():
            start, stop = self._settled[name] + 1, consumer.settled
            if start > stop or consumer.dead == known.jobs[name]:
                continue
            for subject in consumer.filters:
                async for message in read_range(connection, snapshot.queue, subject, start, stop):
                    if message.sequence not in self._scan.index:
                        orphans.add(message.sequence)
        if orphans:
            await sleep(REMOVAL_DELAY)
        return orphans

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
            loaded_at=datetime.now(UTC),
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
        classifier = await scan.context.classifier(
            *(connection, some),
            archive=scan.archive,
            audit=scan.audit,
            inconsistent_consumers=(),
            orphans=[job for job, entries in jobs if not entries],
        )
        self._scan = replace(scan, _classifier=classifier)
        self._preserver.continue_with(self._scan)
        selection = EveryLetter(vanished=scan.context.vanished)
        async for page in self._scan.classified(jobs, selection):
            await self._take(page)
            await sleep(0)

    async def _take(self, page: Page) -> None:
        """Record what the jobs of a page are now."""
        await self._scan.record_handled()
        await self._preserver.preserve(page.letters)
        for letter in page.letters:
            self._forget(letter.sequence)
            taker = self._scan.snapshot.consumer_for(letter.subject) if letter.source == BodySource.QUEUE else None
            self.table.put(letter, taker.name if taker else None)
        for job in page.dismissed:
            self._forget(job.sequence)
            if not job.entries and not job.stored:
                # It was acknowledged just before.
                continue
            self._dismissed[job.status] += 1
            if job.stored and job.consumer in self._scan.snapshot.consumers:
                self._open[job.sequence] = job
            else:
                self._ended[job.sequence] = job.status

    def _forget(self, sequence: int) -> None:
        self.table.remove(sequence)
        known = self._open.pop(sequence, None)
        status = known.status if known else self._ended.pop(sequence, None)
        if status:
            self._dismissed[status] -= 1

    async def _agrees(self, connection: Connection, view: Connection, snapshot: QueueSnapshot) -> bool:
        """Compare what is known with the consumers' numbers; return whether they agree."""
        known = self._known(snapshot)
        counts = [(known.jobs[name], consumer.dead) for name, consumer in snapshot.consumers.items()]
        if any(dead is not None and dead < jobs for jobs, dead in counts):
            stored = await stored_sequences(connection, snapshot.queue, snapshot.state)
            if not stored.exact:
                return False
            gone = [*self.table.stored_below(stored.first), *filter(self.table.is_stored, stored.deleted)]
            if not gone:
                return False
            await self._classify(view, gone)
            known = self._known(snapshot)
        reconciliation = await compare_known(connection, snapshot, known)
        findings = self._scan.context.findings(self._scan.index, uncertain=reconciliation.findings)
        self._scan = replace(self._scan, reconciliation=reconciliation, risks=(*findings, *self._late_ends()))
        return not reconciliation.inconsistent_consumers

    def _late_ends(self) -> tuple[Finding, ...]:
        """Return what looks found of late ends: they are known of jobs that may be read only once."""
        return tuple(risk for risk in self._scan.risks if risk.name == LATE_ENDS)

    def _known(self, snapshot: QueueSnapshot) -> KnownDeaths:
        known = KnownDeaths()
        for name, consumer in snapshot.consumers.items():
            settled = max(consumer.settled, self._settled[name])
            of_consumer = [job for job in self._open.values() if job.consumer == name]
            known.jobs[name] = self.table.count_taken(name) + sum(job.sequence <= settled for job in of_consumer)
            known.above_settled[name] = self.table.count_taken(name, above=consumer.settled)
            known.disbelieved[name] = sum(job.status == Status.UNCERTAIN for job in of_consumer)
        return known

    async def _account(self) -> None:
        """Bring the ledger up to date, unless that was done a moment ago and there are many letters."""
        now = time.monotonic()
        if len(self.table) > _FEW_LETTERS and now - self._accounted_at < _LEDGER_SECONDS:
            self._scan.risks += (await self._scan.account()).findings
            return
        self._accounted_at = now
        scan = self._scan
        if scan.archive:
            # That of the changed jobs knows the ack metrics of these only.
            classifier = await scan.context.classifier(
                *(scan.connection, scan.index), archive=scan.archive, audit=scan.audit, inconsistent_consumers=()
            )
            scan = replace(scan, _classifier=classifier)
        self._scan = replace(scan, _ledger=None)
        await self._scan.account()
