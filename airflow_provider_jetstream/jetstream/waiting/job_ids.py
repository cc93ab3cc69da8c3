"""The ids of awaited jobs by their sequences: compact in memory, and in pages for a process that goes on waiting.

A worker that only acknowledges leaves no trace of a job's id, so what reports on single jobs has to know it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import job_ids_subject
from airflow_provider_jetstream.jetstream.publishing.outgoing_run import UniformRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.outbox import KnownJobs
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun

# For a page's other fields, its headers, and what the server adds to a message.
PAGE_RESERVE = 4 * 2**10
# An id's quotes and comma, and the digits of its sequence.
_ROW_BYTES = 24


class JobIdPage(BaseModel):
    """Ids of some of a task's jobs.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param sequences: the jobs' stream sequences, in ascending order
    :param ids: their ids, in the same order
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.job-ids"] = "io.airflow.jetstream.v1.job-ids"
    stream: str
    created: str
    sequences: list[Annotated[int, Field(ge=0, lt=2**64)]]
    ids: list[str]


class JobIds:
    """Ids of jobs, in the order in which they were published until their sequences are known."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("Q")
        self._sequences: Sequence[int] = ()
        self._order: Sequence[int] = ()

    def note(self, job: OutgoingJob) -> None:
        """Note the id of the next job."""
        self._append(job.job_id)

    def note_run(self, run: OutgoingRun) -> None:
        """Note the ids of the next jobs."""
        if not isinstance(run, UniformRun):
            for offset in range(len(run)):
                self._append(run.job(offset).job_id)
            return
        ids = run.job_ids()
        ends = accumulate(map(len, ids), initial=len(self._text))
        self._text += b"".join(ids)
        self._ends.extend(islice(ends, 1, None))

    def _append(self, job_id: str) -> None:
        self._text += job_id.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))

    def locate(self, sequences: Sequence[int]) -> None:
        """Take the stream sequences of the jobs, by their indexes; 0 where a job isn't stored."""
        known = sequences[: len(self._ends)]
        if all(known[index] < known[index + 1] for index in range(len(known) - 1)):
            self._sequences, self._order = known, range(len(known))
            return
        self._order = array("Q", sorted(range(len(known)), key=known.__getitem__))
        self._sequences = array("Q", (known[index] for index in self._order))

    def get(self, sequence: int) -> str | None:
        """Return the id of a job; ``None`` where it isn't known."""
        position = bisect_left(self._sequences, sequence)
        if not sequence or position >= len(self._sequences) or self._sequences[position] != sequence:
            return None
        return self._id(self._order[position])

    def _id(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode("utf-8", "surrogatepass")

    async def store(self, connection: Connection, queue: str, created: str, events: str, key: str) -> list[int]:
        """Store the ids in pages, and return the sequences of the pages in the events stream.

        :param created: when the queue's stream was created, in the server's own text
        :param key: the task's key, one token
        :raises ApiError: no page can be stored
        :raises TransientError: it isn't known whether a page is stored
        """
        pages: list[int] = []
        limit = connection.max_payload - PAGE_RESERVE
        start = size = 0
        for position in range(len(self._sequences) + 1):
            is_last = position == len(self._sequences)
            row = 0 if is_last else _ROW_BYTES + 2 * len(self._id(self._order[position]).encode(errors="replace"))
            if position > start and (is_last or size + row > limit):
                page = JobIdPage(
                    stream=queue,
                    created=created,
                    sequences=list(self._sequences[start:position]),
                    ids=[self._id(index) for index in self._order[start:position]],
                )
                subject, headers = job_ids_subject(queue, key), {"Nats-Expected-Stream": events}
                pages.append((await store(connection, subject, page.model_dump_json().encode(), headers)).sequence)
                start, size = position, 0
            size += row
        return pages

    @classmethod
    async def read(cls, connection: Connection, queue: str, created: str, events: str, pages: Iterable[int]) -> JobIds:
        """Read the ids of pages; what isn't stored any more is left out.

        :raises TransientError: a page can't be read just now
        """
        ids, sequences = cls(), array("Q")
        for sequence in pages:
            message = await get_message(connection, events, sequence)
            try:
                page = JobIdPage.model_validate_json(message.data) if message else None
            except ValidationError:
                page = None
            if page is None or (page.stream, page.created) != (queue, created):
                continue
            for job_sequence, job_id in zip(page.sequences, page.ids, strict=False):
                ids._append(job_id)
                sequences.append(job_sequence)
        ids.locate(sequences)
        return ids


class NotedIds:
    """Notes the ids of jobs that are about to be sent; what is known of the jobs is asked of another.

    :param known: knows which jobs are stored
    :param ids: gets the ids, in the order of the jobs
    """

    def __init__(self, known: KnownJobs, ids: JobIds) -> None:
        self._known = known
        self._ids = ids

    @property
    def run_size(self) -> int:
        """How many jobs are sent together at most."""
        return self._known.run_size

    @property
    def verifies(self) -> bool:
        """Whether the other one finds out what the server calls duplicates."""
        return self._known.verifies

    def are_new(self, first: int, run: OutgoingRun) -> bool:
        """Note a run; return ``False``, with nothing noted, where one of its jobs may be stored."""
        if not self._known.are_new(first, run):
            return False
        self._ids.note_run(run)
        return True

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Note a job, and return its stream sequence; ``None`` where it isn't known to be stored."""
        sequence = self._known.sequence_of(index, job)
        self._ids.note(job)
        return sequence
