from __future__ import annotations

import asyncio
import time
from itertools import cycle

import pytest

from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from testbed.rates import most_within

TEN_SECONDS = 10.0


class Clock:
    """A monotonic clock that only sleeping moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("rate", "batch"), [(None, 250), (0.1, 1), (30, 1), (400, 9), (5_000, 122), (1e6, 250)])
def test_a_low_rate_has_small_batches(rate: float | None, batch: int) -> None:
    assert RateLimiter(rate).batch_size(250) == batch


async def test_without_a_rate_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), RateLimiter(None)
    began = clock.now
    for _ in range(1_000):
        await pace.wait(250)
        pace.consume(250)
        pace.record_stored(250)
    assert clock.now == began


@pytest.mark.parametrize("rate", [0.2, 0.5, 1, 7, 20, 30, 400, 9_999])
@pytest.mark.parametrize(
    "slowness", [[0.0], [0.001, 0.05], [0.0] * 40 + [1.5], [0.03], [0.0, 0.0, 0.2], [0.0] * 7 + [25.0, 0.14]]
)
async def test_no_ten_seconds_have_more_than_the_rate_allows_however_slow_the_work_is(
    monkeypatch: pytest.MonkeyPatch, rate: float, slowness: list[float]
) -> None:
    clock, pace = Clock(monkeypatch), RateLimiter(rate)
    batch, sent, stored = pace.batch_size(250), list[float](), list[float]()
    delays, lateness = cycle(slowness), cycle([0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 1.0])
    for _ in range(max(200, int(rate * 25 / batch))):
        await pace.wait(batch)
        pace.consume(batch)
        sent.append(clock.now)
        # The server stores it at any time until its answer.
        delay = next(delays)
        stored += [clock.now + delay * next(lateness)] * batch
        clock.now += delay
        pace.record_stored(batch)
    for period in (TEN_SECONDS, 2 * TEN_SECONDS):
        assert most_within(stored, period) <= max(1, rate * period)
    if max(slowness) < 0.1:
        fastest = batch / max(batch / rate, sum(slowness) / len(slowness))
        assert batch * (len(sent) - 1) / (sent[-1] - sent[0]) == pytest.approx(fastest, rel=0.05)


@pytest.mark.parametrize("rate", [0.2, 1, 20, 3_000])
async def test_what_is_stored_late_delays_what_is_sent_after_it(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    clock, pace = Clock(monkeypatch), RateLimiter(rate)
    stored, in_flight = list[float](), 0
    for number in range(int(rate * 40) + 10):
        if in_flight > rate:
            # What was sent while the server was away arrives at once.
            clock.now += 3 / rate
        if in_flight > rate or number % 50 < 20:
            stored += [clock.now] * in_flight
            while in_flight:
                pace.record_stored(in_flight)
                in_flight -= 1
        await pace.wait(1)
        pace.consume(1)
        in_flight += 1
    assert most_within(stored, TEN_SECONDS) <= rate * TEN_SECONDS
