"""Order per key: what comes next are the letters whose key is free, each key by itself.

A step redrives the first letter of each free key. Its key is free again once that letter's job has completed; where the
job doesn't complete, the later letters of its key stay dead letters, and no other key waits for that.

The order is that in which the jobs were stored first: a copy that died again has the place of its original.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from airflow_provider_jetstream.jetstream.audit.intent import read_keys, record_keys
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock, stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, copied_from
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    LeaseLostError,
    NotFoundError,
    RedriveError,
    RedriveRequestError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.redrive.next_letters import NextLetters, ProvedPage
from airflow_provider_jetstream.jetstream.redrive.operation import POLL_SECONDS
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.follower import shared_follower
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.intent import KeyRecord
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.operation import Operation
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.follower import EndFollower

# After the end of a job, for others that end soon, so that one step brings back the next letters of several keys.
_LINGER_SECONDS = 5.0
_ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)


def key_of(letter: DeadLetter, order_key: str) -> str | None:
    """Return the key that a letter states; ``None`` where it states none.

    :param order_key: where it states its key
    """
    kind, _, name = order_key.partition(":")
    if kind == "header":
        return first(letter.headers, name) or None
    if kind == "body":
        return _field(letter.body, name)
    tokens = letter.subject.split(".")
    return tokens[int(name) - 1] if int(name) <= len(tokens) else None


def _field(body: bytes, name: str) -> str | None:
    """Return a field of a body that is a JSON object: text or a whole number, ``None`` for anything else."""
    try:
        value = json.loads(body)
        value = value.get(name) if isinstance(value, dict) else None
        # The number 7 and the text "7" are one key, as in most programs that take either.
        return str(value) or None if isinstance(value, str | int) and not isinstance(value, bool) else None
    except (ValueError, RecursionError):
        return None


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


@dataclass(slots=True)
class _Key:
    """The letters of one key.

    :param waiting: letters that haven't been redriven, the first one last: place and stream sequence
    :param last: the letter that was redriven last, as far as is known here
    :param in_step: whether that is in the current step
    :param awaited: the job that has to complete before the next letter
    :param stopped: why the others stay where they are
    """

    waiting: list[tuple[int, int]] = field(default_factory=list)
    last: int | None = None
    in_step: bool = False
    awaited: int | None = None
    stopped: str = ""

    @property
    def is_free(self) -> bool:
        """Whether its next letter may be redriven."""
        return bool(self.waiting) and self.awaited is None and not self.stopped


class KeyOrder(NextLetters):
    """The rule of a redrive that keeps the order of each key."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation)
        self._connection = operation.connection
        self._storing = operation.storing
        self._order_key = str(operation.request.order_key)
        self._cursor: Cursor
        self._last_before = 0
        self._step_began = 0.0
        self._stack = AsyncExitStack()
        self._forget()

    def _forget(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._unordered: list[int] = []
        self._dismissed: dict[int, Status] = {}
        # Jobs stored before the redrive began, whose ends may be stored as well, and those stored since.
        self._earlier, self._since = WaitReport(set()), WaitReport(set())
        self._awaiting: dict[int, _Key] = {}
        self.is_listed = False

    async def __aenter__(self) -> Self:
        """Note from where on the ends of jobs are read.

        :raises NotFoundError: the queue that gets the new jobs, or its events stream, doesn't exist
        :raises UnsuitableQueueError: jobs of that queue stay stored when they have ended
        """
        self._cursor = await take_cursor(self._connection, self._storing)
        self._last_before = (await stream_info(self._connection, self._storing.name))["state"]["last_seq"]
        # Between the steps it goes on reading.
        await self._stack.enter_async_context(shared_follower(self._connection, self._cursor))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # A step: the letters whose key is free.

    @property
    def at_once(self) -> bool:
        """Never: the letters of a step are few, and their jobs are awaited."""
        return False

    async def pages(self, scan: Scan, selection: Selection) -> AsyncGenerator[ProvedPage, None]:
        """Read all letters once, then return the first one of each free key."""
        audit = self.operation.audit
        if audit is None:
            return
        if self.is_listed:
            await scan.named_unaccounted(selection)
        else:
            async for page in scan.pages(selection):
                await scan.record_handled()
                yield ProvedPage((), page.dismissed, time.monotonic())
                await self._add(page.letters, audit)
            for key in self._keys.values():
                key.waiting.sort(reverse=True)
            self.is_listed = True
        free = await self._next(audit)
        for start in range(0, len(free), PAGE):
            # Not by a selection: these letters were selected, but the request doesn't name them.
            results, proved_at = await scan.classify(free[start : start + PAGE]), time.monotonic()
            letters = [job for job in results if isinstance(job, DeadLetter)]
            dismissed = [job for job in results if isinstance(job, NotDead)]
            self.dismiss(dismissed)
            selected = [letter for letter in letters if (letter.parked is not None) == selection.parked]
            yield ProvedPage(selected, dismissed, proved_at)

    async def _add(self, letters: Sequence[DeadLetter], audit: AuditLog) -> None:
        for letter, place in zip(letters, await map_concurrently(partial(_place_of, audit), letters), strict=True):
            if (key := key_of(letter, self._order_key)) is None:
                self._unordered.append(letter.sequence)
            else:
                self._keys.setdefault(key, _Key()).waiting.append((place, letter.sequence))

    async def _next(self, audit: AuditLog) -> list[int]:
        """Return the letters that may be redriven now, and record that they are about to be.

        :raises RedriveError: the audit takes no records
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        self._step_began = time.monotonic()
        unordered, self._unordered = self._unordered, []
        free = {name: key for name, key in self._keys.items() if key.is_free}
        # Others may have redriven letters of these keys since the last step. A letter is recorded before it is
        # redriven: an interrupted redrive may have got no further.
        records = await read_keys(self._connection, audit, self._order_key, list(free))
        others = [
            (free[name], record)
            for name, record in records.items()
            if record.sequence not in (free[name].last, free[name].waiting[-1][1])
        ]
        await map_concurrently(lambda other: self._follow(*other, audit), others)
        heads = {name: key.waiting[-1][1] for name, key in free.items() if key.is_free}
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
            key = free[name]
            key.waiting.pop()
            key.last, key.in_step = head, True
        return sorted([*unordered, *heads.values()])

    async def _follow(self, key: _Key, record: KeyRecord, audit: AuditLog) -> None:
        """Have a key wait for the job before, which another redrive has stored, if that hasn't ended."""
        key.last = record.sequence
        job = await _preceding_job(self._connection, self._storing, audit, record.sequence)
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

    def dismiss(self, jobs: Sequence[NotDead]) -> None:
        """Note what letters of the step are."""
        self._dismissed.update((job.sequence, job.status) for job in jobs)

    async def end_step(self) -> bool:
        """Note what became of the letters of the step; the redrive is over once none is left."""
        report = self.operation.report
        new_jobs = dict(zip(report.redriven, report.redriven.new_sequences(), strict=True))
        ended, dismissed, self._dismissed = {*report.parked, *report.gone}, self._dismissed, {}
        for key in self._keys.values():
            if not key.in_step or key.last is None:
                continue
            key.in_step = False
            status = dismissed.get(key.last)
            if new_job := new_jobs.get(key.last):
                self._await(key, new_job)
            elif key.last in new_jobs:
                key.stopped = f"the letter before it, {key.last}, became a job of another queue earlier"
            elif status == Status.REDRIVEN:
                # By somebody else: the next step finds out for which job to wait.
                key.last = None
            elif status and status not in (Status.COMPLETED, Status.HANDLED, Status.DISCARDED):
                key.stopped = f"the job before it, {key.last}, isn't known to have completed: {status.meaning}"
            elif status is None and key.last not in ended:
                key.stopped = f"the letter before it, {key.last}, wasn't redriven"
        await self.operation.save(RedriveState.RUNNING)
        return False

    # Between steps: the ends of their jobs.

    async def proceed(self) -> bool | None:
        """Wait until a key is free."""
        operation, report = self.operation, self.operation.report
        if report.cancelled or self.is_put_off:
            # A person has resumed it: others may have redriven its letters meanwhile.
            report.cancelled = False
            self._forget()
            return True
        if await self._wait():
            return True
        if operation.stopped():
            report.cancelled = True
            return None
        self.close()
        if not operation.request.keep_open:
            await operation.save_end()
        return False

    def _await(self, key: _Key, sequence: int) -> None:
        if not key.waiting:
            return
        key.awaited = sequence
        self._awaiting[sequence] = key
        report = self._since if sequence > self._last_before else self._earlier
        report.awaited.add(sequence)

    async def _wait(self) -> bool:
        """Wait until a key is free; return whether one is. False as well once the redrive is to stop."""
        async with shared_follower(self._connection, self._cursor) as follower:
            while not self.operation.stopped():
                self._take_ends()
                if any(key.is_free for key in self._keys.values()):
                    return True
                if not self._awaiting:
                    return False
                await self._next_end(follower)
        return False

    async def _next_end(self, follower: EndFollower) -> None:
        """Wait for the end of a job, and then a moment for those of others; return early if the redrive is to stop."""
        ended, stopped = asyncio.Event(), self.operation.stopped
        reports = ((self._cursor.from_start(), self._earlier), (self._cursor, self._since))
        waiters = [Waiter(cursor, report, _ANY_END, lambda _: ended.set(), {}) for cursor, report in reports]
        waiters = [waiter for waiter in waiters if not waiter.finished.done()]
        finished = [waiter.finished for waiter in waiters]
        for waiter in waiters:
            follower.add(waiter)
        try:
            while not stopped() and not ended.is_set() and not any(future.done() for future in finished):
                await asyncio.wait(finished, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            linger = min(_LINGER_SECONDS, time.monotonic() - self._step_began)
            if not stopped():
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

    def close(self) -> None:
        """Report the letters that stay where they are for the sake of the order."""
        report = self.operation.report
        report.cancelled |= any(key.waiting and not key.stopped for key in self._keys.values())
        for name, key in self._keys.items():
            for _, sequence in reversed(key.waiting if key.stopped else ()):
                why = f"{key.stopped}, and letters of the key {readable_text(name)} come back in order; original kept"
                report.add_failure(sequence, why)
        self._keys = {}


class _PrecedingJob(NamedTuple):
    """The job of the letter of a key that was redriven last, and when the audit recorded it."""

    stream: str
    sequence: int
    recorded_at: datetime
    is_stored: bool


async def _preceding_job(
    connection: Connection, storing: WorkQueue, audit: AuditLog, sequence: int
) -> _PrecedingJob | None:
    """Return the job that a letter became; ``None`` where nothing is to be awaited: it was parked, or not redriven.

    A job that died again, and was redriven again, counts as the job that it became then.

    :param storing: the queue that gets new jobs
    :param audit: of the letters' queue
    :param sequence: the letter's stream sequence
    """
    stream, record = audit.queue, await audit.last_record(sequence)
    found: _PrecedingJob | None = None
    while record and record.new_sequence and record.action in ("redriven", "requeued"):
        stream, sequence = record.new_stream or stream, record.new_sequence
        found = _PrecedingJob(stream, sequence, record.at, await _is_stored(connection, stream, sequence))
        if record.action == "requeued":
            return found
        if stream == audit.queue:
            record = await audit.last_record(sequence)
        elif stream == storing.name:
            created = (await stream_info(connection, stream))["created"]
            other = await AuditLog.open(connection, storing, created)
            record = await other.last_record(sequence) if other else None
        else:
            record = None
    return None if record and record.action in ("parked", "discarded") else found


async def _is_stored(connection: Connection, stream: str, sequence: int) -> bool:
    try:
        return await get_message(connection, stream, sequence) is not None
    except NotFoundError:
        return False


async def _place_of(audit: AuditLog, letter: DeadLetter) -> int:
    """Return the sequence of the original job, from which a letter's job was copied by one or more redrives."""
    place, before = letter.sequence, copied_from(letter)
    while before is not None and before < place:
        record = await audit.last_record(before)
        if record and (record.new_stream or record.new_sequence != place):
            return place
        place, before = before, record.copy_of if record else None
    return place
