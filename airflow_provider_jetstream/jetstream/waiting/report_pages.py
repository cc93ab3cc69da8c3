"""The reports on a task's jobs as a document: itself where it is small, else with its reports in pages.

The pages are messages of the events stream, so they stay for its ``max_age``, and go with it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import job_reports_subject
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JetStreamProviderError,
    JobReportsGoneError,
    NotFoundError,
)
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind
from airflow_provider_jetstream.jetstream.waiting.job_ids import PAGE_RESERVE
from airflow_provider_jetstream.jetstream.waiting.job_report import JobReport, read_job_reports

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Collection, Iterable, Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

log = logging.getLogger(__name__)

# An XCom of both, counts and reports, stays below 64 KiB.
DOCUMENT_BYTES = 32 * 2**10
DOCUMENT_JOBS = 500
# Pages are what tasks map over: neither one for each job nor one for all.
_PAGE_JOBS = 2_000
_FIRST_FAILURES = 20
_DESCRIBED = 5


class _ReportPage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.job-reports"] = "io.airflow.jetstream.v1.job-reports"
    stream: str
    reports: list[JobReport]


class _PagedReports(BaseModel):
    """The fields of a document that lead to its pages."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    queue: str
    task: str
    events: str
    pages: list[tuple[int, int]]


class _PageReference(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    queue: str
    task: str
    events: str
    page: int
    jobs: int


_REPORT = TypeAdapter(JobReport)


@dataclass(slots=True)
class JobReports:
    """The reports on the jobs of a task.

    :param queue: the work queue
    :param task: the task's key
    :param events: the stream of the pages
    :param states: how many jobs are in each state
    :param failures: of each state but ``completed``, the first reports
    :param reports: all reports, where they are few
    :param pages: by page, its sequence in the events stream and the number of its reports
    :param problem: why there are only counts and the first failures
    """

    queue: str
    task: str
    events: str
    states: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[JobReport]] = field(default_factory=dict)
    reports: list[JobReport] | None = field(default_factory=list)
    pages: list[tuple[int, int]] = field(default_factory=list)
    problem: str | None = None

    def count(self, report: JobReport) -> None:
        """Count a report, and keep it if it is one of the first failures."""
        self.states[report.state] += 1
        if report.state != EndKind.COMPLETED.value:
            failures = self.failures.setdefault(report.state, [])
            if len(failures) < _FIRST_FAILURES:
                failures.append(report)

    def as_json(self) -> dict[str, Any]:
        """Return the document: the reports, or the numbers of their pages and the first jobs that didn't complete."""
        document: dict[str, Any] = {"queue": self.queue, "jobs": self.states.total(), "states": dict(self.states)}
        if self.reports is not None:
            return document | {"reports": [report.as_json() for report in self.reports]}
        first = [report for failures in self.failures.values() for report in failures][:_FIRST_FAILURES]
        document["first_failures"] = [report.as_json() for report in first]
        if self.problem:
            return document | {"problem": self.problem}
        return document | {"task": self.task, "events": self.events, "pages": self.pages}

    def items(self) -> list[dict[str, Any]]:
        """Return a list to map over: the reports, or references to their pages.

        :raises JobReportsGoneError: there are only counts
        """
        if self.problem:
            raise JobReportsGoneError(self.problem)
        if self.reports is not None:
            return [report.as_json() for report in self.reports]
        return [
            {"queue": self.queue, "task": self.task, "events": self.events, "page": page, "jobs": jobs}
            for page, jobs in self.pages
        ]

    def describe(self, state: str) -> str:
        """Return a line with the first jobs of a state and their errors, and how many more there are."""
        shown = "; ".join(report.describe() for report in self.failures.get(state, ())[:_DESCRIBED])
        rest = self.states[state] - _DESCRIBED
        return f"{shown}; and {rest} more" if rest > 0 else shown


async def collect_job_reports(
    connection: Connection, reports: AsyncIterable[JobReport], *, queue: str, task: str, events: str
) -> JobReports:
    """Collect reports, few in memory at a time: where they are many, they are stored in pages as they come.

    :param task: the task's key, one token
    :param events: the events stream
    :raises ApiError: a page can't be stored
    :raises TransientError: it isn't known whether a page is stored
    """
    collected = JobReports(queue, task, events)
    writer = _PageWriter(connection, collected)
    async for report in reports:
        collected.count(report)
        await writer.add(report)
    await writer.finish()
    return collected


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


