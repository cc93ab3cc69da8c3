"""A message that was pulled from a work queue, with what its reply subject says about the delivery."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import first_values
from airflow_provider_jetstream.jetstream.client.wire import DELIVERY_REPLY
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text
from airflow_provider_jetstream.jetstream.contract import MARKER_REASON
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

# Many jobs have the same.
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

        Whoever may publish a job may give it the header: a job with a body is one all the same.
        """
        return not self.data and MARKER_REASON in self.headers

    @property
    def reply(self) -> str:
        """The subject of its acknowledgements."""
        return decode_text(self.ack_subject)

    @property
    def stored_at(self) -> datetime:
        """When it was stored, in microseconds."""
        return datetime.fromtimestamp(self.stored_nanoseconds / NANOSECONDS, UTC)
