"""What became of each awaited job: one report per job, held where they are few, else stored as a document.

The parts of a document are messages of the events stream, so they stay for its ``max_age``, and go with it. Tasks can
map over them.
"""

from __future__ import annotations

import json
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import accumulate, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion
from airflow_provider_jetstream.jetstream.attempts import AttemptReader
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_message, read_range
from airflow_provider_jetstream.jetstream.contract import job_completion_filter, job_copy_filter
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record
from airflow_provider_jetstream.jetstream.documents import (
    DocumentName,
    DocumentPart,
    DocumentParts,
    DocumentWriter,
    read_parts,
)
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JetStreamProviderError,
    JobReportsGoneError,
    NotFoundError,
)
from airflow_provider_jetstream.jetstream.evidence import event_of, proves_nothing
from airflow_provider_jetstream.jetstream.publishing.job import stated_job_id
from airflow_provider_jetstream.jetstream.task_values import TaskReport
from airflow_provider_jetstream.jetstream.waiting.comparison import QueueConsumers
from airflow_provider_jetstream.jetstream.waiting.cursor import StreamName
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Collection, Iterable, Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.record import Record
    from airflow_provider_jetstream.jetstream.publishing.batch import Batch
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

log = logging.getLogger(__name__)

AWAITED = "awaited"
_COMPLETED, _CANCELLED, _DEAD, _UNACCOUNTED = (kind.value for kind in EndKind)
_UNACCOUNTED_NOTE = "it is gone without a stored end"
# Larger ones stay where they are stored, so that a part holds many reports.
MAX_RESULT_BYTES = 8 * 2**10
_BATCH = 256
_SHOWN_TEXT = 300
_SHOWN_ERRORS = 20
# An XCom of both, counts and reports, stays below 64 KiB.
DOCUMENT_BYTES = 32 * 2**10
DOCUMENT_JOBS = 500
# Parts are what tasks map over: neither one for each job nor one for all.
_PART_REPORTS = 2_000
_FIRST_FAILURES = 20
_DESCRIBED = 5

_PARTS = TypeAdapter(DocumentParts)
_ID_ROWS = TypeAdapter(list[tuple[Annotated[int, Field(strict=True, ge=1, lt=2**64)], str]])


