"""One redrive: the loop that takes the lease, checks, recovers what was begun, and redrives batch by batch.

A step is what it does while it holds the queue's lease: it scans the queue, finishes what redrives began that were cut
off, and redrives the letters that the rule hands it (:mod:`~.next_letters`); the next ones are proved meanwhile.
Between steps the rule awaits jobs and people without the lease, and says whether another step comes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.intent import IntentLog, no_audit
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, LeaseHeldError, LeaseLostError
from airflow_provider_jetstream.jetstream.redrive.claims import Claims
from airflow_provider_jetstream.jetstream.redrive.discard import Discards, ReturningLetters
from airflow_provider_jetstream.jetstream.redrive.in_place import Requeueing
from airflow_provider_jetstream.jetstream.redrive.key_order import KeyOrder, check_order
from airflow_provider_jetstream.jetstream.redrive.next_letters import PROOF_SECONDS, NextLetters
from airflow_provider_jetstream.jetstream.redrive.operation import POLL_SECONDS, Operation, redrive_lease
from airflow_provider_jetstream.jetstream.redrive.protocol import (
    choose_protocol,
    own_request,
    read_target,
    require_sequences,
)
from airflow_provider_jetstream.jetstream.redrive.recovery import recover
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.jetstream.redrive.waves import Waves

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.next_letters import WaveWait
    from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, RedriveTarget

log = logging.getLogger(__name__)


async def redrive_dead_letters(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest | None = None,
    *,
    progress: Callable[[RedriveReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> RedriveReport:
    """Bring dead letters back as jobs with fresh deliveries; or park or discard them, or undo a discard.

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
    return (await advance_redrive(connection, queue, request, progress=progress, stopped=stopped))[0]


