"""Redrives of many letters take few requests, and remove nothing but the letters' entries."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest, redrive_dead_letters
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.queues import make_dead_letters, make_queue, publish_jobs

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

LETTERS = 550


async def api_requests(connection: NatsPyConnection) -> int:
    return int((await connection.api("INFO"))["api"]["total"])


@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.IN_PLACE])
async def test_many_letters_take_few_api_requests_and_entries_of_others_stay(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    queue = await make_queue(connection, name, archive=None)
    letters = [str(number) for number in range(LETTERS)]
    await make_dead_letters(connection, queue, letters)
    foreign = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{name}.other"
    await connection.client.jetstream().publish(foreign, b"what nobody can read")
    await publish_jobs(connection, queue, ["alive"])
    before = await api_requests(connection)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=protocol))
    report.raise_for_failures()
    used = await api_requests(connection) - before
    assert len(report.redriven) == LETTERS
    assert report.entries_left == 0
    # The entries behind the first one of others are removed one by one, and these are none.
    assert used < 100
    assert [message.data for message in await stream_messages(connection, f"{name}-dead")] == [b"what nobody can read"]


async def test_the_next_batch_is_stored_while_the_one_before_is_finished(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 2)
    monkeypatch.setattr(seams.STEPS_LEAST_OVERLAPPED, 1)
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcdef")
    store_jobs, remove_originals = map(seams.current, (seams.STEPS_STORE_JOBS, seams.STORED_LETTERS_REMOVE_ORIGINALS))
    begun = [asyncio.Event() for _ in range(3)]
    batches, removed = iter(begun), 0

    async def store(*arguments: Any) -> Any:
        next(batches).set()
        return await store_jobs(*arguments)

    async def remove_once_the_next_is_stored(*arguments: Any) -> Any:
        nonlocal removed
        removed += 1
        await asyncio.wait_for(begun[min(removed, 2)].wait(), 10)
        return await remove_originals(*arguments)

    monkeypatch.setattr(seams.STEPS_STORE_JOBS, store)
    monkeypatch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, remove_once_the_next_is_stored)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failures, removed) == (6, 0, 3)
