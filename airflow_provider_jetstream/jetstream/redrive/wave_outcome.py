"""What became of the letters of a wave: their jobs' ends, and of what those died that died again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.redrives import DeathCount, RedriveOutcomes
from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Scan
from airflow_provider_jetstream.jetstream.errors import JobsStalledError, NotFoundError, QueueGoneError
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
from airflow_provider_jetstream.jetstream.waiting.follower import shared_follower
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.audit.redrives import Wave
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.waiting.follower import EndFollower

ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)
# How often a wait looks whether it is to stop.
LOOK_SECONDS = 0.5
_CAUSES = 20
# What ended in time is read after that: so many ends a second, and some time at least to reach the server.
_ENDS_PER_SECOND = 1_000
_LEAST_READING = 30.0
_ERROR_CHARACTERS = 200


@dataclass(slots=True)
class WaveLetters:
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

    def add(self, letter: LetterRecord, stream: str) -> None:
        """Add a letter, once.

        :param stream: the queue that gets the new jobs
        """
        if letter.sequence in self.sequences:
            return
        self.sequences.add(letter.sequence)
        if letter.action == "parked":
            self.parked += 1
            return
        self.redriven += 1
        if (letter.new_stream or letter.stream) == stream and letter.new_sequence:
            self.new_jobs[letter.new_sequence] = letter.fingerprint
        else:
            self.elsewhere += 1


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


@dataclass(slots=True)
class WaveOutcome:
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
    as_before: tuple[int, ...] = ()
    parked: tuple[int, ...] = ()
    problem: str = ""


async def await_wave(
    connection: Connection,
    queue: WorkQueue,
    wave: Wave,
    letters: WaveLetters,
    within: float | None,
    is_interrupted: Callable[[], bool],
) -> WaveOutcome | None:
    """Wait until the jobs of a wave have ended; ``None`` where that was interrupted before.

    :param queue: the queue that got the new jobs
    :param wave: with its cursor, in the state in which its letters are redriven
    :param within: for how many seconds the jobs are awaited
    :param is_interrupted: called a few times a second
    """
    if wave.cursor is None:
        problem = f"{queue.name} declares no events, so nothing tells how its jobs end"
        return WaveOutcome(RedriveOutcomes(unknown=letters.redriven), problem=problem)
    report, problem = WaitReport(set(letters.new_jobs)), ""
    left = await seconds_left(connection, queue, wave, within)
    limit = inf if left is None else time.monotonic() + left
    cursor = Cursor(**wave.cursor)
    async with shared_follower(connection, cursor) as follower:
        waiting = asyncio.create_task(wait(connection, cursor, report, policy=ANY_END))
        try:
            while not waiting.done() and not is_interrupted():
                await asyncio.wait({waiting}, timeout=min(LOOK_SECONDS, max(0.0, limit - time.monotonic())))
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
    died = tuple(sorted(report.dead))
    return await _with_causes(connection, queue, letters, WaveOutcome(outcomes, died, problem=problem))


async def _read_stored(follower: EndFollower, waiting: asyncio.Task[WaitReport], jobs: int) -> None:
    """Have the ends read that are stored by now, however late this program began to look."""
    reading = asyncio.create_task(follower.read_stored())
    limit = max(_LEAST_READING, jobs / _ENDS_PER_SECOND)
    try:
        await asyncio.wait({reading, waiting}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reading.cancel()


async def seconds_left(connection: Connection, queue: WorkQueue, wave: Wave, within: float | None) -> float | None:
    """Return for how many seconds the jobs of a wave are awaited from now on; ``None`` without limit."""
    if within is None:
        return None
    clock = await ServerClock.read(connection, queue.name)
    # An earlier version of the provider didn't record from when they are awaited.
    return clock.seconds_until((wave.awaited_from or wave.began_at) + timedelta(seconds=within))


async def _with_causes(
    connection: Connection, queue: WorkQueue, letters: WaveLetters, outcome: WaveOutcome
) -> WaveOutcome:
    """Return an outcome with what the jobs died of."""
    if not outcome.died or queue.dead_letters is None:
        return outcome
    scan = await Scan.begin(connection, queue)
    counts: Counter[str] = Counter()
    before: Counter[str] = Counter()
    errors: dict[str, str] = {}
    as_before: list[int] = []
    parked: list[int] = []
    for start in range(0, len(outcome.died), PAGE):
        for job in await scan.classify(outcome.died[start : start + PAGE]):
            # Of a job that can't be proved dead yet, the cause isn't known.
            fingerprint = job.death.fingerprint if isinstance(job, DeadLetter) else ""
            counts[fingerprint] += 1
            if not isinstance(job, DeadLetter):
                continue
            death = job.death
            error = ": ".join(text for text in (death.error_class, death.error_message or death.explanation) if text)
            errors.setdefault(fingerprint, (error or death.reason.value)[:_ERROR_CHARACTERS])
            if job.parked is not None:
                parked.append(job.sequence)
            if letters.new_jobs[job.sequence] == fingerprint:
                before[fingerprint] += 1
                as_before.append(job.sequence)
    causes = tuple(
        DeathCount(fingerprint=name, error=errors.get(name, ""), count=count, as_before=before[name])
        for name, count in counts.most_common(_CAUSES)
    )
    return WaveOutcome(outcome.outcomes, outcome.died, causes, tuple(as_before), tuple(parked), problem=outcome.problem)
