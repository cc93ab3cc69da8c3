"""Text that anybody may have written, as one line of limited length: for logs, headers, tables and errors."""

from __future__ import annotations

import reprlib
import unicodedata
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.limits import LINE, SHOWN_VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable

_PATH_STARTS = ("/", "~", "./", "../")
_UNPRINTABLE = frozenset({"Cc", "Cs"})


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = self.maxlong = SHOWN_VALUE

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write numbers of many digits, after a time that grows with their square.
        bits = x.bit_length()
        return super().repr_int(x, level) if bits < _LONGEST_NUMBER else f"a whole number of {bits} bits"


# Bits.
_LONGEST_NUMBER = 4 * SHOWN_VALUE
_short = _ShortRepr()


def one_line(text: str | None) -> str | None:
    """Turn any text into one line of at most a thousand characters.

    :return: ``None`` where nothing is left
    """
    if not text:
        return None
    words = _words(text)
    if words.isascii() and words.isprintable():
        # By far the most frequent case, in a twentieth of the time.
        return words[:LINE].rstrip() or None
    characters = ("\ufffd" if unicodedata.category(character) in _UNPRINTABLE else character for character in words)
    return "".join(characters)[:LINE].rstrip() or None


def shown_value(value: object) -> str:
    """Return a value as Python writes it, for an error's message: one line of limited length, however large it is."""
    return _short.repr(value)


def shown_field(path: Iterable[object]) -> str:
    """Return where a value stands in others, for an error's message: ``consumers.0.name``, of limited length."""
    return (one_line(".".join(map(str, path))) or "")[:SHOWN_VALUE]


def shown_path(path: str) -> str:
    """Return the path in a field for a file, for an error's message; not what may be the secret itself."""
    if path.startswith(_PATH_STARTS) and path.isprintable():
        return path[:LINE]
    return "(what doesn't begin with / or ~ isn't shown: it may be the content)"


def _words(text: str) -> str:
    return " ".join(text[: 10 * LINE].split())
