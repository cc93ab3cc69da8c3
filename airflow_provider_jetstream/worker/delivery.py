"""A job as it was pulled from a work queue, with what its reply subject says, and as a handler receives it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.client.headers import first_values
from airflow_provider_jetstream.jetstream.client.wire import DELIVERY_REPLY
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, readable_text
from airflow_provider_jetstream.jetstream.contract import MARKER_REASON, TRACE_PARENT
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.limits import SHOWN_VALUE
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.jetstream.publishing.job import delivered_advisory, delivered_job_id, redrives_of
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage


# A message's time is computed from a float.
_SAME_TIME = timedelta(milliseconds=1)
# Cached: many jobs have the same names of stream and consumer.
_decode_name = lru_cache(maxsize=256)(decode_text)


@dataclass(slots=True, eq=False)
class PulledMessage:
    """A delivery of a job, as it was pulled.

    Protocol: ADR-15, "JetStream Subject Names and Reply Subjects".

    :param ack_subject: the subject of its acknowledgements, as it is on the wire
    :param headers: the first value of each name
    :param sequence: its stream sequence
    :param attempt: 1 for the first delivery
    :param stored_nanoseconds: when it was stored, since 1970
    """

    subject: str
    ack_subject: bytes
    data: bytes
    headers: dict[str, str]
    stream: str
    consumer: str
    sequence: int
    attempt: int
    stored_nanoseconds: int

    @classmethod
    def parse(cls, subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> Self:
        """Parse a message as it is on the wire.

        :raises WireError: no consumer has delivered it
        """
        if (match := DELIVERY_REPLY.fullmatch(reply)) is None:
            raise WireError(
                f"expected the acknowledgement subject of a delivery, found {shown_value(decode_text(reply))}"
            )
        return cls.of(subject, reply, match.groups(), headers, data)

    @classmethod
    def of(cls, subject: bytes, reply: bytes, fields: Sequence[bytes], headers: bytes | None, data: bytes) -> Self:
        """Make a message.

        :param fields: stream, consumer, number of the delivery, sequence and time, as the reply subject has them
        """
        stream, consumer, delivered, sequence, stored = fields
        return cls(
            _decode_name(subject),
            reply,
            data,
            first_values(headers) if headers else {},
            _decode_name(stream),
            _decode_name(consumer),
            int(sequence),
            int(delivered),
            int(stored),
        )

    @property
    def is_marker(self) -> bool:
        """Whether it says that the last job of its subject has expired (``subject_delete_marker_ttl``), and is no job.

        Any publisher can set the header, so a job with a body is a job whatever its headers say.
        """
        return not self.data and MARKER_REASON in self.headers

    def is_same_as(self, stored: StoredMessage) -> bool:
        """Return whether a stored message is the one that was pulled, rather than one of a recreated stream."""
        return (
            readable_text(stored.subject) == readable_text(self.subject)
            and abs(datetime.fromisoformat(stored.time) - self.stored_at) < _SAME_TIME
        )

    @property
    def reply(self) -> str:
        """The subject of its acknowledgements."""
        return decode_text(self.ack_subject)

    @property
    def stored_at(self) -> datetime:
        """When it was stored, in microseconds."""
        return datetime.fromtimestamp(self.stored_nanoseconds / NANOSECONDS, UTC)


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
    _reporter: Callable[[float, str], None] | None = field(default=None, init=False, repr=False, compare=False)

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
        _set_reporter(delivery, None)
        return delivery

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.id, self.subject, self.body, self.headers, self.sequence, self.attempt)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # A handler's process reports to the worker's process, by way of its own.
        for set_value, value in zip(_SETTERS, (*state, None), strict=True):
            set_value(self, value)

    def report_to(self, reporter: Callable[[float, str], None]) -> None:
        """Set what takes the progress of this delivery; the worker does that."""
        _set_reporter(self, reporter)

    def progress(self, fraction: float, text: str = "") -> None:
        """Report how far the job is; people see it, and nothing is decided by it.

        The last report is stored, at most one a second, where the queue declares ``attempts``. May be called from any
        thread, and as often as you like.

        :param fraction: how much of the job is done, from 0 to 1
        :param text: what is being done, such as ``"page 12 of 30"``; one line of 200 characters, the rest is cut
        :raises ValueError: the fraction is no number from 0 to 1, or the text isn't text
        """
        is_number = isinstance(fraction, Real) and not isinstance(fraction, bool)
        # NaN isn't in any range.
        if not is_number or not 0 <= fraction <= 1:
            raise ValueError(
                f"expected a fraction from 0 to 1, found {shown_value(fraction)}: give the part of the job that is"
                " done, such as 0.4"
            )
        if not isinstance(text, str):
            raise ValueError(f"expected text such as 'page 12 of 30', found {shown_value(text)}: decode bytes first")
        if self._reporter is not None:
            self._reporter(float(fraction), (one_line(text) or "")[:SHOWN_VALUE].rstrip())

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
_SETTERS = tuple(getattr(Delivery, field.name).__set__ for field in fields(Delivery))
_set_id, _set_subject, _set_body, _set_headers, _set_sequence, _set_attempt, _set_reporter = _SETTERS
