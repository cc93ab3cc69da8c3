"""What became of each awaited job: one report per job."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message, read_range
from airflow_provider_jetstream.jetstream.contract import job_completion_filter, job_copy_filter
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.evidence import event_of, proves_nothing
from airflow_provider_jetstream.jetstream.publishing.job_identity import stated_job_id
from airflow_provider_jetstream.jetstream.task_values import TaskReport
from airflow_provider_jetstream.jetstream.waiting.consumers import QueueConsumers
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.record import Record
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

AWAITED = "awaited"
VANISHED_NOTE = "it is gone without a stored end"
STATES = (*(kind.value for kind in EndKind), AWAITED)
# Larger ones stay where they are stored, so that a page holds many reports.
MAX_RESULT_BYTES = 8 * 2**10
_BATCH = 256
_SHOWN_TEXT = 300


@dataclass(frozen=True, slots=True)
class JobReport(TaskReport):
    """What became of one job.

    :param id: the id under which it was published; ``None`` where only its sequence is known
    :param sequence: its stream sequence
    :param state: ``completed``, ``dead``, ``cancelled``, ``vanished``, or ``awaited`` where it hadn't ended
    :param attempts: how often it was delivered, where its end says so
    :param error_class: the class of the handler's error, where the worker recorded it
    :param error_message: the handler's error, else why the job died, was cancelled or vanished
    :param result: what the handler returned
    :param result_at: the sequence in the events stream of the completion whose result can't be repeated here, since it
        is too large, or has numbers that no XCom holds
    """

    id: str | None
    sequence: int
    state: str
    attempts: int | None = None
    error_class: str | None = None
    error_message: str | None = None
    result: Any = None
    result_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def describe(self) -> str:
        """Return one line: the id, else the sequence, and the error."""
        name = f"job {self.id} (sequence {self.sequence})" if self.id else f"the job of sequence {self.sequence}"
        error = ": ".join(part for part in (self.error_class, self.error_message) if part) or self.state
        return f"{name}: {error if len(error) <= _SHOWN_TEXT else error[:_SHOWN_TEXT] + '…'}"


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
    reader = _Reader(connection, cursor, ended, names or {})
    batch: list[tuple[int, str]] = []
    for job in _jobs(ended):
        batch.append(job)
        if len(batch) == _BATCH:
            for report in await map_concurrently(reader.read, batch):
                yield report
            batch = []
    for report in await map_concurrently(reader.read, batch):
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
    """Return what is known of each job of a wait without reading anything."""
    facts = _Facts(ended)
    for sequence, state in _jobs(ended):
        yield JobReport(
            names.get(sequence), sequence, state, facts.attempts(sequence, state), None, facts.note(sequence, state)
        )


def _jobs(ended: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Return sequence and state of each job, in the order of the sequences."""
    spans = sorted(
        (low, high, state)
        for state in STATES
        for low, high in (_details(ended, AWAITED) if state == AWAITED else ended.get(f"{state}_sequences") or ())
    )
    for low, high, state in spans:
        for sequence in range(low, high + 1):
            yield sequence, state


def _details(ended: Mapping[str, Any], name: str) -> Any:
    # The report of a task that an earlier version deferred has none.
    return (ended.get("details") or {}).get(name) or ()


_Spans = list[tuple[int, int, str]]


class _Facts:
    """What a wait's report holds about single jobs."""

    def __init__(self, ended: Mapping[str, Any]) -> None:
        self._is_known = "details" in ended
        self._attempts = _by_sequence(_details(ended, "attempts"))
        self._notes = _by_sequence(_details(ended, "notes"))
        self._with_result = _by_sequence([("", _details(ended, "with_result"))])
        self._copies: dict[int, int] = dict(_details(ended, "copies"))

    def attempts(self, sequence: int, state: str) -> int | None:
        """Return how often a job was delivered, where its end says so."""
        if state in (AWAITED, EndKind.VANISHED.value) or not self._is_known:
            return None
        return int(_found(self._attempts, sequence) or 1) or None

    def note(self, sequence: int, state: str) -> str | None:
        """Return why a job didn't complete."""
        return VANISHED_NOTE if state == EndKind.VANISHED.value else _found(self._notes, sequence)

    def last_copy(self, sequence: int) -> int:
        """Return the stream sequence under which a job ended: that of its last copy, where it was redriven."""
        return self._copies.get(sequence, sequence)

    def may_have_result(self, sequence: int) -> bool:
        """Return whether the completion of a job may hold a result."""
        return not self._is_known or _found(self._with_result, sequence) is not None


