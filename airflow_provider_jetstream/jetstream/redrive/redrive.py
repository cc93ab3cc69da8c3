"""One redrive from the scan to the report: which letters, when and at what rate, with progress and cancellation."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.intent import IntentLog, no_audit
from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import LeaseLostError
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.redrive.claims import Claims
from airflow_provider_jetstream.jetstream.redrive.key_order import KeyOrder, check_order
from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, choose_protocol
from airflow_provider_jetstream.jetstream.redrive.proved_pages import PROOF_SECONDS, ProvedPages
from airflow_provider_jetstream.jetstream.redrive.recovery import recover
from airflow_provider_jetstream.jetstream.redrive.redrive_lease import redrive_lease
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.requested_sequences import require_sequences
from airflow_provider_jetstream.jetstream.redrive.requeueing import Requeueing
from airflow_provider_jetstream.jetstream.redrive.run_progress import RunProgress, finish_run
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.jetstream.redrive.target import RedriveTarget, own_request, read_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)


async def redrive_dead_letters(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest | None = None,
    *,
    progress: Callable[[RedriveReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> RedriveReport:
    """Bring dead letters back as jobs with fresh deliveries.

    Waits until no worker can be working on a letter any more: at most the consumer's ack wait after the letter's death.
    Waits before that until nobody else changes the queue's letters: it holds the queue's lease until it returns. With
    an ``order_key`` it doesn't hold the lease while it waits for jobs to complete.

    :param queue: the work queue, with its dead letter queue
    :param request: which letters, and how; all in circulation, unchanged, where absent
    :param progress: called every five seconds
    :param stopped: called before each batch, and while jobs are awaited; true leaves the remaining letters where they
        are
    :return: the report, which includes letters that failed; nothing is raised for them
    :raises RedriveRequestError: the request isn't possible for this queue; nothing was done
    :raises DeadLetterGoneError: a requested sequence is no dead letter (any more); nothing was done
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises LeaseHeldError: another operation changes the queue's letters; nothing was done
    :raises LeaseLostError: another operation took the lease, since this one was cut off from the server for too long;
        what it did so far is done
    """
    request, report = own_request(request or RedriveRequest(), queue), RedriveReport()
    if request.order_key is None:
        await _redrive_once(connection, queue, request, report, progress, stopped)
        return report
    check_order(request, queue)
    async with KeyOrder(connection, queue, request, stopped) as order:
        while True:
            await _redrive_once(connection, queue, request, report, progress, stopped, order)
            order.take_results(report)
            if report.cancelled or not await order.wait():
                break
        order.close(report)
    if request.run and not (request.keep_open or report.cancelled or report.failures):
        await finish_run(connection, queue, request.run)
    return report


async def _redrive_once(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest,
    report: RedriveReport,
    progress: Callable[[RedriveReport], None],
    stopped: Callable[[], bool],
    order: KeyOrder | None = None,
) -> None:
    # What was scanned before another operation released the lease isn't so any more.
    async with redrive_lease(connection, queue, request, stopped) as lease:
        # The jobs of earlier waves are in flight.
        census = request.census and (order is None or not order.is_listed)
        scan = await Scan.begin(connection, queue, vanished=request.selection.vanished, census=census)
        if lease is None or scan.audit is None:
            raise no_audit(queue.name)
        scan.audit = scan.audit.fenced(lease)
        target = await read_target(connection, request, scan)
        choice = choose_protocol(
            *(request, scan.snapshot, connection.api_level, scan.context.handler_names), target=target.other_snapshot
        )
        log.info("Redriving %s by %s (%s): %s", queue.name, choice.protocol.value, choice.reason, choice.guarantee)
        await scan.account()
        intents = IntentLog(connection, scan.audit, lease.operation)
        running = RunProgress(scan.audit, queue.name, request, report, progress)
        redrive = _Redrive(
            *(connection, queue, request, scan, intents, target, choice, report, running, stopped), order=order
        )
        await redrive.begin(lease, intents)
        await redrive.run()
        if intents.open_since is not None:
            lease.leave_open()


class _Redrive:
    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        request: RedriveRequest,
        scan: Scan,
        intents: IntentLog,
        target: RedriveTarget,
        choice: ProtocolChoice,
        report: RedriveReport,
        progress: RunProgress,
        stopped: Callable[[], bool],
        *,
        order: KeyOrder | None = None,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._request = request
        self._scan = scan
        self._progress = progress
        self._stopped = stopped
        self._order = order
        self._rate_limiter = order.rate_limiter if order else RateLimiter(request.rate)
        report.protocol, report.guarantee = choice.protocol, choice.guarantee
        report.target = target.stream if target.is_other else None
        report.uncertain, report.undeliverable = scan.uncertain, scan.undeliverable
        report.risks = (*scan.risks, *target.risks)
        self._report = report
        self._claims = Claims.of_scan(connection, scan.context)
        self._steps = Steps(
            *(connection, queue, scan.snapshot, request, choice.protocol, intents, self._report),
            claims=self._claims,
            rest_in_place=choice.rest_in_place,
            target=target,
            gathers_entries=True,
        )

        self._requeueing = Requeueing(
            *(scan, self._steps, report, stopped),
            wait_until=lambda moment: _wait_until(scan, moment),
            on_requeued=progress.report_now,
        )

    async def begin(self, lease: Lease, intents: IntentLog) -> None:
        """Add to the report what earlier tries did, and finish what redrives began that were cut off."""
        scan = self._scan
        await self._progress.begin(resumes=self._is_first)
        await recover(self._connection, scan.context, scan.classify, self._steps, intents, lease.open_since)
        # What they left open that still is, this redrive has recorded once more.
        lease.open_since = intents.open_since

    @property
    def _is_first(self) -> bool:
        return self._order is None or not self._order.is_listed

    async def run(self) -> None:
        try:
            async with self._claims or nullcontext():
                await self._run()
        except LeaseLostError as error:
            done = f"{len(self._report.redriven)} letters were redriven and {len(self._report.parked)} parked before"
            raise LeaseLostError(f"{error}; {done}") from None

    async def _run(self) -> None:
        order, selection = self._order, self._request.selection
        if self._is_first:
            await require_sequences(self._scan, selection, {*self._report.redriven, *self._report.parked})
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
        await self._progress.report_now(finished=finished)

    async def _redrive_pages(self, selection: Selection) -> None:
        # With a rate, a page that was proved early would only have to be proved again.
        pages = ProvedPages(self._scan, selection, reads_ahead=self._request.rate is None)
        async with pages:
            while not self._report.cancelled and (proved := await pages.next()):
                await self._steps.clean_up(proved.dismissed)
                await self._redrive(proved.letters, proved.at)

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
            waited = await _wait_until(self._scan, max(letter.ready_at for letter in batch))
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


async def _wait_until(scan: Scan, moment: datetime) -> bool:
    """Wait until a moment by the server's clock; return whether it was in the future."""
    if moment <= scan.snapshot.taken_at:
        return False
    clock = await ServerClock.read(scan.connection, scan.queue.name)
    if (seconds := clock.seconds_until(moment)) > 0:
        await asyncio.sleep(seconds)
    return seconds > 0
