"""The jobs that are sent and have no final answer yet: matches the answers to them, and sends again what needs it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.client.headers import wire_size
from airflow_provider_jetstream.jetstream.client.publish_ack import parse_publish_ack
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.refusals import is_full, is_passing, job_error, too_large
from airflow_provider_jetstream.jetstream.publishing.report import PublishFailure, PublishReport, RepeatedJob
from airflow_provider_jetstream.jetstream.publishing.unanswered_subjects import UnansweredSubjects

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

# Seconds until a job is sent again that the server can't store just now.
_PASSING_PAUSE = 0.25
# How often no stream answers before JetStream is asked why.
_UNANSWERED = 2
# Of all jobs in flight together: they are kept until they are stored.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SendingLimits:
    """How long and how often jobs are sent.

    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: the largest number of times that a job is sent for want of an answer
    :param away_timeout: how many seconds the server may say that it can't store a job just now, as it does while it
        shuts down, starts, or elects a leader
    :param room_timeout: how many seconds a full queue may store no job before the jobs that it refuses are given up
    """

    ack_timeout: float
    attempts: int
    away_timeout: float
    room_timeout: float


@dataclass(slots=True)
class JobInFlight:
    """A job that is sent.

    :param deadline: when it is sent again, by the monotonic clock
    :param attempts: how often it was sent for want of an answer
    :param foreign_answer: whether something answered that is no stream
    :param answer_lost: whether an attempt had no answer, so that the job may be stored
    :param passing_since: since when the server can't store it just now
    :param passing: how often that was the answer
    :param is_passing: whether that was the last answer
    :param refusal: why the server can't; ``None`` where no stream answers
    """

    job: OutgoingJob
    payload: bytes
    deadline: float = 0.0
    attempts: int = 1
    foreign_answer: bool = False
    answer_lost: bool = False
    passing_since: float = 0.0
    passing: int = 0
    is_passing: bool = False
    refusal: JetStreamProviderError | None = None


class JobsInFlight:
    """Sends jobs, and holds the fate of each in its report.

    :param stored: called with the number of jobs that may have been stored just now
    :param stopped: returns whether to wait no longer for a server that can't store a job just now
    :ivar refused: the jobs that a full queue refused, where there is time to wait for room
    :ivar refusal: the latest such refusal
    :ivar full_since: since when the queue has stored nothing for want of room
    :ivar silent: whether the server hasn't answered for too long
    :ivar away: why the server couldn't store a job for too long
    :ivar misplaced: that another stream than the queue's has stored a job
    :ivar takes_no_refused: whether no more time is left to wait for room
    """

    def __init__(
        self,
        connection: Connection,
        limits: SendingLimits,
        stored: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.report = PublishReport()
        self.refused: dict[int, JobInFlight] = {}
        self.refusal: ApiError | None = None
        self.full_since: float | None = None
        self.takes_no_refused = limits.room_timeout <= 0
        self.silent = False
        self.away: JetStreamProviderError | None = None
        self.misplaced: JetStreamProviderError | None = None
        self._connection = connection
        self._limits = limits
        self._stored = stored
        self._stopped = stopped
        self._jobs: OrderedDict[int, JobInFlight] = OrderedDict()
        self._bytes = 0
        self._progress = asyncio.Event()
        self._last_answer = time.monotonic()
        self._unanswered = UnansweredSubjects(connection)
        self._denied: dict[str, PermissionDeniedError] = {}
        self._inbox = connection.new_inbox()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def _stream(self) -> str | None:
        return self.report.destination.stream if self.report.destination else None

    async def open(self) -> None:
        """Subscribe to the answers.

        :raises UnreachableError: the connection is closed
        """
        try:
            self._subscription = await self._connection.subscribe(f"{self._inbox}.*", self._on_answer, self._on_denied)
        except UnreachableError as error:
            raise UnreachableError(f"nothing was published: {error}") from None

    async def close(self) -> None:
        """Unsubscribe."""
        await self._subscription.unsubscribe()

    def fail(self, index: int, job: OutgoingJob, error: JetStreamProviderError, *, certain: bool = True) -> None:
        """Report a job as not known to be stored."""
        self.report.failures.append(PublishFailure(index, job.job_id, error, certain))

    async def send(self, index: int, flight: JobInFlight) -> None:
        """Send a job for the first time, or once more after a full queue has refused it."""
        subject = flight.job.subject
        if refused := self._denied.get(subject) or self._unanswered.missing(subject):
            self.fail(index, flight.job, refused, certain=not flight.answer_lost)
            return
        flight.attempts = 1
        await self._put(index, flight)

    async def wait_until_at_most(self, count: int) -> None:
        """Wait until no more jobs than these are in flight."""
        while len(self._jobs) > count or self._bytes > _MAX_BYTES:
            self._progress.clear()
            seconds = next(iter(self._jobs.values())).deadline - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    await self._progress.wait()
            except TimeoutError:
                await self.send_late()

    def seconds_left(self) -> float:
        """Return the seconds until a job has to be sent again; endless without jobs."""
        return max(
            0.0, min((flight.deadline for flight in self._jobs.values()), default=float("inf")) - time.monotonic()
        )

    async def send_late(self) -> None:
        """Send the jobs again that have no answer in time, or whose pause is over."""
        now = time.monotonic()
        for index, flight in [(index, flight) for index, flight in self._jobs.items() if flight.deadline <= now]:
            # Its answer may have come while another job was sent.
            if index not in self._jobs or flight.deadline > time.monotonic():
                continue
            error = await self._passing_error(flight) if flight.is_passing else self._silence(flight)
            if index not in self._jobs:
                continue
            if error:
                self._remove(index)
                self.fail(index, flight.job, error, certain=not flight.answer_lost)
            else:
                await self._put(index, flight)

    def _silence(self, flight: JobInFlight) -> UnreachableError | None:
        """Return the error of a job that had no answer, unless it is to be sent again."""
        flight.answer_lost = True
        attempts, seconds = self._limits.attempts, self._limits.ack_timeout
        if flight.attempts < attempts:
            flight.attempts += 1
            return None
        self.silent = self._last_answer < flight.deadline - seconds
        reason = f"no acknowledgement after {attempts} attempts of {seconds:g} s"
        if flight.foreign_answer:
            reason += f": what answers on {flight.job.subject} isn't a stream; provision the queue first"
        return UnreachableError(reason + last_report(self._connection.last_error))

    async def _passing_error(self, flight: JobInFlight) -> JetStreamProviderError | None:
        """Return the error of a job that the server can't store, unless it can only not just now."""
        error = flight.refusal
        if error is None and flight.passing >= _UNANSWERED:
            error = await self._unanswered.reason(flight.job.subject, self._stream)
        if isinstance(error, NotFoundError):
            return error
        is_over = time.monotonic() - flight.passing_since >= self._limits.away_timeout
        if is_over or self._stopped():
            self.away = error or await self._unanswered.reason(flight.job.subject, self._stream)
            return self.away
        return None

    async def _put(self, index: int, flight: JobInFlight) -> None:
        if index not in self._jobs:
            self._bytes += len(flight.payload)
        self._jobs[index] = flight
        self._jobs.move_to_end(index)
        flight.deadline, flight.is_passing = time.monotonic() + self._limits.ack_timeout, False
        limit = self._connection.max_payload
        # The client counts the body only; for body and headers together the server would close the connection.
        if len(flight.payload) + wire_size(flight.job.headers) > limit:
            self._remove(index)
            self.fail(index, flight.job, too_large(f"the server's limit of {limit} bytes"))
            return
        try:
            await self._connection.publish(
                flight.job.subject, flight.payload, flight.job.headers, f"{self._inbox}.{index}"
            )
        except UnreachableError as error:
            # While the connection is lost, the job is sent again after its deadline.
            if self._connection.is_connected or self._connection.is_closed:
                self._remove(index)
                self.fail(index, flight.job, error, certain=not flight.answer_lost)

    def _remove(self, index: int) -> None:
        self._bytes -= len(self._jobs.pop(index).payload)

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        unheard = denial.subject == f"{self._inbox}.*"
        if unheard:
            self.away = denial
        elif denial.action == "publish":
            self._denied[denial.subject] = denial
        for index, flight in list(self._jobs.items()):
            if unheard or denial.subject == flight.job.subject:
                self._remove(index)
                self.fail(index, flight.job, denial, certain=not (unheard or flight.answer_lost))
                self._progress.set()

    async def _on_answer(self, message: Msg) -> None:
        index = int(message.subject.rsplit(".", 1)[1])
        flight = self._jobs.get(index)
        ack = refusal = None
        try:
            # An empty answer is the server's own: no stream answers on the subject.
            ack = parse_publish_ack(message.subject, message.data) if message.data else None
        except ApiError as error:
            refusal = error
        except UnreachableError:
            # From a subscriber to the subject that is no stream; the stream's own answer may still come.
            if flight:
                flight.foreign_answer = True
            return
        self._last_answer, self.silent = time.monotonic(), False
        self._progress.set()
        if flight is None:
            return
        if ack is None and (refusal is None or is_passing(refusal)):
            self._retry_soon(index, flight, refusal)
            return
        self._remove(index)
        if ack:
            self._record(index, flight, ack)
        elif refusal and is_full(refusal) and not self.takes_no_refused:
            self.full_since = self.full_since or time.monotonic()
            self.refused[index], self.refusal = flight, refusal
        elif refusal:
            self.fail(index, flight.job, job_error(refusal))

    def _retry_soon(self, index: int, flight: JobInFlight, refusal: ApiError | None) -> None:
        now = time.monotonic()
        flight.passing_since = flight.passing_since or now
        flight.passing, flight.is_passing = flight.passing + 1, True
        flight.refusal = job_error(refusal) if refusal else None
        flight.deadline = now + _PASSING_PAUSE
        self._jobs.move_to_end(index, last=False)

    def _record(self, index: int, flight: JobInFlight, ack: PubAck) -> None:
        self.away = None
        if self.report.destination and (problem := self.report.destination.problem(ack)):
            self.misplaced = problem
            self.fail(index, flight.job, problem)
            return
        if not ack.duplicate:
            self.full_since = None
        self._stored(1 + len(self._jobs))
        self.report.add_acknowledged(index, ack, scheduled=flight.job.scheduled)
        if ack.duplicate and flight.attempts == 1 and not flight.passing:
            job = flight.job
            self.report.repeated.append(RepeatedJob(index, job.job_id, ack.sequence, job.key.body_digest))
