"""What comes next in a redrive: the rule that its loop asks. This one takes all selected letters at once.

The loop begins a step with the queue's lease, redrives what the rule hands it, ends the step, and gives the lease back.
Then the rule awaits jobs and people, and says whether another step comes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, Self

from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from airflow_provider_jetstream.jetstream.audit.redrives import RedriveControl, Wave
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.redrive.operation import Operation
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

# What was proved longer ago than this is proved again before anything is done with it.
PROOF_SECONDS: Final = 0.5
# How many pages are proved at the same time as the next one: while the answers of one arrive, the others are judged.
_AHEAD: Final = 1


@dataclass(frozen=True, slots=True)
class ProvedPage:
    """Some jobs of a scan.

    :param letters: dead letters that were selected
    :param dismissed: jobs that have entries and are no dead letters
    :param at: when the letters were proved at the earliest, in seconds of the monotonic clock
    """

    letters: Sequence[DeadLetter]
    dismissed: Sequence[NotDead]
    at: float


@dataclass(frozen=True, slots=True)
class WaveWait:
    """A wave whose jobs are to be awaited.

    :param cursor: from where their ends are read
    :param sequences: the stream sequences of the jobs
    :param within: for how many seconds from now, where that is limited
    """

    cursor: Cursor
    sequences: tuple[int, ...]
    within: float | None


async def proved_pages(scan: Scan, selection: Selection, *, reads_ahead: bool) -> AsyncGenerator[ProvedPage, None]:
    """Read the pages of a scan in order.

    :param reads_ahead: whether the next pages are read while the caller works on the one before
    """
    ahead = _AHEAD if reads_ahead else 0
    pages = scan.pages(selection, ahead=ahead)
    # When the pages were asked for, of which the first is the next one.
    began: deque[float] = deque(maxlen=ahead + 1)

    async def read() -> ProvedPage | None:
        began.append(time.monotonic())
        if (page := await anext(pages, None)) is None:
            return None
        await scan.record_handled()
        # Its proof began as soon as the scan was asked for one so far before it.
        return ProvedPage(page.letters, page.dismissed, began[0])

    reading: asyncio.Task[ProvedPage | None] | None = None
    try:
        while page := await (reading or read()):
            reading = asyncio.create_task(read()) if reads_ahead else None
            if page.dismissed and time.monotonic() - page.at > PROOF_SECONDS:
                again = await scan.classify([job.sequence for job in page.dismissed], refresh=True)
                page = ProvedPage(page.letters, [job for job in again if isinstance(job, NotDead)], page.at)
            yield page
    finally:
        if reading:
            reading.cancel()
            # What reading the next page raised doesn't matter any more.
            with suppress(asyncio.CancelledError, Exception):
                await reading
        await pages.aclose()


class NextLetters:
    """The rule of one redrive; an async context manager.

    :ivar ended: whether the jobs that are awaited are known to have ended: their ends are read to the last one, however
        long that takes
    :ivar is_put_off: whether the last step redrove nothing, since the redrive was paused when it began
    :ivar is_listed: whether a step before has read all letters, so that its successors are no beginning
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.rate_limiter = RateLimiter(operation.request.rate)
        self.ended = False
        self.is_listed = self.is_put_off = False
        self.patience = self.until = inf

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    # With the lease.

    async def begin_step(self) -> None:
        """Record that letters are about to be redriven."""
        await self.operation.save(RedriveState.RUNNING)

    @property
    def selection(self) -> Selection:
        """Which letters are selected."""
        return self.operation.request.selection

    @property
    def at_once(self) -> bool:
        """Whether a batch may be stored while the one before is finished."""
        return self.operation.request.rate is None

    @property
    def remaining(self) -> int | None:
        """How many letters the step still takes; ``None`` for all."""
        return None

    def brought_again(self) -> SequenceRanges:
        """Return the jobs that died again and are to be redriven once more."""
        return SequenceRanges()

    def pages(self, scan: Scan, selection: Selection) -> AsyncGenerator[ProvedPage, None]:
        """Return the letters among which the step's are, in their order."""
        # With a rate, a page that was proved early would only have to be proved again.
        return proved_pages(scan, selection, reads_ahead=self.operation.request.rate is None)

    def taken(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        """Return those letters of a page that are redriven next."""
        return letters

    def dismiss(self, jobs: Sequence[NotDead]) -> None:
        """Note that letters of the step are no dead letters any more."""

    async def end_step(self) -> bool:
        """Record how the step ended; return whether the redrive is over."""
        operation, report = self.operation, self.operation.report
        complete = not report.cancelled and not report.failures and not operation.request.keep_open
        if report.cancelled or not (complete or report.failures):
            await operation.save(RedriveState.RUNNING)
            return False
        await operation.save(operation.final_state, reason=operation.final_reason)
        return complete

    # Without it.

    async def go_on(self, patience: float) -> bool:
        """Wait for jobs and people as needed; return whether letters are to be redriven now.

        :param patience: for how many seconds they are awaited at one go
        :return: false where the redrive is over, or the caller's patience is
        :raises QueueGoneError: the queue was deleted, or created anew, since the redrive began
        """
        operation = self.operation
        self.patience, self.until = patience, time.monotonic() + patience
        while not operation.is_finished and not operation.caller_stops:
            await operation.require_queue()
            await operation.read_controls()
            if (goes_on := await self._obey()) is not None:
                return goes_on
        return False

    async def _obey(self) -> bool | None:
        """Do what is next between two steps; return whether letters are, or ``None`` where that isn't known yet."""
        operation = self.operation
        record, state = operation.record, operation.state
        is_at_gate = record is not None and record.state == RedriveState.AT_GATE
        if record is None or record.state == RedriveState.ABORTED:
            operation.report.cancelled |= record is not None
            await operation.finish_run()
            return False
        if state == RedriveState.ABORTED:
            await operation.save_later(state, waves=await self.ended_waves(), reason=operation.asked)
        elif is_at_gate and (control := operation.gate_control()):
            await self.pass_gate(control)
        elif state == RedriveState.PAUSED and (record.state != state or operation.last_control()):
            await operation.save_later(state, reason=operation.asked)
        elif state == RedriveState.PAUSED or is_at_gate:
            return None if await operation.wait_while(state, self.until) else False
        else:
            return await self.proceed()
        return None

    async def proceed(self) -> bool | None:
        """Do what is next where nobody has paused the redrive; return as :meth:`go_on` does, or ``None``."""
        # Only what a pause has cut short is left.
        report, record = self.operation.report, self.operation.record
        is_left = (report.cancelled or self.is_put_off) and record is not None and record.state != RedriveState.FAILED
        report.cancelled = False
        return is_left

    async def pass_gate(self, control: RedriveControl) -> None:
        """Go on after a gate, as a person asked."""

    async def ended_waves(self) -> tuple[Wave, ...] | None:
        """Return the waves as an aborted redrive leaves them; ``None`` where nothing changes of them."""
        return None

    def close(self) -> None:
        """Report the letters that stay where they are for the rule's sake."""

    async def wave_wait(self) -> WaveWait | None:
        """Return the wave whose jobs are to be awaited; ``None`` where there is none."""
        return None
