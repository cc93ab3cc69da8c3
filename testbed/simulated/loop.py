"""An event loop whose time is simulated: it doesn't wait, and one seed makes one course of events.

Where every task waits, the time goes on to the next moment at which something is due. The clocks that programs read
(:mod:`time`, :mod:`datetime`) show the simulated time, and what programs take for random is made of the seed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import selectors
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar
from unittest.mock import patch

import time_machine
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

_T = TypeVar("_T")

BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)
# Of real time.
_THREAD_SECONDS: Final = 10.0
_BEGIN_NANOSECONDS: Final = int(BEGIN.timestamp()) * 10**9


class Draws:
    """Random numbers by what they are for: what is drawn for one thing doesn't depend on what others draw."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._uses: Counter[tuple[object, ...]] = Counter()

    def of(self, *what: object) -> random.Random:
        """Return the numbers for something, the next ones each time."""
        self._uses[what] += 1
        return random.Random(f"{self._seed} {what} {self._uses[what]}")  # noqa: S311


class StalledError(RuntimeError):
    """Every task waits, and nothing is due any more."""


class SimulatedTime:
    """The time of one world, in nanoseconds since 1970."""

    def __init__(self, traveller: time_machine.Traveller) -> None:
        self._traveller = traveller
        self.elapsed = 0

    def now(self) -> int:
        """Return the nanoseconds since 1970."""
        return _BEGIN_NANOSECONDS + self.elapsed

    def advance(self, seconds: float) -> None:
        """Go on by some seconds, and by a nanosecond at least."""
        seconds = max(1e-9, seconds)
        self.elapsed += round(seconds * 1e9)
        self._traveller.shift(seconds)


class _Selector(selectors.SelectSelector):
    """Waits by letting the simulated time go on."""

    def __init__(self, simulated: SimulatedTime) -> None:
        super().__init__()
        self._simulated = simulated

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError("every task waits, and nothing is due any more")
        if timeout > 0:
            self._simulated.advance(timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time; functions that other loops run in threads are run at once.

    :param draws: what choices and delays are drawn from
    """

    def __init__(self, simulated: SimulatedTime, draws: Draws) -> None:
        super().__init__(_Selector(simulated))
        self.simulated_time = simulated
        self.draws = draws
        self._clock_resolution = 1e-9

    @override
    def time(self) -> float:
        return self.simulated_time.elapsed / 1e9

    def _write_to_self(self) -> None:
        """Wake nobody: the loop never waits."""

    @override
    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)
        return future


def run_simulated(world: Callable[[], Coroutine[Any, Any, _T]], seed: int) -> _T:
    """Run a coroutine in a world of its own, without a log: the same seed makes the same course of events.

    :param seed: also what :func:`os.urandom` and :mod:`random` are made of while it runs
    :raises StalledError: the coroutine waits for what never comes
    """
    state, thresholds, level = random.getstate(), gc.get_threshold(), logging.root.level
    random.seed(seed)
    logging.disable(logging.CRITICAL)
    # A world is small, and all of it is garbage at its end.
    gc.set_threshold(50_000, 50, 100)
    try:
        with _simulated_clocks() as simulated, _seeded(random.Random(~seed)):  # noqa: S311
            loop = SimulatedLoop(simulated, Draws(seed))
            try:
                asyncio.set_event_loop(loop)
                return _run(loop, world())
            finally:
                asyncio.set_event_loop(None)
                loop.close()
    finally:
        logging.disable(logging.NOTSET)
        # A worker sets it.
        logging.root.setLevel(level)
        gc.set_threshold(*thresholds)
        random.setstate(state)


def _run(loop: SimulatedLoop, main: Coroutine[Any, Any, _T]) -> _T:
    try:
        return loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())


_start_thread = threading.Thread.start


def _start_and_join(thread: threading.Thread) -> None:
    """Run a thread to its end, so that it does the same in each run; it must not wait for the event loop."""
    _start_thread(thread)
    thread.join(_THREAD_SECONDS)
    if thread.is_alive():
        raise StalledError(f"the thread {thread.name} waits for the event loop")


@contextmanager
def _simulated_clocks() -> Iterator[SimulatedTime]:
    with time_machine.travel(BEGIN, tick=False) as traveller:
        simulated = SimulatedTime(traveller)

        def seconds() -> float:
            return simulated.elapsed / 1e9

        with ExitStack() as patches:
            for clock in ("monotonic", "perf_counter"):
                patches.enter_context(patch.object(time, clock, seconds))
            # No CPU time passes, or tasks would give way at other moments in each run.
            patches.enter_context(patch.object(time, "thread_time", lambda: 0.0))
            patches.enter_context(patch.object(threading.Thread, "start", _start_and_join))
            yield simulated


@contextmanager
def _seeded(source: random.Random) -> Iterator[None]:
    with patch.object(os, "urandom", source.randbytes), patch.object(random, "_urandom", source.randbytes):
        yield


def simulated_loop() -> SimulatedLoop:
    """Return the running loop of a world."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimulatedLoop):
        raise TypeError("expected a loop of run_simulated")
    return loop
