"""The reports on a task's jobs: held where they are few, else a stored document, whose parts tasks can map over.

Its parts are messages of the events stream, so they stay for its ``max_age``, and go with it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

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
)
from airflow_provider_jetstream.jetstream.queue.consumer_checks import name_problems
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind
from airflow_provider_jetstream.jetstream.waiting.job_report import JobReport, read_job_reports

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Collection, Iterable, Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

log = logging.getLogger(__name__)

# An XCom of both, counts and reports, stays below 64 KiB.
DOCUMENT_BYTES = 32 * 2**10
DOCUMENT_JOBS = 500
# Parts are what tasks map over: neither one for each job nor one for all.
_PART_REPORTS = 2_000
_FIRST_FAILURES = 20
_DESCRIBED = 5


def _stream_name(name: str) -> str:
    if any(name_problems("stream", name)):
        raise ValueError("expected the name of a stream")
    return name


# An XCom may come from anybody, and it becomes part of a request's subject.
_StreamName = Annotated[str, AfterValidator(_stream_name)]


class _StoredReports(BaseModel):
    """The fields of a document, and of an item for one of its parts, that lead to what is stored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    queue: _StreamName
    task: str
    events: _StreamName
    parts: DocumentParts


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
    task: str
    events: str
    states: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[JobReport]] = field(default_factory=dict)
    reports: list[JobReport] | None = field(default_factory=list)
    parts: list[DocumentPart] = field(default_factory=list)
    problem: str | None = None

    def count(self, report: JobReport) -> None:
        """Count a report, and keep it if it is one of the first failures."""
        self.states[report.state] += 1
        if report.state != EndKind.COMPLETED.value:
            failures = self.failures.setdefault(report.state, [])
            if len(failures) < _FIRST_FAILURES:
                failures.append(report)

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
        if self.problem:
            raise JobReportsGoneError(self.problem)
        if self.reports is not None:
            return [report.as_json() for report in self.reports]
        return [
            {"queue": self.queue, "task": self.task, "events": self.events, "jobs": part.rows, "parts": [list(part)]}
            for part in self.parts
        ]

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
    writer = DocumentWriter(connection, _name(events, queue, task), part_rows=_PART_REPORTS)
    collected.reports = held = []
    size = 0
    async for report in reports:
        collected.count(report)
        if collected.reports is None:
            await writer.add([report.as_json()])
            continue
        held.append(report)
        size += len(json.dumps(report.as_json())) + 2
        if size > DOCUMENT_BYTES or len(held) > DOCUMENT_JOBS:
            collected.reports = None
            await writer.add(report.as_json() for report in held)
    collected.parts = await writer.finish()
    return collected


def _name(events: str, queue: str, task: str) -> DocumentName:
    return DocumentName(events, queue, "reports", task)


def count_job_reports(reports: Iterable[JobReport], *, queue: str, problem: str) -> JobReports:
    """Count reports where they can't be stored, and hold them where they are few.

    :param problem: why not
    """
    counted = JobReports(queue, "", "")
    held: list[JobReport] = []
    for report in reports:
        counted.count(report)
        if len(held) <= DOCUMENT_JOBS:
            held.append(report)
    is_small = len(held) <= DOCUMENT_JOBS and len(json.dumps([report.as_json() for report in held])) <= DOCUMENT_BYTES
    counted.reports, counted.problem = (held, None) if is_small else (None, problem)
    return counted


async def failed_jobs(connection: Connection, cursor: Cursor, ended: Mapping[str, Any]) -> JobReports:
    """Count the jobs of a wait that ended otherwise than completed, and read the first of each state.

    :param ended: what :meth:`WaitReport.as_json` returns
    """
    failed = {name: value for name, value in ended.items() if name != "completed_sequences"}
    failed["details"] = {**(ended.get("details") or {}), "awaited": []}
    counted = JobReports(cursor.queue, "", cursor.events, reports=None)
    try:
        async for report in read_job_reports(connection, cursor, failed):
            counted.count(report)
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
            async for report in _read(connection, item):
                if not states or report.state in states:
                    yield report


async def _read(connection: Connection, stored: _StoredReports) -> AsyncGenerator[JobReport, None]:
    name, parts = _name(stored.events, stored.queue, stored.task), iter(stored.parts)
    async for reports in read_parts(connection, name, stored.parts, _REPORTS):
        part = next(parts)
        if reports is None:
            raise JobReportsGoneError(
                f"expected a part with {part.rows} reports at sequence {part.sequence} of {stored.events}, found none:"
                " the max_age of that stream is over, or it was deleted; read reports earlier, or declare a longer"
                " max_age of the events"
            )
        for report in reports:
            yield report


def _items(source: object) -> Iterator[JobReport | _StoredReports]:
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        for item in source:
            yield from _items(item)
        return
    if not isinstance(source, Mapping):
        raise _unknown(source)
    if isinstance(source.get("problem"), str):
        raise JobReportsGoneError(source["problem"])
    try:
        if isinstance(source.get("reports"), list):
            yield from map(_REPORT.validate_python, source["reports"])
        elif "parts" in source:
            yield _StoredReports.model_validate(source)
        else:
            yield _REPORT.validate_python(source)
    except ValidationError:
        raise _unknown(source) from None


def _unknown(source: object) -> ArgumentError:
    return ArgumentError(
        f"expected the reports on a task's jobs, found {type(source).__name__} {str(source)[:100]!r}: pull the XCom"
        " job_reports of the task that waited, or pass an item of the list that it returned"
    )
