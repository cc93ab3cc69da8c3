"""Sends jobs to the server one after another, matches its answers to them, and sends again what wasn't stored."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import wire_size
from airflow_provider_jetstream.jetstream.client.publish_ack import parse_publish_ack
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    JobNotSerializableError,
    NotFoundError,
    QueueFullError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.refusals import (
    full_text,
    is_full,
    is_full_subject,
    job_error,
    too_large,
    too_old,
)
from airflow_provider_jetstream.jetstream.publishing.report import PublishFailure, PublishReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter

_NO_STREAM_PAUSE = 0.25
# Seconds until a full queue is tried again; doubled for as long as it stays full.
_FIRST_PAUSE = 0.05
# Also the longest time until a stop is noticed.
_LONGEST_PAUSE = 1.0


@dataclass(slots=True)
class _InFlight:
    job: OutgoingJob
    payload: bytes
    deadline: float
    attempts: int = 1
    foreign_answer: bool = False
    no_stream: bool = False
    answer_lost: bool = False


class JobSender:
    """Sends jobs with a bounded number in flight, and holds the fate of each in its report.

    A job that a full queue refuses is held back, and all jobs after it with it, until the queue has room: the first of
    them is sent alone, and after each success twice as many.

    :param window: the largest number of unacknowledged jobs
    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: the largest number of times that a job is sent for want of an answer
    :param room_timeout: how many seconds a full queue may store no job before the jobs that it refuses are given up
    :param stopped: returns whether to wait no longer for a turn or for room
    """

    def __init__(
        self,
        connection: Connection,
        window: int,
        ack_timeout: float,
        attempts: int,
        rate_limiter: RateLimiter,
        room_timeout: float,
        stopped: Callable[[], bool],
    ) -> None:
        self.report = PublishReport()
        self._connection = connection
        self._window = window
        self._ack_timeout = ack_timeout
        self._attempts = attempts
        self._rate_limiter = rate_limiter
        self._room_timeout = room_timeout
        self._stopped = stopped
        self._in_flight: OrderedDict[int, _InFlight] = OrderedDict()
        self._refused: dict[int, _InFlight] = {}
        self._refusal: ApiError | None = None
        self._full_since: float | None = None
        self._gave_up: str | None = None
        self._progress = asyncio.Event()
        self._last_answer = time.monotonic()
        self._silent = False
        self._inbox = connection.new_inbox()

    async def open(self) -> None:
        """Subscribe to the answers.

        :raises UnreachableError: the connection is closed
        """
        try:
            self._subscription = await self._connection.subscribe(f"{self._inbox}.*", self._on_answer)
        except UnreachableError as error:
            raise UnreachableError(f"nothing was published: {error}") from None

    async def close(self) -> None:
        """Unsubscribe."""
        await self._subscription.unsubscribe()

    async def send(self, index: int, job: OutgoingJob) -> None:
        """Send the next job as soon as window, rate and queue allow; its answer may come later.

        :param index: its position among all jobs
        """
        self.report.sequences.append(0)
        try:
            payload = job.job.payload() if job.body is None else job.body
        except JobNotSerializableError as error:
            self._fail(index, job, error, certain=True)
            return
        if job.api_level > self._connection.api_level:
            # An older server stores a schedule as a message like any other and never makes a job of it.
            self._fail(index, job, too_old(job, self._connection), certain=True)
            return
        await self._wait_for_turn()
        if problem := self._not_sent():
            self._fail(index, job, problem, certain=True)
            return
        await self._put(index, _InFlight(job, payload, time.monotonic() + self._ack_timeout))

    async def finish(self) -> None:
        """Wait until the fate of every job is known."""
        await self._send_refused()

    def _not_sent(self) -> JetStreamProviderError | None:
        """Return why no more jobs are sent."""
        if self._silent:
            reason = "it was not sent: the jobs before it got no answer"
            return UnreachableError(reason + self._last_report())
        if self._gave_up:
            return QueueFullError(f"it was not sent: {self._gave_up}")
        if self._stopped():
            return TransientError("it was not sent: publishing was stopped")
        return None

    async def _wait_for_turn(self) -> None:
        while True:
            await self._wait_for_answers(self._window - 1)
            while self._is_away() and self._in_flight and not self._not_sent():
                oldest = next(iter(self._in_flight.values()))
                await self._connection.wait_until_connected(max(oldest.deadline - time.monotonic(), 0.0))
                await self._resend_late()
            if self._refused:
                await self._send_refused()
            if self._not_sent() or (seconds := self._rate_limiter.delay(1)) <= 0:
                break
            await self._sleep(seconds)
        self._rate_limiter.consume(1)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but no longer than until a job in flight or a stop needs attention."""
        now = time.monotonic()
        due = min((flight.deadline for flight in self._in_flight.values()), default=now + seconds)
        await asyncio.sleep(min(seconds, max(0.0, due - now), _LONGEST_PAUSE))
        await self._resend_late()

    async def _send_refused(self) -> None:
        """Send the jobs that a full queue refused again, until they are stored or there is no room for too long."""
        count, pause = 1, _FIRST_PAUSE
        while True:
            await self._wait_for_answers(0)
            if not self._refused:
                return
            now = time.monotonic()
            left = (now if self._full_since is None else self._full_since) + self._room_timeout - now
            if self._silent or self._stopped() or left <= 0:
                self._give_up_refused()
                return
            await asyncio.sleep(min(pause, left))
            waiting = len(self._refused)
            sent = self._first_refused(count)
            for index in sent:
                while (seconds := self._rate_limiter.delay(1)) > 0 and not self._stopped():
                    await self._sleep(seconds)
                self._rate_limiter.consume(1)
                flight = self._refused.pop(index)
                flight.attempts, flight.deadline = 1, time.monotonic() + self._ack_timeout
                await self._put(index, flight)
            await self._wait_for_answers(0)
            stored = waiting - len(self._refused)
            count = min(2 * count, self._window) if stored == len(sent) else 1
            pause = 0.0 if stored else min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)

    def _first_refused(self, count: int) -> list[int]:
        """Return in their order the jobs to be sent again: the first of them alone finds out whether there is room."""
        refused = sorted(self._refused)
        if count == 1 and self._refusal and is_full_subject(self._refusal):
            # There may be room on the subjects of others.
            firsts = {self._refused[index].job.subject: index for index in reversed(refused)}
            return sorted(firsts.values())
        return refused[:count]

    def _give_up_refused(self) -> None:
        problem = self._not_sent()
        if problem is None and self._refusal:
            self._gave_up = full_text(self._refusal, f" and stored nothing for {self._room_timeout:g} s")
            problem = QueueFullError(self._gave_up)
        for index in sorted(self._refused):
            self._fail(index, self._refused[index].job, problem or TransientError("it was not sent"), certain=True)
        self._refused.clear()

    async def _wait_for_answers(self, max_in_flight: int) -> None:
        while len(self._in_flight) > max_in_flight:
            self._progress.clear()
            oldest = next(iter(self._in_flight.values()))
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + oldest.deadline - time.monotonic()):
                    await self._progress.wait()
            except TimeoutError:
                await self._resend_late()

    async def _resend_late(self) -> None:
        now = time.monotonic()
        for index, flight in [(index, flight) for index, flight in self._in_flight.items() if flight.deadline <= now]:
            if index not in self._in_flight:
                continue
            if flight.attempts >= self._attempts:
                del self._in_flight[index]
                self._silent = self._last_answer < flight.deadline - self._ack_timeout
                reason = f"no acknowledgement after {flight.attempts} attempts of {self._ack_timeout:g} s"
                if flight.foreign_answer:
                    reason += f": what answers on {flight.job.subject} isn't a stream; provision the queue first"
                self._fail(index, flight.job, UnreachableError(reason + self._last_report()), certain=False)
                continue
            flight.answer_lost |= not flight.no_stream
            flight.no_stream = False
            flight.attempts += 1
            flight.deadline = now + self._ack_timeout
            self._in_flight.move_to_end(index)
            await self._put(index, flight)

    async def _put(self, index: int, flight: _InFlight) -> None:
        self._in_flight[index] = flight
        limit = self._connection.max_payload
        # The client counts the body only; for body and headers together the server would close the connection.
        if len(flight.payload) + wire_size(flight.job.headers) > limit:
            del self._in_flight[index]
            self._fail(index, flight.job, too_large(f"the server's limit of {limit} bytes"), certain=True)
            return
        try:
            await self._connection.publish(
                flight.job.subject, flight.payload, flight.job.headers, f"{self._inbox}.{index}"
            )
        except UnreachableError as error:
            if self._is_away():
                # The job is sent again after its deadline.
                return
            del self._in_flight[index]
            self._fail(index, flight.job, error, certain=flight.attempts == 1)

    def _is_away(self) -> bool:
        return not (self._connection.is_connected or self._connection.is_closed)

    async def _on_answer(self, message: Msg) -> None:
        index = int(message.subject.rsplit(".", 1)[1])
        flight = self._in_flight.get(index)
        ack = refusal = None
        try:
            # An empty answer is the server's own: no stream captures the subject.
            ack = parse_publish_ack(message.subject, message.data) if message.data else None
        except ApiError as error:
            refusal = error
        except UnreachableError:
            # From a subscriber to the subject that is no stream; the stream's own answer may still come.
            if flight:
                flight.foreign_answer = True
            return
        self._last_answer, self._silent = time.monotonic(), False
        self._progress.set()
        if flight is None:
            return
        if not message.data and flight.attempts < self._attempts:
            # Either no stream captures the subject or the server is just starting: only time shows which.
            flight.no_stream = True
            flight.deadline = time.monotonic() + _NO_STREAM_PAUSE
            self._in_flight.move_to_end(index, last=False)
            return
        del self._in_flight[index]
        if refusal and is_full(refusal) and self._room_timeout > 0 and not self._gave_up:
            self._full_since = self._full_since or time.monotonic()
            self._refused[index], self._refusal = flight, refusal
        elif refusal:
            self._fail(index, flight.job, job_error(refusal), certain=True)
        elif ack is None:
            missing = NotFoundError(
                f"no stream captures {flight.job.subject}: provision the queue first, or check the subject"
            )
            # An attempt whose answer was lost may have been stored before the stream went away.
            self._fail(index, flight.job, missing, certain=not flight.answer_lost)
        else:
            if not ack.duplicate:
                self._full_since = None
            self._rate_limiter.record_stored(1 + len(self._in_flight))
            self.report.add_acknowledged(index, ack, scheduled=flight.job.scheduled)

    def _last_report(self) -> str:
        error = self._connection.last_error
        return f" (the connection last reported: {error})" if error else ""

    def _fail(self, index: int, job: OutgoingJob, error: JetStreamProviderError, *, certain: bool) -> None:
        self.report.failures.append(PublishFailure(index, job.job_id, error, certain))
