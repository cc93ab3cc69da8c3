"""The part of a task's record that says which awaited jobs end by a message on which advisory subject.

It is stored in pages beside the record, so that a triggerer, which has only the task's key, can find each job by
subject and id. A page holds digests of these, and the jobs' sequences once they are stored. While a task waits, its
pages keep other tasks from waiting for a job of the same id on the same subject. They are removed once the record is
closed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import subject_counts
from airflow_provider_jetstream.jetstream.contract import manifest_filter, manifest_page_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, JobError, NotFoundError
from airflow_provider_jetstream.jetstream.publishing.job_reader import read_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.advised_jobs import AdvisedJobs
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# A digest, a sequence of up to 20 digits and the punctuation.
_ROW_BYTES = 50
# The other fields of a page, its headers, and what the server adds to a message.
_RESERVE = 2048


class AdvisoryPage(BaseModel):
    """Some of the awaited jobs of a task.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param task: the publishing task, for messages
    :param pages: how many pages the task has
    :param jobs: stream sequences by the jobs' digests; 0 for a job that isn't known to be stored yet
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.advised"] = "io.airflow.jetstream.v1.advised"
    stream: str
    created: str
    task: str = ""
    pages: int
    jobs: dict[str, int]


class AdvisoryPages:
    """The pages of one task.

    :param key: the task's key, one token
    :param origin: the task, for messages
    """

    def __init__(self, connection: Connection, queue: WorkQueue, key: str, origin: Origin | None = None) -> None:
        self._connection = connection
        self._queue = queue.name
        self._events = str(queue.events.name if queue.events else "")
        limit = connection.max_payload
        if queue.events and (queue.events.max_msg_size or 0) > 0:
            limit = min(limit, queue.events.max_msg_size or limit)
        self._rows = max(1, (limit - _RESERVE) // _ROW_BYTES)
        self._key = key
        self._task = f"{origin.dag_id}/{origin.run_id}/{origin.task_id}" if origin else ""
        self._created = ""

    async def reserve(self, jobs: AdvisedJobs, prepared: Iterable[OutgoingJob], created: str) -> Iterable[OutgoingJob]:
        """Reserve the subjects and ids of jobs that are about to be published, and return all of the jobs.

        Stored first and compared afterwards: of two tasks that reserve the same at once, the one whose page has the
        higher sequence sees the other's.

        :param jobs: collects the advised ones among ``prepared``
        :param created: when the queue's stream was created, in the server's own text
        :raises JobError: another task waits for a job with one of them
        """
        if not jobs.advisory_subjects:
            return prepared
        prepared = await read_all(prepared)
        if not jobs.indexes:
            return prepared
        self._created = created
        known = await read_advisory_pages(self._connection, self._events, self._queue, self._key, self._created)
        reserved_at = await self._store({digest: known.get(digest, 0) for digest in jobs.indexes})
        wanted = {digest for digest in jobs.indexes if not known.get(digest)}
        if conflict := await self._conflict(wanted, reserved_at):
            digest, sequence, page, subject = conflict
            await self.remove()
            where = f"sequence {sequence}" if sequence else "not known to be stored yet"
            raise JobError(
                f"job {jobs.indexes[digest]} has {jobs.names[digest]}, as has a job of {self._queue} ({where}) that"
                f" {page.task or 'another task'} awaits, and a message there wouldn't say which of them has ended: give"
                " it another id or subject, or publish once the other has ended; if that task was killed and won't run"
                f" again, purge {subject} from {self._events}, which ends its claim"
            )
        return prepared

    async def record(self, sequences: Mapping[str, int]) -> None:
        """Record the stream sequences of the reserved jobs, by their digests."""
        if not self._created:
            return
        await self._store(sequences)
        await self._purge(len(sequences), {"keep": 1})

    async def remove(self) -> None:
        """Remove the pages, if there are any."""
        (first,) = await _last_messages(
            self._connection, self._events, [manifest_page_subject(self._queue, self._key, 0)]
        )
        if page := _parse(first):
            await self._purge(page.pages * self._rows, {})

    async def _purge(self, jobs: int, limits: Mapping[str, int]) -> None:
        for number in range(-(-jobs // self._rows)):
            subject = manifest_page_subject(self._queue, self._key, number)
            # A stream that denies purges keeps its pages: they count only as long as their jobs are stored.
            with suppress(ApiError):
                await self._connection.api(f"STREAM.PURGE.{self._events}", {"filter": subject, **limits})

    async def _store(self, jobs: Mapping[str, int]) -> int:
        """Store the pages, and return the sequence of the last."""
        rows = list(jobs.items())
        pages = [dict(rows[start : start + self._rows]) for start in range(0, len(rows), self._rows)]
        stored_at = 0
        for number, page in enumerate(pages):
            subject = manifest_page_subject(self._queue, self._key, number)
            content = AdvisoryPage(
                stream=self._queue, created=self._created, task=self._task, pages=len(pages), jobs=page
            )
            headers = {"Nats-Expected-Stream": self._events}
            ack = await store(self._connection, subject, content.model_dump_json().encode(), headers)
            stored_at = ack.sequence
        return stored_at

    async def _conflict(self, wanted: set[str], reserved_at: int) -> tuple[str, int, AdvisoryPage, str] | None:
        for message in await _last_messages(self._connection, self._events, await self._pages_of_others()):
            page = _parse(message)
            if message is None or page is None or page.created != self._created:
                continue
            for digest in wanted & page.jobs.keys():
                sequence = page.jobs[digest]
                if sequence and await get_message(self._connection, self._queue, sequence) is None:
                    # It has ended, and only the other jobs of its task haven't.
                    continue
                if not any(page.jobs.values()) and message.sequence > reserved_at:
                    # It was reserved later, and its task sees this one.
                    continue
                return digest, sequence, page, message.subject
        return None

    async def _pages_of_others(self) -> list[str]:
        """Return the subjects of the pages of other tasks."""
        subjects: list[str] = []
        stored = subject_counts(self._connection, self._events, manifest_filter(self._queue))
        async for subject, _ in stored:
            key, dash, number = subject.rpartition(".")[2].rpartition("-")
            if dash and number.isdecimal() and key != self._key:
                subjects.append(subject)
        return subjects


async def read_advisory_pages(
    connection: Connection, events: str, queue: str, key: str, created: str
) -> dict[str, int]:
    """Return the awaited jobs of a task that end by a message on an advisory subject: sequences by their digests.

    :param created: when the queue's stream was created, in the server's own text; other pages don't count
    """
    (first,) = await _last_messages(connection, events, [manifest_page_subject(queue, key, 0)])
    page = _parse(first)
    if page is None or page.created != created or page.stream != queue:
        return {}
    others = [manifest_page_subject(queue, key, number) for number in range(1, page.pages)]
    jobs = dict(page.jobs)
    for message in await _last_messages(connection, events, others):
        other = _parse(message)
        if other and other.created == created:
            jobs |= other.jobs
    return {digest: sequence for digest, sequence in jobs.items() if sequence}


async def _last_messages(connection: Connection, stream: str, subjects: Iterable[str]) -> list[StoredMessage | None]:
    async def read(subject: str) -> StoredMessage | None:
        try:
            return await last_message(connection, stream, subject)
        except NotFoundError:
            return None

    return await map_concurrently(read, subjects)


def _parse(message: StoredMessage | None) -> AdvisoryPage | None:
    try:
        return AdvisoryPage.model_validate_json(message.data) if message else None
    except ValidationError:
        return None
