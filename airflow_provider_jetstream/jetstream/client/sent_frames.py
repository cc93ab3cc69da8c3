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

_SEPARATOR = re.compile(rb"[ \t]+")
# The sizes at the end of each verb's line; the server takes verbs in any case.
_SIZES = {b"PUB": 1, b"HPUB": 2}
# Verb and subject; a reply subject may follow.
_FIELDS = 2
_DIGITS = 18
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
        fields = _SEPARATOR.split(line.strip(b" \t\r\n"))
        sizes = _SIZES.get(fields[0].upper(), 0)
        if not sizes or len(fields) < _FIELDS + sizes or not all(map(bytes.isdigit, fields[-sizes:])):
            return SentFrame(line)
        size, header_size = int(fields[-1][:_DIGITS]), int(fields[-2][:_DIGITS]) if sizes > 1 else 0
        if size > MESSAGE:
            raise WireError(f"expected a message of at most {MESSAGE} bytes, found one of {size}")
        begin, end = len(line), len(line) + size
        if len(self._rest) < (whole := end + len(_END_OF_LINE)):
            return None
        return SentFrame(self._rest[:whole], decode_text(fields[1]), self._rest[begin + header_size : end])
