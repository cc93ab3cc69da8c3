"""A job as a handler receives it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.contract import TRACE_PARENT
from airflow_provider_jetstream.jetstream.limits import SHOWN_VALUE
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.jetstream.publishing.job import (
    delivered_advisory,
    delivered_job_id,
    redrives_of,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a job.

    :param id: the job's id: its header ``Job-Id``, else the ``id`` of its JSON body, else its ``Nats-Msg-Id``, else its
        stream sequence
    :param subject: the subject on which it was published
    :param body: its payload
    :param headers: its headers
    :param sequence: its stream sequence
    :param attempt: 1 for the first delivery
    """

    id: str
    subject: str
    body: bytes
    headers: dict[str, str]
    sequence: int
    attempt: int

    @classmethod
    def of(cls, message: PulledMessage) -> Self:
        """Read a message that was pulled from a work queue."""
        delivery = cls.__new__(cls)
        _set_id(delivery, delivered_job_id(message.headers, message.data, message.sequence))
        _set_subject(delivery, message.subject)
        _set_body(delivery, message.data)
        _set_headers(delivery, message.headers)
        _set_sequence(delivery, message.sequence)
        _set_attempt(delivery, message.attempt)
        return delivery

    @property
    def shown_id(self) -> str:
        """The id for logs: anybody may have written it, with line breaks and at any length."""
        return (one_line(self.id) or str(self.sequence))[:SHOWN_VALUE]

    @property
    def advisory(self) -> str | None:
        """The subject that the job names for its completion, which is published there besides the queue's events."""
        return delivered_advisory(self.headers, self.body)

    @property
    def redrives(self) -> int:
        """How often the job was redriven as a dead letter."""
        return redrives_of(self.headers.items())

    @property
    def traceparent(self) -> str | None:
        """The publisher's W3C trace context, which the completion repeats."""
        return self.headers.get(TRACE_PARENT)

    def json(self) -> Any:
        """Decode the body.

        :raises ValueError: the body isn't JSON
        """
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("expected JSON, found lists or objects within each other in too many levels") from None


# The constructor of a frozen dataclass takes three times as long, for each job of a worker.
_set_id, _set_subject, _set_body, _set_headers, _set_sequence, _set_attempt = (
    getattr(Delivery, field.name).__set__ for field in fields(Delivery)
)
