"""Answers in one inbox whose subjects are numbered, which are parsed many at a time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class AnswerRun:
    """The answers by which a server confirms what it has stored or taken, which are parsed many at a time.

    An answer with headers, such as one that nobody takes the request, is none of them.

    :param prefix: the inbox and a dot; the number of the request follows
    :param on_answers: gets the numbers of requests, and the body of each answer
    """

    def __init__(self, prefix: bytes, on_answers: Callable[[Sequence[int], Sequence[bytes]], None]) -> None:
        self._prefix = re.escape(prefix)
        self._on_answers = on_answers

    def bind(self, number: int) -> None:
        """Set the number of the subscription to the inbox."""
        # A body of one line: the confirmation of an acknowledgement has none.
        frame = rb"MSG %b(\d{1,18}) %d {1,2}(\d{1,4})\r\n([^\r\n]*)\r\n" % (self._prefix, number)
        self._frame = re.compile(frame)
        # Atomic: what was matched is never matched again. A possessive repeat goes wrong before Python 3.11.5.
        self._frames = re.compile(rb"(?>(?:%b)*)" % frame)

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Hand the answers that begin at a position over; return where they end, how many they are, and their size."""
        match = self._frames.match(data, start)
        if match is None or match.end() == start:
            return start, 0, 0
        numbers, sizes, bodies = zip(*self._frame.findall(data, start, match.end()), strict=True)
        lengths = list(map(len, bodies))
        if list(map(int, sizes)) != lengths:
            # Made to look like one; the parser finds out where it ends.
            return start, 0, 0
        self._on_answers(list(map(int, numbers)), bodies)
        return match.end(), len(lengths), sum(lengths)
