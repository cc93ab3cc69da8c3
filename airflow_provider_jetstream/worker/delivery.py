"""A job as a handler gets it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.contract import JOB_ADVISORY, JOB_ID, TRACE_PARENT

if TYPE_CHECKING:
    from nats.aio.msg import Msg


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job as a handler gets it.

    :param id: the job's own id, from its header or its body, or its stream sequence where it has none
    :param subject: its subject
    :param body: its body
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
    def of(cls, message: Msg) -> Self:
        """Take a message of a work queue as a job.

        :param message: the message as it was pulled
        :return: the job
        """
        headers = dict(message.headers or {})
        metadata = message.metadata
        return cls(
            id=headers.get(JOB_ID) or _told(message.data, "id") or str(metadata.sequence.stream),
            subject=message.subject,
            body=message.data,
            headers=headers,
            sequence=metadata.sequence.stream,
            attempt=metadata.num_delivered,
        )

    @property
    def advisory(self) -> str | None:
        """The subject on which its completion is reported besides the queue's events, if it names one."""
        return self.headers.get(JOB_ADVISORY) or _told(self.body, "advisory")

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context of its publisher, which is carried on with its completion."""
        return self.headers.get(TRACE_PARENT)

    def json(self) -> Any:
        """Decode the body.

        :return: the JSON value
        :raises ValueError: if the body isn't JSON
        """
        return json.loads(self.body)


def _told(body: bytes, field: str) -> str | None:
    """Read what publishers without headers write into the body: a JSON object with ``id`` and ``advisory``."""
    if not body.startswith(b"{"):
        return None
    try:
        value = json.loads(body).get(field)
    except (ValueError, RecursionError):
        return None
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None
