"""One follower of the dead letters of a queue, shared by all who wait for some on a connection.

The follower proves all letters once, keeps them current by looks that read what has changed
(:mod:`~airflow_provider_jetstream.jetstream.dead_letters.tracked_letters`), and tells its watches after each look. It
looks when the dead letter queue stores an entry, and from time to time for deaths of which the server has published
none. A proof of all letters is repeated where a look can't tell any more, and slowly in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.stream_tail import StreamTail
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import dead_letter_subjects
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, TransientError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.find import Summary
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

# Entries that are stored shortly after one another are read by one look.
_GATHER_SECONDS = 0.05
# Looks for deaths without an entry, and proofs of all letters, come no more often.
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

    :param interval: seconds after which the queue is looked at even if no entry is stored
    """

    def __init__(self, criteria: LetterCriteria, interval: float) -> None:
        self.criteria = criteria
        self.finished: asyncio.Future[Summary] = asyncio.get_running_loop().create_future()
        self._interval = interval
        # Airflow finds a task's log by the context.
        self._context = copy_context()
        self._warn_after = 0.0

    async def check(self, letters: TrackedLetters) -> float:
        """Finish if there are enough letters; return for how many seconds there is no need to look again."""
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
        """Look for a watch, now and from now on."""
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
                    watch.warn("Looking at the dead letters of %s failed, trying again: %s", self._queue.name, error)
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            pause = _PROOF_INTERVAL
            for watch in tuple(self.watches):
                pause = min(pause, await watch.check(letters))
            # Of a proof only another one has to wait: the looks after it read little.
            began = max(began, self._proof_ended)
            took = time.monotonic() - began
            await self._wait_for_bell(pause - took)
            # At most half of the time is spent on looks.
            await asyncio.sleep(max(_GATHER_SECONDS, began + 2 * took - time.monotonic()))

    async def _current_letters(self) -> TrackedLetters:
        """Bring the letters up to date."""
        letters = self._letters
        if self._proof and self._proof.done():
            # The new letters are older than the last look, and so need one themselves.
            letters, self._proof = self._renewed(letters, self._proof), None
        if letters is None or not await letters.update(self._connection):
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
                log.info("%s can't be followed, and is looked at from time to time only: %s", stream, error)
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

    :param interval: seconds after which the queue is looked at even if no entry is stored
    :raises JetStreamProviderError: as :func:`~.find.summarise_dead_letters` does
    """
    watch = LetterWatch(criteria, interval)
    async with shared_follower(connection, queue, unaccounted=criteria.selection.unaccounted) as follower:
        follower.add(watch)
        try:
            return await watch.finished
        finally:
            follower.watches.discard(watch)
