"""Sends jobs to the server one after another, as they come and as window, rate and queue allow."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    JobNotSerializableError,
    QueueFullError,
    TransientError,
    UnreachableError,
    WrongStreamError,
)
from airflow_provider_jetstream.jetstream.publishing.in_flight import JobsInFlight
from airflow_provider_jetstream.jetstream.publishing.job_in_flight import JobInFlight
from airflow_provider_jetstream.jetstream.publishing.known_jobs import NothingKnown
from airflow_provider_jetstream.jetstream.publishing.refusals import full_text, is_full_subject, too_old

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.job_in_flight import SendingLimits
    from airflow_provider_jetstream.jetstream.publishing.job_reader import JobReader
    from airflow_provider_jetstream.jetstream.publishing.known_jobs import KnownJobs
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun
    from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport

# Seconds until a full queue is tried again; doubled for as long as it stays full.
_FIRST_PAUSE = 0.05
# Also the longest time until a stop is noticed.
_LONGEST_PAUSE = 1.0
# So many failures are reported; they are held in memory.
_MAX_FAILURES = 10_000
# After so many jobs, bytes or seconds, other tasks of the event loop run. A run counts as one, since it takes as long.
_YIELD_JOBS = 64
_YIELD_BYTES = 256 << 10
_YIELD_SECONDS = 0.005


class JobSender:
    """Sends jobs with a bounded number in flight; its report holds the fate of each.

    A job that a full queue refuses is held back, and all jobs after it with it, until the queue has room: the first of
    them is sent alone, and after each success twice as many.

    :param window: the largest number of unacknowledged jobs
    :param stopped: returns whether to wait no longer for a turn or for room
    """

    def __init__(
        self,
        connection: Connection,
        window: int,
        limits: SendingLimits,
        rate_limiter: RateLimiter,
        stopped: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._window = window
        self._room_timeout = limits.room_timeout
        self._rate_limiter = rate_limiter
        self._stopped = stopped
        self._in_flight = JobsInFlight(connection, limits, rate_limiter.record_stored, stopped)
        self.report = self._in_flight.report
        self._gave_up: str | None = None
        self._useless_since: float | None = None
        self._yielded_at, self._jobs_since, self._bytes_since = time.monotonic(), 0, 0

    async def __aenter__(self) -> Self:
        await self._in_flight.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._in_flight.close()

    async def send_each(
        self,
        jobs: JobReader,
        known: KnownJobs,
        progress: Callable[[PublishReport], Awaitable[None]],
    ) -> None:
        """Send jobs as they come, until they end or publishing is stopped, and wait until the fate of each is known.

        What their source raises is noted in the report.

        :param known: the jobs that are stored already, and aren't sent again
        :param progress: awaited after the jobs that were sent together, and while the next one is awaited
        """
        while not self._stopped():
            if self._is_over():
                self.report.is_cut = not jobs.ended
                break
            if self._sends_at_once():
                if await self._wait_for_window():
                    continue
                room = min(self._window - len(self._in_flight), known.run_size)
                if ready := jobs.take_ready(room, _YIELD_BYTES):
                    self._send_ready(ready, known)
                    await self._yield(_YIELD_JOBS, ready.size)
                    await progress(self.report)
                    continue
            try:
                job = jobs.take()
            except Exception as error:  # noqa: BLE001
                # A source may raise anything.
                self.report.source_error = error
                break
            if job is None and jobs.ended:
                break
            if job is None:
                await self._wait_for_source(jobs)
                await progress(self.report)
                continue
            index = len(self.report.sequences)
            if sequence := known.sequence_of(index, job):
                self.report.add_stored(sequence)
            else:
                await self._send(index, job)
            await self._yield(1, len(job.body or b""))
            await progress(self.report)
        await self._send_refused()

    def _is_over(self) -> bool:
        """Return whether there is no point in reading more jobs: too many failed, or none is sent any more."""
        if len(self.report.failures) >= _MAX_FAILURES:
            return True
        if self._not_sent() is None:
            self._useless_since = None
            return False
        self._useless_since = self._useless_since or time.monotonic()
        return time.monotonic() - self._useless_since >= _LONGEST_PAUSE

    async def _wait_for_source(self, jobs: JobReader) -> None:
        """Wait for the next job, and meanwhile send those again that need it."""
        if self._in_flight.refused:
            await self._send_refused()
        await jobs.wait(min(self._in_flight.seconds_left(), _LONGEST_PAUSE))
        await self._in_flight.send_late()

    def _sends_at_once(self) -> bool:
        """Return whether nothing but the window decides when the next jobs are sent."""
        if self._rate_limiter.is_limited or self._in_flight.refused or not self._connection.is_connected:
            return False
        return self._not_sent() is None

    async def _wait_for_window(self) -> bool:
        """Wait where the window is full, until there is room; return whether that was so."""
        if len(self._in_flight) < self._window and self._in_flight.has_room_for_bytes:
            return False
        await self._in_flight.wait_until_at_most(self._window - 1)
        return True

    def _send_ready(self, ready: OutgoingRun, known: KnownJobs) -> None:
        """Send jobs in one write."""
        sequences, first = self.report.sequences, len(self.report.sequences)
        if known.are_new(first, ready):
            if self._in_flight.takes(ready):
                sequences.frombytes(bytes(len(ready) * sequences.itemsize))
                self._in_flight.send_run(first, ready)
                return
            known = NothingKnown()
        flights: list[tuple[int, JobInFlight]] = []
        try:
            for offset in range(len(ready)):
                index, job = first + offset, ready.job(offset)
                if sequence := known.sequence_of(index, job):
                    self.report.add_stored(sequence)
                    continue
                sequences.append(0)
                if flight := self._flight(index, job):
                    flights.append((index, flight))
        finally:
            self._in_flight.send_together(flights)

    async def _yield(self, count: int, size: int) -> None:
        """Let other tasks run, such as the one that writes to the connection."""
        self._jobs_since += count
        self._bytes_since += size
        if (
            self._jobs_since >= _YIELD_JOBS
            or self._bytes_since >= _YIELD_BYTES
            or time.monotonic() - self._yielded_at >= _YIELD_SECONDS
        ):
            await asyncio.sleep(0)
            self._yielded_at, self._jobs_since, self._bytes_since = time.monotonic(), 0, 0

    async def _send(self, index: int, job: OutgoingJob) -> None:
        """Send the next job as soon as window, rate and queue allow; its answer may come later."""
        self.report.sequences.append(0)
        if (flight := self._flight(index, job)) is None:
            return
        await self._wait_for_turn()
        if problem := self._not_sent():
            self._in_flight.fail(index, job, problem)
            return
        self._in_flight.send(index, flight)

    def _flight(self, index: int, job: OutgoingJob) -> JobInFlight | None:
        """Return a job that can be sent; ``None`` where it can't, which is then its fate."""
        try:
            payload = job.job.payload() if job.body is None else job.body
        except JobNotSerializableError as error:
            self._in_flight.fail(index, job, error)
            return None
        if job.api_level > self._connection.api_level:
            # An older server stores a schedule as a message like any other and never makes a job of it.
            self._in_flight.fail(index, job, too_old(job, self._connection))
            return None
        return JobInFlight(job, payload)

    def _not_sent(self) -> JetStreamProviderError | None:
        """Return why no more jobs are sent."""
        if self._in_flight.silent:
            reason = "it was not sent: the jobs before it got no answer"
            return UnreachableError(reason + last_report(self._connection.last_error))
        if self._in_flight.away:
            return UnreachableError(f"it was not sent: {self._in_flight.away}")
        if self._in_flight.misplaced:
            return WrongStreamError(f"it was not sent: {self._in_flight.misplaced}")
        if self._gave_up:
            return QueueFullError(f"it was not sent: {self._gave_up}")
        if self._stopped():
            return TransientError("it was not sent: publishing was stopped")
        return None

    async def _wait_for_turn(self) -> None:
        in_flight = self._in_flight
        while True:
            await in_flight.wait_until_at_most(self._window - 1)
            while self._is_away() and len(in_flight) and not self._not_sent():
                await self._connection.wait_until_connected(in_flight.seconds_left())
                await in_flight.send_late()
            if in_flight.refused:
                await self._send_refused()
            if self._not_sent() or (seconds := self._rate_limiter.delay(1)) <= 0:
                break
            await self._sleep(seconds)
        self._rate_limiter.consume(1)

    def _is_away(self) -> bool:
        return not (self._connection.is_connected or self._connection.is_closed)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but no longer than until a job in flight or a stop needs attention."""
        await asyncio.sleep(min(seconds, self._in_flight.seconds_left(), _LONGEST_PAUSE))
        await self._in_flight.send_late()

    async def _send_refused(self) -> None:
        """Wait for all answers, and send the jobs that a full queue refused again.

        Until they are stored, or there is no room for too long.
        """
        in_flight, refused = self._in_flight, self._in_flight.refused
        count, pause = 1, _FIRST_PAUSE
        while True:
            await in_flight.wait_until_at_most(0)
            if not refused:
                return
            now = time.monotonic()
            left = (now if in_flight.full_since is None else in_flight.full_since) + self._room_timeout - now
            if in_flight.silent or in_flight.away or self._stopped() or left <= 0:
                self._give_up_refused()
                return
            await asyncio.sleep(min(pause, left))
            waiting = len(refused)
            sent = self._first_refused(count)
            for index in sent:
                while (seconds := self._rate_limiter.delay(1)) > 0 and not self._stopped():
                    await self._sleep(seconds)
                self._rate_limiter.consume(1)
                in_flight.send(index, refused.pop(index))
            await in_flight.wait_until_at_most(0)
            stored = waiting - len(refused)
            count = min(2 * count, self._window) if stored == len(sent) else 1
            pause = 0.0 if stored else min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)

    def _first_refused(self, count: int) -> list[int]:
        """Return in their order the jobs to be sent again: the first of them alone finds out whether there is room."""
        in_flight = self._in_flight
        refused = sorted(in_flight.refused)
        if count == 1 and in_flight.refusal and is_full_subject(in_flight.refusal):
            # There may be room on the subjects of others.
            firsts = {in_flight.refused[index].job.subject: index for index in reversed(refused)}
            return sorted(firsts.values())
        return refused[:count]

    def _give_up_refused(self) -> None:
        in_flight, problem = self._in_flight, self._not_sent()
        if problem is None and in_flight.refusal:
            self._gave_up = full_text(in_flight.refusal, f" and stored nothing for {self._room_timeout:g} s")
            in_flight.takes_no_refused = True
            problem = QueueFullError(self._gave_up)
        for index in sorted(in_flight.refused):
            in_flight.fail(index, in_flight.refused[index].job, problem or TransientError("it was not sent"))
        in_flight.refused.clear()
