"""The jobs that are sent and have no final answer yet: matches the answers to them, and sends again what needs it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.client.publish_ack import PublishAckRun, parse_publish_ack
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.flight_table import FlightTable
from airflow_provider_jetstream.jetstream.publishing.flight_writer import FlightWriter
from airflow_provider_jetstream.jetstream.publishing.refusals import is_full, is_passing, job_error
from airflow_provider_jetstream.jetstream.publishing.report import PublishFailure, PublishReport, RepeatedJob
from airflow_provider_jetstream.jetstream.publishing.unanswered_subjects import UnansweredSubjects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.job_in_flight import JobInFlight, SendingLimits
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun

# Seconds until a job is sent again that the server can't store just now.
_PASSING_PAUSE = 0.25
# How often no stream answers before JetStream is asked why.
_UNANSWERED = 2


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
        self._table = FlightTable(self.report.sequences)
        self._progress = asyncio.Event()
        self._last_answer = time.monotonic()
        self._unanswered = UnansweredSubjects(connection)
        self._inbox = connection.new_inbox()
        self._reply_prefix = f"{self._inbox}.".encode()
        self._writer = FlightWriter(
            connection, self._reply_prefix, self._table, limits.ack_timeout, self._unanswered, self.fail
        )

    def __len__(self) -> int:
        return len(self._table)

    @property
    def _stream(self) -> str | None:
        return self.report.destination.stream if self.report.destination else None

    async def open(self) -> None:
        """Subscribe to the answers.

        :raises UnreachableError: the connection is closed
        """
        destination = self.report.destination
        run = (
            PublishAckRun(self._reply_prefix, destination.stream, destination.domain or "", self._on_run)
            if destination
            else None
        )
        try:
            self._subscription = await self._connection.subscribe_raw(
                f"{self._inbox}.*", self._on_answer, self._on_denied, run=run
            )
        except UnreachableError as error:
            raise UnreachableError(f"nothing was published: {error}") from None

    async def close(self) -> None:
        """Unsubscribe."""
        await self._subscription.unsubscribe()

    def fail(self, index: int, job: OutgoingJob, error: JetStreamProviderError, *, certain: bool = True) -> None:
        """Report a job as not known to be stored."""
        self.report.failures.append(PublishFailure(index, job.job_id, error, certain))

    def send(self, index: int, flight: JobInFlight) -> None:
        """Send a job for the first time, or once more after a full queue has refused it."""
        self.send_together([(index, flight)])

    def takes(self, run: OutgoingRun) -> bool:
        """Return whether a run can be sent as it is: nothing is known to be wrong with any of its jobs."""
        return self._writer.takes(run)

    def send_run(self, first: int, run: OutgoingRun) -> None:
        """Send a run of jobs for the first time, in one write.

        :param first: the index of its first job
        """
        self._writer.send_run(first, run)

    def send_together(self, flights: Iterable[tuple[int, JobInFlight]]) -> None:
        """Send jobs in one write."""
        self._writer.send_together(flights)

    @property
    def has_room_for_bytes(self) -> bool:
        """Whether the jobs in flight are small enough together for another one."""
        return self._table.has_room_for_bytes

    async def wait_until_at_most(self, count: int) -> None:
        """Wait until no more jobs than these are in flight."""
        while len(self) > count or not self.has_room_for_bytes:
            self._progress.clear()
            try:
                async with asyncio.timeout(self.seconds_left()):
                    await self._progress.wait()
            except TimeoutError:
                await self.send_late()

    def seconds_left(self) -> float:
        """Return the seconds until a job has to be sent again; endless without jobs."""
        return max(0.0, self._table.deadline - time.monotonic())

    async def send_late(self) -> None:
        """Send the jobs again that have no answer in time, or whose pause is over."""
        now = time.monotonic()
        self._table.part_late_runs(now)
        late = sorted(index for index, flight in self._table.jobs.items() if flight.deadline <= now)
        for index, flight in [(index, self._table.jobs[index]) for index in late]:
            # Its answer may have come while another job was sent.
            if index not in self._table.jobs or flight.deadline > time.monotonic():
                continue
            error = await self._passing_error(flight) if flight.is_passing else self._silence(flight)
            if index not in self._table.jobs:
                continue
            if error:
                self._writer.give_up(index, error)
            else:
                self._writer.send_again(index, flight)

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

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        unheard = denial.subject == f"{self._inbox}.*"
        if unheard:
            self.away = denial
        elif denial.action == "publish":
            self._writer.denied[denial.subject] = denial
        self._table.part_all_runs()
        for index, flight in list(self._table.jobs.items()):
            if unheard or denial.subject == flight.job.subject:
                self._table.remove(index)
                self.fail(index, flight.job, denial, certain=not (unheard or flight.answer_lost))
                self._progress.set()

    def _on_run(self, indexes: Sequence[int], sequences: Sequence[int]) -> None:
        """Record jobs that the queue's stream has stored and didn't have: nearly all answers."""
        report = self.report
        self._last_answer, self.silent = time.monotonic(), False
        stored = self._table.runs.record(indexes, sequences)
        if stored < len(indexes) and self._table.jobs:
            stored += self._record_each(indexes, sequences)
        if stored:
            self._note_stored(stored, report.destination.stream if report.destination else report.stream)
        self._progress.set()

    def _note_stored(self, count: int, stream: str | None) -> None:
        self.away = self.full_since = None
        self.report.stream = stream
        self._stored(count + len(self))

    def _record_in_run(self, index: int, ack: PubAck) -> bool:
        """Record a PubAck, where nothing else came for the jobs of its run; return whether that was so."""
        report = self.report
        if ack.duplicate or (report.destination and report.destination.problem(ack)):
            return False
        if not self._table.runs.record([index], [ack.sequence]):
            return False
        self._note_stored(1, ack.stream)
        return True

    def _record_each(self, indexes: Sequence[int], sequences: Sequence[int]) -> int:
        report, stored = self.report, 0
        for index, sequence in zip(indexes, sequences, strict=True):
            if flight := self._table.jobs.get(index):
                self._table.remove(index)
                report.sequences[index] = sequence
                stored += 1
                if flight.job.scheduled:
                    report.scheduled.add(index)
        return stored

    def _on_answer(self, subject: bytes, _reply: bytes, _headers: bytes | None, payload: bytes) -> None:
        number = subject[len(self._reply_prefix) :]
        if number.isdigit():
            self._take_answer(int(number), payload)

    def _take_answer(self, index: int, payload: bytes) -> None:
        ack = refusal = None
        try:
            # An empty answer is the server's own: no stream answers on the subject.
            ack = parse_publish_ack("", payload) if payload else None
        except ApiError as error:
            refusal = error
        except UnreachableError:
            # From a subscriber to the subject that is no stream; the stream's own answer may still come.
            self._table.part_run_of(index)
            if flight := self._table.jobs.get(index):
                flight.foreign_answer = True
            return
        self._last_answer, self.silent = time.monotonic(), False
        self._progress.set()
        if ack and self._record_in_run(index, ack):
            return
        self._table.part_run_of(index)
        if (flight := self._table.jobs.get(index)) is None:
            return
        if ack is None and (refusal is None or is_passing(refusal)):
            self._retry_soon(index, flight, refusal)
            return
        self._table.remove(index)
        if ack:
            self._record(index, flight, ack)
        elif refusal:
            self._refuse(index, flight, refusal)

    def _refuse(self, index: int, flight: JobInFlight, refusal: ApiError) -> None:
        if is_full(refusal) and not self.takes_no_refused:
            self.full_since = self.full_since or time.monotonic()
            self.refused[index], self.refusal = flight, refusal
        else:
            self.fail(index, flight.job, job_error(refusal))

    def _retry_soon(self, index: int, flight: JobInFlight, refusal: ApiError | None) -> None:
        now = time.monotonic()
        flight.passing_since = flight.passing_since or now
        flight.passing, flight.is_passing = flight.passing + 1, True
        flight.refusal = job_error(refusal) if refusal else None
        flight.deadline = now + _PASSING_PAUSE

    def _record(self, index: int, flight: JobInFlight, ack: PubAck) -> None:
        self.away = None
        if self.report.destination and (problem := self.report.destination.problem(ack, flight.job.schedules)):
            self.misplaced = problem
            self.fail(index, flight.job, problem)
            return
        self._stored(1 + len(self))
        if ack.duplicate:
            if not flight.job.scheduled:
                self.report.stream = ack.stream
            self.report.repeated.append(RepeatedJob(index, flight.job, ack.stream, ack.sequence))
            return
        self.full_since = None
        self.report.add_acknowledged(index, ack, scheduled=flight.job.scheduled)
