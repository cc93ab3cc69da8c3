"""Redrives letters of one key one after the other, and letters of different keys beside each other.

A redrive that keeps this order goes in waves. A wave is a redrive like any other, of the first letter of each key,
with the queue's lease. Then the lease is released, until a job of the wave has completed: the next wave brings back the
next letter of its key. Where a job doesn't complete, the later letters of its key stay dead letters.

The order is that in which the jobs were stored first: a copy that died again has the place of its original.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.audit.intent import read_keys, record_keys
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    LeaseLostError,
    RedriveError,
    RedriveRequestError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.redrive.order_key import key_of
from airflow_provider_jetstream.jetstream.redrive.preceding_job import place_of, preceding_job
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.follower import shared_follower
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.intent import KeyRecord
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.follower import EndFollower

# How often a wait looks whether it is to stop.
_LOOK_SECONDS = 0.5
# After the end of a job, for others that end soon, so that one wave brings back the next letters of several keys.
_LINGER_SECONDS = 5.0
_ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)


@dataclass(slots=True)
class _Key:
    """The letters of one key.

    :param waiting: letters that haven't been redriven, the first one last: place and stream sequence
    :param last: the letter that was redriven last, as far as is known here
    :param in_wave: whether that is in the current wave
    :param awaited: the job that has to complete before the next letter
    :param stopped: why the others stay where they are
    """

    waiting: list[tuple[int, int]] = field(default_factory=list)
    last: int | None = None
    in_wave: bool = False
    awaited: int | None = None
    stopped: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether its next letter may be redriven."""
        return bool(self.waiting) and self.awaited is None and not self.stopped


def check_order(request: RedriveRequest, queue: WorkQueue) -> None:
    """Refuse to keep an order where nothing would say when a job has ended.

    :raises RedriveRequestError: the queue that gets the new jobs declares no events
    """
    storing = request.target or queue
    if request.order_key is not None and storing.events is None:
        raise RedriveRequestError(
            f"expected events of {storing.name} for a redrive with order_key, which waits for each job of a key before"
            " the next one, found none: declare events and provision the queue, or leave order_key out"
        )


