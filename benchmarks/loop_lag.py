"""How long an event loop is held, and how much of that is Python's collector, which stops all of the process."""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio import events
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class LoopLags:
    """Measures by how much a timer of the event loop is late, again and again.

    :param interval: of the timer, in seconds
    :ivar all: each delay, in seconds
    :ivar longest_without_collector: the longest delay less the collector's passes in it
    :ivar longest_collection: of one pass
    """

    def __init__(self, interval: float) -> None:
        self.all: list[float] = []
        self.longest_without_collector = self.longest_collection = 0.0
        self._interval = interval
        self._collected = self._began = 0.0
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Measure from now on."""
        gc.callbacks.append(self._on_collection)
        self._ticking = asyncio.create_task(self._tick())

    def stop(self) -> None:
        """Measure no more."""
        gc.callbacks.remove(self._on_collection)
        if self._ticking:
            self._ticking.cancel()

    @property
    def longest(self) -> float:
        """The longest delay."""
        return max(self.all, default=0.0)

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began:
            seconds = time.perf_counter() - self._began
            self._collected += seconds
            self.longest_collection = max(self.longest_collection, seconds)

    async def _tick(self) -> None:
        while True:
            began, collected = time.perf_counter(), self._collected
            await asyncio.sleep(self._interval)
            lag = time.perf_counter() - began - self._interval
            self.all.append(lag)
            own = lag - (self._collected - collected)
            self.longest_without_collector = max(self.longest_without_collector, own)


@dataclass
class Holds:
    """The longest time that the event loop was held, in CPU seconds of its thread."""

    longest: float = 0.0
    _collecting: float = 0.0
    _began: float = field(default=0.0, init=False)

    def install(self) -> None:
        """Measure each callback of event loops from now on."""
        run = events.Handle._run  # noqa: SLF001

        def measured(handle: events.Handle) -> None:
            before, collecting = time.thread_time(), self._collecting
            run(handle)
            held = time.thread_time() - before - (self._collecting - collecting)
            self.longest = max(self.longest, held)

        events.Handle._run = measured  # type: ignore[assignment,method-assign]  # noqa: SLF001
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._began
