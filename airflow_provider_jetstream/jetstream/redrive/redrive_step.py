"""One step of a redrive, under the queue's lease: proves letters, and redrives them at the requested rate."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import LeaseLostError
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.redrive.claims import Claims
from airflow_provider_jetstream.jetstream.redrive.proved_pages import PROOF_SECONDS, ProvedPages
from airflow_provider_jetstream.jetstream.redrive.recovery import recover
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.requested_sequences import require_sequences
from airflow_provider_jetstream.jetstream.redrive.requeueing import Requeueing
from airflow_provider_jetstream.jetstream.redrive.run_progress import RunProgress
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.jetstream.redrive.supervision import Supervision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.intent import IntentLog
    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.key_order import KeyOrder
    from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice
    from airflow_provider_jetstream.jetstream.redrive.run_progress import RunProgress
    from airflow_provider_jetstream.jetstream.redrive.supervision import Supervision
    from airflow_provider_jetstream.jetstream.redrive.target import RedriveTarget

log = logging.getLogger(__name__)

# How often a wait looks whether it is to stop.
_LOOK_SECONDS = 0.5


class RedriveStep:
    """One step of a redrive: what it does while it holds the queue's lease.

    :param choice: how letters are brought back
    :param order: the order of the letters of a key, if it is kept
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        request: RedriveRequest,
        scan: Scan,
        intents: IntentLog,
        target: RedriveTarget,
        choice: ProtocolChoice,
        supervision: Supervision,
        progress: RunProgress,
        *,
        order: KeyOrder | None = None,
    ) -> None:
        report = supervision.report
        self._connection = connection
        self._queue = queue
        self._request = request
        self._scan = scan
        self._progress = progress
        self._supervision = supervision
        self._stopped = supervision.stopped
        self._order = order
        self._rate_limiter = order.rate_limiter if order else RateLimiter(request.rate)
        report.protocol, report.guarantee = choice.protocol, choice.guarantee
        report.target = target.stream if target.is_other else None
        report.uncertain, report.undeliverable = scan.uncertain, scan.undeliverable
        report.risks = (*scan.risks, *target.risks)
        self._report = report
        self._claims = Claims.of_scan(connection, scan.context)
        self._steps = Steps(
            *(connection, queue, scan.snapshot, request, intents, self._report),
            claims=self._claims,
            rest_in_place=choice.rest_in_place,
            target=target,
            gathers_entries=True,
        )

        self._requeueing = Requeueing(
            *(scan, self._steps, report, self._stopped),
            wait_until=self._wait_until,
            on_requeued=progress.report_now,
        )

    async def begin(self, lease: Lease, intents: IntentLog) -> None:
        """Add to the report what earlier tries did, and finish what redrives began that were cut off."""
        scan = self._scan
        await self._progress.begin(scan)
        self._steps.records.wave = self._supervision.wave.number if self._supervision.wave else None
        await recover(self._connection, scan.context, scan.classify, self._steps, intents, lease.open_since)
        # What they left open that still is, this redrive has recorded once more.
        lease.open_since = intents.open_since

    @property
    def _is_first(self) -> bool:
        return self._order is None or not self._order.is_listed

    async def run(self) -> None:
        """Redrive the letters.

        :raises LeaseLostError: another operation took the lease; what was done so far is done
        """
        try:
            async with self._claims or nullcontext():
                await self._run()
        except LeaseLostError as error:
            done = f"{len(self._report.redriven)} letters were redriven and {len(self._report.parked)} parked before"
            raise LeaseLostError(f"{error}; {done}") from None

    async def _run(self) -> None:
        order, selection = self._order, self._supervision.selection
        wave = self._supervision.wave
        if self._is_first and self._supervision.is_recorded and (wave is None or wave.number == 1):
            await require_sequences(self._scan, self._request.selection, {*self._report.redriven, *self._report.parked})
        if self._report.protocol == Protocol.IN_PLACE:
            selection = Selection(sequences=frozenset(await self._requeueing.requeue_all(Selection())))
        if order and self._scan.audit:
            await self._redrive_wave(order, self._scan.audit, selection)
        else:
            await self._redrive_pages(selection)
        await self._requeueing.requeue_rest()
        await self._steps.finished_entries.remove()
        self._report.risks = tuple(dict.fromkeys((*self._report.risks, *self._scan.risks)))
        complete = not self._report.cancelled and not self._report.failures
        finished = complete and not self._request.keep_open and self._order is None
        await self._progress.end(finished=finished)

    async def _redrive_pages(self, selection: Selection) -> None:
        # With a rate, a page that was proved early would only have to be proved again.
        at_once = self._request.rate is None
        pages = ProvedPages(self._scan, selection, reads_ahead=at_once)
        # A wave counts its letters before it takes more.
        overlaps = at_once and not self._claims and self._supervision.wave is None
        async with pages, self._steps.overlapping() if overlaps else nullcontext():
            while self._is_open and (proved := await pages.next()):
                await self._steps.clean_up(proved.dismissed)
                left = list(proved.letters)
                # Where a letter of a wave fails, another one takes its place.
                while self._is_open and (letters := self._supervision.of_wave(left)):
                    await self._redrive(letters, proved.at)
                    tried = {letter.sequence for letter in letters}
                    left = [letter for letter in left if letter.sequence not in tried]

    @property
    def _is_open(self) -> bool:
        return not self._report.cancelled and self._supervision.remaining != 0

    async def _redrive_wave(self, order: KeyOrder, audit: AuditLog, selection: Selection) -> None:
        """Redrive the first letter of each key, as far as the jobs before have completed."""
        if order.is_listed:
            await self._scan.named_unaccounted(selection)
        else:
            async for page in self._scan.pages(selection):
                await self._scan.record_handled()
                await self._steps.clean_up(page.dismissed)
                await order.add(page.letters, audit)
            order.end_listing()
        wave = await order.next_wave(audit)
        for start in range(0, len(wave), PAGE):
            # Not by a selection: these letters were selected, but the request doesn't name them.
            results, proved_at = await self._scan.classify(wave[start : start + PAGE]), time.monotonic()
            letters = [job for job in results if isinstance(job, DeadLetter)]
            dismissed = [job for job in results if isinstance(job, NotDead)]
            order.dismiss(dismissed)
            await self._steps.clean_up(dismissed)
            selected = [letter for letter in letters if (letter.parked is not None) == selection.parked]
            await self._redrive(selected, proved_at)

    async def _redrive(self, letters: Sequence[DeadLetter], proved_at: float) -> None:
        waiting = list(letters)
        while waiting:
            if self._stopped():
                self._report.cancelled = True
                return
            batch = waiting[: self._rate_limiter.batch_size(PAGE)]
            del waiting[: len(batch)]
            await self._rate_limiter.wait(len(batch))
            waited = await self._wait_until(max(letter.ready_at for letter in batch))
            if waited and self._stopped():
                self._report.cancelled = True
                return
            # Meanwhile a slow worker may have finished a job, or a server that crashed may have forgotten a death.
            if waited or time.monotonic() - proved_at > PROOF_SECONDS:
                batch = await self._prove_again(batch, waited=waited)
            if self._claims and batch:
                batch, waiting[:0] = await self._claim(self._claims, batch)
            self._rate_limiter.consume(len(batch))
            await self._steps.redrive(batch)
            self._rate_limiter.record_stored(len(batch))
            await self._progress.report_if_due()

    async def _claim(self, claims: Claims, letters: Sequence[DeadLetter]) -> tuple[list[DeadLetter], list[DeadLetter]]:
        """Return the letters that no handler can get, and those to be claimed once more after them."""
        began = time.monotonic()
        found = await claims.claim(letters)
        ready, later = found.ready, found.busy
        if not ready and not found.gone:
            log.info("%d letters are left to the handlers that have their entries", len(later))
            self._report.left_to_handlers.extend(letter.sequence for letter in later)
            later = []
        for letter in found.gone:
            self._report.add_gone(letter.sequence)
        if ready and time.monotonic() - began > PROOF_SECONDS:
            ready = await self._prove_again(ready, waited=True)
        return ready, later

    async def _prove_again(self, letters: Sequence[DeadLetter], *, waited: bool) -> list[DeadLetter]:
        ended: list[NotDead] = []
        dead: list[DeadLetter] = []
        for job in await self._scan.classify_again(letters, refresh=waited):
            if isinstance(job, DeadLetter) and self._is_selected(job):
                dead.append(job)
            elif isinstance(job, DeadLetter) or job.status == Status.STALE:
                self._report.add_failure(job.sequence, "its consumer or its stream was deleted or recreated meanwhile")
            else:
                ended.append(job)
        if self._order:
            self._order.dismiss(ended)
        await self._steps.clean_up(ended)
        return dead

    def _is_selected(self, letter: DeadLetter) -> bool:
        reason = letter.death.reason
        return reason != Reason.UNDELIVERABLE or reason in (self._request.selection.reasons or ())

    async def _wait_until(self, moment: datetime) -> bool:
        """Wait until no worker can have a letter's job, or the redrive is stopped; return whether it waited.

        :param moment: by the server's clock
        """
        if moment <= self._scan.snapshot.taken_at:
            return False
        clock = await ServerClock.read(self._connection, self._queue.name)
        if clock.seconds_until(moment) <= 0:
            return False
        with self._progress.waiting(moment):
            while (seconds := clock.seconds_until(moment)) > 0 and not self._stopped():  # noqa: ASYNC110
                await asyncio.sleep(min(seconds, _LOOK_SECONDS))
        return True
