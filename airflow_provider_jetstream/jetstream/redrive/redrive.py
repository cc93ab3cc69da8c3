"""One redrive from the scan to the report: which letters, when and at what rate, with progress and cancellation."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.intent import IntentLog, no_audit
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, LeaseHeldError, LeaseLostError
from airflow_provider_jetstream.jetstream.redrive.gates import Gates
from airflow_provider_jetstream.jetstream.redrive.key_order import KeyOrder, check_order
from airflow_provider_jetstream.jetstream.redrive.protocol import choose_protocol
from airflow_provider_jetstream.jetstream.redrive.redrive_lease import redrive_lease
from airflow_provider_jetstream.jetstream.redrive.redrive_step import RedriveStep
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.run_progress import RunProgress, finish_run
from airflow_provider_jetstream.jetstream.redrive.supervision import Supervision
from airflow_provider_jetstream.jetstream.redrive.target import own_request, read_target

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.wave_outcome import WaveWait

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
    request, report = own_request(request or RedriveRequest(), queue), RedriveReport()
    check_order(request, queue)
    supervision = Supervision(connection, queue, request, report, stopped)
    step = partial(_step, connection, queue, supervision, progress)
    return report, await supervise(connection, supervision, step, stopped, patience, ended=ended)


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
    request, report = own_request(request, queue), RedriveReport()
    supervision = Supervision(connection, queue, request, report, stopped)
    wave = await supervise(connection, supervision, None, stopped, patience, ended=ended)
    return report, wave, supervision.letters_are_due


async def supervise(
    connection: Connection,
    supervision: Supervision,
    step: Callable[[], Awaitable[None]] | None,
    stopped: Callable[[], bool],
    patience: float = math.inf,
    *,
    ended: bool = False,
) -> WaveWait | None:
    """Run a redrive step by step until it is over: await jobs and people in between, and obey these.

    :param step: begins the redrive, or goes on with it, with the lease: the letters of a wave, or all of them.
        ``None`` where another program does that, which is left to it with ``letters_are_due`` set
    :param stopped: called a few times a second
    :param patience: for how many seconds jobs and people are awaited at one go
    :param ended: whether the jobs of the wave that is awaited are known to have ended
    :return: the wave whose jobs are to be awaited; ``None`` where there is none
    """
    queue = supervision.queue
    async with supervision:
        park = partial(_park, connection, queue, supervision.request, stopped)
        gates = Gates(connection, supervision, park, patience, ended=ended)
        await supervision.open()
        while True:
            if supervision.may_redrive:
                if step is None:
                    supervision.letters_are_due = True
                    return None
                try:
                    await step()
                except LeaseHeldError:
                    # Whoever pauses or aborts a redrive ends its wait for the lease, not its program.
                    if supervision.caller_stops or not supervision.stopped():
                        raise
                    supervision.report.cancelled = True
            if not await gates.go_on():
                break
            supervision.may_redrive = True
        return await supervision.wave_wait()


async def _step(
    connection: Connection,
    queue: WorkQueue,
    supervision: Supervision,
    progress: Callable[[RedriveReport], None],
) -> None:
    """Redrive the letters of a wave, or all of them where there are no waves."""
    request, report = supervision.request, supervision.report
    if request.order_key is None:
        await _redrive_once(connection, queue, supervision, progress)
        return
    async with KeyOrder(connection, queue, request, supervision.stopped) as order:
        while True:
            await _redrive_once(connection, queue, supervision, progress, order)
            order.take_results(report)
            if report.cancelled or not await order.wait():
                break
        order.close(report)
    if not (request.keep_open or report.cancelled):
        await finish_run(connection, queue, str(request.run), state=supervision.final_state)
        report.state, report.reason = supervision.final_state, supervision.final_reason


async def _park(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest,
    stopped: Callable[[], bool],
    sequences: Collection[int],
    why: str,
) -> int:
    """Park letters of a wave that died again; return how many of them are parked."""
    selection = Selection(sequences=frozenset(sequences))
    parking = RedriveRequest(selection, max_redrives=0, why=why, who=request.who, lease_timeout=request.lease_timeout)
    report = RedriveReport()
    async with Supervision(connection, queue, parking, report, stopped, is_recorded=False) as supervision:
        await _redrive_once(connection, queue, supervision, lambda _: None)
    # Those that this program parked before it was killed count, too.
    scan, named, parked = await Scan.begin(connection, queue), sorted(sequences), 0
    for start in range(0, len(named), PAGE):
        jobs = await scan.classify(named[start : start + PAGE])
        parked += sum(isinstance(job, DeadLetter) and job.parked is not None for job in jobs)
    return parked


async def _redrive_once(
    connection: Connection,
    queue: WorkQueue,
    supervision: Supervision,
    progress: Callable[[RedriveReport], None],
    order: KeyOrder | None = None,
) -> None:
    request, stopped = supervision.request, supervision.stopped
    # What was scanned before another operation released the lease isn't so any more.
    async with redrive_lease(connection, queue, request, stopped) as lease:
        # The jobs of earlier waves are in flight.
        census = request.census and (order is None or not order.is_listed)
        scan = await Scan.begin(connection, queue, unaccounted=request.selection.unaccounted, census=census)
        if lease is None or scan.audit is None:
            raise no_audit(queue.name)
        scan.audit = scan.audit.fenced(lease)
        target = await read_target(connection, request, scan)
        choice = choose_protocol(
            *(request, scan.snapshot, connection.api_level, scan.context.handler_names), target=target.other_snapshot
        )
        log.info("Redriving %s by %s (%s): %s", queue.name, choice.protocol.value, choice.reason, choice.guarantee)
        intents = IntentLog(connection, scan.audit, lease.operation)
        running = RunProgress(scan.audit, supervision, progress)
        redrive = RedriveStep(
            *(connection, queue, request, scan, intents, target, choice, supervision, running), order=order
        )
        try:
            await redrive.begin(lease, intents)
            if supervision.may_redrive:
                await redrive.run()
        except LeaseLostError:
            raise
        except JetStreamProviderError as error:
            await supervision.fail(error)
            raise
        finally:
            if intents.open_since is not None:
                lease.leave_open()
