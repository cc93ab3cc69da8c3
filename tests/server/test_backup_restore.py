"""A queue with its companions is backed up and restored by the server's own snapshots, in the order of docs/backup.md.

What is right afterwards, and what can't be: the page says both.
"""

from __future__ import annotations

import ast
import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Reason,
    RedriveRequest,
    Selection,
    Status,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, QueueGoneError
from testbed.code_blocks import ROOT, code_blocks
from testbed.dead_letters import acknowledge_jobs, make_terminated_letters
from testbed.face import consumer_info, stream_info
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    store_completion,
)
from testbed.stream_backup import StreamBackup, back_up, delete_stream, restore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

# What is named here names only what comes after it: the audit speaks of letters, a job of nothing.
ORDER = ("{}-audit", "{}", "{}-events", "{}-dead", "{}-archive")
_NUMBERS = ("messages", "first_seq", "last_seq")
# The server writes the state of a consumer a moment after it has changed, and a snapshot takes what is written.
PERSISTED = 0.4


@pytest.fixture
def empty_nats() -> Iterator[NatsServer]:
    """A second server."""
    with NatsServer() as server:
        yield server


def settings_of(server: NatsServer) -> ConnectionSettings:
    return connection_settings({"servers": (server.url,), "timeout": 5})


async def back_up_all(connection: NatsPyConnection, queue: WorkQueue) -> list[StreamBackup]:
    await asyncio.sleep(PERSISTED)
    return [await back_up(connection, name.format(queue.name)) for name in ORDER]


async def restore_all(connection: NatsPyConnection, queue: WorkQueue, backups: Sequence[StreamBackup]) -> None:
    """The queue last, since its consumers deliver as soon as it is there."""
    for backup in sorted(backups, key=lambda backup: backup.name == queue.name):
        await restore(connection, backup)


async def replace_all(connection: NatsPyConnection, queue: WorkQueue, backups: Sequence[StreamBackup]) -> None:
    """What is there now gives way to the backups."""
    for name in ORDER:
        await delete_stream(connection, name.format(queue.name))
    await restore_all(connection, queue, backups)


async def created_of(connection: NatsPyConnection, queue: WorkQueue) -> str:
    """When the queue's stream was created. A restore keeps that up to nats-server 2.14; from 2.15 on it doesn't."""
    return str((await stream_info(connection, queue.name))["created"])


async def numbers_of(connection: NatsPyConnection, queue: WorkQueue) -> dict[str, list[int]]:
    """By stream the number of its messages, and the first and the last sequence."""
    infos = [await stream_info(connection, name.format(queue.name)) for name in ORDER]
    # An empty stream that was restored begins with 1 rather than 0.
    return {
        info["config"]["name"]: [info["state"][number] for number in _NUMBERS if info["state"]["messages"]]
        for info in infos
    }


async def position_of(connection: NatsPyConnection, queue: WorkQueue) -> tuple[object, ...]:
    info = await consumer_info(connection, queue.name, CONSUMER)
    delivered, floor = info["delivered"], info["ack_floor"]
    return (
        *(info["num_pending"], info["num_ack_pending"]),
        *(delivered["stream_seq"], delivered["consumer_seq"], floor["stream_seq"]),
    )


