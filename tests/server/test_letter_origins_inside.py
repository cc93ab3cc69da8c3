"""What no face shows of letter origins."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Origin,
)
from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK
from airflow_provider_jetstream.jetstream.dead_letters import facts
from testbed.dead_letters import store_task, task_key
from testbed.face import Scan
from testbed.queues import exhaust_deliveries, make_queue, publish_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

# Sixty characters each, and beyond ASCII.
DAG = "größe_" + "d" * 54


SHOP = Origin(DAG, "manual__2026-11-21T00:00:00+00:00", "publish", 3)


PRINTS = Origin("prints", "r", "t")


async def make_letters_of(
    connection: NatsPyConnection, queue: WorkQueue, *origins: Origin, headers: dict[str, str] | None = None
) -> None:
    """Make a dead letter of each task."""
    for origin in origins:
        job_headers = {AIRFLOW_TASK: task_key(origin)} | (headers or {})
        await publish_jobs(connection, queue, [origin.task_id], headers=job_headers)
    await exhaust_deliveries(connection, queue, len(origins))


@pytest.mark.slow
async def test_letters_proved_again_have_the_origins_too(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    for origin in (SHOP, PRINTS):
        await store_task(connection, queue, origin)
    await make_letters_of(connection, queue, SHOP, PRINTS)
    scan = await Scan.begin(connection, queue)
    found = [letter async for letter in scan.letters()]
    assert [letter.origin for letter in found] == [SHOP, PRINTS]
    again = await scan.classify([letter.sequence for letter in found], refresh=True)
    assert [getattr(letter, "origin", None) for letter in again] == [SHOP, PRINTS]


async def test_more_keys_than_are_remembered_are_looked_up_again(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_MAX_KEYS", 2)
    queue = await make_queue(connection, name)
    await store_task(connection, queue, SHOP)
    origins = facts.LetterOrigins(connection, name, f"{name}-events")
    unknown = [sha256(b"%d" % number).hexdigest()[:32] for number in range(20)]
    for key in unknown[:5]:
        assert await origins.resolve([SHOP.key, key]) == {SHOP.key: SHOP}
    # Also where several pages are read at the same time.
    concurrent = await asyncio.gather(*(origins.resolve([SHOP.key, key]) for key in unknown))
    assert concurrent == [{SHOP.key: SHOP}] * len(unknown)
    assert await origins.resolve(unknown) == {}