async def advance_redrive(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest | None = None,
    *,
    progress: Callable[[RedriveReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    patience: float = math.inf,
    ended: bool = False,
) -> tuple[RedriveReport, WaveWait | None]:
    """Do as :func:`redrive_dead_letters` does, but await jobs and people no longer than a caller has the patience for.

    :param patience: for how many seconds they are awaited at one go
    :param ended: whether the jobs of the wave that is awaited are known to have ended
    :return: also the wave whose jobs are to be awaited; a call with the same ``run`` goes on then. ``None`` where there
        is none: the report's state says whether the redrive is over, paused or at a gate
    """
    request = own_request(request or RedriveRequest(), queue)
    operation = Operation(connection, queue, request, RedriveReport(), progress=progress, stopped=stopped)
    rule = rule_of(operation)
    step = partial(_step, operation, rule)
    return operation.report, await run_redrive(operation, rule, step, patience, ended=ended)


async def advance_gates(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest,
    *,
    stopped: Callable[[], bool] = lambda: False,
    patience: float = math.inf,
    ended: bool = False,
) -> tuple[RedriveReport, WaveWait | None, bool]:
    """Do as :func:`advance_redrive` does, up to where letters are to be redriven, which another program does.

    :param request: with waves, and with a ``run`` under which that program goes on with the same redrive
    :return: also whether letters are to be redriven now
    """
    operation = Operation(connection, queue, own_request(request, queue), RedriveReport(), stopped=stopped)
    wave = await run_redrive(operation, rule_of(operation), None, patience, ended=ended)
    return operation.report, wave, operation.letters_are_due


def rule_of(operation: Operation) -> NextLetters:
    """Return what comes next in a redrive.

    :raises RedriveRequestError: nothing would say when a job has ended, which the order of keys needs
    """
    request = operation.request
    check_order(request, operation.queue)
    if request.waves:
        return Waves(operation, partial(_park, operation))
    if request.undo:
        return ReturningLetters(operation)
    return NextLetters(operation) if request.order_key is None else KeyOrder(operation)


async def run_redrive(
    operation: Operation,
    rule: NextLetters,
    step: Callable[[], Awaitable[None]] | None,
    patience: float = math.inf,
    *,
    ended: bool = False,
) -> WaveWait | None:
    """Run a redrive step by step until it is over: await jobs and people in between, and obey these.

    :param step: begins the redrive, or goes on with it, with the lease. ``None`` where another program does that, which
        is left to it with ``letters_are_due`` set
    :param patience: for how many seconds jobs and people are awaited at one go
    :param ended: whether the jobs of the wave that is awaited are known to have ended
    :return: the wave whose jobs are to be awaited; ``None`` where there is none
    """
    rule.ended = ended
    async with operation, rule:
        await operation.open()
        while True:
            if operation.may_redrive:
                if step is None:
                    operation.letters_are_due = True
                    return None
                try:
                    await step()
                except LeaseHeldError:
                    # Whoever pauses or aborts a redrive ends its wait for the lease, not its program.
                    if operation.caller_stops or not operation.stopped():
                        raise
                    operation.report.cancelled = True
                rule.is_put_off = not operation.may_redrive
            if not await rule.go_on(patience):
                break
            operation.may_redrive = True
        rule.close()
        return await rule.wave_wait()


async def _park(operation: Operation, sequences: Collection[int], why: str) -> int:
    """Park letters of a redrive's wave that died again; return how many of them are parked."""
    connection, queue, request = operation.connection, operation.queue, operation.request
    selection = Selection(sequences=frozenset(sequences))
    parking = RedriveRequest(selection, max_redrives=0, why=why, who=request.who, lease_timeout=request.lease_timeout)
    part = Operation(
        *(connection, queue, parking, RedriveReport()), stopped=lambda: operation.caller_stops, is_recorded=False
    )
    await _step(part, NextLetters(part))
    # Those that this program parked before it was killed count, too.
    scan, named, parked = await Scan.begin(connection, queue), sorted(sequences), 0
    for start in range(0, len(named), PAGE):
        jobs = await scan.classify(named[start : start + PAGE])
        parked += sum(isinstance(job, DeadLetter) and job.parked is not None for job in jobs)
    return parked


async def _step(operation: Operation, rule: NextLetters) -> None:
    """Redrive the letters that come next, with the lease."""
    connection, queue, request = operation.connection, operation.queue, operation.request
    # What was scanned before another operation released the lease isn't so any more.
    async with redrive_lease(connection, queue, request, operation.stopped) as lease:
        # The jobs of earlier steps are in flight.
        count_under_pause = request.count_under_pause and (request.order_key is None or not rule.is_listed)
        scan = await Scan.begin(
            connection, queue, unaccounted=request.selection.unaccounted, count_under_pause=count_under_pause
        )
        if lease is None or scan.audit is None:
            raise no_audit(queue.name)
        scan.audit = scan.audit.fenced(lease)
        target = await read_target(connection, request, scan)
        choice = choose_protocol(
            *(request, scan.snapshot, connection.api_level, scan.context.handler_names), target=target.other_snapshot
        )
        log.info("Redriving %s by %s (%s): %s", queue.name, choice.protocol.value, choice.reason, choice.guarantee)
        intents = IntentLog(connection, scan.audit, lease.operation)
        step = _Step(operation, rule, scan, intents, target, choice)
        try:
            await step.begin(lease)
            if operation.may_redrive:
                await step.run()
        except LeaseLostError:
            raise
        except JetStreamProviderError as error:
            await operation.fail(error)
            raise
        finally:
            if intents.open_since is not None:
                lease.leave_open()


class _Step:
    """What a redrive does while it holds the queue's lease.

    :param choice: how letters are brought back
    """

    def __init__(
        self,
        operation: Operation,
        rule: NextLetters,
        scan: Scan,
        intents: IntentLog,
        target: RedriveTarget,
        choice: ProtocolChoice,
    ) -> None:
        connection, queue, report = operation.connection, operation.queue, operation.report
        self._operation = operation
        self._rule = rule
        self._scan = scan
        self._intents = intents
        self._report = report
        report.protocol, report.guarantee = choice.protocol, choice.guarantee
        report.target = target.stream if target.is_other else None
        report.uncertain, report.undeliverable = scan.uncertain, scan.undeliverable
        report.risks = (*scan.risks, *target.risks)
        request = operation.request
        # No handler has the entries of letters that come back.
        self._claims = None if request.undo else Claims.of_scan(connection, scan.context)
        self._steps = Steps(
            *(connection, queue, scan.snapshot, request, intents, report),
            claims=self._claims,
            rest_in_place=choice.rest_in_place,
            target=target,
            unchanged=scan.unchanged,
            discards=partial(Discards, scan, request, lambda: operation.id) if request.discard else None,
        )
        self._requeueing = Requeueing(
            *(scan, self._steps, report, operation.stopped),
            wait_until=self._wait_until,
            on_requeued=operation.report_now,
        )

    async def begin(self, lease: Lease) -> None:
        """Add to the report what earlier tries did, and finish what redrives began that were cut off."""
        operation, scan, intents = self._operation, self._scan, self._intents
        await operation.begin(scan, intents.audit, self._rule.begin_step)
        self._steps.records.wave = operation.wave.number if operation.wave else None
        await recover(operation.connection, scan.context, scan.classify, self._steps, intents, lease.open_since)
        # What they left open that still is, this redrive has recorded once more.
        lease.open_since = intents.open_since

    async def run(self) -> None:
        """Redrive the letters.

        :raises LeaseLostError: another operation took the lease; what was done so far is done
        """
        try:
            async with self._claims or nullcontext():
                await self._run()
        except LeaseLostError as error:
            report = self._report
            done = f"{len(report.redriven)} letters were redriven and {len(report.parked)} parked before"
            if report.discarded:
                done = f"{len(report.discarded)} letters were discarded before"
            raise LeaseLostError(f"{error}; {done}") from None

    async def _run(self) -> None:
        operation, rule, report = self._operation, self._rule, self._report
        if operation.is_recorded and not rule.is_listed and not operation.request.undo:
            done = {*report.redriven, *report.parked, *report.discarded}
            await require_sequences(self._scan, operation.request.selection, done)
        selection = rule.selection
        if report.protocol == Protocol.IN_PLACE:
            selection = Selection(sequences=frozenset(await self._requeueing.requeue_all(Selection())))
        overlaps = rule.at_once and not self._claims
        pages = rule.pages(self._scan, selection)
        async with aclosing(pages), self._steps.overlapping() if overlaps else nullcontext():
            while self._is_open and (page := await anext(pages, None)):
                await self._steps.clean_up(page.dismissed)
                left = list(page.letters)
                # Where a letter of a wave fails, another one takes its place.
                while self._is_open and (letters := rule.taken(left)):
                    await self._redrive(letters, page.at)
                    tried = {letter.sequence for letter in letters}
                    left = [letter for letter in left if letter.sequence not in tried]
        await self._requeueing.requeue_rest()
        await self._steps.remove_entries()
        report.risks = tuple(dict.fromkeys((*report.risks, *self._scan.risks)))
        await operation.report_now(rule.end_step)

    @property
    def _is_open(self) -> bool:
        return not self._report.cancelled and self._rule.remaining != 0

    async def _redrive(self, letters: Sequence[DeadLetter], proved_at: float) -> None:
        waiting, limiter, stopped = list(letters), self._rule.rate_limiter, self._operation.stopped
        while waiting:
            if stopped():
                self._report.cancelled = True
                return
            batch = waiting[: limiter.batch_size(PAGE)]
            del waiting[: len(batch)]
            await limiter.wait(len(batch))
            waited = await self._wait_until(max(letter.ready_at for letter in batch))
            if waited and stopped():
                self._report.cancelled = True
                return
            # Meanwhile a slow worker may have finished a job, or a server that crashed may have forgotten a death.
            if waited or time.monotonic() - proved_at > PROOF_SECONDS:
                batch = await self._prove_again(batch, waited=waited)
            if self._claims and batch:
                batch, waiting[:0] = await self._claim(self._claims, batch)
            limiter.consume(len(batch))
            await self._steps.redrive(batch)
            limiter.record_stored(len(batch))
            await self._operation.report_if_due()

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
        self._rule.dismiss(ended)
        await self._steps.clean_up(ended)
        return dead

    def _is_selected(self, letter: DeadLetter) -> bool:
        reason = letter.death.reason
        return reason != Reason.UNDELIVERABLE or reason in (self._operation.request.selection.reasons or ())

    async def _wait_until(self, moment: datetime) -> bool:
        """Wait until no worker can have a letter's job, or the redrive is stopped; return whether it waited.

        :param moment: by the server's clock
        """
        operation = self._operation
        if moment <= self._scan.snapshot.taken_at:
            return False
        clock = await ServerClock.read(operation.connection, operation.queue.name)
        if clock.seconds_until(moment) <= 0:
            return False
        with operation.waiting(moment):
            while (seconds := clock.seconds_until(moment)) > 0 and not operation.stopped():  # noqa: ASYNC110
                await asyncio.sleep(min(seconds, POLL_SECONDS))
        return True
