"""One publication of a task's jobs: what is known before the first is sent, and what is recorded of them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID, SCHEDULED_MSG_ID
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    JobError,
    NotFoundError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import AdvisedJobs
from airflow_provider_jetstream.jetstream.publishing.due_jobs import warn_unless_moved
from airflow_provider_jetstream.jetstream.publishing.job_content import named_identity
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest
from airflow_provider_jetstream.jetstream.publishing.outbox import RUN_SIZE, SINGLE_JOBS, NothingKnown
from airflow_provider_jetstream.jetstream.publishing.preparation import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.report import SCHEDULED, Destination, PublishFailure, RepeatedJob
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs, salted_id
from airflow_provider_jetstream.jetstream.publishing.verification import (
    MessageIs,
    PublishedBefore,
    ended_jobs,
    find_out,
    may_have_dropped,
    read_messages,
)
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import log_changes, undeclared_changes

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
    from airflow_provider_jetstream.jetstream.publishing.outbox import Outbox
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun
    from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_COMPARED_AT_ONCE = 256
_TAKEN = "somebody else has taken each message id that it got: see who publishes to the queue"
# How often a job gets another message id, as somebody else has taken that one too.
_MOST_SALTS = 4


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
    verifies: bool = True
    _saving: asyncio.Task[None] | None = None
    _taken: list[RepeatedJob] = field(default_factory=list)
    _unverified: list[RepeatedJob] = field(default_factory=list)

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
        if queue is not None and info is not None:
            log_changes(queue.name, undeclared_changes(queue, {queue.name: info}))
        if queue is None or queue.events is None or origin is None or info is None:
            return publication
        if resumes:
            manifest = Manifest(connection, queue, origin, origin.manifest_key)
            if started := await manifest.begin(info, cursor, have_ended=have_ended):
                publication.manifest, publication.events_from = manifest, manifest.position
                publication.head, publication.stored = started
                head = publication.head
                publication.origin = replace(
                    origin, round=head.round, run=head.run, attempt=None, is_further_run=head.is_further_run
                )
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
            keeps_given_ids=True,
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
        if self.manifest is None:
            return None
        if self.queue and (sequence := self.manifest.unverified(job)):
            # It isn't sent, but looked for once more.
            stream = job.schedules or self.queue.name
            self._unverified.append(RepeatedJob(index, job, stream, sequence & ~SCHEDULED))
            return sequence
        return self.manifest.sequence_of(index, job)

    async def save_progress(self, report: PublishReport) -> None:
        """Record the jobs that are stored by now, now and then, while others are sent."""
        is_due = self.manifest is not None and self.manifest.is_due
        if len(report.repeated) >= _COMPARED_AT_ONCE or (is_due and report.repeated):
            await self._verify(report)
        if self._saving and self._saving.done():
            await self._end_saving()
        if self.manifest and is_due and not self._saving:
            self._saving = asyncio.create_task(self.manifest.save_progress(report))

    async def _verify(self, report: PublishReport) -> None:
        """Find out whether the messages that have the message ids of jobs are the jobs.

        An earlier try that left no record may have stored another body under a given id; and whoever may publish to the
        queue can store what he likes under the id of a job to come.
        """
        repeated, report.repeated = report.repeated, []
        if not repeated:
            return
        if self.info is None and self.queue:
            self.info = await stream_info_of(self.connection, self.queue)
        created = self.info["created"] if self.info else None
        messages = await read_messages(self.connection, self.queue, created, repeated)
        gone = {job.sequence for job, message in zip(repeated, messages, strict=True) if message is None}
        first = self.manifest.unrecorded_from if self.manifest else 0
        events = self.queue.events if self.queue else None
        if gone and first and events and self.info:
            first = 0 if await may_have_dropped(self.connection, events.name, self.info) else first
        publisher = PublishedBefore(
            first,
            of_any_task=self.origin is not None and self.origin.idempotency_key is not None,
            has_origin=self.origin is not None,
        )
        events_from = (self.head.position("events_from") if self.head else None) or 1
        ended = await ended_jobs(self.connection, self.queue, created, gone, events_from)
        for job, message in zip(repeated, messages, strict=True):
            finding = find_out(job, message, publisher, ended)
            if finding is MessageIs.JOB:
                report.add_verified(job)
                if self.manifest:
                    self.manifest.note(job.index, job.job)
            elif finding is MessageIs.UNKNOWN:
                if self.manifest:
                    self.manifest.note_unverified(job.job, job.sequence)
                report.failures.append(PublishFailure(job.index, job.job.job_id, _not_verified(job), certain=False))
            elif self.manifest and not self._has_changed(job, message, publisher):
                self._taken.append(job)
            else:
                report.failures.append(
                    PublishFailure(job.index, job.job.job_id, _other_job(job, message), certain=True)
                )

    async def _send_taken(self, report: PublishReport, outbox: Outbox) -> None:
        """Send jobs whose message ids somebody else has taken under other ids, which the manifest notes first."""
        renewed = list(self.manifest.salts[-1:]) if self.manifest else []
        for _ in range(_MOST_SALTS):
            taken, self._taken = self._taken, []
            if not taken or self.manifest is None:
                return
            try:
                salt = renewed.pop() if renewed else await self.manifest.add_salt()
            except JetStreamProviderError as error:
                self._fail(report, taken, error)
                return
            logger.warning(
                "%d jobs of %s have message ids that somebody else has taken, such as that of sequence %d: they are"
                " sent under other ids; see who else publishes there",
                *(len(taken), taken[0].stream, taken[0].sequence),
            )
            jobs = [_with_salt(repeated.job, salt) for repeated in taken]
            sent = await outbox.send(jobs, NothingKnown(verifies=True))
            for repeated, sequence in zip(taken, sent.sequences, strict=False):
                report.sequences[repeated.index] = sequence
                if sequence and repeated.job.scheduled:
                    report.scheduled.add(repeated.index)
            for failure in sent.failures:
                index, job_id = taken[failure.index].index, taken[failure.index].job.job_id
                report.failures.append(PublishFailure(index, job_id, failure.error, failure.certain))
            self._fail(report, taken[len(sent.sequences) :], TransientError("it was not sent"))
            report.repeated = [
                replace(again, index=taken[again.index].index, job=taken[again.index].job) for again in sent.repeated
            ]
            await self._verify(report)

    def _has_changed(self, repeated: RepeatedJob, message: StoredMessage | None, before: PublishedBefore) -> bool:
        """Return whether a message is what an earlier try seems to have stored, with another body, under a given id."""
        job, begun = repeated.job, self.info["state"]["last_seq"] if self.info else 0
        if message is None or job.key.given_id is None or message.data == job.body:
            return False
        if not job.scheduled and (
            repeated.sequence < before.first or (repeated.sequence > begun and not before.of_any_task)
        ):
            # This try stores the same body whenever it sends the job. Schedules have sequences of another stream.
            return False
        job_id, task = named_identity(message.headers, message.data)
        own_id, own_task = named_identity(job.headers.items(), job.body or b"")
        return job_id == own_id and (before.of_any_task or task == own_task)

    def _fail(self, report: PublishReport, jobs: Iterable[RepeatedJob], error: JetStreamProviderError) -> None:
        for repeated in jobs:
            report.failures.append(PublishFailure(repeated.index, repeated.job.job_id, error, certain=True))

    async def complete(self, report: PublishReport, outbox: Outbox | None = None) -> None:
        """Add to the report what this publication knows of its jobs, once the fate of each is known.

        :param outbox: that of the jobs of the report; without it, those whose ids are taken aren't stored
        """
        await self._end_saving()
        for unverified in self._unverified:
            report.withdraw(unverified.index)
        report.repeated += self._unverified
        await self._verify(report)
        if outbox:
            await self._send_taken(report, outbox)
        self._fail(report, self._taken, TransientError(_TAKEN))
        self._taken.clear()
        report.advised = self.advised.sequences(report)
        report.events_from = self.events_from
        if report.scheduled and self.queue and self.queue.schedules:
            await warn_unless_moved(self.connection, self.queue.name, self.queue.schedules.name)
        if self.manifest and self.origin:
            report.manifest_key = self.origin.manifest_key
            if report.source_error is None and not report.failures:
                report.extra = self.manifest.extra()
        if self.names and self.by_key:
            await _recorded(self.names.conclude(report))

    async def conclude(self, report: PublishReport, outbox: Outbox | None = None) -> None:
        """Record the jobs of a task that doesn't wait for them.

        :param outbox: that of the jobs of the report; without it, those whose ids are taken aren't stored
        """
        await self.complete(report, outbox)
        if self.manifest:
            is_stored = not report.failures and report.source_error is None
            await _recorded(self.manifest.close(report) if is_stored else self.manifest.record_stored(report))


def _with_salt(job: OutgoingJob, salt: str) -> OutgoingJob:
    message_id = salted_id(salt, job.message_id)
    # Without another name, it stays known by its first message id.
    name = {JOB_ID: job.job_id} if job.job_id == job.message_id else {}
    made = {SCHEDULED_MSG_ID: message_id} if SCHEDULED_MSG_ID in job.headers else {}
    return replace(job, message_id=message_id, headers={**job.headers, MSG_ID: message_id, **made, **name})


def _not_verified(repeated: RepeatedJob) -> JetStreamProviderError:
    return TransientError(
        f"not verified: expected to find it stored, found that {repeated.stream} had a message with its message id"
        f" (sequence {repeated.sequence}), which is gone, with no record of what it was: find out whether the job was"
        " done; a task that is cleared sends it again after the duplicate_window"
    )


def _other_job(repeated: RepeatedJob, message: StoredMessage | None) -> JetStreamProviderError:
    job = repeated.job
    found = f"found that {repeated.stream} has another one there (sequence {repeated.sequence})"
    if job.key.given_id is None:
        return TransientError(
            f"expected its message id {job.message_id} to be free, {found}: publish it again after the"
            " duplicate_window, and see who else publishes there"
        )
    differs = "body" if message is None or message.data != job.body else "subject or other headers"
    return JobError(
        f"expected the same job under its id {job.key.given_id!r}, {found}, with another {differs}: give the changed"
        " job another id, or see who else publishes there"
    )


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
