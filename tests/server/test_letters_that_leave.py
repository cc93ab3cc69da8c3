"""Dead letters that leave a queue while a scan reads it: none counts as uncertain, and none that stays is missed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import RedriveRequest, find_dead_letters, redrive_dead_letters
from airflow_provider_jetstream.jetstream.contract import late_ack_subject
from testbed.queues import (
    CONSUMER,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

PATIENT = {"ack_wait": "30s"}
# A redrive waits for as long after a death, in case that a worker is slow.
QUICK = {"ack_wait": "1s"}
LETTERS = (1, 3)


async def _redrive(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await redrive_dead_letters(connection, queue, RedriveRequest())


async def _park(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))


async def _acknowledge_late(connection: NatsPyConnection, queue: WorkQueue) -> None:
    for sequence in LETTERS:
        await connection.request(late_ack_subject(queue.name, CONSUMER, sequence), b"+ACK")


async def _delete(connection: NatsPyConnection, queue: WorkQueue) -> None:
    for sequence in LETTERS:
        await connection.api(f"STREAM.MSG.DELETE.{queue.name}", {"seq": sequence})


async def _purge(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"STREAM.PURGE.{queue.name}", {"seq": 4})


def _once_counted(
    connection: NatsPyConnection, monkeypatch: pytest.MonkeyPatch, change: Callable[[], Awaitable[None]]
) -> None:
    """Change a queue once a scan has counted its consumers, before it reads entries."""
    api, changed = connection.api, asyncio.Event()

    async def changing(subject: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if subject == "STREAM.LIST" and not changed.is_set():
            changed.set()
            await change()
        return await api(subject, *args, **kwargs)

    monkeypatch.setattr(connection, "api", changing)


@pytest.mark.parametrize(
    ("leave", "consumer"),
    [(_redrive, QUICK), (_park, QUICK), (_acknowledge_late, PATIENT), (_delete, PATIENT), (_purge, PATIENT)],
)
async def test_letters_that_leave_while_others_die_are_not_uncertain(
    connection: NatsPyConnection,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    leave: Callable[[NatsPyConnection, WorkQueue], Awaitable[None]],
    consumer: dict[str, str],
) -> None:
    queue = await make_queue(connection, name, consumer=consumer)
    await make_dead_letters(connection, queue, "a")
    await publish_jobs(connection, queue, ["done"])
    await process_all(connection, queue)
    await make_dead_letters(connection, queue, "b")

    async def change() -> None:
        await leave(connection, queue)
        await publish_jobs(connection, queue, "c")
        await exhaust_deliveries(connection, queue, await stored_count(connection, name))

    _once_counted(connection, monkeypatch, change)
    assert (await find_dead_letters(connection, queue)).uncertain == 0


async def test_what_is_dead_without_an_entry_stays_uncertain_while_others_leave(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT)
    await publish_jobs(connection, queue, ["before", "running"])
    await pull_jobs(connection, queue, 2)
    await make_dead_letters(connection, queue, "abcd")
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 4})

    async def change() -> None:
        for sequence in (3, 4):
            await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})
        await publish_jobs(connection, queue, "ef")
        await exhaust_deliveries(connection, queue, 2)

    _once_counted(connection, monkeypatch, change)
    found = await find_dead_letters(connection, queue)
    assert found.uncertain == 1
