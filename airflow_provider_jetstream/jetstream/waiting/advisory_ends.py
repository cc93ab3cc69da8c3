"""Ends of jobs by messages on their own advisory subjects, which workers of any make publish.

Anybody who may publish there could report any id. So a message ends only the job that named its subject and has its id,
and only if it was stored after that job. The job itself is read once for that: a worker reports a job before it
acknowledges it, so either the job is still stored, with the time to compare, or it is gone, as a finished job is.

Where two jobs have the same id and subject, a report doesn't say which of them it is about. Then it ends one that is
gone, and is kept until one is: a worker that reports a job twice must not end the other one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind, JobEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.job_end import AdvisoryReport

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0


class AdvisoryEnds:
    """Turns reports on advisory subjects into the ends of awaited jobs.

    :param queue: the work queue
    :param is_awaited: returns whether a job is awaited, by its stream sequence; with the sequence of an event, whether
        any wait for it began before that
    :param on_end: called with each end
    """

    def __init__(
        self, connection: Connection, queue: str, is_awaited: Callable[..., bool], on_end: Callable[[JobEnd], None]
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._is_awaited = is_awaited
        self._on_end = on_end
        self._sequences: dict[str, set[int]] = {}
        # Digests that several jobs have had, with the reports that ended one of them.
        self._used: dict[str, set[int]] = {}
        self._warned: set[str] = set()
        self._reports: asyncio.Queue[AdvisoryReport] = asyncio.Queue()

    def add(self, jobs: Mapping[str, int]) -> None:
        """Await reports of jobs: stream sequences by their digests."""
        for digest, sequence in jobs.items():
            sequences = self._sequences.setdefault(digest, set())
            sequences.add(sequence)
            if len(sequences) > 1:
                self._used.setdefault(digest, set())

    def remove(self, jobs: Mapping[str, int]) -> None:
        """Forget those of the jobs that nobody awaits any more."""
        for digest in jobs:
            if awaited := set(self._awaited_jobs(digest)):
                self._sequences[digest] = awaited
            else:
                self._sequences.pop(digest, None)
                self._used.pop(digest, None)
                self._warned.discard(digest)

    def take(self, report: AdvisoryReport) -> None:
        """Take a report, once or repeatedly; reports of other jobs change nothing."""
        if self._awaited_jobs(report.digest):
            self._reports.put_nowait(report)

    def _awaited_jobs(self, digest: str) -> list[int]:
        return sorted(sequence for sequence in self._sequences.get(digest, ()) if self._is_awaited(sequence))

    async def run(self) -> None:
        """Decide about the reports that were taken, without end."""
        while True:
            reports = [await self._reports.get()]
            while len(reports) < MAX_CONCURRENT and not self._reports.empty():
                reports.append(self._reports.get_nowait())
            try:
                found = await map_concurrently(self._candidates, reports)
            except (TransientError, ApiError) as error:
                if self._connection.is_closed:
                    raise
                log.warning("Reading jobs of %s failed, trying again: %s", self._queue, error)
                self._take_again(reports)
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            undecided = [
                report for report, jobs in zip(reports, found, strict=True) if not self._end(report, dict(jobs))
            ]
            if undecided:
                asyncio.get_running_loop().call_later(_RETRY_PAUSE, self._take_again, undecided)

    def _take_again(self, reports: Iterable[AdvisoryReport]) -> None:
        for report in reports:
            self.take(report)

    async def _candidates(self, report: AdvisoryReport) -> list[tuple[int, StoredMessage | None]]:
        """Return the awaited jobs that a report may be about, as they are stored."""
        sequences = [
            sequence
            for sequence in self._awaited_jobs(report.digest)
            if self._is_awaited(sequence, report.event_sequence)
        ]
        jobs = list(zip(sequences, await map_concurrently(self._job, sequences), strict=True))
        # Jobs of higher sequences were stored later than these, whether or not they are gone.
        later = min((sequence for sequence, job in jobs if job and job.stored_at > report.stored_at), default=None)
        return [(sequence, job) for sequence, job in jobs if later is None or sequence < later]

    def _end(self, report: AdvisoryReport, jobs: Mapping[int, StoredMessage | None]) -> bool:
        """End the job that a report is about; return whether the report is of no use any more."""
        used = self._used.get(report.digest)
        if used is None:
            ended = list(jobs)
        elif report.event_sequence in used:
            return True
        else:
            # An earlier report, read together with this one, may have ended some of them.
            awaited = [sequence for sequence in jobs if self._is_awaited(sequence)]
            ended = [sequence for sequence in awaited if not jobs[sequence]][:1]
            if awaited and not ended:
                self._warn_once(report.digest, awaited)
                return False
            used.add(report.event_sequence)
        for sequence in ended:
            end = JobEnd(EndKind.COMPLETED, sequence, report.event_sequence, stored_at=report.stored_at)
            self._on_end(end)
        return True

    def _warn_once(self, digest: str, sequences: Iterable[int]) -> None:
        if digest not in self._warned:
            self._warned.add(digest)
            log.warning(
                "Jobs %s of %s have or had an id and advisory subject in common: a report there ends one of them when"
                " it is gone",
                ", ".join(map(str, sequences)),
                self._queue,
            )

    async def _job(self, sequence: int) -> StoredMessage | None:
        try:
            return await get_message(self._connection, self._queue, sequence)
        except NotFoundError:
            return None
