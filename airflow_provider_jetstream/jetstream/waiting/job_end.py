"""The ends of jobs, parsed from stored events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

from airflow_provider_jetstream.jetstream.advisories import (
    DELETED_IN_FLIGHT,
    AckMetric,
    Cancelled,
    Completion,
    MaxDeliveries,
    Terminated,
    parse_advisory,
)
from airflow_provider_jetstream.jetstream.contract import completion_subject
from airflow_provider_jetstream.jetstream.evidence import event_of_body

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
    VANISHED = "vanished"
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


@dataclass(frozen=True, slots=True)
class AdvisoryReport:
    """A message on an advisory subject, by which a worker of any make reports that it has finished a job.

    :param digest: the job's, of subject and id
    :param event_sequence: the message's sequence in the events stream
    """

    digest: str
    event_sequence: int
    stored_at: datetime


def parse_end(
    data: bytes, event_sequence: int, queue: str, domain: str = "", stored_at: datetime = _UNKNOWN, subject: str = ""
) -> JobEnd | None:
    """Parse the body of a message of an events stream or a dead letter queue; ``None`` where it is no job's end.

    :param domain: the JetStream domain of the queue's server; empty where it has none
    :param stored_at: when the message was stored
    :param subject: its subject, with which the body has to agree; not compared where it is empty
    """
    if (plain := _PLAIN_COMPLETION.fullmatch(data)) and _is_date(plain[1]):
        _, stream, consumer, sequence, deliveries = plain.groups()
        if stream.decode() != queue or subject not in ("", _completion_subject(stream, consumer, sequence)):
            return None
        return JobEnd(
            EndKind.COMPLETED,
            *(int(sequence), event_sequence, consumer.decode(), "", False, int(deliveries), stored_at),
        )
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


def _completion_subject(queue: bytes, consumer: bytes, sequence: bytes) -> str:
    return completion_subject(queue.decode(), consumer.decode(), int(sequence))


@lru_cache(maxsize=64)
def _is_date(text: bytes) -> bool:
    try:
        date.fromisoformat(text.decode())
    except ValueError:
        return False
    return True
