"""Writes jobs to the connection, a run in one piece, and gives up those that can't be written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, UnreachableError
from airflow_provider_jetstream.jetstream.publishing.refusals import too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.jetstream.publishing.flight_table import FlightTable
    from airflow_provider_jetstream.jetstream.publishing.job_in_flight import JobInFlight
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun
    from airflow_provider_jetstream.jetstream.publishing.unanswered_subjects import UnansweredSubjects


class FlightWriter:
    """Writes jobs, and notes them in a table.

    :param reply_prefix: the inbox for answers and a dot; a job's index follows
    :param ack_timeout: seconds to wait for an answer
    :param fail: reports a job as not known to be stored
    :ivar denied: by subject, why the server takes nothing there
    """

    def __init__(
        self,
        connection: Connection,
        reply_prefix: bytes,
        table: FlightTable,
        ack_timeout: float,
        unanswered: UnansweredSubjects,
        fail: Callable[..., None],
    ) -> None:
        self.denied: dict[str, PermissionDeniedError] = {}
        self._connection = connection
        self._reply_prefix = reply_prefix
        self._table = table
        self._ack_timeout = ack_timeout
        self._unanswered = unanswered
        self._fail = fail

    def takes(self, run: OutgoingRun) -> bool:
        """Return whether a run can be sent as it is: nothing is known to be wrong with any of its jobs."""
        if not run.is_plain or run.largest > self._connection.max_payload:
            return False
        return not any(self._refusal_of(subject) for subject in run.subjects)

    def send_run(self, first: int, run: OutgoingRun) -> None:
        """Send a run of jobs for the first time, in one write.

        :param first: the index of its first job
        """
        frames = run.encode(self._reply_prefix, first)
        self._table.runs.add(first, run, time.monotonic() + self._ack_timeout)
        try:
            self._connection.write(frames, len(run))
        except UnreachableError as error:
            if self._is_not_lost:
                for index in self._table.part_run_of(first):
                    self.give_up(index, error)

    def send_together(self, flights: Iterable[tuple[int, JobInFlight]]) -> None:
        """Send jobs in one write."""
        frames: list[bytes] = []
        sent: list[int] = []
        deadline = time.monotonic() + self._ack_timeout
        for index, flight in flights:
            subject = flight.job.subject
            if refused := self._refusal_of(subject):
                self._fail(index, flight.job, refused, certain=not flight.answer_lost)
                continue
            flight.attempts = 1
            if frame := self._encoded(index, flight):
                frames.append(frame)
                sent.append(index)
                self._table.add(index, flight)
                flight.deadline, flight.is_passing = deadline, False
        self._write(frames, sent)

    def _refusal_of(self, subject: str) -> JetStreamProviderError | None:
        """Return why nothing is sent on a subject, as far as the server has said so already."""
        return self.denied.get(subject) or self._unanswered.missing(subject)

    def _encoded(self, index: int, flight: JobInFlight) -> bytes | None:
        """Return a job as it is sent; ``None`` where it is too large, which is then its fate."""
        limit = self._connection.max_payload
        if (frame := flight.encode(b"%b%d" % (self._reply_prefix, index), limit)) is None:
            self._fail(index, flight.job, too_large(f"the server's limit of {limit} bytes"))
        return frame

    def _write(self, frames: Sequence[bytes], indexes: Sequence[int]) -> None:
        if not frames:
            return
        try:
            self._connection.write(b"".join(frames), len(frames))
        except UnreachableError as error:
            # While the connection is lost, the jobs are sent again after their deadline.
            if self._is_not_lost:
                for index in indexes:
                    self.give_up(index, error)

    @property
    def _is_not_lost(self) -> bool:
        """Whether the connection is there, or never will be."""
        return self._connection.is_connected or self._connection.is_closed

    def give_up(self, index: int, error: JetStreamProviderError) -> None:
        """Report a job by itself as not known to be stored."""
        flight = self._table.jobs[index]
        self._table.remove(index)
        self._fail(index, flight.job, error, certain=not flight.answer_lost)

    def send_again(self, index: int, flight: JobInFlight) -> None:
        """Send a job once more that had no answer."""
        self._table.jobs.move_to_end(index)
        flight.deadline, flight.is_passing = time.monotonic() + self._ack_timeout, False
        if frame := self._encoded(index, flight):
            self._write([frame], [index])
        else:
            self._table.remove(index)
