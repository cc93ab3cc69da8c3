"""Coroutine functions are called concurrently, and the results come in order."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently


async def test_the_number_of_concurrent_calls_is_bounded() -> None:
    running = maximum = 0
    are_many = asyncio.Event()

    async def call(number: int) -> int:
        nonlocal running, maximum
        running += 1
        maximum = max(maximum, running)
        if running == MAX_CONCURRENT:
            are_many.set()
        # The first calls start over several turns of the loop: those before would be over otherwise.
        await are_many.wait()
        await asyncio.sleep(0)
        running -= 1
        return -number

    assert await map_concurrently(call, range(1_000)) == [-number for number in range(1_000)]
    assert maximum == MAX_CONCURRENT
    assert await map_concurrently(call, ()) == []


async def test_the_first_error_is_raised_after_the_other_calls_have_ended() -> None:
    ended: list[int] = []

    async def call(number: int) -> None:
        await asyncio.sleep(0.01 * number)
        ended.append(number)
        if number in (1, 3):
            raise ValueError(str(number))

    with pytest.raises(ValueError, match="1"):
        await map_concurrently(call, range(5))
    assert ended == [0, 1, 2, 3, 4]
