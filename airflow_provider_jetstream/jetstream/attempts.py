"""Reads what workers say of attempts at jobs: how far each is, and how it failed.

It is for people; :mod:`.retries` decides by the same messages whether a job waits. A worker that died says nothing, so
an attempt without a report that another one follows is shown as unanswered. What is older than the stored job is about
an earlier stream of the queue's name.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_message, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import attempt_filter, job_attempt_filter
from airflow_provider_jetstream.jetstream.errors import NotFoundError, PermissionDeniedError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.evidence import attempt_of
from airflow_provider_jetstream.jetstream.task_values import TaskReport
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.advisories import ReportedAttempt
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

_UNKNOWN: Final = "How far attempts at jobs of %s are, and how they failed, isn't known: %s"
# Of one job, the latest: a job without max_deliver may have any number.
_MOST: Final = 100
_MINUTE: Final = 60
_DEFAULT_ACK_WAIT: Final = 30 * NANOSECONDS
_DIGITS: Final = 10
# What somebody may ask for a job that waits.
ASKED_WORDS: Final = {"retry": "retried", "give_up": "given up"}
_REPLACED: Final = "what its worker stored was replaced by a message that no worker has written"


@dataclass(frozen=True, slots=True)
class AttemptReport(TaskReport):
    """One attempt at a job.

    :param number: which delivery of the job it was, from 1
    :param state: ``running``, ``failed``, or ``unanswered``: it isn't stored how it ended, and the server has delivered
        the job again
    :param at: when the server stored what the worker said last; ``None`` where no worker said anything
    :param worker: the worker's name
    :param fraction: how much of the job was done, from 0 to 1
    :param text: what the handler was doing
    :param seconds: how long the attempt took until it failed
    :param error_class: the class of the error
    :param error_message: the error's text; of an unanswered attempt, that there was no answer
    :param error_place: where the handler failed, as ``module:function:line``
    :param waits_until: until then the job waited for its next delivery, as far as its worker knew
    :param asked: what somebody has asked for since, such as ``retried, by ann: the bank is back``
    """

    number: int
    state: Literal["running", "failed", "unanswered"]
    at: datetime | None = None
    worker: str | None = None
    fraction: float | None = None
    text: str | None = None
    seconds: float | None = None
    error_class: str | None = None
    error_message: str | None = None
    error_place: str | None = None
    waits_until: datetime | None = None
    asked: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        times = {name: getattr(self, name) for name in ("at", "waits_until")}
        return asdict(self) | {name: moment.isoformat() if moment else None for name, moment in times.items()}

    def describe(self, now: datetime | None = None) -> str:
        """Return one line about it: progress with its age, or the error.

        :param now: by the server's clock; without it the age is left out
        """
        age = f", {_span((now - self.at).total_seconds())} ago" if self.at and now else ""
        if self.state != "running":
            error = ": ".join(part for part in (self.error_class, self.error_message) if part) or "failed"
            waits = f", waits until {self.waits_until:%Y-%m-%d %H:%M:%S}" if self._waits(now) else ""
            return f"attempt {self.number}: {error}{age}{waits}"
        done = f"{self.fraction:.0%}" if self.fraction is not None else ""
        return f"attempt {self.number}: {', '.join(part for part in (done, self.text) if part) or 'running'}{age}"

    def _waits(self, now: datetime | None) -> bool:
        return bool(self.waits_until and not self.asked and now and now < self.waits_until)


async def find_attempts_stream(connection: Connection, queue: str) -> str | None:
    """Return the name of the stream that stores what workers say of attempts; ``None`` where the queue has none."""
    captured = attempt_filter(queue)
    for info in await list_streams(connection, captured):
        if covered_by_any(info["config"].get("subjects") or [], captured):
            return str(info["config"]["name"])
    return None


async def read_attempts(
    connection: Connection, queue: WorkQueue, sequence: int, *, deliveries: int | None = None
) -> list[AttemptReport]:
    """Return the attempts at a job in their order, those included of which no worker said anything; the latest 100.

    :param queue: the declaration, with ``attempts``
    :param sequence: the job's stream sequence; what is stored is about the job that has it now, or had it last
    :param deliveries: how often the job was delivered, where that is known: all of these attempts have ended
    :raises QueueDeclarationError: the queue declares no attempts
    :raises NotFoundError: the queue doesn't exist
    """
    if queue.attempts is None:
        raise QueueDeclarationError(queue.name, ["expected attempts, so that workers store them: declare them"])
    job = await get_message(connection, queue.name, sequence)
    created = job.time if job else (await stream_info(connection, queue.name))["created"]
    waits = {
        consumer.name: [wait / NANOSECONDS for wait in consumer.backoff or [consumer.ack_wait or _DEFAULT_ACK_WAIT]]
        for consumer in queue.consumers
    }
    reader = AttemptReader(connection, queue.attempts.name, queue.name, waits)
    return await reader.all_of(sequence, datetime.fromisoformat(created), deliveries)


@dataclass(frozen=True, slots=True)
class AttemptReader:
    """Reads attempts at the jobs of a queue.

    :param stream: the queue's attempts stream
    :param queue: the queue's name
    :param waits: by consumer, the seconds in which a worker has to answer its first delivery, its second…; the last of
        them counts for all further ones
    """

    connection: Connection
    stream: str
    queue: str
    waits: Mapping[str, Sequence[float]]

    async def last_of(self, sequence: int, stored_at: datetime) -> AttemptReport | None:
        """Return the attempt at a job of which a worker said something last; ``None`` where none did.

        :param stored_at: when the job was stored
        """
        try:
            message = await last_message(self.connection, self.stream, job_attempt_filter(self.queue, sequence))
        except NotFoundError:
            return None
        except PermissionDeniedError as denial:
            log.warning(_UNKNOWN, self.queue, denial)
            return None
        return _report(message, self.queue, stored_at) if message else None

    async def all_of(self, sequence: int, stored_at: datetime, deliveries: int | None = None) -> list[AttemptReport]:
        """Return what :func:`read_attempts` does.

        :param stored_at: when the job was stored
        """
        found: dict[int, AttemptReport] = {}
        start, consumer, subject = 1, "", job_attempt_filter(self.queue, sequence)
        try:
            while message := await next_message(self.connection, self.stream, start, subject):
                start = message.sequence + 1
                if message.stored_at >= stored_at:
                    report = _report(message, self.queue, stored_at) or _replaced(message)
                    # A job that was requeued in place is counted from 1 again: higher numbers are of before.
                    found = {number: earlier for number, earlier in found.items() if number < report.number}
                    found[report.number], consumer = report, message.subject.split(".")[2]
        except NotFoundError:
            return []
        except PermissionDeniedError as denial:
            log.warning(_UNKNOWN, self.queue, denial)
            return []
        found.pop(0, None)
        if not found:
            return []
        ended = max(found) - 1 if deliveries is None else deliveries
        last = max(ended, *found)
        attempts = []
        for number in range(max(1, last - _MOST + 1), last + 1):
            report = found.get(number) or AttemptReport(number, "running")
            if report.state == "running" and number <= ended:
                report = replace(report, state="unanswered", error_message=self._unanswered(consumer, number))
            attempts.append(report)
        return attempts

    def _unanswered(self, consumer: str, number: int) -> str:
        waits = self.waits.get(consumer)
        return f"no answer within {waits[min(number, len(waits)) - 1]:g} s" if waits else "no answer"


def _replaced(message: StoredMessage) -> AttemptReport:
    """Return what is known of an attempt whose subject has the server's answer to somebody, or another's message."""
    number = message.subject.rpartition(".")[2]
    is_number = number.isascii() and number.isdecimal() and len(number) < _DIGITS
    return AttemptReport(int(number) if is_number else 0, "unanswered", message.stored_at, error_message=_REPLACED)


def _span(seconds: float) -> str:
    """Return how long ago something was, in whole seconds, and in minutes from two on."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 2 * _MINUTE else f"{whole // _MINUTE} min"


def _report(message: StoredMessage, queue: str, stored_at: datetime) -> AttemptReport | None:
    attempt = attempt_of(message, queue)
    if attempt is None or message.stored_at < stored_at:
        return None
    return AttemptReport(
        number=attempt.deliveries,
        state="failed" if attempt.failed else "running",
        at=message.stored_at,
        worker=attempt.worker or None,
        fraction=attempt.fraction,
        text=attempt.text or None,
        seconds=attempt.seconds,
        error_class=attempt.error_class or None,
        error_message=attempt.error_message or None,
        error_place=attempt.error_place or None,
        waits_until=attempt.waits_until,
        asked=_asked(attempt),
    )


def _asked(attempt: ReportedAttempt) -> str | None:
    if attempt.asked is None:
        return None
    by = f", by {attempt.asked_by}" if attempt.asked_by else ""
    return f"{ASKED_WORDS[attempt.asked]}{by}{f': {attempt.why}' if attempt.why else ''}"
