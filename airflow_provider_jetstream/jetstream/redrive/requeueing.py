"""Requeues in place the letters of one redrive: all of them, or those whose copies are too large for the queue."""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import LeaseLostError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.redrive.in_place import requeue
from airflow_provider_jetstream.jetstream.redrive.proved_pages import ProvedPages
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import Page
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.redrive.proved_pages import ProvedPage
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.steps import Steps

log = logging.getLogger(__name__)


class Requeueing:
    """Requeues letters in place, consumer by consumer.

    :param report: what was done is added to it
    :param stopped: called before each consumer; true leaves its letters where they are
    :param wait_until: waits until a moment by the server's clock, or until it is stopped
    :param on_requeued: called after each consumer
    """

    def __init__(
        self,
        scan: Scan,
        steps: Steps,
        report: RedriveReport,
        stopped: Callable[[], bool],
        *,
        wait_until: Callable[[datetime], Awaitable[bool]],
        on_requeued: Callable[[], Awaitable[None]],
    ) -> None:
        self._scan = scan
        self._steps = steps
        self._report = report
        self._stopped = stopped
        self._wait_until = wait_until
        self._on_requeued = on_requeued

    async def requeue_rest(self) -> None:
        """Requeue in place the letters whose copies are too large for the queue."""
        rest = dict(self._steps.without_room)
        # A reset would run the job of a letter once more whose copy is stored.
        if rest and not self._report.failures and not self._report.cancelled:
            log.info(
                "%d copies are too large for %s: requeueing these letters in place", len(rest), self._scan.queue.name
            )
            unstored = set(await self.requeue_all(Selection(sequences=frozenset(rest))))
            rest = {sequence: why for sequence, why in rest.items() if sequence in unstored}
        for sequence, why in rest.items():
            self._report.add_failure(sequence, why)

    async def requeue_all(self, selection: Selection) -> list[int]:
        """Requeue stored letters in place; return the sequences of the others, which copies bring back."""
        unstored: set[int] = set()
        consumers = self._with_letters()
        for consumer, ready_at in consumers:
            # A slow worker may still be working on a job.
            if self._stopped() or (await self._wait_until(ready_at) and self._stopped()):
                self._report.cancelled = True
                break
            unstored |= await self._requeue(consumer, selection)
        if not consumers:
            async with ProvedPages(self._scan, selection, reads_ahead=True) as pages:
                while page := await pages.next():
                    unstored |= await self._prepare(page)
        return sorted(unstored)

    def _with_letters(self) -> list[tuple[ConsumerState, datetime]]:
        """Return the consumers that may have stored letters, and when no worker can be working on one any more."""
        died_at = self._scan.index.last_recorded()
        found: list[tuple[ConsumerState, datetime]] = []
        for name, consumer in self._scan.snapshot.consumers.items():
            if consumer.dead or (consumer.dead is None and name in died_at):
                # A letter without an entry died at the latest when the last delivery ended.
                last = min(consumer.last_active + consumer.max_ack_wait, consumer.taken_at)
                found.append((consumer, max(last, died_at.get(name, last)) + consumer.max_ack_wait))
        return found

    async def _prepare(self, page: ProvedPage) -> set[int]:
        """Finish the letters of a page that a reset must not deliver; return the sequences of those that none delivers.

        A job that has ended, or has a new job, would be delivered once more.
        """
        await self._steps.clean_up(page.dismissed)
        await self._steps.redrive([letter for letter in page.letters if letter.copy_sequence is not None])
        return {
            letter.sequence for letter in page.letters if letter.source != BodySource.QUEUE or letter.consumer_absent
        }

    async def _requeue(self, consumer: ConsumerState, selection: Selection) -> set[int]:
        letters, entries, unstored = array("Q"), array("Q"), set[int]()

        async def record() -> int:
            scan = await self._scan_again()
            if uncertain := scan.reconciliation.disputed:
                raise RedriveError(
                    f"expected each job without an entry to be dead, found {len(uncertain)} that may be in a worker's"
                    " hands: a reset would deliver them once more; use another protocol"
                )
            # All of them, since a reset delivers all of them.
            async with ProvedPages(scan, Selection(), reads_ahead=True) as pages:
                while page := await pages.next():
                    unstored.update(await self._prepare(page))
                    self._require_resettable(page)
                    stored = [letter for name, letter in self._requeueable(page) if name == consumer.name]
                    letters.extend(letter.sequence for letter in stored)
                    entries.extend(entry for letter in stored for entry in letter.entries)
                    await self._steps.records.write_requeued(stored)
            if self._scan.audit:
                await self._scan.audit.require_lease()
            return letters[0] if letters else 0

        try:
            require_lease = self._scan.audit.require_lease if self._scan.audit else None
            await requeue(self._scan.connection, self._scan.queue.name, consumer, record, require_lease)
        except LeaseLostError:
            raise
        except (RedriveError, TransientError) as error:
            await self._fail_all(consumer.name, selection, str(error))
            return unstored
        for sequence in letters:
            self._report.redriven.add(sequence, sequence)
        self._report.entries_left += await remove_entries(
            self._scan.connection, self._scan.queue, entries, self._scan.context.dead_letter_queue["config"]
        )
        await self._on_requeued()
        return unstored

    async def _scan_again(self) -> Scan:
        """Read the queue once more while nothing moves: jobs that were in flight until then may have died."""
        scan = await Scan.begin(self._scan.connection, self._scan.queue, since=self._scan)
        # The lease fences what is recorded.
        scan.audit = self._scan.audit
        return scan

    def _require_resettable(self, page: ProvedPage) -> None:
        """Raise where a reset would deliver a job that is handled, or one that may have a new job.

        :raises RedriveError: the page has such a job
        """
        queue = self._scan.queue.name
        if handled := [job.sequence for job in page.dismissed if job.status == Status.HANDLED and job.stored]:
            raise RedriveError(
                f"expected no handled job in {queue}, found {handled[0]}: a reset would deliver it once more; use"
                " another protocol"
            )
        left = [letter for letter in page.letters if letter.copy_sequence is None or not self._is_redriven(letter)]
        if unfinished := self._steps.unfinished(left):
            raise RedriveError(
                f"expected no letter that may have a new job, found {unfinished[0]}: a reset would run it once more;"
                " redrive it by its sequence first, or use another protocol"
            )

    def _is_redriven(self, letter: DeadLetter) -> bool:
        return letter.sequence in self._report.redriven

    async def _fail_all(self, consumer: str, selection: Selection, why: str) -> None:
        async for page in self._scan.pages(selection):
            for name, letter in self._requeueable(page):
                if name == consumer:
                    self._report.add_failure(letter.sequence, why)

    def _requeueable(self, page: Page | ProvedPage) -> Iterator[tuple[str, DeadLetter]]:
        """Return the letters that a reset would deliver again, each with the name of the consumer to reset."""
        for letter in page.letters:
            consumer = self._scan.snapshot.consumer_for(letter.subject)
            if consumer and letter.source == BodySource.QUEUE and letter.copy_sequence is None:
                yield consumer.name, letter
