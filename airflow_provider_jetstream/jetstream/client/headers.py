"""Headers as NATS has them: a name may occur more than once, and names with ``Nats-`` belong to the server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text, readable_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Pairs: TypeAlias = tuple[tuple[str, str], ...]

# How headers begin that are a status of the server.
STATUS_LINE: Final = b"NATS/1.0 "
# Where the status is in them.
STATUS: Final = slice(9, 12)
NO_RESPONDERS: Final = b"NATS/1.0 503"

_SERVERS = "Nats-"
_LINE_BREAKS = str.maketrans("\r\n", "  ")
# The server looks for its headers behind a bare line feed, too.
_HIDDEN = re.compile(r"\n(?=nats-)", re.IGNORECASE)
# Headers as nearly every client writes them: printable ASCII, one space behind the colon, and none at the end.
_PLAIN = re.compile(rb"NATS/1\.0((?>(?:\r\n[!-9;-~]+: [!-~](?:[ -~]*[!-~])?)*))\r\n\r\n")
# As above with one header, as most jobs have: their message id.
_PLAIN_ONE = re.compile(rb"NATS/1\.0\r\n([!-9;-~]+): ([!-~](?:[ -~]*[!-~])?)\r\n\r\n")


class Headers(dict[str, str]):
    """Headers in which a name may occur more than once; a connection sends what :meth:`items` returns.

    :param pairs: name and value in order
    :param encoded: what :func:`encode_headers` returns for them, where that is known
    """

    def __init__(self, pairs: Iterable[tuple[str, str]], encoded: bytes | None = None) -> None:
        self._pairs = tuple(pairs)
        # As they are on the wire, once that is known: their size is looked at before they are sent.
        self._encoded = encoded
        super().__init__(self._pairs)

    def items(self) -> Pairs:  # type: ignore[override]
        """Return every name and value in order."""
        return self._pairs

    @property
    def encoded(self) -> bytes:
        """The headers as :func:`encode_headers` encodes them."""
        if self._encoded is None:
            self._encoded = _encode(self)
        return self._encoded


class ExactValue(str):
    """The value of a header that was stored in another form than ``name: value``, and is sent again in that form.

    :param value: the value without white space around it
    :param line: the header as it was stored, with the lines that continue it; a line without a colon is the value of a
        header without a name
    """

    __slots__ = ("line",)

    line: str

    def __new__(cls, value: str, line: str = "") -> Self:
        """Make a value with its line."""
        exact = super().__new__(cls, value)
        exact.line = line
        return exact


def parse_headers(raw: bytes) -> Pairs:
    """Parse headers as they are on the wire, with their first line, into names and values in order."""
    # Not by email.parser as nats-py does: that turns values beyond ASCII into objects and merges repeated names.
    lines: list[list[str]] = []
    for line in decode_text(raw).split("\r\n")[1:]:
        if line[:1] in (" ", "\t") and lines:
            lines[-1].append(line)
        elif line:
            lines.append([line])
    return tuple(_parse_line("\r\n".join(parts)) for parts in lines)


def first_values(raw: bytes) -> dict[str, str]:
    """Parse headers as they are on the wire into the first value of each name; what isn't UTF-8 is U+FFFD."""
    if plain := _PLAIN_ONE.fullmatch(raw):
        return {plain[1].decode("ascii"): plain[2].decode("ascii")}
    if plain := _PLAIN.fullmatch(raw):
        lines = [line.split(": ", 1) for line in plain[1].decode("ascii").split("\r\n")[1:]]
        pairs = dict(lines)
        if len(pairs) < len(lines):
            first_pairs = dict(reversed(lines))
            return {name: first_pairs[name] for name in pairs}
        return pairs
    values: dict[str, str] = {}
    for name, value in parse_headers(raw):
        if name:
            values.setdefault(readable_text(name), readable_text(str(value)))
    return values


def _parse_line(line: str) -> tuple[str, str]:
    name, colon, rest = line.partition(":")
    if not colon:
        return "", ExactValue(line, line)
    value = rest.partition("\r\n")[0].strip()
    if rest == f" {value}" and name == name.strip() and "\n" not in line and "\r" not in line:
        return name, value
    return name, ExactValue(value, line)


def exact_pair(name: str, value: str, line: str) -> tuple[str, str]:
    """Return a header with its line as it was stored, unless the line is another header's or more than one."""
    pairs = parse_headers(b"\r\n" + encode_text(line))
    return pairs[0] if pairs == ((name, value),) else (name, value)


def is_servers(name: str) -> bool:
    """Return whether the server acts on a header of this name."""
    return name.lower().startswith("nats-")


def first(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """Return the first value of a header.

    :param name: its name, compared exactly as the server does
    """
    # Called several times for every dead letter: a loop is twice as fast as a generator.
    for key, value in headers:
        if key == name:
            return value
    return None


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Encode headers as they are on the wire, in their order; the server's come first where another one names one.

    :raises UnicodeEncodeError: a value has characters that no bytes stand for
    """
    if not isinstance(headers, Headers):
        return _encode(headers)
    return headers.encoded


def _encode(headers: Mapping[str, str]) -> bytes:
    # Called for every message that is sent.
    lines = [
        f"{name.strip()}: {value.strip()}\r\n"
        if value.__class__ is str and value.isprintable() and name.isprintable()
        else _line(name, value)
        for name, value in headers.items()
    ]
    block = "".join(lines)
    if block.count(_SERVERS) > sum([line.startswith(_SERVERS) for line in lines]):
        # Before 2.14 the server takes the first place where a name of its own occurs, in any other header too, and
        # ignores its header if that place isn't one: a redriven job would have no id.
        block = "".join(sorted(lines, key=lambda line: not line.startswith(_SERVERS)))
    return encode_text(f"NATS/1.0\r\n{block}\r\n")


def _line(name: str, value: str) -> str:
    if isinstance(value, ExactValue) and value.line:
        line = value.line
        return f"{_HIDDEN.sub(' ', line) if chr(10) in line else line}\r\n"
    line = f"{name.strip()}: {value.strip()}"
    # A value never ends its line: what follows would be another header, or another command.
    return f"{line if line.isprintable() else line.translate(_LINE_BREAKS)}\r\n"


def wire_size(headers: Mapping[str, str]) -> int:
    """Compute the size of headers on the wire, which counts towards the server's ``max_payload``.

    :raises UnicodeEncodeError: a value has characters that no bytes stand for
    """
    return len(encode_headers(headers))
