"""What the stored messages of a queue's companions say about the ends of its jobs: pure functions of one message.

Completions, cancelled ends and ack metrics are in the events stream, deaths in the dead letter queue, and what became
of dead jobs (redriven, parked, discarded, handled) in the audit. A redrive stores a copy under another stream sequence,
and removes job and entry: without the audit, a wait that begins after it finds neither an end nor the job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from airflow_provider_jetstream.jetstream.advisories import (
    DELETED_IN_FLIGHT,
    AckMetric,
    Cancelled,
    Completion,
    MaxDeliveries,
    Terminated,
    parse_advisory,
)
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, parse_record
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    ACK_METRIC,
    MAX_DELIVERIES,
    TERMINATED,
    completion_filter,
    completion_subject,
    ended_job_time,
    handled_subject,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.evidence import event_of_body, handled_sequence
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import reported_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.stream_tail import TailedMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# What a handler says of a job; whether that job is dead at all, others say.
_REPORTED: Final = "a handler of the dead letter queue reports that it has handled it"
_ACTIONS: Final = {
    "handled": "it died, and a handler of the dead letter queue has handled it",
}
_UNKNOWN = datetime.max.replace(tzinfo=UTC)

# A completion without a result as this package's workers write it: by far the most frequent event, and one that needs
# no model. Whatever differs from it in any way is parsed as one.
_PLAIN_TEXT: Final = rb'"[ !#-\[\]-~]{0,500}"'
_PLAIN_COMPLETION: Final = re.compile(
    rb'\{"id":%b,"timestamp":"(\d{4}-\d\d-\d\d)T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?Z"'
    rb',"stream":"([\w-]{1,200})","consumer":"([\w-]{1,200})","stream_seq":([1-9]\d{0,17}),"deliveries":([1-9]\d{0,8})'
    rb',"type":"io\.airflow\.jetstream\.v1\.completion","job_id":%b,"worker":%b\}'
    % (_PLAIN_TEXT, _PLAIN_TEXT, _PLAIN_TEXT)
)


class EndKind(Enum):
    """How a job ended."""

    COMPLETED = "completed"
    """A worker stored its completion, or the server its ack metric."""
    CANCELLED = "cancelled"
    DEAD = "dead"
    UNACCOUNTED = "unaccounted"
    """It is no longer stored, and no event about its end is."""


class Successor(NamedTuple):
    """The new job of a dead letter that was redriven, by its stream and its sequence there."""

    stream: str
    sequence: int

    def describe(self) -> str:
        """Return a note about the dead letter, for people."""
        return f"it died and was redriven as job {self.sequence} of {self.stream}"


class JobEnd(NamedTuple):
    """The end of a job.

    :param sequence: the job's stream sequence
    :param event_sequence: the sequence of its event in the event's own stream; 0 without an event
    :param consumer: the consumer that delivered the job
    :param note: a reason for people
    :param has_result: whether the event holds what the handler returned
    :param attempts: how often the job was delivered; 0 where the event doesn't say it
    :param stored_at: when the event was stored; later than everything where that isn't known
    :param successor: the new job that stands for the job from then on
    :param is_alive: whether the job itself was made to be delivered again
    """

    kind: EndKind
    sequence: int
    event_sequence: int = 0
    consumer: str = ""
    note: str = ""
    has_result: bool = False
    attempts: int = 0
    stored_at: datetime = _UNKNOWN
    successor: Successor | None = None
    is_alive: bool = False

    @property
    def key(self) -> int:
        """What tells the job from others."""
        return self.sequence

    @property
    def is_final(self) -> bool:
        """Whether no other end can follow: a worker may complete a job after its death was reported."""
        return self.kind in (EndKind.COMPLETED, EndKind.CANCELLED)

    @property
    def is_report(self) -> bool:
        """Whether only a handler's report states this end: the handler may be wrong."""
        return self.note == _REPORTED


@dataclass(frozen=True, slots=True)
class AdvisoryReport:
    """A message on an advisory subject, by which a worker of any make reports that it has finished a job.

    :param digest: the job's, of subject and id
    :param event_sequence: the message's sequence in the events stream
    """

    digest: str
    event_sequence: int
    stored_at: datetime

    @property
    def key(self) -> str:
        """What tells the job from others."""
        return self.digest


Statement: TypeAlias = JobEnd | AdvisoryReport