def _by_sequence(named: Iterable[tuple[str, Iterable[Sequence[int]]]]) -> _Spans:
    return sorted((low, high, text) for text, ranges in named for low, high in ranges)


def _found(spans: _Spans, sequence: int) -> str | None:
    index = bisect_right(spans, sequence, key=itemgetter(0)) - 1
    return spans[index][2] if index >= 0 and spans[index][1] >= sequence else None


class _Reader:
    """Reads the stored events, records and messages of single jobs."""

    def __init__(self, connection: Connection, cursor: Cursor, ended: Mapping[str, Any], names: JobNames) -> None:
        self._connection = connection
        self._cursor = cursor
        self._created = datetime.fromisoformat(cursor.created)
        self._facts = _Facts(ended)
        self._names = names
        self._consumers = QueueConsumers(connection, cursor)

    async def read(self, job: tuple[int, str]) -> JobReport:
        sequence, state = job
        job_id, attempts = self._names.get(sequence), self._facts.attempts(sequence, state)
        note = self._facts.note(sequence, state)
        if state == EndKind.DEAD.value:
            return await self._dead(sequence, job_id, attempts, note)
        if state in (EndKind.COMPLETED.value, EndKind.CANCELLED.value):
            has_result = state == EndKind.COMPLETED.value and self._facts.may_have_result(sequence)
            if job_id is None or has_result:
                return await self._ended(sequence, state, job_id, attempts, note)
        elif job_id is None:
            job_id = await self._stored_id(sequence)
        return JobReport(job_id, sequence, state, attempts, None, note)

    async def _ended(
        self, sequence: int, state: str, job_id: str | None, attempts: int | None, note: str | None
    ) -> JobReport:
        queue, copy = self._cursor.queue, self._facts.last_copy(sequence)
        stored = await self._last(self._cursor.events, job_completion_filter(queue, copy), copy)
        event = event_of(stored, queue) if stored else None
        if stored is None or not isinstance(event, Completion | Cancelled):
            return JobReport(job_id, sequence, state, attempts, None, note)
        result, result_at = None, None
        if isinstance(event, Completion) and state == EndKind.COMPLETED.value and event.result is not None:
            size = portable_size(event.result)
            is_small = size is not None and size <= MAX_RESULT_BYTES
            result, result_at = (event.result, None) if is_small else (None, stored.sequence)
        return JobReport(job_id or event.job_id, sequence, state, attempts, None, note, result, result_at)

    async def _dead(self, sequence: int, job_id: str | None, attempts: int | None, note: str | None) -> JobReport:
        record = await self._record(self._facts.last_copy(sequence))
        if record is None:
            return JobReport(
                job_id or await self._stored_id(sequence), sequence, EndKind.DEAD.value, attempts, None, note
            )
        death = record.death
        return JobReport(
            job_id or stated_job_id(record.job.headers, record.job.data),
            sequence,
            EndKind.DEAD.value,
            death.deliveries or attempts,
            death.error_class,
            death.error_message or death.explanation or note,
        )

    async def _record(self, sequence: int) -> Record | None:
        if self._cursor.dead_letters is None:
            return None
        message = await self._last(self._cursor.dead_letters, job_copy_filter(self._cursor.queue, sequence), sequence)
        record = read_record(message, self._cursor.queue) if message else None
        if record is None or record.death.sequence != sequence:
            return None
        return record if record.death.created in ("", self._cursor.created) else None

    async def _last(self, stream: str, subject: str, sequence: int) -> StoredMessage | None:
        """Return the last message about a job, by a consumer that may have had it.

        It is about the queue as it is now, not about one of its name before it.

        :param subject: the filter of the subjects that name a consumer in their third token
        """
        try:
            message = await last_message(self._connection, stream, subject)
            if message is None or message.stored_at < self._created or await self._is_believed(message, sequence):
                return message if message and message.stored_at >= self._created else None
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
        if message is None or message.stored_at < self._created:
            return None
        return stated_job_id(message.headers, message.data)
