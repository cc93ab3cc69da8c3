"""Dead letters that a watcher hasn't reported yet, from the queue's one follower.

A letter is reported once. What was reported is known by sequences and by the latest death among them: a job that was
requeued in place keeps its sequence, and dies a second time later than every death that was reported.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import LetterCriteria, LetterWatch, shared_follower
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupKey
    from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# A burst of deaths makes few events: the run that the first one starts sees the letters of all.
_PAUSE_SECONDS = 5.0
_LETTERS_AT_ONCE = 5_000
_MOST_REPORTED = 100


@dataclass(frozen=True, slots=True)
class ReportedLetters:
    """The letters of one stream that a watcher has reported.

    :param created: when the stream was created; another one has other letters of the same sequences
    :param sequences: of the letters
    :param until: when the last of them died, in microseconds since 1970
    """

    created: str = ""
    sequences: SequenceRanges = field(default_factory=SequenceRanges)
    until: int = 0

    @classmethod
    def of_json(cls, value: object) -> Self:
        """Read what :meth:`as_json` has written; nothing was reported where it is something else."""
        try:
            created, sequences, until = value["created"], value["sequences"], value["until"]  # type: ignore[index]
            return cls(str(created), SequenceRanges.decode(sequences), int(until))
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()

    def as_json(self) -> dict[str, Any]:
        """Return it in a form that :meth:`of_json` reads."""
        return {"created": self.created, "sequences": self.sequences.encode(), "until": self.until}


@dataclass(slots=True)
class _Arrived:
    """The letters of one group that weren't reported."""

    sequences: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0

    def add(self, sequence: int, died_at: int) -> None:
        self.first = min(self.first, died_at) if self.sequences else died_at
        self.last = max(self.last, died_at)
        self.sequences.append(sequence)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Letters that arrived in groups which are large enough.

    :param dead: how many letters are selected, those included that were reported before
    :param groups: the letters that weren't, by the values that those of a group share
    :param reported: what has been reported with these
    """

    queue: str
    dead: int
    group_by: tuple[str, ...]
    groups: Mapping[GroupKey, _Arrived]
    reported: ReportedLetters

    def as_json(self) -> dict[str, Any]:
        """Return the counts, the sequences as ranges, and the largest groups."""
        ranges = list(SequenceRanges.of(self._sequences()).pairs())
        largest = sorted(self.groups.items(), key=lambda item: (-len(item[1].sequences), item[1].sequences[0]))
        groups = largest if self.group_by else []
        return {
            "queue": self.queue,
            "dead": self.dead,
            "arrived": sum(len(arrived.sequences) for arrived in self.groups.values()),
            "sequences": [list(span) for span in ranges[:_MOST_REPORTED]],
            "ranges_left_out": len(ranges[_MOST_REPORTED:]),
            "groups": [
                {
                    "group": dict(zip(self.group_by, map(_text, key), strict=True)),
                    "arrived": len(arrived.sequences),
                    "first_died_at": (_EPOCH + arrived.first * _MICROSECOND).isoformat(),
                }
                for key, arrived in groups[:_MOST_REPORTED]
            ],
            "groups_left_out": len(groups[_MOST_REPORTED:]),
        }

    def _sequences(self) -> Iterator[int]:
        for arrived in self.groups.values():
            yield from arrived.sequences


def _text(value: str | None) -> str | None:
    # A header may have any bytes, and Airflow stores an event as UTF-8.
    return None if value is None else readable_text(value)


class ArrivalWatch(LetterWatch):
    """Waits again and again for letters that weren't reported.

    :param interval: seconds after which the queue is looked at even if no entry is stored
    :param reported: what was reported before
    :param only_new_groups: whether only groups count of which no letter that is dead now was reported
    """

    def __init__(
        self, queue: str, criteria: LetterCriteria, interval: float, reported: ReportedLetters, *, only_new_groups: bool
    ) -> None:
        super().__init__(criteria, interval)
        self.reported = reported
        self._queue = queue
        self._only_new_groups = only_new_groups
        self._arrivals: asyncio.Future[Arrivals] = asyncio.get_running_loop().create_future()
        self._not_before = 0.0

    async def next(self) -> Arrivals:
        """Wait for letters.

        :raises JetStreamProviderError: as :func:`~.letter_watch.wait_for_dead_letters` does
        """
        arrivals = await self._arrivals
        self._arrivals = asyncio.get_running_loop().create_future()
        return arrivals

    def fail(self, error: Exception) -> None:
        """Let :meth:`next` raise an error."""
        if not self._arrivals.done():
            self._arrivals.set_exception(error)

    async def check(self, letters: TrackedLetters) -> float:
        """Look for letters that weren't reported; return for how many seconds there is no need to look again."""
        if (early := self._not_before - time.monotonic()) > 0:
            return early
        if self._arrivals.done():
            return _PAUSE_SECONDS
        dead, groups = await self._compare(letters)
        now = (letters.now - _EPOCH) // _MICROSECOND
        age = self.criteria.age // _MICROSECOND
        large = {key: group for key, group in groups.items() if len(group.sequences) >= self.criteria.count}
        # The server's clock may be ahead of this machine's.
        ready = {key: group for key, group in large.items() if max(0, now - group.first) >= age}
        if ready:
            self._report(ready)
            self._not_before = time.monotonic() + _PAUSE_SECONDS
            self._arrivals.set_result(Arrivals(self._queue, dead, self.criteria.group_by, ready, self.reported))
            return _PAUSE_SECONDS
        left = [(group.first + age - now) / 1_000_000 for group in large.values()]
        return min([self._interval, *left])

    async def _compare(self, letters: TrackedLetters) -> tuple[int, dict[GroupKey, _Arrived]]:
        """Divide the letters in those that were reported and those that weren't."""
        reported = self.reported if self.reported.created == letters.created else ReportedLetters(letters.created)
        query = LetterQuery.of(self.criteria.selection, letters.now)
        groups: dict[GroupKey, _Arrived] = {}
        known: set[GroupKey] = set()
        still_dead: list[int] = []
        dead = last = 0
        while rows := await letters.table.rows(query, self.criteria.group_by, last, _LETTERS_AT_ONCE):
            for key, sequence, died_at in rows:
                if died_at <= reported.until and sequence in reported.sequences:
                    known.add(key)
                    still_dead.append(sequence)
                else:
                    groups.setdefault(key, _Arrived()).add(sequence, died_at)
            dead, last = dead + len(rows), rows[-1][1]
        self.reported = ReportedLetters(reported.created, SequenceRanges.of(still_dead), reported.until)
        if self._only_new_groups:
            self._report({key: groups.pop(key) for key in known & groups.keys()})
        return dead, groups

    def _report(self, groups: Mapping[GroupKey, _Arrived]) -> None:
        """Record that letters are reported, or need no report."""
        sequences, until = self.reported.sequences, self.reported.until
        for group in groups.values():
            sequences, until = sequences | SequenceRanges.of(group.sequences), max(until, group.last)
        self.reported = ReportedLetters(self.reported.created, sequences, until)


@asynccontextmanager
async def watch_arrivals(
    connection: Connection,
    queue: WorkQueue,
    criteria: LetterCriteria,
    interval: float,
    reported: ReportedLetters,
    *,
    only_new_groups: bool = False,
) -> AsyncIterator[ArrivalWatch]:
    """Watch the letters of a queue; all who wait for letters of one queue on a connection share its one follower."""
    watch = ArrivalWatch(queue.name, criteria, interval, reported, only_new_groups=only_new_groups)
    async with shared_follower(connection, queue, unaccounted=criteria.selection.unaccounted) as follower:
        follower.add(watch)
        try:
            yield watch
        finally:
            follower.watches.discard(watch)
