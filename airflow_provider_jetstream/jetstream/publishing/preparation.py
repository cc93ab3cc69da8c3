"""Gives jobs their subjects, ids and headers, and refuses what can't be published: of a run of jobs at once.

A run whose jobs are alike is checked as a whole. One that isn't, or that has something to be refused, is gone through
job by job, so that an error names the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    JOB_ID,
)
from airflow_provider_jetstream.jetstream.errors import JobNotSerializableError, JobTooLargeError
from airflow_provider_jetstream.jetstream.origin import Origin, ShortDigests
from airflow_provider_jetstream.jetstream.publishing.job import Job, OutgoingJob
from airflow_provider_jetstream.jetstream.publishing.job_identity import body_field, identity_headers
from airflow_provider_jetstream.jetstream.publishing.job_keys import (
    JobKeys,
    declared_content,
    given_id,
)
from airflow_provider_jetstream.jetstream.publishing.job_target import JobTargets
from airflow_provider_jetstream.jetstream.publishing.outgoing_checks import (
    check_advisory,
    check_author_headers,
    check_execute_at,
    check_id,
)
from airflow_provider_jetstream.jetstream.publishing.outgoing_run import ListedRun, UniformRun
from airflow_provider_jetstream.jetstream.publishing.reading_thread import iterate
from airflow_provider_jetstream.jetstream.publishing.scheduled_job import moved_headers, scheduled_job
from airflow_provider_jetstream.jetstream.publishing.uniform_runs import UniformRuns
from airflow_provider_jetstream.jetstream.queue.message_size import LONGEST_DUE_ID, Measured

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobIdSource, JobKey
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun
    from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# What the message ids are made of besides that a program gives to jobs with ids.
_GIVEN_ID: Final = "job"
# The jobs of a run; fewer where they are large.
RUN_JOBS = 512
RUN_BYTES = 256 << 10


def prepare_jobs(
    items: Iterable[object] | AsyncIterable[object],
    *,
    subject: str | None,
    origin: Origin | None,
    batch: str,
    queue: WorkQueue | None = None,
    by_key: bool = False,
    limit: SizeLimit | None = None,
    job_id: JobIdSource | None = None,
    check: Callable[[int, OutgoingJob], None] | None = None,
    captured: Sequence[str] = (),
    keeps_given_ids: bool = False,
) -> PreparedJobs:
    """Give every job its subject, id and headers.

    :param items: jobs, or just bodies; of a list, none is returned before all are checked
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task, if there is one
    :param batch: unique for this call; part of the message ids of jobs without an origin
    :param queue: needed for partitions and schedules
    :param by_key: whether a stored record names the task, so that jobs hold only its key; otherwise they name the task
        themselves, as far as it fits
    :param limit: the largest job of the queue, where it is known
    :param job_id: where the ids of jobs are that have none of their own: a field of the body, or what returns the id
    :param check: called with each job and its position; refuses those that can't be published
    :param captured: the subjects of the queue's stream, where they are known
    :param keeps_given_ids: whether an id that the author gave identifies a job in all calls without an origin
    :raises JobTooLargeError: a job, or its redriven copy, is larger than the queue's limit
    :raises JobError: a job has no subject, an invalid one, one that the queue doesn't capture, a header of the
        server's, a partition or a schedule that the queue doesn't have, or the id of another job
    """
    given_ids = ShortDigests(_GIVEN_ID) if keeps_given_ids and not origin else None
    message_ids = origin.message_ids() if origin else ShortDigests(batch)
    is_uniform = not (job_id or check)
    uniform = UniformRuns(subject, origin, batch, queue, limit, given_ids, by_key=by_key) if is_uniform else None
    preparation = _Preparation(
        *(subject, origin, (message_ids, given_ids or message_ids), queue, limit, job_id, check, captured, uniform),
        JobKeys(is_whole=_is_whole(items)),
        by_key=by_key,
    )
    return PreparedJobs(items, preparation)


class PreparedJobs(Iterable[OutgoingJob]):
    """The jobs of one call, prepared as they are read.

    :ivar is_whole: whether none is returned before all are prepared, as of a list
    :ivar error: why the job after the last run can't be published
    """

    def __init__(self, items: Iterable[object] | AsyncIterable[object], preparation: _Preparation) -> None:
        self.is_whole = _is_whole(items)
        self.error: Exception | None = None
        self._items = iterate(items)
        self._preparation = preparation
        self._count = 0
        self._run_jobs = 1
        self._stages: list[tuple[Callable[[int, OutgoingJob], None], Callable[[int, UniformRun], None] | None]] = []

    def then(
        self, note_job: Callable[[int, OutgoingJob], None], note_run: Callable[[int, UniformRun], None] | None = None
    ) -> PreparedJobs:
        """Add what is called with each job and its index; it refuses a job by an error.

        :param note_run: called in its place with jobs that differ in body and ids only, and the index of the first;
            they have neither a schedule nor an advisory subject
        """
        self._stages.append((note_job, note_run))
        return self

    @property
    def items(self) -> Iterator[object]:
        """The jobs as they are listed."""
        return self._items

    @property
    def run_jobs(self) -> int:
        """How many jobs a run should have: one where a function of the author gives the ids, which may block."""
        return 1 if self._preparation.calls_author else self._run_jobs

    def runs(self) -> Iterator[OutgoingRun]:
        """Read and prepare all jobs."""
        # A job of another source than a list is never kept back for the one after it.
        while items := list(islice(self._items, self._run_jobs if self.is_whole else 1)):
            yield self.prepare(items)
            if self.error:
                raise self.error

    def __iter__(self) -> Iterator[OutgoingJob]:
        runs = self.runs()
        for run in list(runs) if self.is_whole else runs:
            for offset in range(len(run)):
                yield run.job(offset)

    def prepare(self, items: Sequence[object]) -> OutgoingRun:
        """Prepare the next jobs.

        :return: fewer where one can't be published, and then why is :attr:`error`
        """
        run: OutgoingRun = self._prepared_together(items) or self._prepared_one_by_one(items)
        self._count += len(run)
        average = run.size // max(1, len(run))
        self._run_jobs = max(1, min(RUN_JOBS, RUN_BYTES // max(1, average)))
        return run

    def _prepared_together(self, items: Sequence[object]) -> UniformRun | None:
        try:
            run = self._preparation.uniform_run(self._count, items)
        except Exception:  # noqa: BLE001
            # A value that misbehaves is found again, and named.
            return None
        if run:
            for _, note_run in self._stages:
                if note_run:
                    note_run(self._count, run)
        return run

    def _prepared_one_by_one(self, items: Sequence[object]) -> ListedRun:
        prepared: list[OutgoingJob] = []
        try:
            for index, item in enumerate(items, self._count):
                job = self._preparation.outgoing(index, item)
                for note_job, _ in self._stages:
                    note_job(index, job)
                prepared.append(job)
        except Exception as error:  # noqa: BLE001
            # What gives the ids may raise anything.
            self.error = error
        return ListedRun(prepared)


class _Preparation:
    def __init__(
        self,
        subject: str | None,
        origin: Origin | None,
        message_ids: tuple[ShortDigests, ShortDigests],
        queue: WorkQueue | None,
        limit: SizeLimit | None,
        job_id: JobIdSource | None,
        check: Callable[[int, OutgoingJob], None] | None,
        captured: Sequence[str],
        uniform: UniformRuns | None,
        keys: JobKeys,
        *,
        by_key: bool,
    ) -> None:
        self._subject = subject
        self._origin = origin
        self._queue = queue
        self._limit = limit
        self._job_id = job_id
        self._check = check
        self._targets = JobTargets(subject, queue, captured)
        self._keys = keys
        self._message_ids, self._given_ids = message_ids
        self._task_key = origin.key if origin and by_key else None
        self._uniform = uniform
        self._advisory_subjects = queue.advisory_subjects if queue else ()

    @property
    def calls_author(self) -> bool:
        """Whether a function of the jobs' author gives their ids."""
        return callable(self._job_id)

    def uniform_run(self, first: int, items: Sequence[object]) -> UniformRun | None:
        """Return jobs as a uniform run; ``None``, with nothing noted of them, where they may be none.

        :param first: the index of the first
        """
        if self._uniform is None or self._subject is None or "{" in self._subject or "}" in self._subject:
            return None
        target = self._targets.of(first, None, None)
        return self._uniform.run_of(first, items, target, self._keys, self._message_ids)

    def outgoing(self, index: int, item: object) -> OutgoingJob:
        """Return a job as it is published.

        :raises JobError: it can't be
        """
        outgoing = self._identified(index, item)
        if self._check:
            self._check(index, outgoing)
        return outgoing

    def _key_of(self, index: int, job: Job, own_id: str | None, body: bytes | None) -> JobKey:
        declared: Sequence[object] = ()
        if own_id:
            check_id(index, own_id)
        elif job.headers or job.advisory or job.schedule:
            declared = declared_content(job.headers, job.advisory, job.schedule, body or b"")
        return self._keys.key_of(index, own_id, job.subject or self._subject or "", job.partition_key, body, declared)

    def _identified(self, index: int, item: object) -> OutgoingJob:
        job, queue, origin, limit = Job.of(item), self._queue, self._origin, self._limit
        target = self._targets.of(index, job.subject, job.partition_key)
        if job.advisory:
            check_advisory(index, job.advisory, self._advisory_subjects)
        if job.headers:
            check_author_headers(index, job.headers)
            check_execute_at(index, job.headers, queue)
        body, is_scheduled = _encoded(job), job.schedule is not None
        own_id = given_id(index, item, job.id, body, self._job_id, self._advisory_subjects)
        key = self._key_of(index, job, own_id, body)
        # The id in the body of an image identifies a job of a task only.
        is_given = own_id is not None and (job.id is not None or self._job_id is not None)
        message_id = (self._given_ids if is_given else self._message_ids).of(*key.parts)
        job_id = own_id or body_field(body or b"", "id") or message_id
        headers = identity_headers(
            job_id=job_id, message_id=message_id, advisory=job.advisory, body=body or b"", scheduled=is_scheduled
        )
        headers = dict(job.headers) | headers
        copied_id = None if JOB_ID in headers or job_id != message_id else message_id
        measured = Measured(len(body or b""), copied_id=copied_id)
        if self._task_key:
            headers[AIRFLOW_TASK] = self._task_key
        elif origin:
            headers = _with_origin(headers, origin, measured, limit)
        outgoing = OutgoingJob(job, target, body, key, job_id, message_id, headers)
        if is_scheduled:
            outgoing = scheduled_job(index, outgoing, queue)
        # The stream of schedules has no limit; what counts is the job that the queue gets.
        stored = moved_headers(Headers(outgoing.headers.items()), LONGEST_DUE_ID) if is_scheduled else outgoing.headers
        if limit and (problem := limit.problem(measured, stored)):
            raise JobTooLargeError(f"job {index} {problem}")
        return outgoing


def _is_whole(items: object) -> bool:
    return isinstance(items, list | tuple)


def _encoded(job: Job) -> bytes | None:
    try:
        return job.payload()
    except JobNotSerializableError:
        # Reported with the fate of all jobs.
        return None


def _with_origin(headers: dict[str, str], origin: Origin, job: Measured, limit: SizeLimit | None) -> dict[str, str]:
    named = headers | origin.headers()
    return headers if limit and limit.problem(job, named) else named
