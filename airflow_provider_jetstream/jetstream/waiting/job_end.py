"""What a stored event says about the end of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from airflow_provider_jetstream.jetstream.advisories import (
    DELETED_IN_FLIGHT,
    AckMetric,
    Cancelled,
    Completion,
    MaxDeliveries,
    Terminated,
    parse_advisory,
)


class EndKind(Enum):
    """How a job ended."""

    COMPLETED = "completed"
    """A worker stored that it was done, or the server that it was acknowledged."""
    CANCELLED = "cancelled"
    DEAD = "dead"
    VANISHED = "vanished"
    """It is gone, and nothing is stored that tells how."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    :param kind: how it ended
    :param sequence: the job's stream sequence
    :param at: the sequence of the event that tells of it, in the event's own stream
    :param consumer: the consumer that delivered it
    :param note: what is known beyond that, for people
    :param has_result: whether the event holds what the handler returned
    """

    kind: EndKind
    sequence: int
    event_sequence: int = 0
    consumer: str = ""
    note: str = ""
    has_result: bool = False


def parse_end(data: bytes, at: int, queue: str) -> JobEnd | None:
    """Read what a stored event says about the end of a job.

    :param data: the body of a message of an events stream or a dead letter queue
    :param at: its sequence there
    :param queue: the work queue
    :return: the end; ``None`` where the message is about something else
    """
    event = parse_advisory(data)
    if event is None or event.stream != queue:
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
    return JobEnd(kind, event.stream_seq, at, event.consumer, note, has_result)
