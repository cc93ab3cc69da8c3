"""How far a query has read a stream, as Spark's checkpoint keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class StreamPosition(NamedTuple):
    """The end of what was read of a stream.

    :param sequence: the last sequence that was read
    :param created: when the stream was created, as the server's text
    :param time: nothing after that sequence was stored before, in nanoseconds since 1970; 0 where that isn't known
    """

    sequence: int
    created: str
    time: int = 0

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> StreamPosition:
        """Read a position from an offset."""
        return cls(int(offset["seq"]), str(offset["created"]), int(offset.get("time", 0)))

    def offset(self) -> dict[str, Any]:
        """Return the position as an offset."""
        return {"seq": self.sequence, "created": self.created, "time": self.time}

    def since(self, start: StreamPosition) -> int:
        """Return how many sequences lie between an earlier position, or the beginning of a new stream, and this one."""
        return max(0, self.sequence - (start.sequence if start.created == self.created else 0))
