"""Texts by number, in one block of bytes: letters may be on as many subjects as there are letters."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.packed_column import PackedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each grows by itself, so that no growth takes long.
_TABLES = 256
_SMALLEST = 16
# Where more places are in use, a table grows by a quarter.
_FULL = 0.7
_MAX_BEGINNINGS = 1_000
_WILDCARDS = {">": rb".+", "*": rb"[^.]+"}


class TextTable:
    """Subjects, each with its number: about ten bytes for each, besides its last token.

    What is before the last token is held once for all subjects that begin alike.
    """

    def __init__(self) -> None:
        self._beginnings = [b""]
        self._numbers = {b"": 0}
        self._beginning = PackedColumn()
        self._rests = bytearray()
        self._ends = PackedColumn()
        # Hash tables of numbers plus one; 0 is an empty place.
        self._tables: list[array[int] | None] = [None] * _TABLES
        self._counts = array("I", bytes(4 * _TABLES))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        return self._encoded(number).decode()

    def find(self, text: str) -> int | None:
        """Return the number of a text; ``None`` where it has none."""
        digest = hash(text)
        table = self._tables[digest % _TABLES]
        known = table[self._place(table, digest, text.encode())] if table else 0
        return known - 1 if known else None

    def number_of(self, text: str) -> int:
        """Return the number of a text, a new one where it has none."""
        encoded, digest = text.encode(), hash(text)
        which = digest % _TABLES
        table = self._tables[which] or array("I", bytes(4 * _SMALLEST))
        place = self._place(table, digest, encoded)
        if known := table[place]:
            return known - 1
        number = len(self)
        beginning, rest = self._parts(encoded)
        self._beginning.append(beginning)
        self._rests += rest
        self._ends.append(len(self._rests))
        table[place] = number + 1
        self._counts[which] += 1
        self._tables[which] = self._larger(table) if self._counts[which] > _FULL * len(table) else table
        return number

    def matching(self, subject: str, numbers: range) -> Iterator[int]:
        """Return those of some numbers whose texts a subject with wildcards covers."""
        tokens = subject.split(".")
        pattern = rb"\.".join(_WILDCARDS.get(token) or re.escape(token.encode()) for token in tokens)
        matches = re.compile(pattern, re.DOTALL).fullmatch
        last = None if tokens[-1] in _WILDCARDS else tokens[-1].encode()
        # What follows a beginning is one token: any is covered, or only one.
        covered = [bool(matches(beginning + (last or b"x"))) for beginning in self._beginnings]
        beginnings = self._beginning[numbers.start : numbers.stop]
        for number, beginning in zip(numbers, beginnings, strict=True):
            if beginning == 0:
                if matches(self._rest(number)):
                    yield number
            elif covered[beginning] and (last is None or self._rest(number) == last):
                yield number

    def _parts(self, encoded: bytes) -> tuple[int, bytes]:
        """Return the number of a text's beginning and the rest; 0 and all of it where it isn't divided."""
        end = encoded.rfind(b".") + 1
        if not 0 < end < len(encoded):
            return 0, encoded
        beginning = encoded[:end]
        number = self._numbers.get(beginning)
        if number is None:
            if len(self._beginnings) >= _MAX_BEGINNINGS:
                return 0, encoded
            number = self._numbers[beginning] = len(self._beginnings)
            self._beginnings.append(beginning)
        return number, encoded[end:]

    def _rest(self, number: int) -> bytearray:
        return self._rests[self._ends[number - 1] if number else 0 : self._ends[number]]

    def _encoded(self, number: int) -> bytes:
        return self._beginnings[self._beginning[number]] + self._rest(number)

    def _place(self, table: array[int], digest: int, encoded: bytes) -> int:
        """Return the place of a text in its table, or the one where it belongs."""
        place = (digest // _TABLES) % len(table)
        while (known := table[place]) and self._encoded(known - 1) != encoded:
            place = (place + 1) % len(table)
        return place

    def _larger(self, table: array[int]) -> array[int]:
        larger = array("I", bytes(4 * (len(table) * 5 // 4)))
        for known in table:
            if known:
                place = (hash(self[known - 1]) // _TABLES) % len(larger)
                while larger[place]:
                    place = (place + 1) % len(larger)
                larger[place] = known
        return larger
