"""Coroutines that run ahead: their results come in order, and nothing goes on behind one that failed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.client.concurrency import in_order

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


@pytest.mark.parametrize(("ahead", "begun_before_the_first_result"), [(0, 1), (1, 2), (2, 3), (9, 5)])
async def test_results_come_in_order_and_as_many_run_ahead_as_asked(
    ahead: int, begun_before_the_first_result: int
) -> None:
    begun: list[int] = []

    async def work(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0.05 if number % 2 == 0 else 0)
        return number

    def works() -> Iterator[Coroutine[object, object, int]]:
        return (work(number) for number in range(5))

    results = in_order(works(), ahead)
    assert await anext(results) == 0
    assert len(begun) == begun_before_the_first_result
    assert [number async for number in results] == [1, 2, 3, 4]


async def test_what_runs_ahead_ends_where_one_fails_or_the_caller_stops() -> None:
    ended: list[int] = []

    async def work(number: int, *, fails: bool) -> int:
        try:
            if fails and number == 1:
                raise ValueError("the second one")
            await (asyncio.Event().wait() if number > 1 else asyncio.sleep(0))
        finally:
            ended.append(number)
        return number

    results = in_order((work(number, fails=True) for number in range(4)), 2)
    assert await anext(results) == 0
    with pytest.raises(ValueError, match="the second one"):
        await anext(results)
    assert sorted(ended) == [0, 1, 2]
    ended.clear()
    results = in_order((work(number, fails=False) for number in range(4)), 2)
    assert await anext(results) == 0
    await asyncio.sleep(0)
    await results.aclose()
    assert sorted(ended) == [0, 1, 2]
