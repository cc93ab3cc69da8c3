"""One follower of the dead letters of a queue, shared by all who wait for some on a connection.

The follower proves all letters once, refreshes them
(:mod:`~airflow_provider_jetstream.jetstream.dead_letters.tracked_letters`), which reads what has changed, and tells
its watches after each refresh: when the dead letter queue stores an entry, and from time to time for deaths of which
the server has published none. A proof of all letters is repeated where a refresh can't tell any more, and slowly in
the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.stream_tail import StreamTail
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import dead_letter_subjects
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.find import Summary
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, GroupKey
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


log = logging.getLogger(__name__)

# Entries that are stored shortly after one another are read by one refresh.
_GATHER_SECONDS = 0.05
# Refreshes for deaths without an entry, and proofs of all letters, come no more often.
_SHORTEST_INTERVAL = 2.0
_PROOF_INTERVAL = 900.0
_RETRY_PAUSE = 1.0
_TAIL_PAUSE = 30.0
_PROOF_PAUSE = 60.0
# A server that is away makes an error a second.
_WARNING_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LetterCriteria:
    """Which dead letters to wait for.

    :param selection: which letters; without sequences, and not the jobs that match no consumer
    :param group_by: the fields whose values the letters of a group share
    :param count: how many letters, of any one group
    :param age: how long the first of them has been dead, at least
    """

    selection: Selection
    group_by: tuple[GroupField, ...] = ()
    count: int = 1
    age: timedelta = timedelta()


class LetterWatch:
    """One wait for dead letters.

    :param interval: seconds after which the letters are refreshed even if no entry is stored
    """

    def __init__(self, criteria: LetterCriteria, interval: float) -> None:
        self.criteria = criteria
        self.finished: asyncio.Future[Summary] = asyncio.get_running_loop().create_future()
        self._interval = interval
        # Airflow finds a task's log by the context.
        self._context = copy_context()
        self._warn_after = 0.0

    async def check(self, letters: TrackedLetters) -> float:
        """Finish if there are enough letters; return for how many seconds there is no need to refresh again."""
        selection, group_by, age = self.criteria.selection, self.criteria.group_by, self.criteria.age
        counted = await letters.counted(selection, group_by)
        if not counted.reached(self.criteria.count, age):
            groups = [group for group in counted.groups.values() if group.count >= self.criteria.count]
            left = [(age - (counted.at - group.first)).total_seconds() for group in groups]
            return min([max(self._interval, _SHORTEST_INTERVAL), *left])
        summary = await letters.summary(selection, group_by)
        if not self.finished.done():
            self.finished.set_result(summary)
        return self._interval

    def warn(self, text: str, *arguments: object) -> None:
        """Log to the waiter's own log, twice a minute at most."""
        if time.monotonic() < self._warn_after:
            return
        self._warn_after = time.monotonic() + _WARNING_SECONDS
        self._context.run(log.warning, text, *arguments)

    def fail(self, error: Exception) -> None:
        """Finish with an error."""
        if not self.finished.done():
            self.finished.set_exception(error)


