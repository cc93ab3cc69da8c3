"""Requeues in place the letters of one redrive: all of them, or those whose copies are too large for the queue."""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import LeaseLostError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.redrive.in_place import requeue
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.status import Page
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.steps import Steps

log = logging.getLogger(__name__)


class Requeueing:
    """Requeues letters in place, consumer by consumer.

    :param report: what was done is added to it
    :param stopped: called before each consumer; true leaves its letters where they are
    :param wait_until: waits until a moment by the server's clock
    :param on_requeued: called after each consumer
    """

    def __init__(
        self,
        scan: Scan,
        steps: Steps,
        report: RedriveReport,
        stopped: Callable[[], bool],
        *,
        wait_until: Callable[[datetime], Awaitable[object]],
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
        waiting: dict[str, datetime] = {}
        unstored: list[int] = []
        async for page in self._scan.pages(selection):
            # A job that has ended, or has a new job, would be delivered once more.
            await self._steps.clean_up(page.dismissed)
            await self._steps.redrive([letter for letter in page.letters if letter.copy_sequence is not None])
            unstored += (letter.sequence for letter in page.letters if letter.source != BodySource.QUEUE)
            for name, letter in self._requeueable(page):
                waiting[name] = max(waiting.get(name, letter.ready_at), letter.ready_at)
        for name, ready_at in waiting.items():
            if self._stopped():
                self._report.cancelled = True
                break
            # A slow worker may still be working on a job.
            await self._wait_until(ready_at)
            await self._requeue(self._scan.snapshot.consumers[name], selection)
        return unstored

    async def _requeue(self, consumer: ConsumerState, selection: Selection) -> None:
        letters, entries = array("Q"), array("Q")

        async def record() -> int:
            async for page in self._scan.pages(selection):
                if handled := [job.sequence for job in page.dismissed if job.status == Status.HANDLED and job.stored]:
                    raise RedriveError(
                        f"expected no handled job in {self._scan.queue.name}, found {handled[0]}: a reset would deliver"
                        " it once more; use another protocol"
                    )
                if unfinished := self._steps.unfinished(page.letters):
                    raise RedriveError(
                        f"expected no letter that may have a new job, found {unfinished[0]}: a reset would run it once"
                        " more; redrive it by its sequence first, or use another protocol"
                    )
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
            return
        for sequence in letters:
            self._report.redriven.add(sequence, sequence)
        self._report.entries_left += await remove_entries(
            self._scan.connection, self._scan.queue, entries, self._scan.context.dead_letter_queue["config"]
        )
        await self._on_requeued()

    async def _fail_all(self, consumer: str, selection: Selection, why: str) -> None:
        async for page in self._scan.pages(selection):
            for name, letter in self._requeueable(page):
                if name == consumer:
                    self._report.add_failure(letter.sequence, why)

    def _requeueable(self, page: Page) -> Iterator[tuple[str, DeadLetter]]:
        """Return the letters that a reset would deliver again, each with the name of the consumer to reset."""
        for letter in page.letters:
            consumer = self._scan.snapshot.consumer_for(letter.subject)
            if consumer and letter.source == BodySource.QUEUE and letter.copy_sequence is None:
                yield consumer.name, letter
