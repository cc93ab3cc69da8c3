"""Scans of queues' dead letters: shared by all viewers, one by one, each on no more than half of a core."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from heapq import merge
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.readahead import read_ahead
from airflow_provider_jetstream.jetstream.dead_letters.classifier import Status
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.plugins.monitor.letter_index import DeadLetterNote, LetterIndex, note_of
from airflow_provider_jetstream.plugins.monitor.models import LetterCounts
from airflow_provider_jetstream.plugins.monitor.queue_scan import QueueScan, dead_in

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview

_MOST_CHANGED = 20_000
_FEW_ENTRIES = 500
# While jobs come and go, without a word about deaths.
_ASKED_AGE = 15.0
_UNASKED_AGE = 60.0
# Of all queues of a server; what was looked at longest ago is forgotten first.
_MOST_LETTERS = 2_000_000
_HELD_BYTES = 8 * 2**20
_SMALLEST_PAGE = 8
_LONGEST_PAUSE = 1.0


class _InAndOutOfCirculation(Selection):
    """Every dead letter, parked or not."""

    def matches(self, letter: DeadLetter, now: datetime | None = None) -> bool:
        """Mean every letter."""
        return True


class Scanner:
    """Scans the queues of one server.

    :param shared: opens the connection, or takes the one that is open
    """

    def __init__(self, shared: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._shared = shared
        self._scans: dict[str, QueueScan] = {}
        self._looks: Mapping[str, QueueOverview] = {}
        self._sweeping: asyncio.Task[None] | None = None
        # Whoever asks for a queue doesn't wait for the large one that nobody asked for.
        self._asked, self._unasked = asyncio.Semaphore(1), asyncio.Semaphore(1)

    def known(self, queue: str) -> QueueScan:
        """Give what is known of a queue's letters.

        :param queue: the queue
        :return: the scan, whatever its state
        """
        return self._scans.setdefault(queue, QueueScan())

    def ask(self, look: QueueOverview) -> QueueScan:
        """Give what is known of a queue's letters, and see to it that it will be known.

        :param look: the last look at the queue
        :return: the scan, whatever its state
        """
        scan = self.known(look.name)
        scan.used_at = time.monotonic()
        if scan.running is None and scan.outdated(look, _ASKED_AGE, shown=True) and scan.rested():
            scan.running = asyncio.create_task(self._run(scan, look, self._asked))
        return scan

    async def wait(self, scan: QueueScan, seconds: float) -> None:
        """Wait for a scan that has no result yet.

        :param scan: the scan
        :param seconds: for how long at most
        """
        if scan.running is not None and scan.scan is None:
            await asyncio.wait({scan.running}, timeout=seconds)

    def schedule_scans(self, looks: Mapping[str, QueueOverview]) -> None:
        """Scan the queues of which something has become, so that the overview knows how many are dead.

        :param looks: the last look at each queue
        """
        self._looks = looks
        for gone in self._scans.keys() - looks.keys():
            if (running := self._scans.pop(gone).running) is not None:
                running.cancel()
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Scan one after the other, as long as nobody asks for one."""
        while not any(scan.running for scan in self._scans.values()) and (look := self._next()) is not None:
            began, scan = time.monotonic(), self.known(look.name)
            scan.running = asyncio.create_task(self._run(scan, look, self._unasked))
            await asyncio.wait({scan.running})
            await asyncio.sleep(min(_LONGEST_PAUSE, time.monotonic() - began))

    def _next(self) -> QueueOverview | None:
        for name, look in sorted(self._looks.items(), key=lambda item: self.known(item[0]).ended_at):
            scan = self.known(name)
            if look.dead_letter_queue is None:
                continue
            if not _may_hold_letters(look, scan):
                scan.counts = _counts(LetterIndex())
            elif scan.outdated(look, _UNASKED_AGE, shown=False) and scan.rested():
                return look
        return None

    def drop_connection(self) -> None:
        """Let go of what needs the connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for scan in self._scans.values():
            scan.scan = None
            if scan.running is not None:
                scan.running.cancel()
                scan.running = None

    async def _run(self, scan: QueueScan, look: QueueOverview, turn: asyncio.Semaphore) -> None:
        try:
            async with turn, self._shared() as connection:
                await self._scan(connection, look, scan)
            scan.seen_of, scan.error = look, None
        except TransientError as error:
            scan.error = error
        except JetStreamProviderError as error:
            # It stays so until something about the queue changes.
            scan.seen_of, scan.error = look, error
        finally:
            scan.ended_at, scan.running = time.monotonic(), None
            self._forget()

    async def _scan(self, connection: Connection, look: QueueOverview, scan: QueueScan) -> None:
        began, scan.seen = time.monotonic(), 0
        declared = await discover_queue(connection, look.name)
        # Finding out what can be read ahead takes a list of all streams.
        many = look.dead_letter_queue is not None and look.dead_letter_queue["state"]["messages"] > _FEW_ENTRIES
        way = await read_ahead(connection, declared.name, declared.companion_names()) if many else connection
        looked = await Scan.begin(way, declared)
        looked.page_size = _page_size(looked)
        index = await self._what_changed(scan, looked) if scan.may_carry_over(looked) else None
        if index is None:
            index = LetterIndex()
            if not scan.full_at:
                # People see the first ones while the others are being looked at.
                scan.index, scan.scan = index, looked
            async for letters in _slices(looked, _InAndOutOfCirculation()):
                for letter in letters:
                    index.add(letter)
                scan.seen = len(index)
            scan.full_at = time.monotonic()
        scan.index, scan.scan, scan.risks = index, looked, looked.risks
        took, lost = time.monotonic() - began, looked.dismissed[Status.LOST]
        scan.counts = _counts(index, looked.reconciliation.uncertain, took, lost)

    async def _what_changed(self, scan: QueueScan, looked: Scan) -> LetterIndex | None:
        """Look only at jobs about which something was said since the last scan; nothing if these are most of them."""
        before, changed = scan.index or LetterIndex(), set(looked.reconciliation.orphans)
        for sequence, mentions in looked.index.jobs():
            if before.place_of(sequence, _last(mentions)) is None:
                changed.add(sequence)
                if len(changed) > _MOST_CHANGED:
                    return None
        found: dict[int, DeadLetterNote] = {}
        async for letters in _slices(looked, _InAndOutOfCirculation(sequences=frozenset(changed))):
            found |= {letter.sequence: note_of(letter) for letter in letters}
            scan.seen = len(found)
        index = LetterIndex()
        untold = ((sequence, ()) for sequence in sorted(changed) if sequence not in looked.index)
        for sequence, mentions in merge(looked.index.jobs(), untold, key=lambda job: job[0]):
            if (note := found.get(sequence)) is not None:
                index.note(sequence, note)
            elif sequence not in changed:
                index.take(before, sequence, _last(mentions))
        return index

    def _forget(self) -> None:
        held = sorted((scan for scan in self._scans.values() if scan.index), key=lambda scan: -scan.used_at)
        total = 0
        for scan in held:
            total += len(scan.index or ())
            if total > _MOST_LETTERS and scan is not held[0]:
                scan.index = scan.scan = None


async def _slices(looked: Scan, selection: Selection) -> AsyncGenerator[tuple[DeadLetter, ...], None]:
    worked = time.thread_time()
    async for page in looked.pages(selection):
        yield page.letters
        # The other half of the core is the API server's, whose threads share one interpreter lock.
        await asyncio.sleep(time.thread_time() - worked)
        worked = time.thread_time()


def _counts(index: LetterIndex, uncertain: int = 0, took: float = 0.0, lost: int = 0) -> LetterCounts:
    parked = index.count(Selection(parked=True))
    return LetterCounts(
        certain=len(index) - parked,
        uncertain=uncertain,
        parked=parked,
        lost=lost,
        scanned_at=datetime.now(UTC),
        scan_seconds=round(took, 3),
    )


def _may_hold_letters(look: QueueOverview, scan: QueueScan) -> bool:
    told = look.dead_letter_queue["state"]["messages"] if look.dead_letter_queue else 0
    return bool(told or dead_in(look) != 0 or (scan.counts and (scan.counts.certain or scan.counts.uncertain)))


def _last(mentions: tuple[Entry, ...]) -> int:
    return max((each.sequence for each in mentions), default=0)


def _page_size(scan: Scan) -> int:
    state = scan.snapshot.state
    heaviest = state["bytes"] // state["messages"] if state["messages"] else 0
    return max(_SMALLEST_PAGE, min(scan.page_size, _HELD_BYTES // (heaviest or 1)))
