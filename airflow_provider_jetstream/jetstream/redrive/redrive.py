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
    step = partial(run_step, operation, rule)
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
    await run_step(part, NextLetters(part))
    # Those that this program parked before it was killed count, too.
    scan, named, parked = await Scan.begin(connection, queue), sorted(sequences), 0
    for start in range(0, len(named), PAGE):
        jobs = await scan.classify(named[start : start + PAGE])
        parked += sum(isinstance(job, DeadLetter) and job.parked is not None for job in jobs)
    return parked


async def run_step(
    operation: Operation,
    rule: NextLetters,
    kind: Callable[[Operation, NextLetters, Scan, IntentLog], RedriveStep] | None = None,
) -> None:
    """Redrive the letters that come next, with the lease.

    :param kind: what redrives them, where this process doesn't
    """
    connection, queue, request = operation.connection, operation.queue, operation.request
    # What was scanned before another operation released the lease isn't so any more.
    async with redrive_lease(connection, queue, request, operation.stopped, operation.title) as lease:
        # The jobs of earlier steps are in flight.
        count_under_pause = request.count_under_pause and (request.order_key is None or not rule.is_listed)
        scan = await Scan.begin(
            connection, queue, unaccounted=request.selection.unaccounted, count_under_pause=count_under_pause
        )
        if lease is None or scan.audit is None:
            raise no_audit(queue.name)
        scan.audit = scan.audit.fenced(lease)
        step = (kind or RedriveStep)(operation, rule, scan, IntentLog(connection, scan.audit, lease.operation))
        await step.prepare()
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
            if step.leaves_open:
                lease.leave_open()


