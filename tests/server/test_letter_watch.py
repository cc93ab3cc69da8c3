"""Waits for dead letters on one connection share one follower, and end soon after the letter that they wait for."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Selection, connect, connection_settings
from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import LetterCriteria, wait_for_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed import seams
from testbed.face import stream_info, summarise_dead_letters
from testbed.queues import eventually, make_queue, probe, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from airflow_provider_jetstream.jetstream.dead_letters.find import Summary
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

# Longer than any test: what ends a wait is an entry, not the time.
_LONG = 3_600.0


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the queues whose letters are all proved."""
    names: list[str] = []
    prove = TrackedLetters.prove

    async def counted(connection: NatsPyConnection, queue: WorkQueue, *args: object, **options: object) -> object:
        names.append(queue.name)
        return await prove(connection, queue, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(TrackedLetters, "prove", counted)
    return names


async def die(connection: NatsPyConnection, queue: WorkQueue, *, terminated: bool = False) -> None:
    """Let a new job die; the follower may copy its body at any time."""
    await publish_jobs(connection, queue, ["x"])
    for _ in range(1 if terminated else queue.consumers[0].max_deliver or 1):
        for job in await pull_jobs(connection, queue, 1):
            await (job.term() if terminated else job.nak())
    await probe(connection, queue)


def wait(
    connection: NatsPyConnection, queue: WorkQueue, *, interval: float = _LONG, **criteria: object
) -> asyncio.Task[Summary]:
    """Begin to wait for dead letters."""
    chosen = LetterCriteria(**{"selection": Selection(), **criteria})  # type: ignore[arg-type]
    return asyncio.create_task(wait_for_dead_letters(connection, queue, chosen, interval))


async def ended(*waits: asyncio.Task[Summary]) -> list[Summary]:
    """Return the summaries of waits that are about to end."""
    async with asyncio.timeout(30):
        return await asyncio.gather(*waits)


async def test_many_waits_share_one_proof_and_each_ends_with_its_letter(
    connection: NatsPyConnection, name: str, proofs: list[str]
) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"])
    at_once, more = wait(connection, queue, count=2), wait(connection, queue, count=3)
    terminated = [wait(connection, queue, selection=Selection(reasons={"terminated"})) for _ in range(20)]
    none = wait(connection, queue, selection=Selection(reasons={"expired"}))
    (summary,) = await ended(at_once)
    assert (summary.dead, summary.ranges) == (2, [(1, 2)])
    assert len(proofs) == 1
    await die(connection, queue, terminated=True)
    for summary in await ended(*terminated):
        assert (summary.dead, summary.ranges) == (1, [(3, 3)])
    (summary,) = await ended(more)
    scanned = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.ranges, summary.uncertain) == (3, scanned.ranges, scanned.uncertain)
    assert not none.done()
    none.cancel()
    assert proofs == [name]


@pytest.mark.slow
async def test_a_wait_for_a_group_and_an_age(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    waiting = wait(connection, queue, group_by=("consumer",), age=timedelta(seconds=2.5))
    (summary,) = await ended(waiting)
    (group,) = summary.as_json()["groups"]
    assert group["count"] == 1
    assert group["oldest_age_seconds"] >= 2.5


@pytest.mark.slow
async def test_a_wait_sees_deaths_that_nothing_reports(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    waiting = wait(connection, queue, interval=0.5)
    await publish_jobs(connection, queue, ["a"])
    # The worker is gone, and no other one pulls.
    await pull_jobs(connection, queue, 1)
    (summary,) = await ended(waiting)
    assert (summary.dead, summary.ranges) == (1, [(1, 1)])


async def _is_followed(connection: NatsPyConnection, stream: str) -> bool:
    return bool((await stream_info(connection, stream))["state"]["consumer_count"])


@pytest.mark.slow
async def test_a_wait_goes_on_after_the_server_was_away(own_nats: NatsServer, name: str, proofs: list[str]) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queue = await make_queue(connection, name)
        waiting = wait(connection, queue)
        await eventually(lambda: proofs)
        await eventually(lambda: _is_followed(connection, f"{name}-dead"))
        own_nats.restart()
        await eventually(lambda: connection.reconnects, within=30)
        await die(connection, queue)
        (summary,) = await ended(waiting)
        assert (summary.dead, summary.ranges) == (1, [(1, 1)])
        # After a gap all letters are proved again.
        assert len(proofs) >= 2


async def test_a_wait_for_a_queue_that_is_deleted_fails(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    waiting = wait(connection, queue, interval=0.5)
    await asyncio.sleep(0)
    await connection.api(f"STREAM.DELETE.{name}")
    with pytest.raises(NotFoundError):
        await ended(waiting)
    # A later wait isn't told of it.
    await make_queue(connection, name)
    later = wait(connection, queue)
    await die(connection, queue)
    (summary,) = await ended(later)
    assert summary.dead == 1


async def test_a_letter_soon_after_a_long_proof_ends_a_wait_at_once(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    added = 0.0
    prove = TrackedLetters.prove

    async def long_proof(*args: object, **options: object) -> object:
        nonlocal added
        added += _LONG
        return await prove(*args, **options)  # type: ignore[arg-type]

    def monotonic() -> float:
        return time.monotonic() + added

    monkeypatch.setattr(TrackedLetters, "prove", long_proof)
    monkeypatch.setattr(seams.LETTER_WATCH_TIME, SimpleNamespace(monotonic=monotonic))
    waiting = wait(connection, queue, interval=3 * _LONG)
    await eventually(lambda: added)
    await die(connection, queue)
    (summary,) = await ended(waiting)
    assert summary.dead == 1
