"""What a client sends, as whoever stands between it and its server reads it.

Protocol: PUB and HPUB in "NATS Client Protocol". Every other line is a frame by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.wire_text import decode_text
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.limits import MESSAGE, PROTOCOL_LINE

if TYPE_CHECKING:
    from collections.abc import Iterator

# The server takes any case, and spaces or tabs between the fields.
_MESSAGE = re.compile(
    rb"(?:PUB|(HPUB))[ \t]+([^ \t\r\n]+)[ \t]+(?:[^ \t\r\n]+[ \t]+)??(?(1)(\d{1,9})[ \t]+)(\d{1,9})[ \t]*\r\n",
    re.IGNORECASE,
)
_END_OF_LINE = b"\r\n"


@dataclass(frozen=True, slots=True)
class SentFrame:
    """A frame of a client.

    :param data: the whole frame, as it is on the wire
    :param subject: that of a message; empty for every other frame
    :param payload: the message's body
    """

    data: bytes
    subject: str = ""
    payload: bytes = b""


class SentFrameReader:
    """Divides what a client sends into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SentFrame]:
        """Yield the frames that are complete with these bytes.

        :raises WireError: no client of a nats-server has sent this
        """
        self._rest += data
        while frame := self._next():
            self._rest = self._rest[len(frame.data) :]
            yield frame

    def _next(self) -> SentFrame | None:
        end = self._rest.find(_END_OF_LINE)
        if end < 0:
            if len(self._rest) > PROTOCOL_LINE:
                raise WireError(f"expected a line of a NATS client, found {len(self._rest)} bytes without an end")
            return None
        line = self._rest[: end + len(_END_OF_LINE)]
        if (match := _MESSAGE.fullmatch(line)) is None:
            return SentFrame(line)
        _, subject, header_size, text = match.groups()
        if (size := int(text)) > MESSAGE:
            raise WireError(f"expected a message of at most {MESSAGE} bytes, found one of {size}")
        whole = len(line) + size + len(_END_OF_LINE)
        if len(self._rest) < whole:
            return None
        begin = len(line) + int(header_size or 0)
        return SentFrame(self._rest[:whole], decode_text(subject), self._rest[begin : len(line) + size])