class RedriveStep:
    """What a redrive does while it holds the queue's lease.

    :param scan: of the queue, with the lease's audit
    :param intents: of this step
    """

    # Whether new jobs that an earlier redrive was about to store may be stored once more as the request says.
    can_repeat = True

    def __init__(self, operation: Operation, rule: NextLetters, scan: Scan, intents: IntentLog) -> None:
        self.operation = operation
        self.report = operation.report
        self.scan = scan
        self._rule = rule
        self._intents = intents
        self._claims: Claims | None = None
        self.steps: Steps
        self._requeueing: Requeueing

    async def prepare(self) -> None:
        """Choose how letters are brought back.

        :raises RedriveRequestError: the request isn't possible for this queue
        """
        connection, request, scan = self.operation.connection, self.operation.request, self.scan
        target = await read_target(connection, request, scan)
        choice = await self.choose(request, target)
        log.info("Redriving %s by %s (%s): %s", scan.queue.name, choice.protocol.value, choice.reason, choice.guarantee)
        self.report.protocol, self.report.guarantee = choice.protocol, choice.guarantee
        self.report.target = target.stream if target.is_other else None
        self.report.risks = target.risks
        self.describe()
        # No handler has the entries of letters that come back.
        self._claims = None if request.undo else Claims.of_scan(connection, scan.context)
        self.steps = Steps(
            *(connection, scan.queue, scan.snapshot, request, self._intents, self.report),
            claims=self._claims,
            rest_in_place=choice.rest_in_place,
            target=target,
            unchanged=self._unchanged,
            discards=partial(Discards, scan, request, lambda: self.operation.id) if request.discard else None,
        )
        self._requeueing = Requeueing(
            *(scan, self.steps, self.report, self.operation.stopped),
            wait_until=self._wait_until,
            on_requeued=self.operation.report_now,
        )

    async def choose(self, request: RedriveRequest, target: RedriveTarget) -> ProtocolChoice:
        """Return how letters are brought back.

        :raises RedriveRequestError: the request isn't possible for this queue
        """
        scan, api_level = self.scan, self.operation.connection.api_level
        handlers = scan.context.handler_names
        return choose_protocol(request, scan.snapshot, api_level, handlers, target=target.other_snapshot)

    def describe(self) -> None:
        """Add to the report what the scan says of the queue."""
        scan, report = self.scan, self.report
        report.uncertain, report.undeliverable = scan.uncertain, scan.undeliverable
        report.risks = tuple(dict.fromkeys((*scan.risks, *report.risks)))

    async def _unchanged(self, entries: Sequence[int]) -> Sequence[int]:
        # Of the last scan: a step may scan the queue again.
        return await self.scan.unchanged(entries)

    @property
    def leaves_open(self) -> bool:
        """Whether letters may have intents whose outcome isn't known."""
        return self._intents.open_since is not None

    async def begin(self, lease: Lease) -> None:
        """Add to the report what earlier tries did, and finish what redrives began that were cut off."""
        operation, scan, intents = self.operation, self.scan, self._intents
        await operation.begin(scan, intents.audit, self._rule.begin_step)
        self.steps.records.wave = operation.wave.number if operation.wave else None
        arguments = (operation.connection, scan.context, scan.classify, self.steps, intents, lease.open_since)
        await recover(*arguments, can_repeat=self.can_repeat)
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
            report = self.report
            done = f"{len(report.redriven)} letters were redriven and {len(report.parked)} parked before"
            if report.discarded:
                done = f"{len(report.discarded)} letters were discarded before"
            raise LeaseLostError(f"{error}; {done}") from None

    async def _run(self) -> None:
        operation, rule, report = self.operation, self._rule, self.report
        if operation.is_recorded and not rule.is_listed and not operation.request.undo:
            done = {*report.redriven, *report.parked, *report.discarded}
            await require_sequences(self.scan, operation.request.selection, done)
        if report.protocol == Protocol.IN_PLACE:
            unstored = await self._requeueing.requeue_all(Selection())
            await self._redrive_pages(Selection(sequences=frozenset(unstored)))
        else:
            await self.redrive_selected()
        await self._requeueing.requeue_rest()
        await self.steps.remove_entries()
        report.risks = tuple(dict.fromkeys((*report.risks, *self.scan.risks)))
        await operation.report_now(rule.end_step)

    async def redrive_selected(self) -> None:
        """Redrive the letters that the rule hands out."""
        await self._redrive_pages(self._rule.selection)

    async def _redrive_pages(self, selection: Selection) -> None:
        rule = self._rule
        overlaps = rule.at_once and not self._claims
        pages = rule.pages(self.scan, selection)
        async with aclosing(pages), self.steps.overlapping() if overlaps else nullcontext():
            while self._is_open and (page := await anext(pages, None)):
                await self.steps.clean_up(page.dismissed)
                left = list(page.letters)
                # Where a letter of a wave fails, another one takes its place.
                while self._is_open and (letters := rule.taken(left)):
                    await self._redrive(letters, page.at)
                    tried = {letter.sequence for letter in letters}
                    left = [letter for letter in left if letter.sequence not in tried]

    @property
    def _is_open(self) -> bool:
        return not self.report.cancelled and self._rule.remaining != 0

    async def _redrive(self, letters: Sequence[DeadLetter], proved_at: float) -> None:
        waiting, limiter, stopped = list(letters), self._rule.rate_limiter, self.operation.stopped
        while waiting:
            if stopped():
                self.report.cancelled = True
                return
            batch = waiting[: limiter.batch_size(PAGE)]
            del waiting[: len(batch)]
            await limiter.wait(len(batch))
            waited = await self._wait_until(max(letter.ready_at for letter in batch))
            if waited and stopped():
                self.report.cancelled = True
                return
            # Meanwhile a slow worker may have finished a job, or a server that crashed may have forgotten a death.
            if waited or time.monotonic() - proved_at > PROOF_SECONDS:
                batch = await self._prove_again(batch, waited=waited)
            if self._claims and batch:
                batch, waiting[:0] = await self._claim(self._claims, batch)
            limiter.consume(len(batch))
            await self.steps.redrive(batch)
            limiter.record_stored(len(batch))
            await self.operation.report_if_due()

    async def _claim(self, claims: Claims, letters: Sequence[DeadLetter]) -> tuple[list[DeadLetter], list[DeadLetter]]:
        """Return the letters that no handler can get, and those to be claimed once more after them."""
        began = time.monotonic()
        found = await claims.claim(letters)
        ready, later = found.ready, found.busy
        if not ready and not found.gone:
            log.info("%d letters are left to the handlers that have their entries", len(later))
            self.report.left_to_handlers.extend(letter.sequence for letter in later)
            later = []
        for letter in found.gone:
            self.report.add_gone(letter.sequence)
        if ready and time.monotonic() - began > PROOF_SECONDS:
            ready = await self._prove_again(ready, waited=True)
        return ready, later

    async def _prove_again(self, letters: Sequence[DeadLetter], *, waited: bool) -> list[DeadLetter]:
        ended: list[NotDead] = []
        dead: list[DeadLetter] = []
        for job in await self.scan.classify_again(letters, refresh=waited):
            if isinstance(job, DeadLetter) and self._is_selected(job):
                dead.append(job)
            elif isinstance(job, DeadLetter) or job.status == Status.STALE:
                self.report.add_failure(job.sequence, "its consumer or its stream was deleted or recreated meanwhile")
            else:
                ended.append(job)
        self._rule.dismiss(ended)
        await self.steps.clean_up(ended)
        return dead

    def _is_selected(self, letter: DeadLetter) -> bool:
        reason = letter.death.reason
        return reason != Reason.UNDELIVERABLE or reason in (self.operation.request.selection.reasons or ())

    async def _wait_until(self, moment: datetime) -> bool:
        """Wait until no worker can have a letter's job, or the redrive is stopped; return whether it waited.

        :param moment: by the server's clock
        """
        operation = self.operation
        if moment <= self.scan.snapshot.taken_at:
            return False
        clock = await ServerClock.read(operation.connection, operation.queue.name)
        if clock.seconds_until(moment) <= 0:
            return False
        with operation.waiting(moment):
            while (seconds := clock.seconds_until(moment)) > 0 and not operation.stopped():  # noqa: ASYNC110
                await asyncio.sleep(min(seconds, POLL_SECONDS))
        return True
