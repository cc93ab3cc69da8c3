from __future__ import annotations

import asyncio
import time
from itertools import accumulate, repeat

import pytest

from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter


@pytest.mark.parametrize(("rate", "batch"), [(None, 250), (0.1, 1), (30, 1), (400, 12), (5_000, 150), (1e6, 250)])
def test_a_low_rate_has_small_batches(rate: float | None, batch: int) -> None:
    assert RateLimiter(rate).batch_size(250) == batch


async def test_without_a_rate_nothing_waits() -> None:
    started, pace = time.monotonic(), RateLimiter(None)
    for _ in range(1_000):
        await pace.wait(250)
        pace.consume(250)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("rate", [0.5, 7, 30, 400, 9_999])
@pytest.mark.parametrize("slowness", [[0.0], [0.001, 0.05], [0.0] * 40 + [1.5], [0.03], [0.0, 0.0, 0.2]])
async def test_no_period_has_more_than_the_rate_allows_however_slow_the_work_is(
    monkeypatch: pytest.MonkeyPatch, rate: float, slowness: list[float]
) -> None:
    now = 1_000.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = RateLimiter(rate)
    batch, went = pace.batch_size(250), list[float]()
    for delay in slowness * (400 // len(slowness)):
        await pace.wait(batch)
        pace.consume(batch)
        went.append(now)
        now += delay
    before = [0, *accumulate(repeat(batch, len(went)))]
    for first, start in enumerate(went):
        for last in range(first, len(went)):
            assert before[last + 1] - before[first] <= rate * (went[last] - start) + pace.burst + 1e-6
    fastest = batch / max(batch / rate, sum(slowness) / len(slowness))
    if len(set(slowness)) == 1:
        assert before[-1] / (went[-1] - went[0]) == pytest.approx(fastest, rel=0.05)


async def test_a_wait_can_be_cancelled() -> None:
    pace = RateLimiter(0.001)
    pace.consume(pace.burst)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pace.wait(1)