class KeyOrder:
    """The order of one redrive, as a context manager.

    :ivar is_listed: whether the letters are known, which :meth:`add` adds
    :ivar rate_limiter: the limiter of all waves
    """

    def __init__(
        self, connection: Connection, queue: WorkQueue, request: RedriveRequest, stopped: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._storing = request.target or queue
        self._order_key = str(request.order_key)
        self._stopped = stopped
        self._keys: dict[str, _Key] = {}
        self._unordered: list[int] = []
        self._dismissed: dict[int, Status] = {}
        # Jobs stored before the redrive began, whose ends may be stored as well, and those stored since.
        self._earlier, self._since = WaitReport(set()), WaitReport(set())
        self._awaiting: dict[int, _Key] = {}
        self._cursor: Cursor
        self._last_before = 0
        self._wave_began = 0.0
        self._stack = AsyncExitStack()
        self.is_listed = False
        self.rate_limiter = RateLimiter(request.rate)

    async def __aenter__(self) -> Self:
        """Note from where on the ends of jobs are read.

        :raises NotFoundError: the queue that gets the new jobs, or its events stream, doesn't exist
        :raises UnsuitableQueueError: jobs of that queue stay stored when they have ended
        """
        self._cursor = await take_cursor(self._connection, self._storing)
        self._last_before = (await stream_info(self._connection, self._storing.name))["state"]["last_seq"]
        # Between the waves it goes on reading.
        await self._stack.enter_async_context(shared_follower(self._connection, self._cursor))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def add(self, letters: Sequence[DeadLetter], audit: AuditLog) -> None:
        """Add letters, in any order."""
        for letter, place in zip(letters, await map_concurrently(partial(place_of, audit), letters), strict=True):
            if (key := key_of(letter, self._order_key)) is None:
                self._unordered.append(letter.sequence)
            else:
                self._keys.setdefault(key, _Key()).waiting.append((place, letter.sequence))

    def end_listing(self) -> None:
        """Sort the letters; all are added."""
        self.is_listed = True
        for key in self._keys.values():
            key.waiting.sort(reverse=True)

    async def next_wave(self, audit: AuditLog) -> list[int]:
        """Return the letters that may be redriven now, and record that they are about to be.

        :raises RedriveError: the audit takes no records
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        self._wave_began = time.monotonic()
        wave, self._unordered = self._unordered, []
        ready = {name: key for name, key in self._keys.items() if key.is_ready}
        # Others may have redriven letters of these keys since the last wave.
        last = await read_keys(self._connection, audit, self._order_key, list(ready))
        others = [name for name, record in last.items() if self._is_of_others(ready[name], record)]
        await map_concurrently(lambda name: self._follow(ready[name], last[name], audit), others)
        heads = {name: key.waiting[-1][1] for name, key in ready.items() if key.is_ready}
        try:
            await record_keys(audit, self._order_key, heads)
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            raise RedriveError(
                f"expected {audit.stream} to record which letters are redriven, found: {error}; none of them was: see"
                " to it that the audit takes records, then run it again"
            ) from None
        for name, head in heads.items():
            key = ready[name]
            key.waiting.pop()
            key.last, key.in_wave = head, True
        return sorted([*wave, *heads.values()])

    def _is_of_others(self, key: _Key, record: KeyRecord) -> bool:
        # The letter is recorded before it is redriven: an interrupted redrive may have got no further.
        return record.sequence not in (key.last, key.waiting[-1][1])

    async def _follow(self, key: _Key, record: KeyRecord, audit: AuditLog) -> None:
        """Have a key wait for the job before, which another redrive has stored, if that hasn't ended."""
        key.last = record.sequence
        job = await preceding_job(self._connection, self._storing, audit, record.sequence)
        if job is None or any(job.sequence == sequence for _, sequence in key.waiting):
            return
        if job.stream == self._storing.name:
            if job.is_stored or not await self._is_forgotten(job.recorded_at):
                self._await(key, job.sequence)
        elif job.is_stored:
            key.stopped = f"the job before it, {job.sequence} of {job.stream}, hasn't ended"

    async def _is_forgotten(self, moment: datetime) -> bool:
        """Return whether the end of a job that was stored at a moment may be gone from the events stream by now."""
        info = await stream_info(self._connection, self._cursor.events)
        max_age = timedelta(microseconds=info["config"].get("max_age", 0) / 1_000)
        return timedelta() < max_age < ServerClock.of(info).answered_at - moment

    def dismiss(self, jobs: Iterable[NotDead]) -> None:
        """Note that letters of the wave are no dead letters any more."""
        self._dismissed.update((job.sequence, job.status) for job in jobs)

    def take_results(self, report: RedriveReport) -> None:
        """Note what became of the letters of the wave."""
        new_jobs = dict(zip(report.redriven, report.redriven.new_sequences(), strict=True))
        ended, dismissed, self._dismissed = {*report.parked, *report.gone}, self._dismissed, {}
        for key in self._keys.values():
            if not key.in_wave or key.last is None:
                continue
            key.in_wave = False
            status = dismissed.get(key.last)
            if new_job := new_jobs.get(key.last):
                self._await(key, new_job)
            elif key.last in new_jobs:
                key.stopped = f"the letter before it, {key.last}, became a job of another queue earlier"
            elif status == Status.REDRIVEN:
                # By somebody else: the next wave finds out for which job to wait.
                key.last = None
            elif status and status not in (Status.COMPLETED, Status.HANDLED):
                key.stopped = f"the job before it, {key.last}, isn't known to have completed: {status.meaning}"
            elif status is None and key.last not in ended:
                key.stopped = f"the letter before it, {key.last}, wasn't redriven"

    def _await(self, key: _Key, sequence: int) -> None:
        if not key.waiting:
            return
        key.awaited = sequence
        self._awaiting[sequence] = key
        report = self._since if sequence > self._last_before else self._earlier
        report.awaited.add(sequence)

    async def wait(self) -> bool:
        """Wait until the next letter of a key may be redriven; return whether one may.

        To be called without the lease. Returns false as well once the redrive is to stop.
        """
        async with shared_follower(self._connection, self._cursor) as follower:
            while not self._stopped():
                self._take_ends()
                if any(key.is_ready for key in self._keys.values()):
                    return True
                if not self._awaiting:
                    return False
                await self._next_end(follower)
        return False

    async def _next_end(self, follower: EndFollower) -> None:
        """Wait for the end of a job, and then a moment for those of others; return early if the redrive is to stop."""
        ended = asyncio.Event()
        reports = ((self._cursor.from_start(), self._earlier), (self._cursor, self._since))
        waiters = [Waiter(cursor, report, _ANY_END, lambda _: ended.set(), {}) for cursor, report in reports]
        waiters = [waiter for waiter in waiters if not waiter.finished.done()]
        finished = [waiter.finished for waiter in waiters]
        for waiter in waiters:
            follower.add(waiter)
        try:
            while not self._stopped() and not ended.is_set() and not any(future.done() for future in finished):
                await asyncio.wait(finished, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            linger = min(_LINGER_SECONDS, time.monotonic() - self._wave_began)
            if not self._stopped():
                await asyncio.wait(finished, timeout=linger)
        finally:
            for waiter in waiters:
                follower.remove(waiter)
        for future in finished:
            if future.done():
                future.result()

    def _take_ends(self) -> None:
        for report in (self._earlier, self._since):
            for sequence in (*report.completed, *report.cancelled):
                if key := self._awaiting.pop(sequence, None):
                    key.awaited = None
            for sequence, why in (*report.dead.items(), *((sequence, "") for sequence in report.unaccounted)):
                if key := self._awaiting.pop(sequence, None):
                    key.awaited = None
                    died = f"is dead again ({why})" if why else "is gone, and how it ended isn't known"
                    key.stopped = f"the job before it, {sequence} of {self._storing.name}, {died}"
            report.results_at = {}

    def close(self, report: RedriveReport) -> None:
        """Report the letters that stay where they are for the sake of the order."""
        report.cancelled |= any(key.waiting and not key.stopped for key in self._keys.values())
        for name, key in self._keys.items():
            for _, sequence in reversed(key.waiting if key.stopped else ()):
                why = f"{key.stopped}, and letters of the key {readable_text(name)} come back in order; original kept"
                report.add_failure(sequence, why)
