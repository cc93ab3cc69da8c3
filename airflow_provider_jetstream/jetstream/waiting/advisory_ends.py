"""Ends of jobs by messages on their own advisory subjects, which workers of any make publish.

Anybody who may publish there could report any id. So a message ends only the job that named its subject and has its id,
and only if it was stored after that job. The job itself is read once for that: a worker reports a job before it
acknowledges it, so either the job is still stored, with the time to compare, or it is gone, as a finished job is.
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
    from collections.abc import Callable, Mapping

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
        self._reports: asyncio.Queue[AdvisoryReport] = asyncio.Queue()

    def add(self, jobs: Mapping[str, int]) -> None:
        """Await reports of jobs: stream sequences by their digests."""
        for digest, sequence in jobs.items():
            self._sequences.setdefault(digest, set()).add(sequence)

    def remove(self, jobs: Mapping[str, int]) -> None:
        """Forget those of the jobs that nobody awaits any more."""
        for digest in jobs:
            if awaited := set(self._awaited_jobs(digest)):
                self._sequences[digest] = awaited
            else:
                self._sequences.pop(digest, None)

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
                ended = await map_concurrently(self._ended_jobs, reports)
            except (TransientError, ApiError) as error:
                if self._connection.is_closed:
                    raise
                log.warning("Reading jobs of %s failed, trying again: %s", self._queue, error)
                for report in reports:
                    self._reports.put_nowait(report)
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            for report, sequences in zip(reports, ended, strict=True):
                for sequence in sequences:
                    self._on_end(JobEnd(EndKind.COMPLETED, sequence, report.event_sequence))

    async def _ended_jobs(self, report: AdvisoryReport) -> list[int]:
        sequences = [
            sequence
            for sequence in self._awaited_jobs(report.digest)
            if self._is_awaited(sequence, report.event_sequence)
        ]
        jobs = dict(zip(sequences, await map_concurrently(self._job, sequences), strict=True))
        # Jobs of higher sequences were stored later than these, whether or not they are gone.
        later = min(
            (sequence for sequence, job in jobs.items() if job and job.stored_at > report.stored_at), default=None
        )
        candidates = [sequence for sequence in sequences if later is None or sequence < later]
        # Of a job that is gone and one that is stored, the stored one: the other was reported before it left the queue.
        stored = [sequence for sequence in candidates if jobs[sequence]]
        if len(stored) > 1:
            log.warning(
                "Jobs %s of %s have the same id and advisory subject, so a report there ends none of them",
                ", ".join(map(str, stored)),
                self._queue,
            )
            return []
        return stored or candidates

    async def _job(self, sequence: int) -> StoredMessage | None:
        try:
            return await get_message(self._connection, self._queue, sequence)
        except NotFoundError:
            return None
