"""A wait for very many jobs, which is kept apart from those for few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import WaitPolicy, take_cursor
from testbed import seams
from testbed.queues import make_queue, publish_jobs, pull_jobs
from testbed.waiters import start_waiting, store_completions, wait_reports

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wait for ten jobs be one for many."""
    monkeypatch.setattr(seams.AWAITED_JOBS_MANY, 10)


@pytest.mark.slow
async def test_waits_for_many_and_for_few_jobs_get_the_ends_of_their_jobs(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.2)
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m", "max_deliver": 3})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(30)))
    policy = WaitPolicy(None, None, None)
    waiters = [start_waiting(connection, cursor, of, policy) for of in (jobs, jobs[:3], jobs[2:20], jobs[25:])]
    messages = await pull_jobs(connection, queue, 30)
    await store_completions(connection, queue, jobs[:20])
    for message in messages:
        await message.ack_sync()
    late = start_waiting(connection, cursor, jobs[1:29], policy)
    reports = await wait_reports([*waiters, late], within=30)
    gone = set(jobs[20:])
    for report, of in zip(reports, (jobs, jobs[:3], jobs[2:20], jobs[25:], jobs[1:29]), strict=True):
        assert report.completed == set(of) - gone
        assert report.unaccounted == set(of) & gone
