"""The jobs of an index as ranges, by what their entries state; they grow with the entries that are added."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.dead_letters.entry import COPIES, ENDS, HIGHEST_JOB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex

_ENTRIES_AT_ONCE = 2_000


class IndexRanges:
    """Three sets of jobs; :meth:`update` brings them up to date.

    :ivar known: those that have entries
    :ivar ended: those of which an entry states how they left the queue: a job that has used up its deliveries stays
        stored, so that its entry doesn't say why it is gone. Nor does a worker's copy, since the worker may have been
        stopped before it terminated the job, nor the server's report that a job was deleted while a worker had it: the
        server states that also of jobs that were done
    :ivar copied: those that are in circulation and of which there is a copy
    """

    def __init__(self) -> None:
        self.known = self.ended = self.copied = SequenceRanges()
        self._read, self._drops = 0, 0
        self._since: datetime | None = None

    async def update(self, index: EntryIndex, since: datetime) -> None:
        """Add the entries that were added since; other tasks of the event loop run in between.

        :param index: the same one at each call
        :param since: ends and copies of earlier times are about other jobs
        """
        if (self._drops, self._since) != (index.drops, since):
            self.__init__()  # type: ignore[misc]
            self._drops, self._since = index.drops, since
        known, ended, copied = _Growing(self.known), _Growing(self.ended), _Growing(self.copied)
        while self._read < len(index):
            entries = index.added(self._read, self._read + _ENTRIES_AT_ONCE, since)
            self._read = min(self._read + _ENTRIES_AT_ONCE, len(index))
            known.add([job for job, _, _ in entries if job < HIGHEST_JOB])
            ended.add([job for job, kind, is_later in entries if kind in ENDS and is_later and job < HIGHEST_JOB])
            copied.add([job for job, kind, is_later in entries if kind in COPIES and is_later and job < HIGHEST_JOB])
            await sleep(0)
        self.known, self.ended, self.copied = known.ranges(), ended.ranges(), copied.ranges()


class _Growing:
    """Ranges in parts of about one size, so that none is joined often."""

    def __init__(self, ranges: SequenceRanges) -> None:
        self._parts = [ranges] if ranges else []

    def add(self, sequences: Sequence[int]) -> None:
        if not sequences:
            return
        self._parts.append(SequenceRanges.of(sequences))
        while len(self._parts) > 1 and len(self._parts[-1].bounds) * 2 >= len(self._parts[-2].bounds):
            last = self._parts.pop()
            self._parts[-1] |= last

    def ranges(self) -> SequenceRanges:
        return reduce(or_, self._parts, SequenceRanges())