class EndReader:
    """Returns what messages say about the ends of a queue's jobs; nothing where they are about an earlier stream.

    :param domain: the JetStream domain of the queue's server; empty where it has none
    :ivar streams: by the cursor's name of a stream the subjects of ends in it, and what returns what a message says
    """

    def __init__(self, cursor: Cursor, domain: str) -> None:
        queue = self._queue = cursor.queue
        self._domain = domain
        self._created_text = cursor.created
        self._created = datetime.fromisoformat(cursor.created)
        # Workers of version 1 of the contract state a job's time in microseconds, and so does this.
        self._created_nanoseconds = (self._created - _EPOCH) // timedelta(microseconds=1) * 1_000
        self._advisory_subjects = cursor.advisory_subjects
        self._letters = letter_audit_subject(queue, 0)[:-1]
        self._handled = handled_subject(queue, 0)[:-1]
        events = (completion_filter(queue), f"{ACK_METRIC}.{queue}.*", *cursor.advisory_subjects)
        deaths = (f"{MAX_DELIVERIES}.{queue}.*", f"{TERMINATED}.{queue}.*")
        records = (f"{self._letters}*", f"{self._handled}*")
        self.streams: Mapping[str, tuple[tuple[str, ...], Callable[[TailedMessage], Iterable[Statement]]]] = {
            "events": (events, self._read_event),
            "dead_letters": (deaths, self._read_end),
            "audit": (records, self._read_record),
        }

    def _read_event(self, message: TailedMessage) -> Iterable[Statement]:
        if not self._advisory_subjects or not covered_by_any(self._advisory_subjects, message.subject):
            return self._read_end(message)
        # Never by the sequence in it: anybody may publish here.
        if not self._counts(message) or (digest := reported_job(message.subject, message.data)) is None:
            return ()
        return (AdvisoryReport(digest, message.sequence, message.stored_at),)

    def _read_end(self, message: TailedMessage) -> Iterable[Statement]:
        if not self._counts(message):
            return ()
        place = (self._queue, self._domain, message.stored_at, message.subject)
        if (end := parse_end(message.data, message.sequence, *place)) is None:
            return ()
        # A worker may end a job late that an earlier stream of this name had stored.
        stored = ended_job_time(message.message_id, end.sequence)
        return () if stored is not None and stored < self._created_nanoseconds else (end,)

    def _read_record(self, message: TailedMessage) -> Iterable[Statement]:
        if not self._counts(message):
            return ()
        stored = StoredMessage(message.subject, message.sequence, message.stored_at.isoformat(), (), message.data)
        if message.subject.startswith(self._handled):
            sequence = handled_sequence(stored, self._queue)
            end = JobEnd(EndKind.DEAD, sequence, message.sequence, note=_REPORTED, stored_at=message.stored_at)
            return (end,) if sequence else ()
        record = parse_record(LetterRecord, stored)
        if record is None or (record.stream, record.created) != (self._queue, self._created_text):
            return ()
        return self._recorded(record, message) if message.subject == f"{self._letters}{record.sequence}" else ()

    def _counts(self, message: TailedMessage) -> bool:
        return message.stored_at >= self._created and not message.is_from_elsewhere

    def _recorded(self, record: LetterRecord, message: TailedMessage) -> Iterable[Statement]:
        action, new, successor = record.action, record.new_sequence, None
        if action == "redriven":
            # Of one stream, a copy is stored later than its job: others would lead in a circle.
            stream = record.new_stream or self._queue
            if not new or (stream == self._queue and new <= record.sequence):
                return ()
            successor = Successor(stream, new)
            note = successor.describe()
        else:
            note = _ACTIONS.get(action, f"it died and was {action}") + (f": {record.why}" if record.why else "")
        place = (record.sequence, message.sequence, record.consumer or "", note)
        is_alive = action == "requeued"
        return (JobEnd(EndKind.DEAD, *place, stored_at=message.stored_at, successor=successor, is_alive=is_alive),)


def said_most(statement: Statement) -> tuple[bool, bool, int]:
    """Return by what the statement is chosen that counts where several are about one job.

    The ack metric of a completed or cancelled job comes last and adds nothing; the backlog has older ends.
    """
    if isinstance(statement, AdvisoryReport):
        return False, False, statement.event_sequence
    return statement.has_result, statement.kind is EndKind.CANCELLED, statement.event_sequence


def is_superseded(death: JobEnd, recorded: JobEnd | None, *, is_record: bool) -> bool:
    """Return whether the audit knows more of a dead job: that it was redriven, requeued or parked since.

    :param recorded: what the audit says last of the job
    :param is_record: whether the death is a record of the audit itself
    """
    if recorded is None or recorded.is_report:
        return False
    return recorded.event_sequence > death.event_sequence if is_record else recorded.stored_at >= death.stored_at


def parse_end(
    data: bytes, event_sequence: int, queue: str, domain: str = "", stored_at: datetime = _UNKNOWN, subject: str = ""
) -> JobEnd | None:
    """Parse the body of a message of an events stream or a dead letter queue; ``None`` where it is no job's end.

    :param domain: the JetStream domain of the queue's server; empty where it has none
    :param stored_at: when the message was stored
    :param subject: its subject, with which the body has to agree; not compared where it is empty
    """
    if (plain := _PLAIN_COMPLETION.fullmatch(data)) and _is_date(plain[1]):
        stream, consumer, sequence, deliveries = plain[2].decode(), plain[3].decode(), int(plain[4]), int(plain[5])
        if stream != queue or subject not in ("", completion_subject(stream, consumer, sequence)):
            return None
        return JobEnd(EndKind.COMPLETED, sequence, event_sequence, consumer, attempts=deliveries, stored_at=stored_at)
    event = event_of_body(subject, data, queue, domain) if subject else parse_advisory(data)
    if event is None or event.stream != queue:
        return None
    # What workers publish names no domain.
    if not isinstance(event, Completion | Cancelled) and not event.is_of_server(queue, domain):
        return None
    kind, note, has_result = EndKind.DEAD, "", False
    match event:
        case Completion():
            kind, has_result = EndKind.COMPLETED, event.result is not None
        case AckMetric():
            kind = EndKind.COMPLETED
        case Cancelled():
            reason = event.why or "no reason given"
            kind, note = EndKind.CANCELLED, f"{event.by}: {reason}" if event.by else reason
        case MaxDeliveries():
            note = f"{event.deliveries} deliveries to {event.consumer}"
        case Terminated() if event.reason != DELETED_IN_FLIGHT:
            note = f"terminated by {event.consumer}: {event.reason or 'no reason given'}"
        case _:
            return None
    return JobEnd(kind, event.stream_seq, event_sequence, event.consumer, note, has_result, event.deliveries, stored_at)


@lru_cache(maxsize=64)
def _is_date(text: bytes) -> bool:
    try:
        date.fromisoformat(text.decode())
    except ValueError:
        return False
    return True
