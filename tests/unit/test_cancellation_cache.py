from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_jetstream.jetstream.cancellation.cache import CancellationCache
from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
from airflow_provider_jetstream.jetstream.errors import UnreachableError

_NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
_HOUR = timedelta(hours=1)


async def _waiting(cache: CancellationCache, job_id: str, stored_at: datetime) -> asyncio.Task[Cancellation]:
    task = asyncio.create_task(cache.wait(job_id, stored_at))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(("stored_at", "meant"), [(_NOON - _HOUR, True), (_NOON, True), (_NOON + _HOUR, False)])
def test_a_cancellation_covers_jobs_that_were_stored_before_it(stored_at: datetime, *, meant: bool) -> None:
    cache = CancellationCache()
    cache.add(Cancellation("a", _NOON))
    assert (cache.get("a", stored_at) is not None) == meant
    assert cache.get("b", stored_at) is None


async def test_a_wait_fails_when_no_more_cancellations_arrive() -> None:
    cache = CancellationCache()
    task = await _waiting(cache, "a", _NOON)
    cache.add(Cancellation("b", _NOON))
    cache.fail(UnreachableError("the connection is closed"))
    for waiting in (task, cache.wait("c", _NOON)):
        with pytest.raises(UnreachableError):
            await waiting
    assert cache.get("b", _NOON)


def test_cancellations_older_than_the_server_stores_are_removed() -> None:
    cache = CancellationCache(max_age=_HOUR)
    cache.add(Cancellation("a", _NOON))
    cache.add(Cancellation("b", _NOON))
    cache.add(Cancellation("a", _NOON + _HOUR))
    cache.add(Cancellation("c", _NOON + 1.5 * _HOUR))
    assert [bool(cache.get(job_id, _NOON - _HOUR)) for job_id in "abc"] == [True, False, True]