@dataclass(frozen=True, slots=True)
class JobReport(TaskReport):
    """What became of one job.

    :param id: the id under which it was published; ``None`` where only its sequence is known
    :param sequence: its stream sequence
    :param state: ``completed``, ``dead``, ``cancelled``, ``unaccounted``, or ``awaited`` where it hadn't ended
    :param attempts: how often it was delivered, where its end says so
    :param error_class: the class of the handler's error, where the worker recorded it
    :param error_message: the handler's error, else why the job died, was cancelled or is unaccounted for
    :param result: what the handler returned
    :param result_at: the sequence in the events stream of the completion whose result can't be repeated here, since it
        is too large, or has numbers that no XCom holds
    :param errors: of a dead job, a line for each attempt, the latest 20, where workers store attempts
    """

    id: str | None
    sequence: int
    state: str
    attempts: int | None = None
    error_class: str | None = None
    error_message: str | None = None
    result: Any = None
    result_at: int | None = None
    errors: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, ``errors`` only where there are some."""
        values = asdict(self)
        # Most jobs have none, and a document may have a million.
        errors = values.pop("errors")
        return values | ({"errors": list(errors)} if errors else {})

    def describe(self) -> str:
        """Return one line: the id, else the sequence, and the error."""
        name = f"job {self.id} (sequence {self.sequence})" if self.id else f"the job of sequence {self.sequence}"
        error = ": ".join(part for part in (self.error_class, self.error_message) if part) or self.state
        return f"{name}: {error if len(error) <= _SHOWN_TEXT else error[:_SHOWN_TEXT] + '…'}"


class JobIds:
    """The ids of jobs by sequence; in the order of publishing until sequences are known.

    A worker that only acknowledges leaves no trace of a job's id, so what reports on single jobs has to know it. The
    ids are compact in memory, and a document for a process that goes on waiting.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("Q")
        self._sequences: Sequence[int] = ()
        self._order: Sequence[int] = ()

    def note(self, batch: Batch) -> None:
        """Note the ids of the next jobs."""
        self._extend(batch.job_ids())

    def _extend(self, ids: Sequence[bytes]) -> None:
        self._ends.extend(islice(accumulate(map(len, ids), initial=len(self._text)), 1, None))
        self._text += b"".join(ids)

    def locate(self, sequences: Sequence[int]) -> None:
        """Take the stream sequences of the jobs, by their indexes; 0 where a job isn't stored."""
        known = sequences[: len(self._ends)]
        self._order = range(len(known))
        if any(known[index] >= known[index + 1] for index in range(len(known) - 1)):
            self._order = array("Q", sorted(self._order, key=known.__getitem__))
            known = array("Q", (known[index] for index in self._order))
        self._sequences = known

    def get(self, sequence: int) -> str | None:
        """Return the id of a job; ``None`` where it isn't known."""
        position = bisect_left(self._sequences, sequence)
        if not sequence or position >= len(self._sequences) or self._sequences[position] != sequence:
            return None
        return self._id(self._order[position])

    def _id(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode("utf-8", "surrogatepass")

    async def store(self, connection: Connection, name: DocumentName) -> list[DocumentPart]:
        """Store the ids as a document, and return the references to its parts.

        :raises JetStreamProviderError: a part can't be stored, or isn't known to be
        """
        writer, located = DocumentWriter(connection, name), zip(self._sequences, self._order, strict=True)
        await writer.add((sequence, self._id(index)) for sequence, index in located if sequence)
        return await writer.finish()

    @classmethod
    async def read(cls, connection: Connection, name: DocumentName, parts: object) -> JobIds:
        """Read the ids of a document; a part that isn't stored any more is left out.

        :param parts: what :meth:`store` returned, as JSON; none where it is something else
        :raises TransientError: a part can't be read just now
        """
        ids, sequences = cls(), array("Q")
        try:
            references = _PARTS.validate_python(parts)
        except ValidationError:
            references = []
        async for rows in read_parts(connection, name, references, _ID_ROWS):
            ids._extend([job_id.encode("utf-8", "surrogatepass") for _, job_id in rows or ()])
            sequences.extend(sequence for sequence, _ in rows or ())
        ids.locate(sequences)
        return ids


class JobNames(Protocol):
    """The ids of jobs by their stream sequences."""

    def get(self, sequence: int, /) -> str | None:
        """Return the id of a job; ``None`` where it isn't known."""


async def read_job_reports(
    connection: Connection, cursor: Cursor, ended: Mapping[str, Any], names: JobNames | None = None
) -> AsyncGenerator[JobReport, None]:
    """Read what became of each job of a wait, in the order of their sequences, few in memory at a time.

    :param cursor: that of the wait
    :param ended: what :meth:`WaitReport.as_json` returns
    :param names: the ids under which the jobs were published, as far as they are known
    """
    reader, known = _Reader(connection, cursor, ended), plain_job_reports(ended, names or {})
    while batch := list(islice(known, _BATCH)):
        for report in await map_concurrently(reader.complete, batch):
            yield report


def portable_size(result: object) -> int | None:
    """Return the length of a result in JSON; ``None`` where it has values that no XCom can hold.

    These are numbers that aren't finite or have more than 64 bits, and what is nested too deeply.
    """
    try:
        text = json.dumps(result, allow_nan=False)
        json.loads(text, parse_int=_int_of_64_bits)
    except (ValueError, RecursionError):
        return None
    return len(text)


def _int_of_64_bits(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError("more than 64 bits")
    return number


def plain_job_reports(ended: Mapping[str, Any], names: JobNames) -> Iterator[JobReport]:
    """Yield what is known of each job of a wait without reading anything, in the order of their sequences."""
    details = ended.get("details") or {}
    attempts, notes = _by_sequence(details.get("attempts")), _by_sequence(details.get("notes"))
    states = [(state, ended.get(f"{state}_sequences") or ()) for state in (kind.value for kind in EndKind)]
    for low, high, state in _by_sequence([*states, (AWAITED, details.get(AWAITED) or ())]):
        for sequence in range(low, high + 1):
            is_said = state not in (AWAITED, _UNACCOUNTED)
            delivered = int(_found(attempts, sequence) or 1) or None if is_said else None
            note = _UNACCOUNTED_NOTE if state == _UNACCOUNTED else _found(notes, sequence)
            yield JobReport(names.get(sequence), sequence, state, delivered, None, note)


_Spans = list[tuple[int, int, str]]


def _by_sequence(named: Iterable[tuple[str, Iterable[Sequence[int]]]] | None) -> _Spans:
    return sorted((low, high, text) for text, ranges in named or () for low, high in ranges)


def _found(spans: _Spans, sequence: int) -> str | None:
    index = bisect_right(spans, sequence, key=itemgetter(0)) - 1
    return spans[index][2] if index >= 0 and spans[index][1] >= sequence else None


class _Reader:
    """Completes the reports on single jobs by stored events, records and messages."""

    def __init__(self, connection: Connection, cursor: Cursor, ended: Mapping[str, Any]) -> None:
        details = ended.get("details") or {}
        self._connection = connection
        self._cursor = cursor
        self._created = datetime.fromisoformat(cursor.created)
        self._with_result = _by_sequence([("result", details.get("with_result") or ())])
        # Of redriven jobs, the sequence under which each ended.
        self._copies: dict[int, int] = dict(details.get("copies") or ())
        self._consumers = QueueConsumers(connection, cursor)

    async def complete(self, report: JobReport) -> JobReport:
        copy = self._copies.get(report.sequence, report.sequence)
        if report.state in (_COMPLETED, _CANCELLED):
            has_result = report.state == _COMPLETED and _found(self._with_result, report.sequence) is not None
            return await self._with_end(report, copy) if has_result or report.id is None else report
        if report.state == _DEAD:
            report = replace(report, errors=await self._errors(copy, report.attempts))
        if report.state == _DEAD and (record := await self._record(copy)):
            death = record.death
            return replace(
                report,
                id=report.id or stated_job_id(record.job.headers, record.job.data),
                attempts=death.deliveries or report.attempts,
                error_class=death.error_class,
                error_message=death.error_message or death.explanation or report.error_message,
            )
        return replace(report, id=await self._stored_id(report.sequence)) if report.id is None else report

    async def _with_end(self, report: JobReport, copy: int) -> JobReport:
        queue = self._cursor.queue
        stored = await self._last(self._cursor.events, job_completion_filter(queue, copy), copy)
        event = event_of(stored, queue) if stored else None
        if stored is None or not isinstance(event, Completion | Cancelled):
            return report
        report = replace(report, id=report.id or event.job_id)
        if isinstance(event, Cancelled) or report.state != _COMPLETED or event.result is None:
            return report
        size = portable_size(event.result)
        if size is None or size > MAX_RESULT_BYTES:
            return replace(report, result_at=stored.sequence)
        return replace(report, result=event.result)

    async def _errors(self, sequence: int, deliveries: int | None) -> tuple[str, ...]:
        if self._cursor.attempts is None:
            return ()
        reader = AttemptReader(self._connection, self._cursor.attempts, self._cursor.queue, {})
        attempts = await reader.all_of(sequence, self._created, deliveries)
        return tuple(attempt.describe()[:_SHOWN_TEXT] for attempt in attempts[-_SHOWN_ERRORS:])

    async def _record(self, sequence: int) -> Record | None:
        if self._cursor.dead_letters is None:
            return None
        message = await self._last(self._cursor.dead_letters, job_copy_filter(self._cursor.queue, sequence), sequence)
        record = read_record(message, self._cursor.queue) if message else None
        if record is None or record.death.sequence != sequence:
            return None
        return record if record.death.created in ("", self._cursor.created) else None

    async def _last(self, stream: str, subject: str, sequence: int) -> StoredMessage | None:
        """Return the last message about a job, by a consumer that may have had it, and not of an earlier queue.

        :param subject: the filter of the subjects that name a consumer in their third token
        """
        try:
            message = await last_message(self._connection, stream, subject)
            if message is None or message.stored_at < self._created:
                return None
            if await self._is_believed(message, sequence):
                return message
            found = None
            async for earlier in read_range(self._connection, stream, subject, stop=message.sequence):
                is_own = earlier.stored_at >= self._created and not proves_nothing(earlier)
                if is_own and await self._is_believed(earlier, sequence):
                    found = earlier
        except NotFoundError:
            return None
        return found

    async def _is_believed(self, message: StoredMessage, sequence: int) -> bool:
        return all(await self._consumers.may_have_had([(message.subject.split(".")[2], sequence)]))

    async def _stored_id(self, sequence: int) -> str | None:
        try:
            message = await get_message(self._connection, self._cursor.queue, sequence)
        except NotFoundError:
            return None
        is_own = message is not None and message.stored_at >= self._created
        return stated_job_id(message.headers, message.data) if message and is_own else None


class _StoredReports(BaseModel):
    """The fields of a document, and of an item for one of its parts, that lead to what is stored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    queue: StreamName
    task: str
    events: StreamName
    parts: DocumentParts

    @property
    def name(self) -> DocumentName:
        return DocumentName(self.events, self.queue, "reports", self.task)


_REPORT = TypeAdapter(JobReport)
_REPORTS = TypeAdapter(list[JobReport])


@dataclass(slots=True)
class JobReports:
    """The reports on the jobs of a task.

    :param queue: the work queue
    :param task: the task's key
    :param events: the events stream
    :param states: how many jobs are in each state
    :param failures: of each state but ``completed``, the first reports
    :param reports: all reports, where they are few
    :param parts: references to the parts of the stored document, where they are many
    :param problem: why there are only counts and the first failures
    """

    queue: str
    task: str = ""
    events: str = ""
    states: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[JobReport]] = field(default_factory=dict)
    reports: list[JobReport] | None = field(default_factory=list)
    parts: list[DocumentPart] = field(default_factory=list)
    problem: str | None = None
    _size: int = 0

    def add(self, report: JobReport) -> list[JobReport]:
        """Count a report and hold it while reports are few; return the reports that are not held."""
        self.states[report.state] += 1
        failures = self.failures.setdefault(report.state, [])
        if report.state != _COMPLETED and len(failures) < _FIRST_FAILURES:
            failures.append(report)
        if self.reports is None:
            return [report]
        self.reports.append(report)
        self._size += len(json.dumps(report.as_json())) + 2
        if self._size <= DOCUMENT_BYTES and len(self.reports) <= DOCUMENT_JOBS:
            return []
        too_many, self.reports = self.reports, None
        return too_many

    def as_json(self) -> dict[str, Any]:
        """Return the reports, or references to their parts and the first jobs that didn't complete."""
        document: dict[str, Any] = {"queue": self.queue, "jobs": self.states.total(), "states": dict(self.states)}
        if self.reports is not None:
            return document | {"reports": [report.as_json() for report in self.reports]}
        first = [report for failures in self.failures.values() for report in failures][:_FIRST_FAILURES]
        document["first_failures"] = [report.as_json() for report in first]
        if self.problem:
            return document | {"problem": self.problem}
        return document | {"task": self.task, "events": self.events, "parts": [list(part) for part in self.parts]}

    def items(self) -> list[dict[str, Any]]:
        """Return a list to map over: the reports, or a reference to each part.

        :raises JobReportsGoneError: there are only counts
        """
        if self.reports is not None:
            return [report.as_json() for report in self.reports]
        if self.problem:
            raise JobReportsGoneError(self.problem)
        place = {"queue": self.queue, "task": self.task, "events": self.events}
        return [{**place, "jobs": part.rows, "parts": [list(part)]} for part in self.parts]

    def describe(self, state: str) -> str:
        """Return a line with the first jobs of a state and their errors, and how many more there are."""
        shown = "; ".join(report.describe() for report in self.failures.get(state, ())[:_DESCRIBED])
        rest = self.states[state] - _DESCRIBED
        return f"{shown}; and {rest} more" if rest > 0 else shown


async def collect_job_reports(
    connection: Connection, reports: AsyncIterable[JobReport], *, queue: str, task: str, events: str
) -> JobReports:
    """Collect reports, few in memory at a time: where they are many, they are stored as they come.

    :param task: the task's key, one token
    :param events: the events stream
    :raises JetStreamProviderError: a part can't be stored, or isn't known to be
    """
    collected = JobReports(queue, task, events)
    name = _StoredReports.model_construct(queue=queue, task=task, events=events).name
    writer = DocumentWriter(connection, name, part_rows=_PART_REPORTS)
    async for report in reports:
        await writer.add(stored.as_json() for stored in collected.add(report))
    collected.parts = await writer.finish()
    return collected


def count_job_reports(reports: Iterable[JobReport], *, queue: str, problem: str) -> JobReports:
    """Count reports where they can't be stored, and hold them where they are few.

    :param problem: why not
    """
    counted = JobReports(queue, problem=problem)
    for report in reports:
        counted.add(report)
    return counted


async def failed_jobs(connection: Connection, cursor: Cursor, ended: Mapping[str, Any]) -> JobReports:
    """Count the jobs of a wait that ended otherwise than completed, and read the first of each state.

    :param ended: what :meth:`WaitReport.as_json` returns
    """
    reader, counted = _Reader(connection, cursor, ended), JobReports(cursor.queue, reports=None)
    for report in plain_job_reports(ended, {}):
        if report.state not in (_COMPLETED, AWAITED):
            counted.add(report)
    try:
        for state, failures in counted.failures.items():
            counted.failures[state] = await map_concurrently(reader.complete, failures[:_DESCRIBED])
    except JetStreamProviderError as error:
        log.warning("Failed jobs of %s can't be named: %s", cursor.queue, error)
    return counted


class JobReportSource:
    """What tasks pass on about the reports of jobs: documents, references to parts, reports, and lists of these.

    :raises ArgumentError: it is none of these
    """

    def __init__(self, source: object) -> None:
        self._items = list(_items(source))

    @property
    def has_parts(self) -> bool:
        """Whether reports have to be read from the server."""
        return any(isinstance(item, _StoredReports) for item in self._items)

    def held(self, states: Collection[str] | None = None) -> list[JobReport]:
        """Return the reports that it holds itself.

        :param states: the wanted states; all where absent
        """
        return [item for item in self._items if isinstance(item, JobReport) and (not states or item.state in states)]

    async def read(
        self, connection: Connection, states: Collection[str] | None = None
    ) -> AsyncGenerator[JobReport, None]:
        """Read all reports, part by part.

        :param states: the wanted states; all where absent
        :raises JobReportsGoneError: a part isn't stored any more
        :raises TransientError: a part can't be read just now
        """
        for item in self._items:
            if isinstance(item, JobReport):
                if not states or item.state in states:
                    yield item
                continue
            parts = iter(item.parts)
            async for reports in read_parts(connection, item.name, item.parts, _REPORTS):
                part = next(parts)
                if reports is None:
                    raise JobReportsGoneError(
                        f"expected a part with {part.rows} reports at sequence {part.sequence} of {item.events}, found"
                        " none: the max_age of that stream is over, or it was deleted; read reports earlier, or declare"
                        " a longer max_age of the events"
                    )
                for report in reports:
                    if not states or report.state in states:
                        yield report


def _items(source: object) -> Iterator[JobReport | _StoredReports]:
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        for item in source:
            yield from _items(item)
        return
    fields = source if isinstance(source, Mapping) else {}
    if isinstance(fields.get("problem"), str):
        raise JobReportsGoneError(fields["problem"])
    try:
        if isinstance(fields.get("reports"), list):
            yield from map(_REPORT.validate_python, fields["reports"])
        elif "parts" in fields:
            yield _StoredReports.model_validate(fields)
        else:
            yield _REPORT.validate_python(source)
    except ValidationError:
        raise ArgumentError(
            f"expected the reports on a task's jobs, found {type(source).__name__} {str(source)[:100]!r}: pull the XCom"
            " job_reports of the task that waited, or pass an item of the list that it returned"
        ) from None
