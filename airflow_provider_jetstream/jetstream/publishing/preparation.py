"""Gives jobs their subjects, ids and headers, and refuses what can't be published.

A job is identified among those of its task by the id that its author gave it, else by its content and the number of
equal jobs before it: never by its position, nor by the number of the try, since a retry may list the same jobs in
another order. The content is what the author declares: a delay counts as it is written, and not as the time that it
gives at this try. Headers of a trace say which try has sent a job, so they don't count.

Jobs that differ in body and ids only are checked together. What has something to be refused is gone through job by job,
so that an error names the job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, subject_problem
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    DAG_ID,
    EXECUTE_AT,
    JOB_ADVISORY,
    JOB_ID,
    JOB_UNIQUE,
    MAP_INDEX,
    MSG_ID,
    REDRIVE_CONSUMER,
    REDRIVE_COUNT,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
    RUN_ID,
    SCHEDULED_MSG_ID,
    TASK_ID,
    TRACE_PARENT,
    TRACE_STATE,
)
from airflow_provider_jetstream.jetstream.errors import (
    EventLoopError,
    JobError,
    JobNotSerializableError,
    JobTooLargeError,
)
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.origin import DIGEST_BYTES, Origin, ShortDigests, short_digest
from airflow_provider_jetstream.jetstream.publishing.batch import MESSAGE_ID_LENGTH, Batch, digest_texts
from airflow_provider_jetstream.jetstream.publishing.job import (
    MAX_JOB_ID,
    Job,
    OutgoingJob,
    blank_problem,
    body_field,
    header_job_id,
    identity_headers,
)
from airflow_provider_jetstream.jetstream.publishing.unique import UNIQUE_LEVEL, unique_headers, unique_subject
from airflow_provider_jetstream.jetstream.queue.declaration import (
    PLACEHOLDER,
    partition_of,
    partition_subject,
    placeholder_problem,
)
from airflow_provider_jetstream.jetstream.queue.message_size import LONGEST_DUE_ID, Measured
from airflow_provider_jetstream.jetstream.units import parse_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource
    from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# The jobs of a batch; fewer where they are large.
_BATCH_JOBS: Final = 512
_BATCH_BYTES: Final = 256 << 10
# The names in lower case of headers that differ at each try.
_OF_A_TRY: Final = frozenset(name.lower() for name in (TRACE_PARENT, TRACE_STATE, "baggage"))
# A message id of a publication without an identity is the job's number and the publication's digest. Ten digits number
# as many jobs as fit into no stream; the others are 72 bits.
_NUMBER: Final = 10
_PLACE: Final = "x" * MESSAGE_ID_LENGTH
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_LINE_BREAK = re.compile(r"[\r\n]")
# The headers that a publisher or a redrive writes itself, in lower case, and what an author gives in their place.
_TASK: Final = (AIRFLOW_TASK, DAG_ID, RUN_ID, TASK_ID, MAP_INDEX)
_REDRIVE: Final = (REDRIVE_COUNT, REDRIVE_STREAM, REDRIVE_SEQUENCE, REDRIVE_CONSUMER)
_WRITTEN: Final = {
    JOB_ID.lower(): "give the id as Job(id=…), or by job_id",
    JOB_ADVISORY.lower(): "give the subject as Job(advisory=…)",
    JOB_UNIQUE.lower(): "give the key as Job(unique=…)",
    SCHEDULED_MSG_ID.lower(): "leave it out: the mover makes it of the job's id",
    **dict.fromkeys(map(str.lower, _TASK), "leave it out: the task that publishes a job is named by itself"),
    **dict.fromkeys(
        map(str.lower, _REDRIVE), "leave it out, or give it another name: it says what a job was redriven of"
    ),
}
# What a job has none of that differs from others in body and ids only, besides headers.
_particulars = attrgetter("subject", "advisory", "partition_key", "unique", "at", "delay", "every", "time_zone")
_NOTHING: Final = _particulars(Job(b""))


class PreparedJobs(Iterable[OutgoingJob]):
    """The jobs of one call, each with its subject, id and headers, prepared as they are read.

    :param items: jobs, or just bodies; of a list, none is returned before all are checked
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task, if there is one
    :param batch: unique for this call; part of the message ids of jobs without an origin and without an id
    :param queue: needed for partitions and schedules
    :param by_key: whether a stored record names the task, so that jobs hold only its key; otherwise they name the task
        themselves, as far as it fits
    :param limit: the largest job of the queue, where it is known
    :param job_id: where the ids of jobs are that have none of their own: a field of the body, or what returns the id
    :param check: called with each job and its position; refuses those that can't be published
    :param captured: the subjects of the queue's stream, where they are known

    :ivar is_whole: whether none is returned before all are prepared, as of a list
    :ivar source: the jobs as they are listed
    :ivar error: why the job after the last batch can't be published: a :class:`JobError`, such as that it has no
        subject, one that the queue doesn't capture, a header of the server's, a partition or a schedule that the queue
        doesn't have, or the id of another job; or what the function that gives the ids has raised
    """

    def __init__(
        self,
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
    ) -> None:
        self.is_whole = isinstance(items, list | tuple)
        self.source = items
        self.error: Exception | None = None
        self._prepared = 0
        self._batch_jobs = 1
        self._checks: list[Callable[[int, OutgoingJob], None]] = []
        self._subject = subject
        self._origin = origin
        self._queue = queue
        self._limit = limit
        self._job_id = job_id
        self._check = check
        self._captured = captured
        self._message_ids = origin.message_ids() if origin else ShortDigests("job")
        self._numbered = f"%0{_NUMBER}d{short_digest(batch)[_NUMBER:]}"
        self._task_key = origin.key if origin and by_key else None
        self._advisory_subjects = queue.advisory_subjects if queue else ()
        self._checked: tuple[str, str] | None = None
        # The index of the first job of the batch that has an id, and the ids of that batch.
        self._ids: dict[bytes, tuple[int, list[bytes]]] = {}
        # The number of jobs with a content.
        self._contents: dict[bytes, int] = {}

    def then(self, check: Callable[[int, OutgoingJob], None]) -> PreparedJobs:
        """Add what is called with each job that has an advisory subject or a schedule; it refuses a job by an error."""
        self._checks.append(check)
        return self

    @property
    def batch_jobs(self) -> int:
        """How many jobs a batch should have: one where a function of the author gives the ids, which may block."""
        return 1 if callable(self._job_id) else self._batch_jobs

    def batches(self) -> Iterator[Batch]:
        """Read and prepare all jobs, of a source that doesn't block.

        :raises EventLoopError: the source is asynchronous
        """
        if not isinstance(self.source, Iterable):
            raise EventLoopError(
                "expected an asynchronous source of jobs to be read by publish(), found another reader: pass it on as"
                " it is"
            )
        listed = iter(self.source)
        # A job of another source than a list is never kept back for the one after it.
        while items := list(islice(listed, self._batch_jobs if self.is_whole else 1)):
            yield from self.prepare(items)
            if self.error:
                raise self.error

    def __iter__(self) -> Iterator[OutgoingJob]:
        batches = self.batches()
        for batch in list(batches) if self.is_whole else batches:
            for offset in range(len(batch)):
                yield batch.job(offset)

    def prepare(self, items: Sequence[object]) -> list[Batch]:
        """Prepare the next jobs; where one can't be published, those before it, and then why is :attr:`error`."""
        batches: list[Batch] = []
        # A value that misbehaves is found again, and named.
        with suppress(Exception):
            if together := self._batch_of(self._prepared, items):
                batches.append(together)
        if not batches:
            try:
                for index, item in enumerate(items, self._prepared):
                    job = self._outgoing(index, item)
                    for check in self._checks:
                        check(index, job)
                    batches.append(Batch.of(job))
            except Exception as error:  # noqa: BLE001
                # What gives the ids may raise anything.
                self.error = error
        self._prepared += sum(map(len, batches))
        average = sum(batch.size for batch in batches) // len(items)
        self._batch_jobs = max(1, min(_BATCH_JOBS, _BATCH_BYTES // max(1, average)))
        return batches

    def _target(self, index: int, subject: str | None, partition_key: str | None, job: Job | None = None) -> str:
        """Return the subject of a job, with its partition; checked once for as long as jobs have the same.

        :param job: where it may have a unique key
        """
        subject, checked = subject or self._subject, self._checked
        has_key = job is not None and job.unique is not None
        if checked and partition_key is None and subject == checked[0] and not has_key:
            return checked[1]
        target = _partitioned_subject(index, partition_key, subject, self._queue)
        if job is not None and has_key:
            target = unique_subject(index, job, target, self._queue)
        if self._queue and self._captured:
            _check_captured(index, target, self._queue.name, self._captured)
        if subject is not None and partition_key is None and not has_key:
            self._checked = subject, target
        return target

    # Jobs that differ in body and ids only.

    def _batch_of(self, first: int, items: Sequence[object]) -> Batch | None:
        """Return jobs as one batch; ``None``, with nothing noted, where they have to be looked at one by one."""
        if self._job_id or self._check or not self._subject or "{" in self._subject or "}" in self._subject:
            return None
        contents, given = _columns(items)
        bodies = _encoded(contents) if contents else None
        ids = _id_column(given) if given else None
        if bodies is None or (given and ids is None) or not self._have_no_fields(bodies, has_ids=ids is not None):
            return None
        target, headers = self._target(first, None, None), {}
        if self._origin:
            headers = {AIRFLOW_TASK: self._task_key} if self._task_key else self._origin.headers()
        if not self._fit(bodies, headers, max(given, key=len) if given else None):
            return None
        if given and ids:
            noted = dict.fromkeys(ids, (first, ids))
            if len(noted) < len(ids) or not self._ids.keys().isdisjoint(noted):
                return None
            self._ids |= noted
            return Batch(target, bodies, headers, digest_texts(self._message_ids.of_texts(given)), ids, items)
        return Batch(target, bodies, headers, self._ids_of(first, bodies), None, items)

    def _ids_of(self, first: int, bodies: Sequence[bytes]) -> list[bytes]:
        """Return the message ids of jobs without ids of their own."""
        if self._origin is None:
            form = self._numbered.encode()
            return [form % number for number in range(first, first + len(bodies))]
        name = _line(self._subject, None)
        digests = [sha256(name + body).digest() for body in bodies]
        places = [digest[:DIGEST_BYTES] for digest in digests]
        new, counts = dict.fromkeys(places, 1), bytes(len(places))
        if len(new) < len(places) or not self._contents.keys().isdisjoint(new):
            return digest_texts(self._message_ids.of_contents(digests, map(self._count, places)))
        self._contents |= new
        return digest_texts(self._message_ids.of_contents(digests, counts))

    def _count(self, place: bytes) -> int:
        """Return how many jobs with a content came before this one."""
        count = self._contents.get(place, 0)
        self._contents[place] = count + 1
        return count

    def _have_no_fields(self, bodies: Sequence[bytes], *, has_ids: bool) -> bool:
        """Return whether no body names an advisory subject, nor an id where the author gives another."""
        text = b"\n".join([b"", *bodies])
        if self._advisory_subjects and (b'"advisory"' in text or b"\\u" in text):
            return False
        if b"\n{" not in text:
            return True
        return b'"advisory"' not in text and not (has_ids and b'"id"' in text)

    def _fit(self, bodies: Sequence[bytes], headers: Mapping[str, str], longest_id: str | None) -> bool:
        """Return whether the queue stores the largest of the jobs, and its redriven copy."""
        if self._limit is None:
            return True
        with_ids = {MSG_ID: _PLACE, **({} if longest_id is None else {JOB_ID: longest_id}), **headers}
        measured = Measured(max(map(len, bodies)), copied_id=_PLACE if longest_id is None else None)
        return self._limit.problem(measured, with_ids) is None

    # A job by itself.

    def _outgoing(self, index: int, item: object) -> OutgoingJob:
        """Return a job as it is published."""
        job, queue, origin, limit = Job.of(item), self._queue, self._origin, self._limit
        target = self._target(index, job.subject, job.partition_key, job)
        if job.advisory:
            _check_advisory(index, job.advisory, self._advisory_subjects)
        if job.headers:
            _check_author_headers(index, job.headers)
            _check_execute_at(index, job.headers, queue)
        body, is_scheduled = _payload(job), job.schedule is not None
        own_id = _own_id(index, item, job.id, body, self._job_id, self._advisory_subjects)
        # The id in the body of an image identifies a job of a task only.
        is_given = own_id is not None and (origin is not None or job.id is not None or self._job_id is not None)
        message_id = self._message_id(index, job, own_id, body, is_given=is_given)
        job_id = own_id or body_field(body or b"", "id") or message_id
        headers = identity_headers(
            job_id=job_id, message_id=message_id, advisory=job.advisory, body=body or b"", scheduled=is_scheduled
        )
        headers = dict(job.headers) | headers
        if job.unique is not None:
            headers |= unique_headers(job.unique, target)
        copied_id = None if JOB_ID in headers or job_id != message_id else message_id
        measured = Measured(len(body or b""), copied_id=copied_id)
        if self._task_key:
            headers[AIRFLOW_TASK] = self._task_key
        elif origin:
            named = headers | origin.headers()
            headers = headers if limit and limit.problem(measured, named) else named
        level = 0 if job.unique is None else UNIQUE_LEVEL
        outgoing = OutgoingJob(job, target, body, own_id, job_id, message_id, headers, level)
        stored: Mapping[str, str] = outgoing.headers
        if is_scheduled:
            # Few jobs have a schedule, and DAG files check jobs too.
            from airflow_provider_jetstream.jetstream.publishing.schedules import moved_headers, scheduled_job

            outgoing = scheduled_job(index, outgoing, queue)
            # The stream of schedules has no limit; what counts is the job that the queue gets.
            stored = moved_headers(Headers(outgoing.headers.items()), LONGEST_DUE_ID)
        if limit and (problem := limit.problem(measured, stored)):
            raise JobTooLargeError(f"job {index} {problem}")
        if self._check:
            self._check(index, outgoing)
        return outgoing

    def _message_id(self, index: int, job: Job, own_id: str | None, body: bytes | None, *, is_given: bool) -> str:
        if own_id is not None:
            _check_id(index, own_id)
            encoded = own_id.encode("utf-8", "surrogatepass")
            start, ids = self._ids.setdefault(encoded, (index, [encoded]))
            if (first := start + ids.index(encoded)) != index:
                raise JobError(
                    f"jobs {first} and {index} both have the id {own_id!r}, and only one of them would be stored:"
                    " expected an id for each job; give each its own, or none, where equal jobs count"
                )
        if is_given and own_id is not None:
            return self._message_ids.of(own_id)
        if self._origin is None or body is None:
            return self._numbered % index
        subject = job.subject or self._subject or ""
        name = _line(subject, job.partition_key if PLACEHOLDER in subject else None, *_declared(job, body))
        content = sha256(name + body)
        return self._message_ids.of(content.hexdigest(), self._count(content.digest()[:DIGEST_BYTES]))


def _payload(job: Job) -> bytes | None:
    try:
        return job.payload()
    except JobNotSerializableError:
        # Reported with the fate of all jobs.
        return None


def _declared(job: Job, body: bytes) -> Sequence[object]:
    """Return what tells a job from others with the same subject and body: all that its author declares for it."""
    counting = sorted([name, value] for name, value in job.headers.items() if name.lower() not in _OF_A_TRY)
    stated = job.advisory if job.advisory and job.advisory != body_field(body, "advisory") else None
    if not counting and stated is None and job.schedule is None and job.unique is None:
        return ()
    if job.unique is not None:
        # Not among the others, so that those of jobs without a key stay what they are.
        return ("unique", job.unique, counting, stated)
    return (counting, stated, *(None if value is None else str(value) for value in job.schedule or ()))


def _line(*names: object) -> bytes:
    return json.dumps(names).encode() + b"\n"


def _columns(items: Sequence[object]) -> tuple[Sequence[object], list[str] | None]:
    """Return the bodies of jobs and their given ids, if they have any; no bodies where there is more to the jobs."""
    kinds = set(map(type, items))
    if kinds != {Job}:
        return () if any(issubclass(kind, Job) for kind in kinds) else items, None
    jobs: Sequence[Job] = items  # type: ignore[assignment]
    if set(map(_particulars, jobs)) != {_NOTHING} or any(map(attrgetter("headers"), jobs)):
        return (), None
    given = [job.id for job in jobs]
    return [job.body for job in jobs], None if set(given) == {None} else given  # type: ignore[return-value]


def _encoded(contents: Sequence[object]) -> list[bytes] | None:
    """Return bodies as they are sent; ``None`` where one can't be encoded."""
    kinds = set(map(type, contents))
    if kinds == {bytes}:
        return list(contents)  # type: ignore[arg-type]
    try:
        if kinds == {str}:
            return [text.encode() for text in contents]  # type: ignore[attr-defined]
        return [Job(content).payload() for content in contents]
    except (JobNotSerializableError, UnicodeEncodeError):
        return None


def _id_column(given: Sequence[str]) -> list[bytes] | None:
    """Return ids in ASCII; ``None`` where one may be no id."""
    if set(map(type, given)) != {str}:
        return None
    text = "\n".join(given)
    if not text.isascii() or text.count("\n") != len(given) - 1 or not text.replace("\n", "").isprintable():
        return None
    if not all(given) or max(map(len, given)) > MAX_JOB_ID or list(map(str.strip, given)) != list(given):
        return None
    return text.encode().split(b"\n")


# What a job can't be published with.


def _check_id(index: int, job_id: str) -> None:
    """Refuse an id that no header can hold."""
    if not _is_header_value(job_id):
        raise JobError(f"job {index} has the id {job_id!r}: expected text in one line, which a header can hold")
    if header_job_id([(JOB_ID, job_id)]) is None:
        raise JobError(
            f"job {index} has an id of {len(job_id.encode())} bytes: expected at most {MAX_JOB_ID}, and no U+FFFD,"
            " which stands for what isn't UTF-8; use a digest"
        )


def _check_captured(index: int, subject: str, queue: str, captured: Sequence[str]) -> None:
    """Refuse a subject that the queue's stream doesn't capture: another stream may."""
    if not covered_by_any(captured, subject):
        raise JobError(
            f"job {index} can't be published to {subject!r}: expected a subject of {queue} ({', '.join(captured)});"
            " choose one of them, or add this one to the declaration and provision the queue"
        )


def _partitioned_subject(index: int, partition_key: str | None, subject: str | None, queue: WorkQueue | None) -> str:
    """Return the subject of a job, with its partition."""
    if subject is None:
        raise JobError(f"job {index} has no subject: set it on the job, or a default for all")
    if "{" in subject or "}" in subject or partition_key is not None:
        subject = _partitioned(index, partition_key, subject, queue)
    if problem := subject_problem(subject, wildcards=False):
        raise JobError(f"job {index} can't be published to {subject!r}: {problem}")
    return subject


def _check_advisory(index: int, advisory: str, declared: tuple[str, ...]) -> None:
    """Refuse an advisory subject that can't be one, or that its queue doesn't declare."""
    if problem := subject_problem(advisory, wildcards=False):
        raise JobError(
            f"job {index} can't be reported on {advisory!r}: {problem}; publish Job(body) where the body's"
            " advisory means something else"
        )
    if declared and not covered_by_any(declared, advisory):
        raise JobError(
            f"job {index} names the advisory subject {advisory!r}, which is outside of the queue's advisory_subjects"
            f" ({', '.join(declared)}), so nothing would store what its worker reports there: choose a subject among"
            " them, or add this one to the declaration"
        )


def _partitioned(index: int, key: str | None, subject: str, queue: WorkQueue | None) -> str:
    if problem := placeholder_problem(subject):
        with_key = " and a partition_key" if key is not None else ""
        raise JobError(f"job {index} has the subject {subject!r}{with_key}: {problem}")
    if key is None:
        raise JobError(f"job {index} has no partition_key, which {subject!r} needs: set it on the job")
    if queue is None:
        raise JobError(f"job {index} has a partition_key: pass the queue too, which declares the number of partitions")
    if (count := queue.partition_count(subject)) is None:
        raise JobError(
            f"job {index} can't be published to {subject!r}: no consumer of {queue.name} has partitions on that"
            " subject; declare one with partitions and such a filter"
        )
    return partition_subject(subject, partition_of(str(key), count))


def _check_author_headers(index: int, headers: Mapping[str, str]) -> None:
    """Refuse headers that can't be sent, on which the server would act, or that are written for each job."""
    check_headers(index, headers)
    for name in headers:
        if instead := _WRITTEN.get(name.lower()):
            raise JobError(
                f"job {index} sets the header {name}: expected none that the publisher or a redrive writes; {instead}"
            )


def check_headers(index: int | str, headers: Mapping[str, str]) -> None:
    """Refuse headers that can't be sent, or on which the server would act, of the job of an index or id."""
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise JobError(
                f"job {index} has a header {shown_value(name)}: expected a name of letters, digits and dashes"
            )
        if name.lower().startswith("nats-"):
            raise JobError(f"job {index} sets {name}: headers starting with Nats- belong to the server")
        if not isinstance(value, str) or not _is_header_value(value):
            raise JobError(f"job {index}, header {name}: expected text without line breaks, found {shown_value(value)}")


def _is_header_value(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return not _LINE_BREAK.search(text)


def _check_execute_at(index: int, headers: Mapping[str, str], queue: WorkQueue | None) -> None:
    """Refuse a time that workers can't parse: such a job would be a dead letter."""
    if queue is None or not queue.execute_at_header or EXECUTE_AT not in headers:
        return
    try:
        parse_time(headers[EXECUTE_AT])
    except ValueError as error:
        raise JobError(f"job {index}, header {EXECUTE_AT}: {error}") from None


def _own_id(
    index: int,
    item: object,
    own_id: str | None,
    body: bytes | None,
    source: JobIdSource | None,
    advisory_subjects: tuple[str, ...],
) -> str | None:
    """Return the id that the author gave a job; ``None`` where a job is known by its content.

    A body with ``id`` and one of the queue's advisory subjects as ``advisory`` states the id by which its worker
    reports it.
    """
    if own_id is not None:
        return _exact_id(index, str(own_id))
    if source is not None:
        return _sourced_id(index, item, body, source)
    if body and advisory_subjects and (advisory := body_field(body, "advisory")):
        return body_field(body, "id") if covered_by_any(advisory_subjects, advisory) else None
    return None


def _sourced_id(index: int, item: object, body: bytes | None, source: JobIdSource) -> str:
    if callable(source):
        try:
            value = source(item)
        except Exception as error:
            raise JobError(
                f"job {index}: expected an id from job_id ({getattr(source, '__name__', source)}), found"
                f" {type(error).__name__}: {error}; return the id of each job"
            ) from error
        where = f"from job_id ({getattr(source, '__name__', source)})"
    else:
        if (fields := _json_object(body)) is None:
            raise JobError(
                f"job {index}: expected a JSON object with the field {source!r}, which job_id names, found another"
                " body: give the job an id of its own, or pass a callable as job_id"
            )
        value, where = fields.get(source), f"in the field {source!r}, which job_id names"
    is_id = isinstance(value, str | int) and not isinstance(value, bool)
    if not is_id or not str(value).strip():
        raise JobError(f"job {index}: expected text or a whole number {where}, found {value!r}: give each job an id")
    return _exact_id(index, str(value))


def _exact_id(index: int, text: str) -> str:
    if problem := blank_problem(text):
        raise JobError(f"job {index}: {problem}")
    return text


def _json_object(body: bytes | None) -> dict[str, Any] | None:
    try:
        value = json.loads(body or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def refuse_schedule(index: int, job: OutgoingJob) -> None:
    """Refuse a job that can't be waited for, since it is scheduled."""
    if job.scheduled:
        raise JobError(
            f"job {index} is scheduled, and the server gives it a sequence only when it is due, so that it can't be"
            " waited for: publish it with a task that doesn't wait, or without a schedule"
        )
