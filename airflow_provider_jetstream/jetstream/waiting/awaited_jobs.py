"""The jobs that the waiters of a queue await: by job where a waiter has few, by waiter where it has many."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.waiting.many_sequences import ManySequences

if TYPE_CHECKING:
    from collections.abc import Container

    from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

# From here on a list for each job would take more memory and time than asking the waiter at each end.
_MANY: Final = 5_000
# How many jobs are looked at without letting others use the event loop.
_SLICE: Final = 5_000


class AwaitedJobs:
    """The waiters of a queue by the stream sequences of their jobs."""

    def __init__(self) -> None:
        self._by_job: dict[int, list[Waiter]] = {}
        self._with_many: dict[int, Waiter] = {}
        # What they awaited at first, in order.
        self._ordered: dict[int, array[int]] = {}

    def __contains__(self, sequence: object) -> bool:
        if sequence in self._by_job:
            return True
        return any(waiter.report.is_unsettled(sequence) for waiter in self._with_many.values())

    def add(self, waiter: Waiter) -> None:
        """Add a waiter to those of its jobs whose state may change."""
        if waiter.report.unsettled_count >= _MANY:
            self._with_many[id(waiter)] = waiter
            return
        for sequence in waiter.report.unsettled():
            self._by_job.setdefault(sequence, []).append(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter from all its jobs."""
        self._ordered.pop(id(waiter), None)
        if self._with_many.pop(id(waiter), None) is None:
            for sequence in waiter.report.unsettled():
                self.drop(sequence, waiter)

    def drop(self, sequence: int, waiter: Waiter) -> None:
        """Remove a waiter from a job that has ended for good."""
        if (waiters := self._by_job.get(sequence)) is None:
            return
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            del self._by_job[sequence]

    def waiters_of(self, sequence: int) -> list[Waiter]:
        """Return the waiters that await a job."""
        waiters = list(self._by_job.get(sequence, ()))
        if self._with_many:
            waiters += [waiter for waiter in self._with_many.values() if waiter.report.is_unsettled(sequence)]
        return waiters

    def waiters(self) -> list[Waiter]:
        """Return all waiters."""
        few = {id(waiter): waiter for waiters in self._by_job.values() for waiter in waiters}
        return [*few.values(), *self._with_many.values()]

    async def some(self, above: int, upto: int, after: int, most: int, *, besides: Container[int] = ()) -> list[int]:
        """Return some awaited sequences above one and up to another, in order: those after a third, else the first.

        :param most: how many at most
        :param besides: none of these
        """
        found = await self._between(max(above, after), upto, most, besides)
        return found or await self._between(above, upto, most, besides)

    async def _between(self, above: int, upto: int, most: int, besides: Container[int]) -> list[int]:
        few = sorted(job for job in self._by_job if above < job <= upto and job not in besides)
        found = set(few[:most])
        for waiter in tuple(self._with_many.values()):
            sequences, chosen = await self._ordered_jobs(waiter), 0
            for position in range(bisect_right(sequences, above), bisect_right(sequences, upto)):
                if not position % _SLICE:
                    await asyncio.sleep(0)
                if waiter.report.is_unsettled(sequence := sequences[position]) and sequence not in besides:
                    found.add(sequence)
                    chosen += 1
                    if chosen == most:
                        break
        return sorted(found)[:most]

    async def _ordered_jobs(self, waiter: Waiter) -> array[int]:
        if (ordered := self._ordered.get(id(waiter))) is not None:
            return ordered
        report, ordered = waiter.report, array("Q")
        if isinstance(report.awaited, ManySequences) and not (report.dead or report.vanished):
            for part in report.awaited.ordered_parts():
                ordered.extend(part)
                await asyncio.sleep(0)
        else:
            ordered.extend(sorted(report.unsettled()))
        if id(waiter) in self._with_many:
            self._ordered[id(waiter)] = ordered
        return ordered
