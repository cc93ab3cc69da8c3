"""Refuses jobs that can't be published as they are: ids, subjects, advisory subjects, partitions and headers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, subject_problem
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    DAG_ID,
    EXECUTE_AT,
    JOB_ADVISORY,
    JOB_ID,
    MAP_INDEX,
    REDRIVE_CONSUMER,
    REDRIVE_COUNT,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
    RUN_ID,
    SCHEDULED_MSG_ID,
    TASK_ID,
)
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.publishing.job import blank_problem
from airflow_provider_jetstream.jetstream.publishing.job_identity import MAX_JOB_ID, body_field, header_job_id
from airflow_provider_jetstream.jetstream.queue.partitions import (
    partition_of,
    partition_subject,
    placeholder_problem,
)
from airflow_provider_jetstream.jetstream.units import parse_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_LINE_BREAK = re.compile(r"[\r\n]")
# The headers that a publisher or a redrive writes itself, in lower case, and what an author gives in their place.
_TASK: Final = (AIRFLOW_TASK, DAG_ID, RUN_ID, TASK_ID, MAP_INDEX)
_REDRIVE: Final = (REDRIVE_COUNT, REDRIVE_STREAM, REDRIVE_SEQUENCE, REDRIVE_CONSUMER)
_WRITTEN: Final = {
    JOB_ID.lower(): "give the id as Job(id=…), or by job_id",
    JOB_ADVISORY.lower(): "give the subject as Job(advisory=…)",
    SCHEDULED_MSG_ID.lower(): "leave it out: the mover makes it of the job's id",
    **dict.fromkeys(map(str.lower, _TASK), "leave it out: the task that publishes a job is named by itself"),
    **dict.fromkeys(
        map(str.lower, _REDRIVE), "leave it out, or give it another name: it says what a job was redriven of"
    ),
}


def check_id(index: int, job_id: str) -> None:
    """Refuse an id that no header can hold.

    :raises JobError: it can't be used
    """
    if not _is_header_value(job_id):
        raise JobError(f"job {index} has the id {job_id!r}: expected text in one line, which a header can hold")
    if header_job_id([(JOB_ID, job_id)]) is None:
        raise JobError(
            f"job {index} has an id of {len(job_id.encode())} bytes: expected at most {MAX_JOB_ID}, and no U+FFFD,"
            " which stands for what isn't UTF-8; use a digest"
        )


def check_captured(index: int, subject: str, queue: str, captured: Sequence[str]) -> None:
    """Refuse a subject that the queue's stream doesn't capture: another stream may.

    :param captured: the subjects of the stream
    :raises JobError: it doesn't
    """
    if not covered_by_any(captured, subject):
        raise JobError(
            f"job {index} can't be published to {subject!r}: expected a subject of {queue} ({', '.join(captured)});"
            " choose one of them, or add this one to the declaration and provision the queue"
        )


def checked_subject(index: int, partition_key: str | None, subject: str | None, queue: WorkQueue | None) -> str:
    """Return the subject of a job, with its partition.

    :raises JobError: it has none, or an invalid one
    """
    if subject is None:
        raise JobError(f"job {index} has no subject: set it on the job, or a default for all")
    if "{" in subject or "}" in subject or partition_key is not None:
        subject = _partitioned(index, partition_key, subject, queue)
    if problem := subject_problem(subject, wildcards=False):
        raise JobError(f"job {index} can't be published to {subject!r}: {problem}")
    return subject


def check_advisory(index: int, advisory: str, declared: tuple[str, ...]) -> None:
    """Refuse an advisory subject that can't be one, or that its queue doesn't declare.

    :raises JobError: it is such a one
    """
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


def check_author_headers(index: int, headers: Mapping[str, str]) -> None:
    """Refuse headers that can't be sent, on which the server would act, or that are written for each job.

    :raises JobError: there is such a header
    """
    check_headers(index, headers)
    for name in headers:
        if instead := _WRITTEN.get(name.lower()):
            raise JobError(
                f"job {index} sets the header {name}: expected none that the publisher or a redrive writes; {instead}"
            )


def check_headers(index: int | str, headers: Mapping[str, str]) -> None:
    """Refuse headers that can't be sent, or on which the server would act.

    :param index: the job's index or id, for the message
    :raises JobError: there is such a header
    """
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


def check_execute_at(index: int, headers: Mapping[str, str], queue: WorkQueue | None) -> None:
    """Refuse a time that workers can't parse: such a job would be a dead letter.

    :raises JobError: it is such a time
    """
    if queue is None or not queue.execute_at_header or EXECUTE_AT not in headers:
        return
    try:
        parse_time(headers[EXECUTE_AT])
    except ValueError as error:
        raise JobError(f"job {index}, header {EXECUTE_AT}: {error}") from None


def given_id(
    index: int,
    item: object,
    own_id: str | None,
    body: bytes | None,
    source: JobIdSource | None,
    advisory_subjects: tuple[str, ...],
) -> str | None:
    """Return the id that the author gave a job; ``None`` where a job is known by its content.

    :param item: the job as it was listed
    :param own_id: that of a :class:`Job`
    :param source: a field of its body that is a JSON object, or what returns its id
    :param advisory_subjects: those that its queue declares: a body with ``id`` and one of them as ``advisory`` states
        the id by which its worker reports it
    :raises JobError: the source gives no id
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
