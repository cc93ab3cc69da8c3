"""Between the steps of a redrive: the outcome of a wave and what follows from it, pauses, and the end."""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.redrive.wave_outcome import LOOK_SECONDS, await_wave

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive, RedriveControl, Wave
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.redrive.supervision import Supervision
    from airflow_provider_jetstream.jetstream.redrive.wave_outcome import WaveLetters, WaveOutcome


class Gates:
    """The gates of one redrive, at which it holds no lease.

    :param park: parks letters by their stream sequences for a reason, and returns how many of them are parked
    :param patience: for how many seconds jobs and people are awaited at one go
    :param ended: whether the jobs of the wave that is awaited are known to have ended: their ends are read to the last
        one, however long that takes
    """

    def __init__(
        self,
        connection: Connection,
        supervision: Supervision,
        park: Callable[[Collection[int], str], Awaitable[int]],
        patience: float = inf,
        *,
        ended: bool = False,
    ) -> None:
        self._connection = connection
        self._supervision = supervision
        self._park = park
        self._patience = patience
        self._until = inf
        self._is_ended = ended

    async def go_on(self) -> bool:
        """Wait for jobs and people as needed; return whether letters are to be redriven now.

        :return: false where the redrive is over, or the caller's patience is
        :raises QueueGoneError: the queue was deleted, or created anew, since the redrive began
        """
        self._until = time.monotonic() + self._patience
        while not self._supervision.is_finished and not self._supervision.caller_stops:
            await self._supervision.require_queue()
            await self._supervision.read_controls()
            if (goes_on := await self._proceed()) is not None:
                return goes_on
        return False

    async def _proceed(self) -> bool | None:
        """Do what is next between two steps; return whether letters are, or ``None`` where that isn't known yet."""
        supervision, report = self._supervision, self._supervision.report
        record, state, wave = supervision.record, supervision.state, supervision.wave
        if record is None:
            return False
        if state == RedriveState.ABORTED:
            return await self._abort()
        if state == RedriveState.PAUSED or record.state == RedriveState.AT_GATE:
            return await self._await_person(record, state)
        if wave and wave.state == "awaiting":
            return await self._await_wave(wave)
        # Without waves, only what a pause has cut short is left.
        is_left = record.state != RedriveState.FAILED and (wave is not None or report.cancelled)
        report.cancelled = False
        return is_left

    async def _await_person(self, record: Redrive, state: RedriveState) -> bool | None:
        supervision = self._supervision
        if record.state == RedriveState.AT_GATE and (control := supervision.gate_control()):
            await self._pass_gate(control)
        elif state == RedriveState.PAUSED and (record.state != state or supervision.last_control()):
            await supervision.save_later(state, reason=self._summary())
        elif not await self._wait_while(state):
            return False
        return None

    async def _await_wave(self, wave: Wave) -> bool | None:
        supervision = self._supervision
        if supervision.record and supervision.record.state == RedriveState.PAUSED:
            # That it was resumed is known from now on, not once the wave has ended.
            await supervision.save_later(RedriveState.RUNNING)
            return None
        letters = await supervision.wave_letters(wave)
        within = supervision.request.stop_rule.within_seconds
        outcome = await await_wave(
            *(self._connection, supervision.storing, wave, letters, within, self._is_interrupted)
        )
        if outcome is None:
            return False if not self._is_ended and time.monotonic() >= self._until else None
        await self._decide(wave, letters, outcome)
        self._is_ended = False
        self._until = time.monotonic() + self._patience
        return None

    def _is_interrupted(self) -> bool:
        return self._supervision.stopped() or (not self._is_ended and time.monotonic() >= self._until)

    async def _wait_while(self, state: RedriveState) -> bool:
        """Wait until a person asks for another state, or the queue is gone; return false where the patience is."""
        supervision = self._supervision
        while supervision.state == state and time.monotonic() < self._until and not supervision.caller_stops:
            if supervision.is_queue_gone:
                return True
            # The caller's wish to stop is a function, which tells nobody.
            await asyncio.wait({asyncio.ensure_future(asyncio.sleep(LOOK_SECONDS / 2))})
        return supervision.state != state

    def _summary(self) -> str:
        control = self._supervision.last_control()
        return control.summary if control else ""

    async def _abort(self) -> bool | None:
        """Record that the redrive is aborted; return false once that is recorded."""
        supervision = self._supervision
        supervision.report.cancelled = True
        if supervision.record and supervision.record.state == RedriveState.ABORTED:
            await supervision.finish_run()
            return False
        wave, waves = supervision.wave, None
        if wave and supervision.record and wave.state != "passed":
            letters = await supervision.wave_letters(wave)
            ended = wave.model_copy(update={"redriven": letters.redriven, "parked": letters.parked})
            waves = (*supervision.record.waves[:-1], ended)
        await supervision.save_later(RedriveState.ABORTED, waves=waves, reason=self._summary())
        return None

    async def _with_later_ends(self, wave: Wave, *, brings_back: bool = True) -> Wave:
        """Return a wave with what has become since of its jobs that were still running.

        :param brings_back: whether those that died again are brought back, or parked
        """
        supervision, before = self._supervision, wave.outcomes
        if not before.still_running:
            return wave
        letters = await supervision.wave_letters(wave)
        found = await await_wave(self._connection, supervision.storing, wave, letters, 0.0, lambda: False)
        # The streams may not hold all ends any more.
        if (
            found is None
            or found.outcomes.still_running + found.outcomes.unknown > before.still_running + before.unknown
        ):
            return wave
        update: dict[str, Any] = {"outcomes": found.outcomes}
        if brings_back:
            update |= {"died_of": found.causes, "parked_again": len(found.parked)}
        if brings_back and supervision.request.target is None:
            update["returned"] = SequenceRanges.of(sorted(set(found.died) - set(found.parked))).encode()
        return wave.model_copy(update=update)

    async def _pass_gate(self, control: RedriveControl) -> None:
        supervision, wave = self._supervision, self._supervision.wave
        if wave is None or supervision.record is None:
            return
        wave = await self._with_later_ends(wave)
        parked = wave.parked_again
        if control.park_returned and wave.returned and supervision.request.target is None:
            parked += await self._park(list(SequenceRanges.decode(wave.returned)), control.summary)
        update = {"state": "passed", "passed_by": control.who, "parked_again": parked}
        waves = (*supervision.record.waves[:-1], wave.model_copy(update=update))
        await supervision.save_later(RedriveState.RUNNING, waves=waves)

    async def _decide(self, wave: Wave, letters: WaveLetters, outcome: WaveOutcome) -> None:
        """Record the outcome of a wave, and what follows from it."""
        supervision, rule, outcomes = self._supervision, self._supervision.request.stop_rule, outcome.outcomes
        record = supervision.record
        if record is None:
            return
        parked, left = len(outcome.parked), set(outcome.died) - set(outcome.parked)
        is_own = supervision.request.target is None
        if rule.then == "park" and is_own and (returned := set(outcome.as_before) - set(outcome.parked)):
            parked += await self._park(returned, "dead again of the same cause")
            left -= returned
        is_last = wave.number >= len(supervision.request.waves)
        counted = outcomes.died_again - (parked if rule.then == "park" else 0)
        too_many = rule.then != "go_on" and rule.exceeds(outcomes, counted)
        stops = not is_last and (too_many or rule.is_unknown(outcomes))
        reason = _reason(wave, outcome, parked, rule.died_again if too_many else None)
        earlier = supervision.brought_again()
        ended = wave.model_copy(
            update={
                "state": "at_gate" if stops else "passed",
                "redriven": letters.redriven,
                "parked": letters.parked,
                "outcomes": outcomes,
                "died_of": outcome.causes,
                "returned": "" if is_last or not is_own else SequenceRanges.of(left).encode(),
                "parked_again": parked,
                "brought_again": sum(sequence in earlier for sequence in letters.sequences),
                "passed_by": "" if stops else "rule",
                "reason": reason,
            }
        )
        waves = (*record.waves[:-1], ended)
        if is_last:
            # What a person didn't wait for at a gate.
            waves = (*[await self._with_later_ends(passed, brings_back=False) for passed in waves[:-1]], ended)
        if stops:
            await supervision.save_later(RedriveState.AT_GATE, waves=waves, reason=reason)
        elif not is_last:
            await supervision.save_later(RedriveState.RUNNING, waves=waves)
        elif await supervision.save_later(supervision.final_state, waves=waves, reason=supervision.final_reason):
            await supervision.finish_run()


def _reason(wave: Wave, outcome: WaveOutcome, parked: int, limit: float | None) -> str:
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
