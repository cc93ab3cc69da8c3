from __future__ import annotations

import asyncio

import pytest

from airflow_provider_jetstream.plugins.monitor.request_cache import SingleFlightCache


class Counting:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        await asyncio.sleep(0.01)
        return self.calls


async def test_all_who_ask_at_the_same_time_share_one_answer() -> None:
    once, make = SingleFlightCache[int](2, 60), Counting()
    assert await asyncio.gather(*(once.get("a", make) for _ in range(20))) == [1] * 20
    assert await once.get("a", make) == 1


async def test_an_answer_is_kept_for_its_time() -> None:
    once, make = SingleFlightCache[int](2, 0), Counting()
    assert [await once.get("a", make), await once.get("a", make)] == [1, 2]


async def test_one_who_gives_up_takes_it_from_nobody() -> None:
    once, make = SingleFlightCache[int](2, 60), Counting()
    first, second = (asyncio.create_task(once.get("a", make)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1


async def test_an_error_is_not_kept() -> None:
    once = SingleFlightCache[int](2, 60)

    async def fail() -> int:
        raise KeyError("away")

    for _ in range(2):
        with pytest.raises(KeyError, match="away"):
            await once.get("a", fail)
    assert await once.get("a", Counting()) == 1


async def test_the_oldest_answers_are_forgotten() -> None:
    once, make = SingleFlightCache[int](2, 60), Counting()
    for key in "abc":
        await once.get(key, make)
    assert await once.get("a", make) == 4
