"""Awaited jobs that are stored and that no consumer delivers: none takes their subject, or those that do are paused.

A wait for such a job would last until its time limit, although nobody works on the job. The same holds for all jobs of
a queue whose stream doesn't exist any more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JobsStalledError, QueueGoneError
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Mapping

OnStall: TypeAlias = Literal["fail", "wait"]

FAIL: Final = "fail"
WAIT: Final = "wait"
RECONCILE_SECONDS = 300.0

_REMEDY = "provision the queue again, resume the consumer, or correct the subject of the jobs"

# A scan that counts pauses a consumer for a few seconds at a time, and a redrive does so in place.
_BRIEF_PAUSE = 15 * NANOSECONDS


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a job isn't delivered, and since when that has been so.

    :param reason: a clause about the job, for people
    :param since: in seconds of the monotonic clock
    """

    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """What a wait does about jobs that no consumer delivers.

    :param reconcile: how many seconds a job has to be stalled
    :param on_stall: ``fail`` to end the wait with an error, ``wait`` to go on with a warning
    """

    reconcile: float = RECONCILE_SECONDS
    on_stall: OnStall = FAIL

    def is_due(self, stall: Stall) -> bool:
        """Return whether a stall has lasted long enough to say so."""
        return time.monotonic() - stall.since >= self.reconcile

    def failure(self, queue: str, sequence: int | None, stall: Stall) -> JobsStalledError | QueueGoneError | None:
        """Return the error of a stall that has lasted long enough; ``None`` where the wait goes on.

        :param sequence: the stalled job; ``None`` where the queue's stream doesn't exist, which stalls every job
        """
        if self.on_stall != FAIL:
            return None
        if sequence is None:
            return QueueGoneError(
                f"expected stream {queue} with the awaited jobs, found for {self.reconcile:g} s that it doesn't exist:"
                " how jobs ended that are still awaited can't be known; find out which of them are done before you"
                " publish any of them again"
            )
        return JobsStalledError(
            f"expected every awaited job of {queue} to be delivered, found for {self.reconcile:g} s that job {sequence}"
            f" isn't: {stall.reason}; {_REMEDY}. The jobs stay stored, so don't publish them again"
        )

    def warning(self, queue: str, sequence: int | None, stall: Stall) -> str:
        """Return what is said of a stall where the wait goes on."""
        job = f"every job of {queue}" if sequence is None else f"job {sequence} of {queue}"
        return f"{job} isn't delivered, and the wait goes on: {stall.reason}"


def parse_on_stall(value: object) -> OnStall:
    """Return what a wait does about stalled jobs.

    :raises ArgumentError: it is neither ``fail`` nor ``wait``
    """
    if value == FAIL:
        return FAIL
    if value == WAIT:
        return WAIT
    raise ArgumentError(f"expected on_stall to be {FAIL!r} or {WAIT!r}, found {value!r}: choose one of them")


class Stalls:
    """The stalled jobs among the awaited ones of a queue, as of the last comparison with the server.

    :param queue: the work queue
    :ivar absence: that of the queue's stream, which stalls every job; ``None`` where it exists
    """

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._subjects: dict[int, str] = {}
        self._stalls: dict[int, Stall] = {}
        self.absence: Stall | None = None

    def note_absence(self) -> None:
        """Note that the queue's stream doesn't exist."""
        self.absence = self.absence or Stall(f"stream {self._queue} doesn't exist any more", time.monotonic())

    def update(
        self,
        stored: Mapping[int, str],
        gone: Collection[int],
        awaited: Container[int],
        consumers: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Look which jobs are stalled, after the queue's stream was found to exist.

        :param stored: the subjects of jobs that were just read and may be delivered, by their sequences
        :param gone: jobs that were just read and are gone or dead
        :param awaited: the awaited jobs
        :param consumers: CONSUMER.INFO by name, without the internal ones
        """
        self.absence = None
        self._subjects |= stored
        reasons = {subject: _why_stalled(subject, consumers) for subject in set(self._subjects.values())}
        before, self._stalls, now = self._stalls, {}, time.monotonic()
        for sequence, subject in list(self._subjects.items()):
            reason = reasons[subject]
            if reason and sequence in awaited and sequence not in gone:
                since = before[sequence].since if sequence in before else now
                self._stalls[sequence] = Stall(reason, since)
            else:
                # Others are read again in their turn.
                del self._subjects[sequence]

    def __iter__(self) -> Iterator[tuple[int, Stall]]:
        return iter(self._stalls.items())


def _why_stalled(subject: str, consumers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why a job of a subject isn't delivered; empty where a consumer takes it and isn't paused."""
    takers = {
        name: info for name, info in consumers.items() if covered_by_any(filter_subjects(info["config"]), subject)
    }
    if not takers:
        existing = ", ".join(sorted(consumers)) or "none"
        return f"no consumer takes its subject {subject} (consumers: {existing})"
    paused = {name: info for name, info in takers.items() if _is_paused(info)}
    if paused.keys() != takers.keys():
        return ""
    return f"{', '.join(map(_pause_clause, paused.values()))}, and no other consumer takes its subject {subject}"


def _is_paused(info: Mapping[str, Any]) -> bool:
    return bool(info.get("paused")) and int(info.get("pause_remaining", 0)) > _BRIEF_PAUSE


def _pause_clause(info: Mapping[str, Any]) -> str:
    until = info["config"].get("pause_until")
    return f"consumer {info['name']} is paused" + (f" until {until}" if until else "")