class _PageWriter:
    """Holds reports as long as they fit a document, and stores pages from then on."""

    def __init__(self, connection: Connection, collected: JobReports) -> None:
        self._connection = connection
        self._collected = collected
        self._page: list[JobReport] = []
        self._size = 0
        self._limit = connection.max_payload - PAGE_RESERVE
        self._room = min(DOCUMENT_BYTES, self._limit)

    async def add(self, report: JobReport) -> None:
        size = len(json.dumps(report.as_json())) + 2
        document = self._collected.reports
        if document is not None and (self._size + size > self._room or len(document) >= DOCUMENT_JOBS):
            self._page, self._collected.reports = document, None
        elif document is not None:
            document.append(report)
        if self._collected.reports is None:
            if self._page and (self._size + size > self._limit or len(self._page) >= _PAGE_JOBS):
                await self._store()
            self._page.append(report)
        self._size += size

    async def finish(self) -> None:
        if self._page:
            await self._store()

    async def _store(self) -> None:
        queue, events = self._collected.queue, self._collected.events
        page = _ReportPage(stream=queue, reports=self._page).model_dump_json().encode()
        subject = job_reports_subject(queue, self._collected.task)
        ack = await store(self._connection, subject, page, {"Nats-Expected-Stream": events})
        self._collected.pages.append((ack.sequence, len(self._page)))
        self._page, self._size = [], 0


class JobReportSource:
    """What tasks pass on about the reports of jobs: documents, references to pages, reports, and lists of these.

    :raises ArgumentError: it is none of these
    """

    def __init__(self, source: object) -> None:
        self._parts = list(_parts(source))

    @property
    def has_pages(self) -> bool:
        """Whether reports have to be read from the server."""
        return any(isinstance(part, _PagedReports) for part in self._parts)

    def held(self, states: Collection[str] | None = None) -> list[JobReport]:
        """Return the reports that it holds itself.

        :param states: the wanted states; all where absent
        """
        return [part for part in self._parts if isinstance(part, JobReport) and (not states or part.state in states)]

    async def read(
        self, connection: Connection, states: Collection[str] | None = None
    ) -> AsyncGenerator[JobReport, None]:
        """Read all reports, page by page.

        :param states: the wanted states; all where absent
        :raises JobReportsGoneError: a page isn't stored any more
        :raises TransientError: a page can't be read just now
        """
        for part in self._parts:
            if isinstance(part, JobReport):
                if not states or part.state in states:
                    yield part
                continue
            for page, count in part.pages:
                for report in await _read_page(connection, part, page, count):
                    if not states or report.state in states:
                        yield report


async def _read_page(connection: Connection, paged: _PagedReports, page: int, count: int) -> list[JobReport]:
    try:
        message = await get_message(connection, paged.events, page)
    except NotFoundError:
        message = None
    subject = job_reports_subject(paged.queue, paged.task)
    try:
        stored = _ReportPage.model_validate_json(message.data) if message and message.subject == subject else None
    except ValidationError:
        stored = None
    if stored is None or stored.stream != paged.queue:
        raise JobReportsGoneError(
            f"expected a page with {count} reports at sequence {page} of {paged.events}, found none: the max_age of"
            " that stream is over, or it was deleted; read reports earlier, or declare a longer max_age of the events"
        )
    return stored.reports


def _parts(source: object) -> Iterator[JobReport | _PagedReports]:
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        for item in source:
            yield from _parts(item)
        return
    if not isinstance(source, Mapping):
        raise _unknown(source)
    if isinstance(source.get("problem"), str):
        raise JobReportsGoneError(source["problem"])
    try:
        if isinstance(source.get("reports"), list):
            yield from map(_REPORT.validate_python, source["reports"])
        elif "page" in source:
            one = _PageReference.model_validate(source)
            yield _PagedReports(queue=one.queue, task=one.task, events=one.events, pages=[(one.page, one.jobs)])
        elif "pages" in source:
            yield _PagedReports.model_validate(source)
        else:
            yield _REPORT.validate_python(source)
    except ValidationError:
        raise _unknown(source) from None


def _unknown(source: object) -> ArgumentError:
    return ArgumentError(
        f"expected the reports on a task's jobs, found {type(source).__name__} {str(source)[:100]!r}: pull the XCom"
        " job_reports of the task that waited, or pass an item of the list that it returned"
    )