class LetterFollower:
    """Follows the dead letters of one queue for its watches.

    :param unaccounted: whether an unaccounted job with a copy counts as a dead letter
    """

    def __init__(self, connection: Connection, queue: WorkQueue, *, unaccounted: bool) -> None:
        self._connection = connection
        self._queue = queue
        self._unaccounted = unaccounted
        self._letters: TrackedLetters | None = None
        self._proof: asyncio.Task[TrackedLetters] | None = None
        # When the last proof was made that others waited for, and for how many seconds.
        self._proof_ended = self._proof_took = 0.0
        self._bell, self._proved_once = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.watches: set[LetterWatch] = set()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, so that new watches need another follower."""
        return any(task.done() for task in self._tasks)

    def start(self) -> None:
        """Start to follow."""
        for coroutine in (self._follow(), self._ring()):
            task = asyncio.create_task(coroutine)
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Stop following."""
        tasks: list[asyncio.Task[None] | asyncio.Task[TrackedLetters]] = [*self._tasks]
        for task in self._tasks:
            task.remove_done_callback(self._on_task_end)
        if self._proof:
            tasks.append(self._proof)
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, watch: LetterWatch) -> None:
        """Refresh for a watch, now and from now on."""
        self.watches.add(watch)
        self._bell.set()

    async def _follow(self) -> None:
        while True:
            began = time.monotonic()
            self._bell.clear()
            try:
                letters = await self._current_letters()
            except (TransientError, ApiError) as error:
                if self._connection.is_closed:
                    raise
                for watch in tuple(self.watches):
                    watch.warn("Reading the dead letters of %s failed, trying again: %s", self._queue.name, error)
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            pause = _PROOF_INTERVAL
            for watch in tuple(self.watches):
                pause = min(pause, await watch.check(letters))
            # Of a proof only another one has to wait: the refreshes after it read little.
            began = max(began, self._proof_ended)
            took = time.monotonic() - began
            await self._wait_for_bell(pause - took)
            # At most half of the time is spent on refreshes.
            await asyncio.sleep(max(_GATHER_SECONDS, began + 2 * took - time.monotonic()))

    async def _current_letters(self) -> TrackedLetters:
        """Bring the letters up to date."""
        letters = self._letters
        if self._proof and self._proof.done():
            # The new letters are older than the last refresh, and so need one themselves.
            letters, self._proof = self._renewed(letters, self._proof), None
        if letters is None or not await letters.refresh(self._connection):
            if self._proof:
                self._proof.cancel()
                self._proof = None
            if letters is not None:
                # At most half of the time is spent on proofs.
                await asyncio.sleep(self._proof_ended + self._proof_took - time.monotonic())
            return await self._prove()
        if time.monotonic() - letters.proved_at > _PROOF_INTERVAL and self._proof is None:
            self._proof = asyncio.create_task(self._proved(in_background=True))
            self._proof.add_done_callback(lambda _: self._bell.set())
        return letters

    def _renewed(self, letters: TrackedLetters | None, proof: asyncio.Task[TrackedLetters]) -> TrackedLetters | None:
        """Return the letters of a proof that was made in the background, or the earlier ones."""
        if proof.cancelled() or (error := proof.exception()):
            if letters and not proof.cancelled():
                log.info("The letters of %s couldn't be proved again: %s", self._queue.name, error)
                letters.proved_at = time.monotonic() - _PROOF_INTERVAL + _PROOF_PAUSE
            return letters
        self._letters = proof.result()
        return self._letters

    async def _prove(self) -> TrackedLetters:
        began = time.monotonic()
        self._letters = letters = await self._proved(in_background=False)
        self._proof_ended = time.monotonic()
        self._proof_took = self._proof_ended - began
        self._proved_once.set()
        return letters

    async def _proved(self, *, in_background: bool) -> TrackedLetters:
        options = {"unaccounted": self._unaccounted, "in_background": in_background}
        return await TrackedLetters.prove(self._connection, self._queue, **options)

    async def _wait_for_bell(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._bell.wait()

    async def _ring(self) -> None:
        """Ring when the dead letter queue stores an entry."""
        stream = self._queue.dead_letters.name if self._queue.dead_letters else ""
        while True:
            await self._proved_once.wait()
            try:
                info = await stream_info(self._connection, stream)
                captured = info["config"].get("subjects") or []
                subjects = tuple(
                    subject for subject in dead_letter_subjects(self._queue.name) if covered_by_any(captured, subject)
                )
                start = info["state"]["last_seq"] + 1
                tail = StreamTail(self._connection, stream, subjects, start, lambda _: self._bell.set())
                # For what was stored before it begins.
                self._bell.set()
                if subjects:
                    await tail.run()
            except JetStreamProviderError as error:
                if self._connection.is_closed:
                    raise
                log.info("%s can't be followed, and is refreshed from time to time only: %s", stream, error)
            await asyncio.sleep(_TAIL_PAUSE)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception() or RuntimeError(f"{task.get_coro()} ended by itself")
        for watch in tuple(self.watches):
            watch.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))


_followers: WeakKeyDictionary[Connection, dict[str, LetterFollower]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_follower(
    connection: Connection, queue: WorkQueue, *, unaccounted: bool
) -> AsyncIterator[LetterFollower]:
    """Use a connection's one follower of a queue; it stops with its last watch."""
    followers = _followers.setdefault(connection, {})
    key = f"{unaccounted} {queue.model_dump_json()}"
    follower = followers.get(key)
    if follower is None or follower.has_failed:
        follower = followers[key] = LetterFollower(connection, queue, unaccounted=unaccounted)
        follower.start()
    try:
        yield follower
    finally:
        if not follower.watches:
            if followers.get(key) is follower:
                del followers[key]
            await follower.stop()


async def wait_for_dead_letters(
    connection: Connection, queue: WorkQueue, criteria: LetterCriteria, interval: float
) -> Summary:
    """Wait until a queue has dead letters; all waits for one queue on a connection share its one follower.

    :param interval: seconds after which the letters are refreshed even if no entry is stored
    :raises JetStreamProviderError: as :func:`~.find.summarise_dead_letters` does
    """
    watch = LetterWatch(criteria, interval)
    async with shared_follower(connection, queue, unaccounted=criteria.selection.unaccounted) as follower:
        follower.add(watch)
        try:
            return await watch.finished
        finally:
            follower.watches.discard(watch)


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

    :param interval: seconds after which the letters are refreshed even if no entry is stored
    :param reported: what was reported before
    :param only_new_groups: whether a group counts only if none of its dead letters was reported
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
        """Find letters that weren't reported; return for how many seconds there is no need to refresh again."""
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
        """Divide the letters into reported and unreported ones."""
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
    """Watch the letters of a queue. All watches of a queue on one connection share one follower."""
    watch = ArrivalWatch(queue.name, criteria, interval, reported, only_new_groups=only_new_groups)
    async with shared_follower(connection, queue, unaccounted=criteria.selection.unaccounted) as follower:
        follower.add(watch)
        try:
            yield watch
        finally:
            follower.watches.discard(watch)
