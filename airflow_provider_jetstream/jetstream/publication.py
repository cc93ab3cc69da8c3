"""One publication of jobs: what is stored already, what is sent, and what is recorded so that no job is stored twice.

The only place that knows manifest, cursor and handle together, and what a retry, a task that is cleared, a run that was
made anew, and an idempotency key mean for the jobs.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.archive import job_sequence
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import Streams
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID, SCHEDULED_MSG_ID, archived_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JetStreamProviderError,
    JobError,
    NotFoundError,
    QueueDeclarationError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.origin import Origin, checked_key
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import AdvisedJobs, Reservations
from airflow_provider_jetstream.jetstream.publishing.batch import Batch
from airflow_provider_jetstream.jetstream.publishing.job_reader import read_all
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest, NamedTask, read_manifest_sequences
from airflow_provider_jetstream.jetstream.publishing.outbox import BATCH_SIZE, SINGLE_JOBS, KnownJobs, Outbox
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs, refuse_schedule
from airflow_provider_jetstream.jetstream.publishing.report import (
    SCHEDULED,
    Destination,
    PublishReport,
    RepeatedJob,
    sequence_ranges,
)
from airflow_provider_jetstream.jetstream.publishing.schedules import warn_unless_moved
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import (
    StoredJobs,
    ended_jobs,
    is_stored,
    may_have_dropped,
    named_identity,
    read_messages,
    salted_id,
)
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import log_changes, undeclared_changes
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor, events_of, take_cursor
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.jetstream.waiting.job_reports import JobIds
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Self

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource, OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.manifest_record import ManifestRecord
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

_COMPARED_AT_ONCE = 256
_NAMED_RANGES = 5
_TAKEN = "somebody else has taken each message id that it got: see who publishes to the queue"
# How often a job gets another message id, as somebody else has taken that one too.
_MOST_SALTS = 4
# How long a cleared task looks whether jobs that an earlier try no longer waited for have ended by now.
_ENDED_SECONDS = 10.0


class Publication(KnownJobs):
    """One publication of jobs to a queue.

    Entered, it notes in the queue's events stream that publishing begins, and reads what earlier tries have stored:

    - a retry stores the jobs that are missing, whatever the order of the list;
    - a task that is cleared, and whose jobs have ended, publishes new jobs; before, it goes on with those of the
      earlier try;
    - a run that was deleted and made again, or another deployment's, is another run with jobs of its own;
    - publications with one idempotency key publish the same jobs, each of them once.

    Without events, and without an identity, a job with an id of its own is stored once within the stream's
    ``duplicate_window``.

    :param queue: where the jobs go; without it, subjects have no partitions, jobs have no schedules, and jobs of a task
        name it in full
    :param identity: the publishing task; or an idempotency key, under which a program publishes its jobs once, whenever
        and wherever it runs again; ``None`` where each publication is another one
    :param waits: whether the caller waits for the jobs, from :attr:`cursor`, and calls :meth:`close` afterwards
    :param with_handle: whether the report gets a handle, by which others can wait for the jobs
    :raises ArgumentError: the key isn't text of 1 to 1,024 bytes
    :raises QueueDeclarationError: there is a key, or the caller waits, and the queue has no events

    :ivar cursor: where the ends of the jobs will be found, if the caller waits
    :ivar job_ids: the ids of the jobs by their sequences, if the caller waits
    :ivar report: the fate of the jobs; ``None`` until all are sent
    """

    verifies = True

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue | None,
        identity: Origin | str | None = None,
        *,
        waits: bool = False,
        with_handle: bool = False,
    ) -> None:
        self.cursor: Cursor | None = None
        self.job_ids = JobIds()
        self.report: PublishReport | None = None
        self._connection = connection
        self._queue = queue
        self._key = None if isinstance(identity, Origin) else checked_key(identity)
        self._origin = identity if isinstance(identity, Origin) else Origin.of_key(self._key) if self._key else None
        self._waits = waits
        self._with_handle = with_handle
        self._is_begun = False
        self._info: Mapping[str, Any] | None = None
        self._manifest: Manifest | None = None
        self._names: NamedTask | None = None
        self._events_from = 1
        self._resumed_from: int | None = None
        self._stored = StoredJobs()
        self._advised = AdvisedJobs(queue.advisory_subjects if queue else ())
        self._saving: asyncio.Task[None] | None = None
        self._scan: Scan | None = None
        self._taken: list[RepeatedJob] = []
        self._unverified: list[RepeatedJob] = []
        if self._key and (queue is None or queue.events is None):
            raise QueueDeclarationError(
                queue.name if queue else "a queue",
                ["expected events, which record what is published for an idempotency_key: declare them"],
            )
        if queue and waits:
            events_of(queue)

    async def __aenter__(self) -> Self:
        """Begin: note that publishing begins, and read what is stored.

        :raises ApiError: the server refused
        :raises TransientError: it can't be done just now
        :raises NotFoundError: the queue doesn't exist, and the caller waits or has an idempotency key
        """
        self._is_begun = True
        if self._queue:
            await self._begin(self._queue, self._origin)
        return self

    async def _begin(self, queue: WorkQueue, origin: Origin | None) -> None:
        connection = self._connection
        has_records = queue.events is not None and origin is not None
        if has_records or self._waits:
            try:
                self._info = await stream_info(connection, queue.name)
            except NotFoundError:
                # Else the error of publishing says more: it names the job and its subject.
                if self._waits or self._key:
                    raise
        if self._waits or (self._with_handle and origin is None and queue.events):
            try:
                self.cursor = await take_cursor(connection, queue, self._info)
            except JetStreamProviderError as error:
                if self._waits:
                    raise
                # Publishing needs none of it.
                log.debug("There is no handle on jobs of %s: %s", queue.name, error)
        if not has_records or origin is None or self._info is None:
            return
        log_changes(queue.name, undeclared_changes(queue, {queue.name: self._info}))
        if origin.tells_tries_apart:
            origin = await self._begin_manifest(queue, origin, self._info)
        if origin.is_task and not (self._manifest and origin.is_key_of_manifest):
            # What all runs of an idempotency key have published, or one call, isn't what this task has.
            await self._announce(queue, origin, self._info)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until what is being recorded is; where publishing failed, record no more."""
        self._is_begun = False
        if self._saving and error:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        else:
            await self._end_saving()

    async def _end_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving:
            await saving

    @property
    def is_recorded(self) -> bool:
        """Whether the events stream records the jobs, so that a retry stores none twice, however late it comes."""
        return self._manifest is not None

    async def publish(
        self,
        jobs: Iterable[object] | AsyncIterable[object],
        *,
        subject: str | None = None,
        job_id: JobIdSource | None = None,
        rate: float | None = None,
        room_timeout: float = 0.0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> PublishReport:
        """Publish the jobs that aren't stored yet, make sure that all are stored, and record them; call it once.

        :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
        :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers
            divide the jobs
        :param job_id: where the ids of jobs are that have none of their own: a field of the body that is a JSON object,
            or what returns the id of each job
        :param rate: jobs per second at most; as fast as possible where absent
        :param room_timeout: how many seconds a full queue (``discard: new``) may store no job before the jobs that it
            refuses are given up
        :param stopped: returns whether to stop; the jobs that aren't sent by then are missing in :attr:`report`
        :return: the fate of every job
        :raises JobError: a job can't be published as it is; the jobs before it may be stored
        :raises PublishError: some jobs aren't known to be stored; carries the report
        """
        if not self._is_begun:
            raise ArgumentError("expected one publish within 'async with' of a Publication, found another: make one")
        self._is_begun = False
        queue, origin = self._queue, self._origin
        destination = Destination.of(queue.name, self._info) if queue else None
        outbox = Outbox(
            self._connection, rate=rate, room_timeout=room_timeout, destination=destination, stopped=stopped
        )
        prepared = self._prepare(jobs, subject, job_id)
        reservations: Reservations | None = None
        reserved: PreparedJobs | list[Batch] = prepared
        if self.cursor and self._waits:
            prepared.then(refuse_schedule)
            if queue and origin and self._manifest and queue.advisory_subjects:
                reservations = Reservations(self._connection, queue, self.cursor.created, origin)
                reserved = await read_all(prepared)
                await reservations.reserve(self._advised)
        self.report = report = await outbox.send(reserved, self, self._save_progress)
        await self._complete(report, outbox)
        if reservations:
            await reservations.record(report.advised)
        await self._record(report, is_incomplete=stopped() or bool(report.failures) or report.source_error is not None)
        report.raise_for_failures()
        return report

    async def close(self, *, over: bool = False) -> None:
        """Record that the task has nothing more to do, so that a clear of it publishes new jobs.

        Without having been entered, it closes what another process has published, such as the one that deferred.

        :param over: whether waiting is over for good although jobs may still run; then a clear waits for them again
        """
        manifest = self._manifest
        if manifest is None and self._queue and self._queue.events and self._origin:
            manifest = Manifest(self._connection, self._queue, self._origin)
        if manifest:
            await _recorded(manifest.mark_over() if over else manifest.close())

    # What the outbox asks.

    @property
    def batch_size(self) -> int:
        """How many jobs are sent together at most."""
        return BATCH_SIZE if self._stored.is_empty else SINGLE_JOBS

    def are_new(self, first: int, batch: Batch) -> bool:
        """Note jobs that are about to be sent; return ``False``, with nothing noted, where one may be stored."""
        if self._manifest and not self._manifest.are_new(first, batch):
            return False
        if self._waits:
            self.job_ids.note(batch)
        return True

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Note a job that is about to be sent; return its stream sequence where it is known to be stored."""
        sequence = None
        if self._queue and self._manifest and (sequence := self._stored.unverified(job)):
            # It isn't sent, but looked for once more.
            stream = job.schedules or self._queue.name
            self._unverified.append(RepeatedJob(index, job, stream, sequence & ~SCHEDULED))
        elif self._manifest:
            sequence = self._manifest.sequence_of(index, job)
        if self._waits:
            self.job_ids.note(Batch.of(job))
        return sequence

    async def letters_with_keys(self, jobs: Mapping[int, OutgoingJob]) -> Mapping[int, int]:
        """Return by index the jobs whose unique keys belong to dead letters that have left the queue.

        The archive says which job had a key last. While that is stored, the server refuses the next one.

        :raises PermissionDeniedError: the publisher may not read the queue's dead letters
        """
        queue = self._queue
        if queue is None or queue.dead_letters is None or queue.archive is None:
            return {}
        subjects = {index: archived_subject(queue.name, job.subject) for index, job in jobs.items()}
        copies = await Streams(self._connection).last_many(queue.archive.name, list(subjects.values()))
        last = {index: copies[subject] for index, subject in subjects.items()}
        sequences = {index: job_sequence(copy) for index, copy in last.items() if copy and job_sequence(copy)}
        if not sequences:
            return {}
        self._scan = await Scan.begin(self._connection, queue, since=self._scan)
        found = await self._scan.classify(sorted(set(sequences.values())))
        letters = {job.sequence: job for job in found}
        return {
            index: sequence
            for index, sequence in sequences.items()
            if _keeps_key(letters[sequence], jobs[index].subject)
        }

    # Before the first job is sent.

    async def _announce(self, queue: WorkQueue, origin: Origin, info: Mapping[str, Any]) -> None:
        """Store what names the task, so that its jobs hold only its key."""
        names = NamedTask(self._connection, queue, origin)
        try:
            position = await names.announce(info)
        except JetStreamProviderError as error:
            log.warning("The task's record couldn't be stored, so its jobs name the task as far as it fits: %s", error)
            return
        if position:
            self._names, self._events_from = names, max(self._events_from, position)

    async def _begin_manifest(self, queue: WorkQueue, origin: Origin, info: Mapping[str, Any]) -> Origin:
        manifest = Manifest(self._connection, queue, origin)
        cursor = asdict(self.cursor) if self.cursor else None
        record = await manifest.begin(info, cursor, have_ended=self._have_ended if self.cursor else None)
        if record is None:
            if self._key:
                events = queue.events.name if queue.events else ""
                problem = f"expected {events} to store what is published for an idempotency_key, found that it captures"
                raise QueueDeclarationError(queue.name, [f"{problem} no published.{queue.name}.>: provision the queue"])
            return origin
        self._manifest, self._stored = manifest, manifest.known
        self._events_from = manifest.position
        self._resumed_from = record.position("events_from")
        self._origin = replace(
            origin, round=record.round, run=record.run, attempt=None, is_further_run=record.is_further_run
        )
        if self.cursor and self._resumed_from:
            # An earlier try may have published the jobs, and they may have ended before this try took its cursor.
            self.cursor = self.cursor.resumed(self._resumed_from, record.position("dead_letters_from") or 1)
        return self._origin

    async def _have_ended(self, record: ManifestRecord) -> bool:
        """Return whether all jobs of an earlier try have ended, whose waiting was over before they had."""
        cursor = self.cursor
        if cursor is None:
            return False
        key = record.manifest_origin.manifest_key
        sequences = await read_manifest_sequences(self._connection, cursor.events, cursor.queue, key)
        if sequences is None:
            return False
        resumed = cursor.resumed(record.position("events_from") or 1, record.position("dead_letters_from") or 1)
        report = WaitReport(set(sequences))
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDED_SECONDS):
                await wait(self._connection, resumed, report, policy=WaitPolicy(None, None, None))
        return not report.awaited

    def _prepare(
        self, jobs: Iterable[object] | AsyncIterable[object], subject: str | None, job_id: JobIdSource | None
    ) -> PreparedJobs:
        config = self._info["config"] if self._info else None
        captured = self._queue.subjects if self._queue else ()
        origin = self._origin
        prepared = PreparedJobs(
            jobs,
            subject=subject,
            origin=origin,
            batch="" if origin else uuid4().hex,
            queue=self._queue,
            by_key=bool(self._names or (self._manifest and origin and origin.is_key_of_manifest)),
            limit=SizeLimit.of(self._queue, config) if self._queue else None,
            job_id=job_id,
            check=None if self._stored.is_empty else self._stored.check,
            captured=(config.get("subjects") or ()) if config else captured,
        )
        return prepared.then(self._advised.note) if self._advised.advisory_subjects else prepared

    # While jobs are sent.

    async def _save_progress(self, report: PublishReport) -> None:
        """Record the jobs that are stored by now, now and then, while others are sent."""
        is_due = self._manifest is not None and self._manifest.is_due
        if len(report.repeated) >= _COMPARED_AT_ONCE or (is_due and report.repeated):
            await self._verify(report)
        if self._saving and self._saving.done():
            await self._end_saving()
        if self._manifest and is_due and not self._saving:
            self._saving = asyncio.create_task(self._manifest.save_progress(report))

    async def _verify(self, report: PublishReport) -> None:
        """Find out whether the messages that have the message ids of jobs are the jobs.

        An earlier try that left no record may have stored another body under a given id; and whoever may publish to the
        queue can store what he likes under the id of a job to come.
        """
        repeated, report.repeated = report.repeated, []
        if not repeated:
            return
        if self._info is None and self._queue:
            with suppress(NotFoundError):
                self._info = await stream_info(self._connection, self._queue.name)
        created = self._info["created"] if self._info else None
        messages = await read_messages(self._connection, self._queue, created, repeated)
        gone = {job.sequence for job, message in zip(repeated, messages, strict=True) if message is None}
        first = self._manifest.unrecorded_from if self._manifest else 0
        events = self._queue.events if self._queue else None
        if (
            gone
            and first
            and events
            and self._info
            and await may_have_dropped(self._connection, events.name, self._info)
        ):
            first = 0
        ended = await ended_jobs(self._connection, self._queue, created, gone, self._resumed_from or 1)
        for job, message in zip(repeated, messages, strict=True):
            is_job = is_stored(
                job, message, ended, first=first, of_any_task=self._is_of_any_task, is_secret=self._origin is None
            )
            if is_job:
                report.add_verified(job)
                if self._manifest and self._stored.unverified(job.job):
                    # The others were noted when they were sent.
                    self._manifest.note(job.index, job.job)
            elif is_job is None:
                if self._manifest:
                    self._manifest.note_unverified(job.job, job.sequence)
                report.add_failure(job, _not_verified(job), certain=False)
            elif self._manifest and not self._has_changed(job, message, first):
                self._taken.append(job)
            else:
                report.add_failure(job, _other_job(job, message))

    @property
    def _is_of_any_task(self) -> bool:
        return self._origin is not None and self._origin.idempotency_key is not None

    async def _send_taken(self, report: PublishReport, outbox: Outbox) -> None:
        """Send jobs whose message ids somebody else has taken under other ids, which the manifest notes first."""
        renewed = list(self._manifest.salts[-1:]) if self._manifest else []
        for _ in range(_MOST_SALTS):
            taken, self._taken = self._taken, []
            if not taken or self._manifest is None:
                break
            try:
                salt = renewed.pop() if renewed else await self._manifest.add_salt()
            except JetStreamProviderError as error:
                report.add_failures(taken, error)
                break
            log.warning(
                "%d jobs of %s have message ids that somebody else has taken, such as that of sequence %d: they are"
                " sent under other ids; see who else publishes there",
                *(len(taken), taken[0].stream, taken[0].sequence),
            )
            known = KnownJobs()
            known.verifies = True
            sent = await outbox.send([Batch.of(_with_salt(repeated.job, salt)) for repeated in taken], known)
            for repeated, sequence in zip(taken, sent.sequences, strict=False):
                report.sequences[repeated.index] = sequence
                if sequence and repeated.job.scheduled:
                    report.scheduled.add(repeated.index)
            for failure in sent.failures:
                report.add_failure(taken[failure.index], failure.error, certain=failure.certain)
            report.add_failures(taken[len(sent.sequences) :], TransientError("it was not sent"))
            report.repeated = [
                replace(again, index=taken[again.index].index, job=taken[again.index].job) for again in sent.repeated
            ]
            await self._verify(report)
        report.add_failures(self._taken, TransientError(_TAKEN))
        self._taken = []

    def _has_changed(self, repeated: RepeatedJob, message: StoredMessage | None, first: int) -> bool:
        """Return whether a message is what an earlier try seems to have stored, with another body, under a given id."""
        job, begun = repeated.job, self._info["state"]["last_seq"] if self._info else 0
        if message is None or job.given_id is None or message.data == job.body:
            return False
        of_any_task = self._is_of_any_task
        if not job.scheduled and (repeated.sequence < first or (repeated.sequence > begun and not of_any_task)):
            # This try stores the same body whenever it sends the job. Schedules have sequences of another stream.
            return False
        job_id, task = named_identity(message.headers, message.data)
        own_id, own_task = named_identity(job.headers.items(), job.body or b"")
        return job_id == own_id and (of_any_task or task == own_task)

    # Once the fate of each job is known.

    async def _complete(self, report: PublishReport, outbox: Outbox) -> None:
        """Find out what is known of jobs that weren't sent, and send those under other ids whose own are taken."""
        await self._end_saving()
        for unverified in self._unverified:
            report.withdraw(unverified.index)
        report.repeated += self._unverified
        await self._verify(report)
        await self._send_taken(report, outbox)
        report.advised = self._advised.sequences(report)
        report.events_from = self._events_from
        if report.scheduled and self._queue and self._queue.schedules:
            await warn_unless_moved(self._connection, self._queue.name, self._queue.schedules.name)
        if self._manifest and self._origin:
            report.manifest_key = self._origin.manifest_key
            if report.source_error is None and not report.failures:
                report.extra = self._manifest.extra()
        self.job_ids.locate(report.queue_sequences())
        if self.cursor and report.duplicates and not self._resumed_from:
            self.cursor = self.cursor.from_start()

    async def _record(self, report: PublishReport, *, is_incomplete: bool) -> None:
        """Record what is stored, and close the manifest unless the caller waits, or a retry has something to do."""
        if self._names:
            await _recorded(self._names.conclude(report))
        if report.extra and not is_incomplete:
            log.warning(
                "An earlier try has stored %d jobs in %s that aren't among the jobs any more: sequences %s",
                len(report.extra),
                report.stream or report.destination,
                sequence_ranges(report.extra)[:_NAMED_RANGES],
            )
        if self._with_handle and not is_incomplete:
            await self._add_handle(report)
        if self._manifest:
            is_open = self._waits or is_incomplete
            await _recorded(self._manifest.record_stored(report) if is_open else self._manifest.close(report))

    async def _add_handle(self, report: PublishReport) -> None:
        """Add a handle to the report; what prevents it is logged, since the jobs are stored."""
        cursor, queue, stream = self.cursor, self._queue, report.destination
        if cursor is None and queue and queue.events and self._origin and stream and stream.created:
            cursor = Cursor(
                queue=queue.name,
                created=stream.created,
                events=queue.events.name,
                events_from=report.events_from,
                dead_letters=queue.dead_letters.name if queue.dead_letters else None,
                dead_letters_from=1,
                advisory_subjects=queue.advisory_subjects,
                audit=queue.audit.name if queue.audit else None,
            )
        if cursor is None:
            return
        key = self._origin.key if self._origin else "_"
        try:
            report.handle = (await JobsHandle.take(self._connection, cursor, report, key)).as_json()
        except JetStreamProviderError as error:
            log.warning(
                "There is no handle on the jobs of %s, so that only this task can wait: %s", cursor.queue, error
            )


async def publish(
    connection: Connection,
    queue: WorkQueue | None,
    jobs: Iterable[object] | AsyncIterable[object],
    *,
    subject: str | None = None,
    origin: Origin | None = None,
    idempotency_key: str | None = None,
    job_id: JobIdSource | None = None,
    rate: float | None = None,
    room_timeout: float = 0.0,
) -> PublishReport:
    """Publish jobs in one :class:`Publication`, and make sure that all of them are stored.

    :param queue: see :class:`Publication`
    :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
    :param subject: see :meth:`Publication.publish`, as for the other arguments that aren't here
    :param origin: the publishing task; its jobs have the same ids when the task is tried again. With ``max_tries``, the
        queue's events keep a manifest of them: a retry stores nothing twice, however late it comes
    :param idempotency_key: publish each job once for this key, whenever and wherever the program runs again; needs a
        queue with events, which know the key for their ``max_age`` after its last use
    :param job_id: where the ids of jobs are that have none of their own
    :param rate: jobs per second at most
    :param room_timeout: how many seconds a full queue may store no job
    :return: the fate of every job
    :raises ArgumentError: there are both an origin, which may have a key of its own, and a key
    :raises JobError: a job can't be published as it is; the jobs before it may be stored
    :raises PublishError: some jobs aren't known to be stored; carries the report
    """
    async with Publication(connection, queue, identity_of(origin, idempotency_key)) as publication:
        return await publication.publish(jobs, subject=subject, job_id=job_id, rate=rate, room_timeout=room_timeout)


async def publish_with_handle(
    connection: Connection,
    /,
    queue: WorkQueue | None,
    jobs: Iterable[object] | AsyncIterable[object],
    *,
    origin: Origin | None = None,
    idempotency_key: str | None = None,
    **options: Any,
) -> PublishReport:
    """Do what :func:`publish` does; where the queue declares events, the report has a handle on the jobs.

    :param jobs: the jobs, or their bodies
    :param origin: the Airflow task that publishes; absent outside of tasks
    :param idempotency_key: publish each job once for this key
    :param options: further arguments of :func:`publish`
    """
    identity = identity_of(origin, idempotency_key)
    async with Publication(connection, queue, identity, with_handle=True) as publication:
        return await publication.publish(jobs, **options)


def identity_of(origin: Origin | None, idempotency_key: str | None) -> Origin | str | None:
    """Return whose jobs are published.

    :raises ArgumentError: both are given
    """
    if origin is not None and idempotency_key is not None:
        raise ArgumentError(
            "expected either an origin or an idempotency_key, found both: give the key to the origin, as in"
            " Origin(…, idempotency_key=…)"
        )
    return origin or idempotency_key


def _keeps_key(job: DeadLetter | NotDead, subject: str) -> bool:
    if isinstance(job, DeadLetter):
        # After a loss of power, another job may have got its sequence.
        return job.parked is None and job.subject == subject
    return job.status == Status.UNCERTAIN


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
    if job.given_id is None:
        return TransientError(
            f"expected its message id {job.message_id} to be free, {found}: publish it again after the"
            " duplicate_window, and see who else publishes there"
        )
    differs = "body" if message is None or message.data != job.body else "subject or other headers"
    return JobError(
        f"expected the same job under its id {job.given_id!r}, {found}, with another {differs}: give the changed"
        " job another id, or see who else publishes there"
    )


async def _recorded(recording: Awaitable[None]) -> None:
    """Log what prevents a record: the jobs are stored, and the record stays open for all jobs that it may be about."""
    try:
        await recording
    except JetStreamProviderError as error:
        log.warning("What the task has published couldn't be recorded, so a clear of it may publish nothing: %s", error)
