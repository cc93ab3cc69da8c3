"""A parser of the NATS protocol, one frame at a time: slow, and the reference for the bulk parser.

Protocol: "NATS Client Protocol" in the NATS documentation.
"""

from __future__ import annotations

import secrets
import string
from typing import NamedTuple

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.limits import MESSAGE, PROTOCOL_LINE

_CRLF = b"\r\n"
_MOST_DIGITS = 9
_WITH_HEADER = 2
_WITHOUT_REPLY = 2
_WITH_REPLY = 3
_OPS = (b"PING", b"PONG", b"+OK", b"-ERR", b"INFO")

# The bulk parser finds frames by the subscription's id. DEL is rare in text, so it examines few candidates. Seven of
# them contain exactly one aligned word of four bytes, wherever the id begins.
MARKS = b"\x7f" * 7
_ALPHABET = string.ascii_letters + string.digits
_RANDOM = 7
SID_LENGTH = len(MARKS) + _RANDOM


class Frame(NamedTuple):
    """The position of a frame in a buffer, and of its fields.

    :param op: ``MSG``, ``HMSG`` or the name of a control line
    :param start: its first byte
    :param end: the first byte after it
    :param line: its first line, without the line ending
    :param sid: the subscription of a message; empty for a control line
    :param offsets: for a message: subject (start, end), reply (start, end), header start, body start, body end
    """

    op: bytes
    start: int
    end: int
    line: bytes
    sid: bytes = b""
    offsets: tuple[int, int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0, 0)


def next_frame(buffer: bytearray | bytes, start: int, filled: int) -> Frame | None:
    """Parse the frame that begins at a position; ``None`` where it hasn't arrived as a whole.

    :param filled: the number of bytes in the buffer
    :raises WireError: the bytes aren't a frame
    """
    line_end = buffer.find(_CRLF, start, filled)
    if line_end < 0:
        if filled - start > PROTOCOL_LINE:
            raise WireError(f"expected a line of the NATS protocol, found {bytes(buffer[start : start + 40])!r}…")
        return None
    line = bytes(buffer[start:line_end])
    op, _, rest = line.partition(b" ")
    if op not in (b"MSG", b"HMSG"):
        if op.upper() not in _OPS:
            raise WireError(f"expected a line of the NATS protocol, found {line[:40]!r}")
        return Frame(op.upper(), start, line_end + 2, line)
    return _message(buffer, filled, start, op, line, rest.split(b" "))


def _message(
    buffer: bytearray | bytes, filled: int, start: int, op: bytes, line: bytes, fields: list[bytes]
) -> Frame | None:
    numbers = _WITH_HEADER if op == b"HMSG" else 1
    names, sizes = fields[:-numbers], fields[-numbers:]
    if len(names) not in (_WITHOUT_REPLY, _WITH_REPLY) or not all(
        size.isdigit() and len(size) <= _MOST_DIGITS for size in sizes
    ):
        raise WireError(f"expected the first line of a message, found {line[:80]!r}")
    reply = names[2] if len(names) == _WITH_REPLY else b""
    total = int(sizes[-1])
    header_size = int(sizes[0]) if numbers == _WITH_HEADER else 0
    header = start + len(line) + 2
    end = header + total
    if total > MESSAGE:
        raise WireError(f"expected a message of at most {MESSAGE} bytes, found {line[:80]!r}")
    if not 0 <= header_size <= total:
        raise WireError(f"expected a header within its message, found {line[:80]!r}")
    if end + 2 > filled:
        return None
    if buffer[end : end + 2] != _CRLF:
        raise WireError(f"expected a message of {total} bytes, found another end after {line[:80]!r}")
    subject = start + len(op) + 1
    subject_end = subject + len(fields[0])
    reply_start = subject_end + 1 + len(fields[1]) + (1 if reply else 0)
    offsets = (subject, subject_end, reply_start, reply_start + len(reply), header, header + header_size, end)
    return Frame(op, start, end + 2, line, fields[1], offsets)


def new_sid() -> bytes:
    """Return a subscription id of fourteen bytes that no payload contains by chance and no publisher can guess."""
    return MARKS + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM)).encode()
