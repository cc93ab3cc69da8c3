"""Headers as NATS has them: a name may occur more than once, and names with ``Nats-`` belong to the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Pairs: TypeAlias = tuple[tuple[str, str], ...]


class Headers(dict[str, str]):
    """Headers in which a name may occur more than once; a connection sends what :meth:`items` returns.

    :param pairs: name and value in order
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        super().__init__(self._pairs)

    def items(self) -> Pairs:  # type: ignore[override]
        """Return every name and value in order."""
        return self._pairs


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
    """Encode headers as they are on the wire.

    :raises UnicodeEncodeError: a value was stored in something other than UTF-8 and can't be sent again
    """
    # Names and values without surrounding white space, as nats-py sends them.
    lines = "".join([f"{name.strip()}: {value.strip()}\r\n" for name, value in headers.items()])
    return f"NATS/1.0\r\n{lines}\r\n".encode()


def wire_size(headers: Mapping[str, str]) -> int:
    """Compute the size of headers on the wire, which counts towards the server's ``max_payload``.

    :raises UnicodeEncodeError: a value was stored in something other than UTF-8 and can't be sent again
    """
    return len(encode_headers(headers))
