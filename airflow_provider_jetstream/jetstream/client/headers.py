"""Headers as NATS has them: a name may come more than once, and the server's own belong to it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Pairs: TypeAlias = tuple[tuple[str, str], ...]

_FRAME = len("NATS/1.0\r\n\r\n")


class Headers(dict[str, str]):
    """Headers in which a name may come more than once; the client sends what :meth:`items` gives.

    :param pairs: name and value in order
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        super().__init__(self._pairs)

    def items(self) -> Pairs:  # type: ignore[override]
        """Give every pair.

        :return: name and value in order
        """
        return self._pairs


def is_servers(name: str) -> bool:
    """Tell whether a header belongs to the server, which acts on it.

    :param name: the header's name
    :return: whether it starts with ``Nats-``
    """
    return name.lower().startswith("nats-")


def first(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """Give a header's first value.

    :param headers: name and value in order
    :param name: its name, compared exactly as the server does
    :return: the value, if there is one
    """
    # Asked several times of every letter: a loop is twice as fast as a generator.
    for key, value in headers:
        if key == name:
            return value
    return None


def wire_size(headers: Mapping[str, str]) -> int:
    """Compute what headers take on the wire, which counts towards the server's ``max_payload``.

    :param headers: the headers
    :return: bytes
    :raises UnicodeEncodeError: one was stored in something other than UTF-8 and can't be sent again
    """
    return _FRAME + len("".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode())
