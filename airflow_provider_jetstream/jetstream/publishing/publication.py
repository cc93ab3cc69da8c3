"""One publication of a task's jobs: what is known before the first is sent, and what is recorded of them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, JobError, NotFoundError
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import AdvisedJobs
from airflow_provider_jetstream.jetstream.publishing.job_keys import CONTENTS
from airflow_provider_jetstream.jetstream.publishing.known_jobs import RUN_SIZE, SINGLE_JOBS
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest
from airflow_provider_jetstream.jetstream.publishing.preparation import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.report import Destination
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Self

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobIdSource
    from airflow_provider_jetstream.jetstream.publishing.manifest_head import ManifestHead
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun
    from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport, RepeatedJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_COMPARED_AT_ONCE = 256


@dataclass(slots=True)
class Publication:
    """What one publication knows of its queue and of the jobs that earlier tries have stored.

    :param origin: the publishing task, in its round
    :param info: the queue's STREAM.INFO; ``None`` where it wasn't needed
    :param manifest: what the task publishes; ``None`` where nothing can record it
    :param head: the head of the manifest as it was begun
    :param stored: the jobs that are stored already
    :param names: the record that names the task alone, where its manifest has another key
    :param by_key: whether a record names the task, so that jobs hold only its key
    :param events_from: a position in the events stream that was the last before anything was published
    """

    connection: Connection
    queue: WorkQueue | None
    origin: Origin | None
    info: Mapping[str, Any] | None = None
    manifest: Manifest | None = None
    head: ManifestHead | None = None
    stored: StoredJobs = field(default_factory=StoredJobs)
    names: Manifest | None = None
    by_key: bool = False
    events_from: int = 1
    advised: AdvisedJobs = field(default_factory=lambda: AdvisedJobs.of(None))
    _saving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until what is being recorded is; where publishing failed, record no more."""
        if self._saving and error:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        else:
            await self._end_saving()

    async def _end_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving:
            await saving

    @classmethod
    async def begin(
        cls,
        connection: Connection,
        queue: WorkQueue | None,
        origin: Origin | None,
        *,
        info: Mapping[str, Any] | None,
        cursor: Mapping[str, Any] | None = None,
        resumes: bool = True,
        have_ended: Callable[[ManifestHead], Awaitable[bool]] | None = None,
    ) -> Publication:
        """Store what names the task, and read what its earlier tries have stored.

        :param info: the queue's STREAM.INFO, read before anything is published
        :param cursor: where the ends of the jobs will be found
        :param resumes: whether a manifest makes a later try of the task go on with the jobs of this one
        :param have_ended: returns whether all jobs of a manifest have ended for which waiting is over
        """
        publication = cls(connection, queue, origin, info, advised=AdvisedJobs.of(queue))
        if queue is None or queue.events is None or origin is None or info is None:
            return publication
        if resumes:
            manifest = Manifest(connection, queue, origin, origin.manifest_key)
            if started := await manifest.begin(info, cursor, have_ended=have_ended):
                publication.manifest, publication.events_from = manifest, manifest.position
                publication.head, publication.stored = started
                head = publication.head
                further = {"run": head.run, "attempt": None, "is_further_run": head.is_further_run}
                publication.origin = replace(origin, round=head.round, **further)
        if resumes and publication.origin is not None and publication.origin.is_key_of_manifest:
            publication.by_key = publication.manifest is not None
            return publication
        # What all runs of an idempotency key have published, or one call, isn't what this task has.
        publication.names = Manifest(connection, queue, origin)
        publication.by_key = await _announced(publication.names, info)
        publication.events_from = max(publication.events_from, publication.names.position)
        return publication

    @property
    def destination(self) -> Destination | None:
        """The queue's stream."""
        return Destination.of(self.queue.name, self.info) if self.queue else None

    def prepare(
        self, jobs: Iterable[object] | AsyncIterable[object], subject: str | None, job_id: JobIdSource | None
    ) -> PreparedJobs:
        """Give every job its subject, id and headers; see :func:`prepare_jobs`.

        :raises JobError: a job of a list can't be published as it is
        """
        config = self.info["config"] if self.info else None
        captured = self.queue.subjects if self.queue else ()
        prepared = prepare_jobs(
            jobs,
            subject=subject,
            origin=self.origin,
            batch="" if self.origin else uuid4().hex,
            queue=self.queue,
            by_key=self.by_key,
            limit=SizeLimit.of(self.queue, config) if self.queue else None,
            job_id=job_id,
            check=None if self.stored.is_empty else self.stored.check,
            captured=(config.get("subjects") or ()) if config else captured,
            contents=self.head.contents if self.head else CONTENTS,
        )
        # Jobs that differ in body and ids only name no advisory subject.
        return prepared.then(self.advised.note) if self.advised.advisory_subjects else prepared

    @property
    def run_size(self) -> int:
        """How many jobs are sent together at most."""
        return RUN_SIZE if self.stored.is_empty else SINGLE_JOBS

    def are_new(self, first: int, run: OutgoingRun) -> bool:
        """Note a run that is about to be sent; return ``False``, with nothing noted, where one may be stored."""
        return self.manifest is None or self.manifest.are_new(first, run)

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job that is about to be sent; ``None`` where it isn't known to be stored."""
        return self.manifest.sequence_of(index, job) if self.manifest else None

    async def save_progress(self, report: PublishReport) -> None:
        """Record the jobs that are stored by now, now and then, while others are sent."""
        is_due = self.manifest is not None and self.manifest.is_due
        if len(report.repeated) >= _COMPARED_AT_ONCE or (is_due and report.repeated):
            await self._compare_repeated(report)
        if self._saving and self._saving.done():
            await self._end_saving()
        if self.manifest and is_due and not self._saving:
            self._saving = asyncio.create_task(self.manifest.save_progress(report))

    async def _compare_repeated(self, report: PublishReport) -> None:
        """Refuse jobs in whose place the server has stored others, under the same message ids.

        An earlier try that left no record may have stored another body under a given id; and whoever may publish to the
        queue can store what he likes under the id of a job to come.
        """
        repeated, report.repeated = report.repeated, []
        queue = self.queue
        if queue is None:
            return

        async def stored(job: RepeatedJob) -> StoredMessage | None:
            return await get_message(self.connection, queue.name, job.sequence)

        for job, message in zip(repeated, await map_concurrently(stored, repeated), strict=True):
            # A job that is done can't be compared any more.
            if message is not None and sha256(message.data).digest() != job.body_digest:
                report.reject(
                    job,
                    JobError(
                        f"expected its body under its message id {message.header(MSG_ID)}, found that {queue.name} has"
                        f" another one there (sequence {job.sequence}): give the changed job another id"
                    ),
                )

    async def complete(self, report: PublishReport) -> None:
        """Add to the report what this publication knows of its jobs, once the fate of each is known."""
        await self._end_saving()
        await self._compare_repeated(report)
        report.advised = self.advised.sequences(report)
        report.events_from = self.events_from
        if self.manifest and self.origin:
            report.manifest_key = self.origin.manifest_key
            if report.source_error is None and not report.failures:
                report.extra = self.manifest.extra()
        if self.names and self.by_key:
            await _recorded(self.names.conclude(report))

    async def conclude(self, report: PublishReport) -> None:
        """Record the jobs of a task that doesn't wait for them."""
        await self.complete(report)
        if self.manifest:
            is_stored = not report.failures and report.source_error is None
            await _recorded(self.manifest.close(report) if is_stored else self.manifest.record_stored(report))


async def stream_info_of(connection: Connection, queue: WorkQueue) -> dict[str, Any] | None:
    """Return the STREAM.INFO of a queue; ``None`` where it doesn't exist."""
    try:
        return await stream_info(connection, queue.name)
    except NotFoundError:
        # The error of publishing says more: it names the job and its subject.
        return None


async def _announced(names: Manifest, info: Mapping[str, Any]) -> bool:
    try:
        return await names.announce(info)
    except JetStreamProviderError as error:
        logger.warning("The task's record couldn't be stored, so its jobs name the task as far as it fits: %s", error)
        return False


async def _recorded(recording: Awaitable[None]) -> None:
    try:
        await recording
    except JetStreamProviderError as error:
        # Not raised, since the jobs are stored. The record stays open, and covers all jobs that it may be about.
        logger.warning("What the task has published couldn't be recorded: %s", error)
