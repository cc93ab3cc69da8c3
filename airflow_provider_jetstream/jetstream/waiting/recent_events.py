"""The events of a stream that were read last."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_Key = TypeVar("_Key")
_Event = TypeVar("_Event")


class RecentEvents(Generic[_Key, _Event]):
    """The events that were read last, one for each key, in two generations of which the older is dropped as a whole.

    Dropping them one by one holds the event loop: a dict looks for its first entry among all that were removed before
    it, and an ordered one takes 20 ms whenever it grows.

    :param generation: how many events a generation has; so many are kept at least
    :ivar dropped_upto: the last position in the stream of the events that were dropped
    """

    def __init__(self, generation: int) -> None:
        self.dropped_upto = 0
        self._generation = generation
        self._newer: dict[_Key, _Event] = {}
        self._older: dict[_Key, _Event] = {}
        self._last_newer = self._last_older = 0

    def get(self, key: _Key) -> _Event | None:
        """Return the event of a key, where it was read lately."""
        event = self._newer.get(key)
        return self._older.get(key) if event is None else event

    def put(self, key: _Key, event: _Event, position: int) -> None:
        """Note the event of a key in the place of an earlier one.

        :param position: its sequence in the stream
        """
        self._older.pop(key, None)
        self._newer[key] = event
        self._last_newer = max(self._last_newer, position)
        if len(self._newer) >= self._generation:
            self.dropped_upto = max(self.dropped_upto, self._last_older)
            self._older, self._newer = self._newer, {}
            self._last_older, self._last_newer = self._last_newer, 0

    def values(self) -> Iterator[_Event]:
        """Yield the events."""
        return chain(self._older.values(), self._newer.values())

    def clear(self) -> None:
        """Forget all events, as where their stream was created anew."""
        self._newer, self._older = {}, {}
        self._last_newer = self._last_older = self.dropped_upto = 0

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)
