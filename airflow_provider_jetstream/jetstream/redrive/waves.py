"""Waves: what comes next is a number of letters, and the ends of their jobs are awaited before the next ones.

After each wave one check says whether the redrive goes on (``stop_when``), or a person does, at the wave's gate.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.audit.redrives import DeathCount, RedriveOutcomes, RedriveState, Wave
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock, stream_info
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Scan
from airflow_provider_jetstream.jetstream.errors import JobsStalledError, NotFoundError, QueueGoneError
from airflow_provider_jetstream.jetstream.redrive.next_letters import NextLetters, WaveWait
from airflow_provider_jetstream.jetstream.redrive.operation import POLL_SECONDS
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor, take_cursor
from airflow_provider_jetstream.jetstream.waiting.follower import shared_follower
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from airflow_provider_jetstream.jetstream.audit.redrives import RedriveControl
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.redrive.operation import Operation
    from airflow_provider_jetstream.jetstream.waiting.follower import EndFollower

ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)
_RULE = "rule"
_CAUSES = 20
# What ended in time is read after that: so many ends a second, and some time at least to reach the server.
_ENDS_PER_SECOND = 1_000
_LEAST_READING = 30.0
_ERROR_CHARACTERS = 200


@dataclass(slots=True)
class _WaveLetters:
    """The letters of a wave, as the audit has them.

    :param new_jobs: the fingerprint of each letter by the stream sequence of its new job
    :param redriven: how many became jobs
    :param elsewhere: how many of them are jobs of a stream whose ends aren't read
    :param parked: how many were parked
    :param sequences: the letters' own stream sequences
    """

    new_jobs: dict[int, str] = field(default_factory=dict)
    redriven: int = 0
    elsewhere: int = 0
    parked: int = 0
    sequences: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Outcome:
    """What became of the letters of a wave.

    :param died: the stream sequences of the jobs that died again
    :param causes: of what, the most frequent first
    :param as_before: those of them that died of the same cause as the letter that they are a copy of
    :param parked: those that are parked since
    :param problem: why the others' ends can't be known; empty where they may still be awaited
    """

    outcomes: RedriveOutcomes
    died: tuple[int, ...] = ()
    causes: tuple[DeathCount, ...] = ()
    as_before: frozenset[int] = frozenset()
    parked: frozenset[int] = frozenset()
    problem: str = ""


class Waves(NextLetters):
    """The rule of a redrive in waves.

    :param park: parks letters by their stream sequences for a reason, and returns how many of them are parked
    """

    def __init__(self, operation: Operation, park: Callable[[Collection[int], str], Awaitable[int]]) -> None:
        super().__init__(operation)
        self._park = park
        # Letters of the wave that were done before this step began, and what the report said then.
        self._done = self._base = 0

    # A step: the letters of a wave.

    async def begin_step(self) -> None:
        """Record that a wave begins, or goes on."""
        operation = self.operation
        record, audit = operation.record, operation.audit
        if record is None or audit is None:
            return
        self._base, self._done, waves = operation.report.done, 0, record.waves
        if waves and waves[-1].state == "redriving":
            found = await self._letters(waves[-1])
            self._done = found.redriven + found.parked
        else:
            # A redrive that failed after its last wave goes on with what is left.
            sizes = (*operation.request.waves, "rest")
            size = sizes[min(len(waves), len(sizes) - 1)]
            info = await stream_info(operation.connection, audit.stream)
            storing = operation.storing
            cursor = await take_cursor(operation.connection, storing) if storing.events else None
            wave = Wave(
                number=len(waves) + 1,
                size=size if isinstance(size, int) else None,
                from_sequence=info["state"]["last_seq"] + 1,
                cursor=None if cursor is None else asdict(cursor),
                began_at=datetime.fromisoformat(info["ts"]),
            )
            waves = (*waves, wave)
        await operation.save(RedriveState.RUNNING, waves=waves)
        self.is_listed = len(waves) > 1

    @property
    def selection(self) -> Selection:
        """The selection, plus the letters that died again and come back once more."""
        selection = self.operation.request.selection
        if selection.sequences is not None and (again := self.brought_again()):
            return selection.model_copy(update={"sequences": selection.sequences | frozenset(again)})
        return selection

    @property
    def at_once(self) -> bool:
        """Never: a wave counts its letters before it takes more."""
        return False

    @property
    def remaining(self) -> int | None:
        """How many letters the wave still takes; ``None`` for all."""
        wave = self.operation.wave
        if wave is None or wave.size is None:
            return None
        return max(0, wave.size - self._done - (self.operation.report.done - self._base))

    def taken(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        """Return those letters of a page that the wave takes: no copies of this redrive, unless a person said so."""
        if (record := self.operation.record) is None or not record.waves:
            return letters
        again, failed = self.brought_again(), self.operation.report.failed
        taken = [
            letter
            for letter in letters
            if (letter.sequence <= record.until or letter.sequence in again) and letter.sequence not in failed
        ]
        return taken[: self.remaining]

    def brought_again(self) -> SequenceRanges:
        """Return the jobs that died again in waves after which a person let the redrive go on."""
        found = SequenceRanges()
        for wave in self.operation.record.waves if self.operation.record else ():
            if wave.passed_by not in ("", _RULE) and wave.returned:
                found |= SequenceRanges.decode(wave.returned)
        return found

    async def end_step(self) -> bool:
        """Record that the jobs of the wave are awaited, or that no letter was left."""
        operation = self.operation
        record, wave, audit = operation.record, operation.wave, operation.audit
        if record is None or wave is None or audit is None or operation.report.cancelled:
            await operation.save(RedriveState.RUNNING)
            return False
        letters = await self._letters(wave)
        if not letters.sequences:
            # No letter was left.
            await operation.save(operation.final_state, waves=record.waves[:-1], reason=operation.final_reason)
            return operation.is_finished
        # A wave may take longer to redrive than its jobs are awaited.
        now = datetime.fromisoformat((await stream_info(operation.connection, audit.stream))["ts"])
        counts = {"redriven": letters.redriven, "parked": letters.parked}
        await operation.save(
            RedriveState.RUNNING, waves=self._changed(wave, state="awaiting", awaited_from=now, **counts)
        )
        return False

    def _changed(self, wave: Wave, **update: Any) -> tuple[Wave, ...]:
        """Return the recorded waves with some fields of the last one changed."""
        waves = self.operation.record.waves if self.operation.record else ()
        return (*waves[:-1], wave.model_copy(update=update))

    async def _letters(self, wave: Wave) -> _WaveLetters:
        """Read which letters of a wave were redriven and parked."""
        found, operation = _WaveLetters(), self.operation
        if operation.audit is None or operation.record is None:
            return found
        async for letter in operation.audit.letters_of_run(operation.record.run, wave.from_sequence):
            if letter.wave != wave.number or letter.sequence in found.sequences:
                continue
            found.sequences.add(letter.sequence)
            if letter.action == "parked":
                found.parked += 1
                continue
            found.redriven += 1
            if (letter.new_stream or letter.stream) == operation.storing.name and letter.new_sequence:
                found.new_jobs[letter.new_sequence] = letter.fingerprint
            else:
                found.elsewhere += 1
        return found

    # Between steps: the ends of its jobs, and its gate.

    async def proceed(self) -> bool | None:
        """Wait for the jobs of the wave, and decide what follows."""
        operation, wave = self.operation, self.operation.wave
        record, report = operation.record, operation.report
        if record is None or wave is None or wave.state != "awaiting":
            report.cancelled = False
            return record is not None and record.state != RedriveState.FAILED
        if record.state == RedriveState.PAUSED:
            # That it was resumed is known from now on, not once the wave has ended.
            await operation.save_later(RedriveState.RUNNING)
            return None
        letters, within = await self._letters(wave), operation.request.stop_rule.within_seconds
        outcome = await self._outcome(wave, letters, within, lambda: operation.stopped() or self._is_patience_over)
        if outcome is None:
            return False if self._is_patience_over else None
        await self._decide(wave, letters, outcome)
        self.ended = False
        self.until = time.monotonic() + self.patience
        return None

    @property
    def _is_patience_over(self) -> bool:
        return not self.ended and time.monotonic() >= self.until

    async def wave_wait(self) -> WaveWait | None:
        """Return the wave while its jobs are awaited."""
        operation, wave = self.operation, self.operation.wave
        if wave is None or wave.state != "awaiting" or wave.cursor is None or operation.state != RedriveState.RUNNING:
            return None
        jobs = tuple((await self._letters(wave)).new_jobs)
        left = await self._seconds_left(wave, operation.request.stop_rule.within_seconds)
        return WaveWait(Cursor(**wave.cursor), jobs, left)

    async def ended_waves(self) -> tuple[Wave, ...] | None:
        """Return the waves with what the last one has done."""
        wave = self.operation.wave
        if wave is None or wave.state == "passed":
            return None
        letters = await self._letters(wave)
        return self._changed(wave, redriven=letters.redriven, parked=letters.parked)

    async def pass_gate(self, control: RedriveControl) -> None:
        """Record that a person let the redrive go on; park what died again, if that was asked."""
        operation = self.operation
        if (wave := operation.wave) is None:
            return
        wave = await self._with_later_ends(wave)
        parked = wave.parked_again
        if control.park_returned and wave.returned and operation.request.target is None:
            parked += await self._park(list(SequenceRanges.decode(wave.returned)), control.summary)
        waves = self._changed(wave, state="passed", passed_by=control.who, parked_again=parked)
        await operation.save_later(RedriveState.RUNNING, waves=waves)

    async def _with_later_ends(self, wave: Wave, *, brings_back: bool = True) -> Wave:
        """Return a wave with the outcomes of its jobs as they are now.

        :param brings_back: whether jobs that died again are brought back, or parked
        """
        before = wave.outcomes
        if not before.still_running:
            return wave
        found = await self._outcome(wave, await self._letters(wave), 0.0, lambda: False)
        # The streams may not hold all ends any more.
        if (
            found is None
            or found.outcomes.still_running + found.outcomes.unknown > before.still_running + before.unknown
        ):
            return wave
        update: dict[str, Any] = {"outcomes": found.outcomes}
        if brings_back:
            update |= {"died_of": found.causes, "parked_again": len(found.parked)}
            if self.operation.request.target is None:
                update["returned"] = SequenceRanges.of(set(found.died) - found.parked).encode()
        return wave.model_copy(update=update)

    async def _decide(self, wave: Wave, letters: _WaveLetters, outcome: _Outcome) -> None:
        """Record the outcome of a wave, and what follows from it."""
        operation, request, outcomes = self.operation, self.operation.request, outcome.outcomes
        rule, is_own = request.stop_rule, request.target is None
        parked, left = len(outcome.parked), set(outcome.died) - outcome.parked
        if rule.then == "park" and is_own and (returned := outcome.as_before - outcome.parked):
            parked += await self._park(returned, "dead again of the same cause")
            left -= returned
        is_last = wave.number >= len(request.waves)
        counted = outcomes.died_again - (parked if rule.then == "park" else 0)
        too_many = rule.then != "go_on" and rule.exceeds(outcomes, counted)
        stops = not is_last and (too_many or rule.is_unknown(outcomes))
        reason = _reason(wave, outcome, parked, rule.died_again if too_many else None)
        earlier = self.brought_again()
        waves = self._changed(
            wave,
            state="at_gate" if stops else "passed",
            redriven=letters.redriven,
            parked=letters.parked,
            outcomes=outcomes,
            died_of=outcome.causes,
            returned="" if is_last or not is_own else SequenceRanges.of(left).encode(),
            parked_again=parked,
            brought_again=sum(sequence in earlier for sequence in letters.sequences),
            passed_by="" if stops else _RULE,
            reason=reason,
        )
        if stops:
            await operation.save_later(RedriveState.AT_GATE, waves=waves, reason=reason)
        elif not is_last:
            await operation.save_later(RedriveState.RUNNING, waves=waves)
        else:
            # What a person didn't wait for at a gate.
            passed = [await self._with_later_ends(before, brings_back=False) for before in waves[:-1]]
            waves = (*passed, waves[-1])
            if await operation.save_later(operation.final_state, waves=waves, reason=operation.final_reason):
                await operation.finish_run()

    async def _outcome(
        self, wave: Wave, letters: _WaveLetters, within: float | None, is_interrupted: Callable[[], bool]
    ) -> _Outcome | None:
        """Wait until the jobs of a wave have ended; ``None`` where that was interrupted before.

        :param within: for how many seconds the jobs are awaited
        :param is_interrupted: called a few times a second
        """
        connection, queue = self.operation.connection, self.operation.storing
        if wave.cursor is None:
            problem = f"{queue.name} declares no events, so nothing tells how its jobs end"
            return _Outcome(RedriveOutcomes(unknown=letters.redriven), problem=problem)
        report, problem = WaitReport(set(letters.new_jobs)), ""
        left = await self._seconds_left(wave, within)
        limit = inf if left is None else time.monotonic() + left
        cursor = Cursor(**wave.cursor)
        async with shared_follower(connection, cursor) as follower:
            waiting = asyncio.create_task(wait(connection, cursor, report, policy=ANY_END))
            try:
                while not waiting.done() and not is_interrupted():
                    await asyncio.wait({waiting}, timeout=min(POLL_SECONDS, max(0.0, limit - time.monotonic())))
                    if time.monotonic() >= limit and not waiting.done():
                        await _read_stored(follower, waiting, len(letters.new_jobs))
                        if report.awaited:
                            problem = f"not all jobs ended within {within:g} seconds"
                            break
                        limit = inf
                if waiting.done():
                    await waiting
                elif not problem:
                    return None
            except (JobsStalledError, QueueGoneError, NotFoundError) as error:
                problem = str(error)
            finally:
                waiting.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await waiting
        outcomes = RedriveOutcomes(
            completed=len(report.completed) + len(report.cancelled),
            died_again=len(report.dead),
            still_running=len(report.awaited),
            unknown=len(report.unaccounted) + letters.elsewhere,
        )
        if outcomes.unknown and not problem:
            problem = f"how {outcomes.unknown} jobs ended isn't known: they are gone without evidence"
        return await self._with_causes(letters, _Outcome(outcomes, tuple(sorted(report.dead)), problem=problem))

    async def _seconds_left(self, wave: Wave, within: float | None) -> float | None:
        """Return for how many seconds the jobs of a wave are awaited from now on; ``None`` without limit."""
        if within is None:
            return None
        clock = await ServerClock.read(self.operation.connection, self.operation.storing.name)
        return clock.seconds_until((wave.awaited_from or wave.began_at) + timedelta(seconds=within))

    async def _with_causes(self, letters: _WaveLetters, outcome: _Outcome) -> _Outcome:
        """Add to an outcome what the jobs died of."""
        queue = self.operation.storing
        if not outcome.died or queue.dead_letters is None:
            return outcome
        scan = await Scan.begin(self.operation.connection, queue)
        counts: Counter[str] = Counter()
        errors: dict[str, str] = {}
        as_before: dict[int, str] = {}
        parked: set[int] = set()
        for start in range(0, len(outcome.died), PAGE):
            for job in await scan.classify(outcome.died[start : start + PAGE]):
                # Of a job that can't be proved dead yet, the cause isn't known.
                fingerprint = job.death.fingerprint if isinstance(job, DeadLetter) else ""
                counts[fingerprint] += 1
                if not isinstance(job, DeadLetter):
                    continue
                death = job.death
                error = ": ".join(
                    text for text in (death.error_class, death.error_message or death.explanation) if text
                )
                errors.setdefault(fingerprint, (error or death.reason.value)[:_ERROR_CHARACTERS])
                if job.parked is not None:
                    parked.add(job.sequence)
                if letters.new_jobs[job.sequence] == fingerprint:
                    as_before[job.sequence] = fingerprint
        before = Counter(as_before.values())
        outcome.causes = tuple(
            DeathCount(fingerprint=name, error=errors.get(name, ""), count=count, as_before=before[name])
            for name, count in counts.most_common(_CAUSES)
        )
        outcome.as_before, outcome.parked = frozenset(as_before), frozenset(parked)
        return outcome


async def _read_stored(follower: EndFollower, waiting: asyncio.Task[WaitReport], jobs: int) -> None:
    """Have the ends read that are stored by now, however late this program began to look."""
    reading = asyncio.create_task(follower.read_stored())
    limit = max(_LEAST_READING, jobs / _ENDS_PER_SECOND)
    try:
        await asyncio.wait({reading, waiting}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reading.cancel()


def _reason(wave: Wave, outcome: _Outcome, parked: int, limit: float | None) -> str:
    """Return what became of a wave, a sentence."""
    counts = outcome.outcomes
    total = sum(counts.model_dump().values())
    jobs = "job" if total == 1 else "jobs"
    text = f"of {total} {jobs} of wave {wave.number}, {counts.completed} completed and {counts.died_again} died again"
    if outcome.causes:
        cause = outcome.causes[0]
        text += f" ({cause.count} of {cause.error or 'an unknown cause'}, fingerprint {cause.fingerprint or '-'})"
    if parked:
        text += f", {parked} of them parked"
    if limit is not None:
        text += f": more than {limit:.0%}"
    return f"{text}; {outcome.problem}" if outcome.problem else text
