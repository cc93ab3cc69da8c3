"""Encodes what is published, as the NATS protocol has it on the wire.

Protocol: "NATS Client Protocol" in the NATS documentation, PUB and HPUB. What is encoded here is written by
:meth:`~airflow_provider_jetstream.jetstream.client.connection.Connection.write`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.headers import encode_headers, is_servers
from airflow_provider_jetstream.jetstream.client.wire_text import encode_text
from airflow_provider_jetstream.jetstream.errors import ArgumentError, WireError
from airflow_provider_jetstream.jetstream.limits import PUBLISHED_SUBJECT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# The server separates the fields of a line by these, and ends the line at a line feed. Any other control character may
# be a part of a subject that it has stored; what this package lets users publish on is stricter.
_SUBJECT: Final = re.compile(rb"[^\t\n\r ]+")
_FIRST_LINE: Final = b"NATS/1.0\r\n"
_END: Final = b"\r\n"
_LINE_BREAKS: Final = str.maketrans("\r\n", "  ")


@lru_cache(maxsize=4096)
def encode_subject(subject: str) -> bytes:
    """Encode a subject to which something is published.

    :raises WireError: a line of the protocol can't hold it
    """
    encoded = encode_text(subject)
    if len(encoded) > PUBLISHED_SUBJECT or not _SUBJECT.fullmatch(encoded):
        # The server closes the connection that sends a longer line, and takes the rest for another field.
        raise WireError(
            f"expected a subject of at most {PUBLISHED_SUBJECT} bytes without space, tab or line break, found"
            f" {subject[:80]!r}"
        )
    return encoded


def encode_message(subject: bytes, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Encode one message: PUB, or HPUB where it has headers.

    :param subject: from :func:`encode_subject`
    :param headers: from :func:`~.headers.encode_headers` or :class:`HeaderBlock`; empty where it has none
    :param reply: the subject for answers, in the same form as the subject
    """
    if headers:
        size = len(headers)
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(payload), headers, payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)


def encode_numbered(
    subject: bytes,
    reply_prefix: bytes,
    first: int,
    headers: bytes,
    values: Sequence[Sequence[bytes]],
    sizes: int | Sequence[int],
    payloads: Sequence[bytes],
) -> bytes:
    """Encode messages that differ in payload and some values of their headers: one format for all of them.

    :param reply_prefix: the subjects for answers without the numbers at their ends
    :param first: the number of the first message
    :param headers: encoded, with ``%b`` in the place of each value, and other percent signs doubled
    :param values: for each place, those of all messages
    :param sizes: of the headers of each message; one number where all have the same
    """
    count, lengths = len(payloads), list(map(len, payloads))
    numbers = range(first, first + count)
    line = b"HPUB %b %b%%d" % (subject.replace(b"%", b"%%"), reply_prefix.replace(b"%", b"%%"))
    columns: list[Iterable[int] | Sequence[bytes]]
    if not isinstance(sizes, int):
        form = b"%b %%d %%d\r\n%b%%b\r\n" % (line, headers)
        columns = [numbers, sizes, map(int.__add__, sizes, lengths), *values, payloads]
    elif min(lengths) == max(lengths):
        form = b"%b %d %d\r\n%b%%b\r\n" % (line, sizes, sizes + lengths[0], headers)
        columns = [numbers, *values, payloads]
    else:
        form = b"%b %d %%d\r\n%b%%b\r\n" % (line, sizes, headers)
        columns = [numbers, map(sizes.__add__, lengths), *values, payloads]
    return form * count % tuple(chain.from_iterable(zip(*columns, strict=True)))


def encode_requests(
    subjects: Sequence[bytes],
    reply_prefix: bytes,
    first: int,
    payloads: Sequence[bytes],
    headers: Sequence[bytes] | None = None,
) -> bytes:
    """Encode requests whose answers' subjects end with consecutive numbers: one format for all of them.

    :param subjects: from :func:`encode_subject`
    :param reply_prefix: the subjects for answers without the numbers at their ends
    :param first: the number of the first request
    :param headers: those of each, encoded; ``None`` where none has any
    """
    count, sizes, prefix = len(subjects), list(map(len, payloads)), reply_prefix.replace(b"%", b"%%")
    numbers = range(first, first + count)
    columns: list[Iterable[int] | Sequence[bytes]] = [subjects, numbers, sizes, payloads]
    form = b"PUB %%b %b%%d %%d\r\n%%b\r\n" % prefix
    if headers is not None:
        header_sizes = list(map(len, headers))
        columns = [subjects, numbers, header_sizes, map(int.__add__, header_sizes, sizes), headers, payloads]
        form = b"HPUB %%b %b%%d %%d %%d\r\n%%b%%b\r\n" % prefix
    return form * count % tuple(chain.from_iterable(zip(*columns, strict=True)))


class HeaderBlock:
    """Headers of many messages, of which only some values differ: the others are encoded once.

    The server's headers come first. Before 2.14 a server takes the first place where a name of its own occurs, in the
    value of any other header too.

    :param constant: the headers that are the same for all messages
    :param varying: the names of the others, those of the server first
    """

    __slots__ = ("_first", "_names", "_rest")

    def __init__(self, constant: Mapping[str, str], *varying: str) -> None:
        if both := set(varying) & set(constant):
            raise ArgumentError(f"expected headers with constant or with varying values, found {sorted(both)} in both")
        if list(varying) != sorted(varying, key=lambda name: not is_servers(name)):
            raise ArgumentError(f"expected the names of the server's headers first, found {', '.join(varying)}")
        servers = {name: value for name, value in constant.items() if is_servers(name)}
        others = {name: value for name, value in constant.items() if not is_servers(name)}
        self._first = encode_headers(servers)[: -len(_END)]
        self._names = [b"%b: " % name.encode("ascii") for name in varying]
        self._rest = encode_headers(others)[len(_FIRST_LINE) :]

    def with_values(self, *values: str) -> bytes:
        """Return the headers of one message as they are on the wire.

        :param values: one for each varying name; a line break in one becomes a space
        """
        parts = [self._first]
        for name, value in zip(self._names, values, strict=True):
            text = value.strip()
            parts += (name, encode_text(text if text.isprintable() else text.translate(_LINE_BREAKS)), _END)
        parts.append(self._rest)
        return b"".join(parts)
