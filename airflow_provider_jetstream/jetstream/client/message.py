"""A message as a stream stores it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.headers import first

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as its stream keeps it.

    :param subject: its subject
    :param sequence: its stream sequence
    :param time: the server's own text of when it was stored, with nanoseconds
    :param headers: name and value in order; a name may come more than once
    :param data: its body
    """

    subject: str
    sequence: int
    time: str
    headers: tuple[tuple[str, str], ...]
    data: bytes

    @property
    def stored_at(self) -> datetime:
        """When it was stored, in microseconds."""
        return datetime.fromisoformat(self.time)

    def header(self, name: str) -> str | None:
        """Give a header's first value.

        :param name: its name, compared exactly as the server does
        :return: the value, if there is one
        """
        return first(self.headers, name)


def message_of(answer: Mapping[str, Any]) -> StoredMessage:
    """Take an answer of the API apart.

    :param answer: the answer, decoded
    :return: the message
    """
    message = answer["message"]
    return StoredMessage(
        subject=message["subject"],
        sequence=message["seq"],
        time=message["time"],
        headers=parse_headers(base64.b64decode(message.get("hdrs", ""))),
        data=base64.b64decode(message.get("data", "")),
    )


def parse_headers(raw: bytes) -> tuple[tuple[str, str], ...]:
    """Read headers as they are on the wire.

    :param raw: the headers, with their first line
    :return: name and value in order
    """
    # Not through email.parser as the client does: that turns values beyond ASCII into objects and merges repeats.
    lines = raw.decode("utf-8", "surrogateescape").split("\r\n")[1:]
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return tuple((name, value.strip()) for name, value in pairs)
