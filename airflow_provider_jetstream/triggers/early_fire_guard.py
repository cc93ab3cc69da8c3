"""Keeps a trigger from firing before Airflow is ready for its event.

Airflow's scheduler fails a task instance whose trigger fires before the scheduler has seen the end of the worker
process that deferred it. The process that supervises the worker may notice that end only ``[workers]
min_heartbeat_interval`` later, and the scheduler needs its own time after that: up to one round of its loop. A trigger
can't see how long that takes, but a triggerer that was slow to start the trigger, or whose machine has more to do than
it can, belongs to an Airflow that is slow to see exits.
"""

from __future__ import annotations

import asyncio
import os
import time

from airflow_provider_jetstream.airflow_compat import conf

SHORTEST_MARGIN = 3.0
LONGEST_MARGIN = 10.0
SETTLED_AFTER = 60.0
# Seconds of a round of the scheduler's loop for each process that is ready to run on a core: rounds took 5 to 6 s where
# sixteen tasks started at once on two cores.
_LOOP_SECONDS = 3.0


def exit_notice_seconds() -> float:
    """Return how long Airflow may take to notice that the process which deferred a task has ended."""
    return float(conf.getfloat("workers", "min_heartbeat_interval", fallback=5.0))


def shortest_delay(elapsed: float = 0.0) -> float:
    """Return how many seconds after a deferral its task may be resumed at the earliest.

    :param elapsed: seconds that Airflow took to start the trigger
    """
    margin = min(max(elapsed, _LOOP_SECONDS * _load(), SHORTEST_MARGIN), LONGEST_MARGIN)
    return exit_notice_seconds() + margin


def _load() -> float:
    """Return how many processes were ready to run on each core of this machine in the last minute."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


class EarlyFireGuard:
    """Delays the event of one trigger run for as long as firing might fail the task.

    :param deferred_at: seconds since the epoch at which the task deferred itself
    """

    __slots__ = ("_until",)

    def __init__(self, deferred_at: float) -> None:
        elapsed = time.time() - deferred_at
        # A trigger that another triggerer takes over belongs to a task whose end was seen long ago.
        self._until = time.monotonic() + (shortest_delay(elapsed) if elapsed < SETTLED_AFTER else 0.0)

    async def wait(self) -> None:
        """Return as soon as firing is safe."""
        if (remaining := self._until - time.monotonic()) > 0:
            await asyncio.sleep(remaining)
