"""The ends of a queue's jobs in one stream: a follower, a reader of older ones, and the ends read recently."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_tail import StreamTail
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import ended_job_time
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import reported_job
from airflow_provider_jetstream.jetstream.waiting.job_end import AdvisoryReport, EndKind, parse_end
from airflow_provider_jetstream.jetstream.waiting.recent_events import RecentEvents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.client.stream_tail import TailedMessage

# A new waiter is seconds behind its cursor, or minutes after a restart; older ends are read again.
_RECENT = 25_000
# Seconds in which further waiters share one reading of the backlog.
_JOIN_DELAY = 0.05
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class EndSource:
    """The ends of a queue's jobs in one stream.

    :param subjects: the subjects of the ends
    :param start: the first sequence to read
    :param created: when the stream was created in which ``start`` is a position; empty where that isn't known
    :param on_end: called with each end as it is read
    :param advisory_subjects: further subjects, on which workers of any make report jobs
    :param on_report: called with each such report as it is read
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subjects: tuple[str, ...],
        cursor: Cursor,
        start: int,
        created: str,
        on_end: Callable[[EndSource, JobEnd], None],
        *,
        advisory_subjects: tuple[str, ...] = (),
        on_report: Callable[[AdvisoryReport], None] = lambda _: None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._subjects = (*subjects, *advisory_subjects)
        self._advisory_subjects = advisory_subjects
        self._on_report = on_report
        self._queue = cursor.queue
        self._created = datetime.fromisoformat(cursor.created)
        # Workers of version 1 of the contract state a job's time in microseconds, and so does this.
        self._created_nanoseconds = (self._created - _EPOCH) // timedelta(microseconds=1) * 1_000
        self._on_end = on_end
        # By the job's sequence, and by its digest.
        self._recent: RecentEvents[int, JobEnd] = RecentEvents(_RECENT)
        self._recent_reports: RecentEvents[str, AdvisoryReport] = RecentEvents(_RECENT)
        # Every end stored from here on has been read or will be.
        self._low = start
        self._backlog_start: int | None = None
        self._backlog_requested = asyncio.Event()
        self._backlog_read = asyncio.Event()
        self._backlog_read.set()
        self._stream_created: str | None = None
        self._tail = StreamTail(
            *(connection, stream, self._subjects, start, self._take),
            created=created or None,
            on_created=self._note_created,
        )

    async def follow(self) -> None:
        """Read what is stored from now on; see :meth:`StreamTail.run`."""
        await self._tail.run()

    async def read_backlog(self) -> None:
        """Read what :meth:`request_backlog` asks for, in one go for concurrent requests; see :meth:`StreamTail.run`."""
        while True:
            await self._backlog_requested.wait()
            await asyncio.sleep(_JOIN_DELAY)
            self._backlog_requested.clear()
            start, stop, self._backlog_start = self._backlog_start, self._low - 1, None
            if start is not None and start <= stop:
                # Set before reading: a waiter added from here on gets what is read later, and the recent ends.
                self._low = start
                await StreamTail(self._connection, self._stream, self._subjects, start, self._take, stop=stop).run()
            if not self._backlog_requested.is_set():
                self._backlog_read.set()

    def start_of(self, start: int, created: str) -> int:
        """Return a position of a cursor in the stream that is read: its beginning, where it was created anew since.

        :param created: when the stream was created in which ``start`` is a position; empty where that isn't known
        """
        return 1 if created and self._stream_created not in (None, created) else start

    def abandon(self) -> None:
        """Let nobody wait any more for what can't be read."""
        self._tail.caught_up.set()
        self._backlog_read.set()

    def _note_created(self, created: str) -> None:
        if self._stream_created not in (None, created):
            self._recent.clear()
            self._recent_reports.clear()
            self._low = 1
        self._stream_created = created

    def request_backlog(self, start: int) -> None:
        """Have the ends read that are stored from a sequence on, where they haven't been."""
        if start >= self._low:
            return
        self._backlog_start = min(start, self._low if self._backlog_start is None else self._backlog_start)
        self._backlog_read.clear()
        self._backlog_requested.set()

    def recent_ends(self, report: WaitReport, start: int) -> list[JobEnd]:
        """Return the ends of a report's jobs that were read and are stored at or after a sequence of this stream."""
        if report.unsettled_count > len(self._recent):
            # Of very many jobs, most haven't ended.
            return [
                end
                for end in self._recent.values()
                if end.event_sequence >= start and report.is_unsettled(end.sequence)
            ]
        ends = (self._recent.get(sequence) for sequence in report.unsettled())
        return [end for end in ends if end is not None and end.event_sequence >= start]

    def recent_reports(self, digests: Iterable[str], start: int) -> list[AdvisoryReport]:
        """Return the last report of each job that was read and is stored at or after a sequence of this stream."""
        reports = (self._recent_reports.get(digest) for digest in digests)
        return [report for report in reports if report is not None and report.event_sequence >= start]

    async def wait_until_read(self) -> None:
        """Wait until everything stored so far has been read."""
        await self._tail.caught_up.wait()
        await self._backlog_read.wait()

    def _take(self, message: TailedMessage) -> None:
        if message.stored_at < self._created:
            return
        if self._advisory_subjects and covered_by_any(self._advisory_subjects, message.subject):
            # Never by the sequence in it: anybody may publish here.
            self._take_report(message)
            return
        if message.is_from_elsewhere:
            return
        place = (self._queue, self._connection.domain, message.stored_at, message.subject)
        end = parse_end(message.data, message.sequence, *place)
        if end is None or self._is_of_earlier_stream(message, end):
            return
        self._note(end)

    def _note(self, end: JobEnd) -> None:
        latest = end
        if earlier := self._recent.get(end.sequence):
            # The ack metric of a completed or cancelled job comes last and adds nothing; the backlog has older ends.
            latest = max(earlier, end, key=_said_most)
        self._recent.put(end.sequence, latest, latest.event_sequence)
        self._low = max(self._low, self._recent.dropped_upto + 1)
        self._on_end(self, end)

    def _is_of_earlier_stream(self, message: TailedMessage, end: JobEnd) -> bool:
        """Return whether a worker ended a job late that an earlier stream of this name had stored."""
        stored = ended_job_time(message.message_id, end.sequence)
        return stored is not None and stored < self._created_nanoseconds

    def _take_report(self, message: TailedMessage) -> None:
        if message.is_from_elsewhere or (digest := reported_job(message.subject, message.data)) is None:
            return
        report = AdvisoryReport(digest, message.sequence, message.stored_at)
        earlier = self._recent_reports.get(digest) or report
        latest = max(earlier, report, key=lambda report: report.event_sequence)
        self._recent_reports.put(digest, latest, latest.event_sequence)
        self._low = max(self._low, self._recent_reports.dropped_upto + 1)
        self._on_report(report)


def _said_most(end: JobEnd) -> tuple[bool, bool, int]:
    return end.has_result, end.kind is EndKind.CANCELLED, end.event_sequence
