from __future__ import annotations

import asyncio

from airflow_provider_jetstream.plugins.monitor.background import SingleFlightCache


class CountedComputation:
    """Counts its calls, and returns their number."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        await asyncio.sleep(0.01)
        return self.calls


async def test_a_cancelled_request_does_not_cancel_the_computation_of_others() -> None:
    cache, compute = SingleFlightCache[int](2, 60), CountedComputation()
    first, second = (asyncio.create_task(cache.get("a", compute)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1


async def test_the_oldest_results_are_dropped_first() -> None:
    cache, compute = SingleFlightCache[int](2, 60), CountedComputation()
    for key in "abc":
        await cache.get(key, compute)
    assert await cache.get("a", compute) == 4
