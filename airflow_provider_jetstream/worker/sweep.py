"""One timer for all jobs of a worker: their in-progress signals, deadlines and unconfirmed requests."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

# At least so many seconds between two sweeps, each of which looks at every job.
_SHORTEST_PAUSE: Final = 0.02


class Timed(Protocol):
    """Something that has to be looked at from time to time, by the clock of the event loop."""

    due: float

    def on_due(self, now: float) -> None:
        """Do what is due, and set the next time."""


class Sweep:
    """Looks at what is due; a timer for each job would cost more than most jobs do.

    :param items: all that is looked at
    """

    def __init__(self, items: Collection[Timed]) -> None:
        self._items = items
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at = inf

    def expect(self, due: float) -> None:
        """Note that something is due at a time."""
        if due < self._at:
            self._schedule(due)

    def close(self) -> None:
        """Look at nothing any more."""
        if self._timer:
            self._timer.cancel()

    def _schedule(self, at: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._at = at
        self._timer = None if at == inf else self._loop.call_at(at, self._handle_due)

    def _handle_due(self) -> None:
        now, self._at, self._timer = self._loop.time(), inf, None
        # What is due may end, and leave the collection.
        for item in [item for item in self._items if item.due <= now]:
            item.on_due(now)
        self._schedule(max(min((item.due for item in self._items), default=inf), now + _SHORTEST_PAUSE))