async def publish_what_is_stale(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Run the page's own code."""
    (block,) = [block for block in code_blocks("python") if block.page == "docs/backup.md"]
    code = compile(block.numbered_code, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, {"connection": connection, "queue": queue})  # noqa: S307 - It is the page's.


@pytest.mark.slow
async def test_letters_of_a_backup_are_found_redriven_and_done_once_on_an_empty_server(
    own_nats: NatsServer, empty_nats: NatsServer, name: str
) -> None:
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, dead=["a", "b"])
        # Its body is in the archive only: no scan has copied it.
        await make_terminated_letters(connection, queue, ["c"])
        await publish_jobs(connection, queue, ["done"])
        await acknowledge_jobs(connection, queue, 1)
        await publish_jobs(connection, queue, ["d", "e"])
        numbers, position = await numbers_of(connection, queue), await position_of(connection, queue)
        backups = await back_up_all(connection, queue)
        created = await created_of(connection, queue)
    own_nats.kill()
    async with connect(settings_of(empty_nats)) as connection:
        await restore_all(connection, queue, backups)
        assert await numbers_of(connection, queue) == numbers
        assert await position_of(connection, queue) == position
        findings = await find_dead_letters(connection, queue)
        found = {letter.sequence: letter.body for letter in findings.letters}
        if await created_of(connection, queue) == created:
            assert found == {1: b"a", 2: b"b", 3: b"c"}
            assert {letter.death.reason for letter in findings.letters} == {Reason.MAX_DELIVERIES, Reason.TERMINATED}
        else:
            # What is said of them is older than the stream, so it counts for nothing: the numbers tell the others.
            assert found == {1: b"a", 2: b"b"}
            assert {letter.death.reason for letter in findings.letters} == {Reason.ORPHAN}
            assert [(letter.sequence, letter.status) for letter in findings.dismissed] == [(3, Status.STALE)]
        assert findings.uncertain == 0
        await publish_what_is_stale(connection, queue)
        report = await redrive_dead_letters(connection, queue)
        assert (report.redriven.keys(), report.failed) == (found.keys(), {})
        assert await process_all(connection, queue) == dict.fromkeys("abcde", 1)
        assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_letters_of_a_backup_are_done_once_in_a_cluster_that_may_drop_them_while_it_restores() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 5})) as connection:
            queue = await make_queue(connection, "orders", num_replicas=3, dead=["a", "b"])
            await make_terminated_letters(connection, queue, ["c"])
            await publish_jobs(connection, queue, ["d"])
            backups = await back_up_all(connection, queue)
            await replace_all(connection, queue, backups)
            await asyncio.to_thread(cluster.wait_settled, queue.name)
            findings = await find_dead_letters(connection, queue)
            gone = {letter.sequence: letter.status for letter in findings.dismissed}
            assert {letter.sequence for letter in findings.letters} | gone.keys() == {1, 2, 3}
            # Unaccounted where the stream keeps its creation, else stale.
            assert set(gone.values()) <= {Status.STALE, Status.UNACCOUNTED}
            await publish_what_is_stale(connection, queue)
            await redrive_dead_letters(connection, queue, RedriveRequest(Selection(unaccounted=True)))
            assert await process_all(connection, queue) == dict.fromkeys("abcd", 1)


@pytest.mark.slow
async def test_a_copy_of_a_stopped_servers_folder_has_everything(tmp_path: Path, name: str) -> None:
    with NatsServer(tmp_path / "first") as server:
        async with connect(settings_of(server)) as connection:
            queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, dead=["a"])
            await make_terminated_letters(connection, queue, ["b"])
            headers = {"Nats-Msg-Id": "c"}
            await publish_jobs(connection, queue, ["c"], headers=headers)
            created = await created_of(connection, queue)
        await asyncio.to_thread(server.stop)
        shutil.copytree(server.store, tmp_path / "second" / "store")
    with NatsServer(tmp_path / "second") as server:
        async with connect(settings_of(server)) as connection:
            assert await created_of(connection, queue) == created
            findings = await find_dead_letters(connection, queue)
            assert {letter.body: letter.death.reason for letter in findings.letters} == {
                b"a": Reason.MAX_DELIVERIES,
                b"b": Reason.TERMINATED,
            }
            assert await publish_jobs(connection, queue, ["c"], headers=headers) == [3]
            await redrive_dead_letters(connection, queue)
            assert await process_all(connection, queue) == dict.fromkeys("abc", 1)


@pytest.mark.slow
async def test_a_job_that_ended_after_the_backup_runs_once_more(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%", "max_deliver": 3, "ack_wait": "1s"})
    await publish_jobs(connection, queue, ["in flight", "pending"])
    (running,) = await pull_jobs(connection, queue, 1)
    backups = await back_up_all(connection, queue)
    await running.ack_sync()
    assert await process_all(connection, queue) == {"pending": 1}
    await replace_all(connection, queue, backups)
    # What was pending is delivered for the first time, what was in flight after its ack wait for the second.
    attempts = {}
    for _ in range(2):
        (message,) = await pull_jobs(connection, queue, 1)
        attempts[message.data.decode()] = message.metadata.num_delivered
        await message.ack_sync()
    assert attempts == {"pending": 1, "in flight": 2}
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 0)
    assert (await account_for_jobs(connection, queue)).unaccounted == ()


