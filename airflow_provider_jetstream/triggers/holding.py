"""Keeping a trigger from firing before Airflow is ready for it.

Airflow's scheduler fails a task instance whose trigger fires before the scheduler has seen the end of the worker
process that deferred it. How long that takes isn't visible from a trigger, but a triggerer that was slow to start the
trigger belongs to an Airflow that is slow to see exits.
"""

from __future__ import annotations

import asyncio
import time

SHORTEST_HOLD = 5.0
LONGEST_HOLD = 15.0


class EarlyFireGuard:
    """Holds the event of one trigger run back for as long as firing might fail the task.

    :param deferred_at: seconds since the epoch at which the task deferred itself
    """

    def __init__(self, deferred_at: float) -> None:
        started = time.time()
        hold = min(max(started - deferred_at, SHORTEST_HOLD), LONGEST_HOLD)
        self._until = time.monotonic() + hold

    async def hold(self) -> None:
        """Return as soon as firing is safe."""
        if (left := self._until - time.monotonic()) > 0:
            await asyncio.sleep(left)
