"""A message as its stream stores it, and how the server's answers are parsed into one."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from airflow_provider_jetstream.jetstream.client.diagnostics import decode_answer, not_found
from airflow_provider_jetstream.jetstream.client.headers import first, parse_headers
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE, decode_text
from airflow_provider_jetstream.jetstream.errors import ApiError, WireError
from airflow_provider_jetstream.jetstream.limits import SEQUENCE, TIME
from airflow_provider_jetstream.jetstream.line_text import shown_value

NO_MESSAGE: Final = 10037

# How the server writes an answer to MSG.GET; any other spelling is decoded as JSON.
_MSG_GET_ANSWER = re.compile(
    rb'\{"type":"io\.nats\.jetstream\.api\.v1\.stream_msg_get_response","message":\{"subject":"([^"\\]*)","seq":(\d{1,20}),'
    rb'(?:"hdrs":"([^"\\]*)",)?(?:"data":"([^"\\]*)",)?"time":"([^"\\]*)"\}\}'
)
# What the server adds to a message's headers, behind the message's own ones, which may have the same names.
_ADDED_HEADERS = b"Nats-Stream: "
_ADDED = re.compile(
    rb"Nats-Stream: [^\r]*\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d{1,20})\r\nNats-Time-Stamp: ([^\r]*)\r\n"
)
_FIRST_LINE = len(b"NATS/1.0\r\n")


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as its stream stores it.

    :param subject: its subject
    :param sequence: its stream sequence
    :param time: the server's own text of when it was stored, with nanoseconds
    :param headers: name and value in order; a name may occur more than once
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
        """Return a header's first value.

        :param name: its name, compared exactly as the server does
        """
        return first(self.headers, name)


def parse_msg_get(answer: bytes, stream: str) -> StoredMessage | None:
    """Parse the answer to a MSG.GET request; ``None`` where the message isn't stored.

    :raises NotFoundError: the stream doesn't exist
    :raises ApiError: the server refused
    :raises UnreachableError: JetStream is unavailable just now
    :raises WireError: the answer is neither a message nor a refusal
    """
    if match := _MSG_GET_ANSWER.fullmatch(answer):
        subject, sequence, headers, data, time = match.groups()
        return _message(subject.decode(errors="replace"), int(sequence), time.decode(errors="replace"), headers, data)
    try:
        message = decode_answer(answer, f"STREAM.MSG.GET.{stream}").get("message")
    except ApiError as error:
        if error.err_code == NO_MESSAGE:
            return None
        raise not_found(error, f"stream {stream}") from None
    match message:
        case {"subject": str(subject), "seq": int(sequence), "time": str(time), **others} if 0 <= sequence <= SEQUENCE:
            return _message(subject, sequence, time, others.get("hdrs"), others.get("data"))
    raise _no_message(stream)


def _message(subject: str, sequence: int, time: str, headers: Any, data: Any) -> StoredMessage:
    try:
        # Every reader relies on the time: it proves which message this is.
        require_time(time)
        return StoredMessage(
            # The API's JSON has U+FFFD for every byte that isn't UTF-8.
            subject.replace("\ufffd", UNKNOWN_BYTE),
            sequence,
            time,
            parse_headers(base64.b64decode(headers)) if headers else (),
            base64.b64decode(data or b""),
        )
    except (ValueError, TypeError):
        raise _no_message(subject) from None


def require_time(text: str) -> None:
    """Check a time in an answer of the server.

    :raises ValueError: it isn't one
    """
    if len(text) > TIME or datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("expected a time with its zone")


def _no_message(place: str) -> WireError:
    return WireError(f"expected a stored message of {shown_value(place)}, found an answer of another form")


def parse_direct_get(header: bytes, body: bytes) -> StoredMessage:
    """Parse the message in an answer to a direct get.

    :param header: the answer's headers as they are on the wire
    :raises WireError: the headers don't name a message
    """
    start = header.rfind(_ADDED_HEADERS)
    match = _ADDED.match(header, start) if start >= 0 else None
    if match is None:
        raise WireError(f"expected an answer to a direct get, found the headers {header[:200]!r}")
    subject, sequence, time = match.groups()
    try:
        require_time(time.decode())
    except ValueError:
        raise WireError(f"expected the time of a message in an answer to a direct get, found {time[:40]!r}") from None
    own = parse_headers(header[:start]) if start > _FIRST_LINE else ()
    return StoredMessage(decode_text(subject), int(sequence), time.decode(), own, body)