@pytest.mark.slow
async def test_ids_are_known_only_of_stored_jobs_and_only_where_the_stream_keeps_its_creation(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window="2m")
    jetstream = connection.client.jetstream()

    async def is_duplicate(job: str) -> bool:
        answer = await jetstream.publish(f"{name}.jobs.a", job.encode(), headers={"Nats-Msg-Id": job})
        return bool(answer.duplicate)

    assert not await is_duplicate("done")
    await acknowledge_jobs(connection, queue, 1)
    assert not await is_duplicate("stored")
    assert await is_duplicate("done")
    created = await created_of(connection, queue)
    await replace_all(connection, queue, await back_up_all(connection, queue))
    assert await is_duplicate("stored") == (await created_of(connection, queue) == created)
    assert not await is_duplicate("done")


@pytest.mark.slow
async def test_a_wait_for_a_lost_job_ends_with_an_error_or_with_the_end_of_another_job(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, jobs=["before"])
    await process_all(connection, queue)
    backups, created = await back_up_all(connection, queue), await created_of(connection, queue)
    cursor = await take_cursor(connection, queue)
    lost = await publish_jobs(connection, queue, ["lost"])
    await replace_all(connection, queue, backups)
    assert await publish_jobs(connection, queue, ["another"]) == lost
    waiting = asyncio.create_task(asyncio.wait_for(wait(connection, cursor, lost), 50))
    await acknowledge_jobs(connection, queue, 1)
    if await created_of(connection, queue) == created:
        assert (await waiting).completed == set(lost)
    else:
        with pytest.raises(QueueGoneError, match="created anew"):
            await waiting


@pytest.mark.slow
@pytest.mark.parametrize("newer", ["queue", "audit"])
async def test_a_letter_that_is_redriven_between_two_backups_is_lost_if_the_audit_is_the_newer_one(
    connection: NatsPyConnection, name: str, newer: str
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    created = await created_of(connection, queue)
    first, second, *others = ORDER if newer == "queue" else (ORDER[1], ORDER[0], *ORDER[2:])
    await asyncio.sleep(PERSISTED)
    backups = [await back_up(connection, first.format(name))]
    assert dict((await redrive_dead_letters(connection, queue)).redriven) == {1: 2}
    backups += [await back_up(connection, each.format(name)) for each in (second, *others)]
    await replace_all(connection, queue, backups)
    await redrive_dead_letters(connection, queue)
    is_lost = newer == "audit" and await created_of(connection, queue) == created
    assert await process_all(connection, queue) == ({} if is_lost else {"a": 1})


@pytest.mark.slow
async def test_events_that_are_newer_than_the_queue_hide_no_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, jobs=["before"])
    await process_all(connection, queue)
    await asyncio.sleep(PERSISTED)
    backup = await back_up(connection, name)
    (lost,) = await publish_jobs(connection, queue, ["lost"])
    await store_completion(connection, queue, lost)
    await process_all(connection, queue)
    await delete_stream(connection, name)
    await restore(connection, backup)
    assert await make_dead_letters(connection, queue, ["new"]) == [lost]
    findings = await find_dead_letters(connection, queue)
    # The completion of the job that is lost is older than the one that has its sequence now.
    assert [letter.body for letter in findings.letters] == [b"new"]
    assert (findings.dismissed, findings.uncertain) == ((), 0)


async def test_a_stream_that_exists_is_not_restored_and_one_in_memory_only_by_newer_servers(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name)
    backup = await back_up(connection, name)
    with pytest.raises(ApiError, match="10130"):
        await restore(connection, backup)
    in_memory = f"{name}x"
    queue = await make_queue(connection, in_memory, storage="memory")
    await publish_jobs(connection, queue, ["a"])
    try:
        backup = await back_up(connection, in_memory)
    except ApiError as error:
        assert "10064" in str(error)  # noqa: PT017 - Servers before 2.15 refuse it.
    else:
        await delete_stream(connection, in_memory)
        await restore(connection, backup)
        assert await process_all(connection, queue) == {"a": 1}


def test_the_page_backs_up_in_the_tested_order_and_restores_the_queue_last() -> None:
    page = (ROOT / "docs/backup.md").read_text()
    lines = [line.split() for line in page.splitlines()]
    assert [words[3] for words in lines if words[:3] == ["nats", "stream", "backup"]] == [
        name.format("orders") for name in ORDER
    ]
    restored = [words[3].partition("/")[2] for words in lines if words[:3] == ["nats", "stream", "restore"]]
    assert sorted(restored) == sorted(name.format("orders") for name in ORDER)
    assert restored[-1] == "orders"
