"""Ends that are older than the message of their sequence, and terminations of jobs that are done."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream import (
    Status,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from testbed.dead_letters import request_for
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    completion_body,
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

_SAMPLED = {"max_deliver": 5, "ack_wait": "300ms", "sample_freq": "100%"}


@pytest.fixture(params=["2.15.0", "2.12.8"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NatsServer]:
    binary = find_nats_server() if request.param == "2.15.0" else nats_server_of(request.param)
    with NatsServer(tmp_path / "server", binary=binary) as running:
        yield running


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("evidence", ["completions", "ack metrics", "redriven", "handled"])
async def test_ends_of_jobs_that_a_loss_of_power_took_back_hide_no_dead_job_of_their_sequences(
    server: NatsServer, evidence: str
) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q", consumer={"sample_freq": "100%"})
        (early,) = await publish_jobs(connection, queue, ["early"])
        (message,) = await pull_jobs(connection, queue, 1)
        await message.ack_sync()
        folder, kept = server.store / "jetstream" / "$G" / "streams" / "q", server.folder / "q-before"
        await asyncio.sleep(0.4)
        shutil.copytree(folder, kept)
        await end_jobs(connection, queue, evidence)
    server.kill()
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    server.start()
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        cursor = await take_cursor(connection, queue)
        new = await make_dead_letters(connection, queue, ["new1", "new2"])
        # It ends with the first death.
        awaited = await asyncio.wait_for(wait(connection, cursor, new), 30)
        assert awaited.completed == set()
        assert awaited.dead.keys() <= set(new)
        assert awaited.dead
        assert new == [early + 1, early + 2]
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        findings = await find_dead_letters(connection, queue)
        left = {letter.sequence for letter in findings.letters} | set(report.redriven)
        uncertain = {job.sequence for job in findings.dismissed if job.status == Status.UNCERTAIN}
        assert left | uncertain == set(new)
        assert await stored_count(connection, "q") == 2
        if evidence == "completions":
            assert set(report.redriven) == set(new)


# Where acknowledgements are sampled, times of jobs are read first, in another order than bodies.
@pytest.mark.parametrize("sampled", ["0", "100%"])
async def test_a_terminated_job_has_its_own_body_where_an_older_one_had_its_sequence(
    server: NatsServer, sampled: str
) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q", consumer={"sample_freq": sampled})
        await publish_jobs(connection, queue, ["early"])
        folder, kept = server.store / "jetstream" / "$G" / "streams" / "q", server.folder / "q-before"
        await asyncio.sleep(0.4)
        shutil.copytree(folder, kept)
        await publish_jobs(connection, queue, ["old1", "old2", "old3"])
    server.kill()
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    server.start()
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        await publish_jobs(connection, queue, ["new1", "new2"])
        for message in await pull_jobs(connection, queue, 3):
            await message.term()

        async def entered() -> bool:
            return await stored_count(connection, "q-dead") >= 3

        await eventually(entered)
        found = await find_dead_letters(connection, queue)
        bodies = {letter.sequence: letter.body for letter in found.letters}
        assert bodies == {1: b"early", 2: b"new1", 3: b"new2"}


async def test_a_terminated_job_is_no_earlier_one_that_was_redriven(server: NatsServer) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q")
        folder, kept = server.store / "jetstream" / "$G" / "streams" / "q", server.folder / "q-before"
        await asyncio.sleep(0.4)
        shutil.copytree(folder, kept)
        await end_jobs(connection, queue, "redriven")
    server.kill()
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    server.start()
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        new = await publish_jobs(connection, queue, ["new1", "new2"])
        assert new == [1, 2]
        for message in await pull_jobs(connection, queue, 2):
            await message.term()

        async def entered() -> bool:
            return await stored_count(connection, "q-dead") >= len(new)

        await eventually(entered)
        found = await find_dead_letters(connection, queue)
        uncertain = {job.sequence for job in found.dismissed if job.status == Status.UNCERTAIN}
        assert {letter.sequence for letter in found.letters} | uncertain == set(new)
        report = await redrive_dead_letters(connection, queue, request_for(new))
        assert set(report.redriven) == set(new)
        assert {message.data for message in await pull_jobs(connection, queue, 2)} == {b"new1", b"new2"}


async def end_jobs(connection: NatsPyConnection, queue: WorkQueue, evidence: str) -> None:
    """End the two jobs of the next sequences, so that the companions have evidence of one kind about them."""
    if evidence in ("redriven", "handled"):
        dead = await make_dead_letters(connection, queue, ["old1", "old2"])
        if evidence == "redriven":
            assert set((await redrive_dead_letters(connection, queue)).redriven) == set(dead)
        for sequence in dead if evidence == "handled" else ():
            await connection.request(f"handled.q.{sequence}", b'{"by": "ann"}')
        return
    await publish_jobs(connection, queue, ["old1", "old2"])
    if evidence == "completions":
        for message in await pull_jobs(connection, queue, 2):
            metadata = message.metadata
            time = int(metadata.timestamp.timestamp() * 1_000_000) * 1_000
            headers = {"Nats-Msg-Id": f"done:q:{metadata.sequence.stream}:{time}"}
            subject = f"completed.q.{CONSUMER}.{metadata.sequence.stream}"
            body = completion_body("q", metadata.sequence.stream)
            await connection.client.jetstream().publish(subject, body, headers=headers)
            await message.ack_sync()
        return
    for message in await pull_jobs(connection, queue, 2):
        await message.ack_sync()

    async def reported() -> bool:
        return await stored_count(connection, "q-events") >= 3

    await eventually(reported)


@pytest.mark.parametrize("evidence", ["ack metric", "completion"])
@pytest.mark.parametrize("order", ["acknowledged first", "terminated first"])
async def test_a_termination_beside_a_stored_end_makes_no_letter(server: NatsServer, evidence: str, order: str) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q", consumer=_SAMPLED)
        cursor = await take_cursor(connection, queue)
        await publish_jobs(connection, queue, ["job"])
        waiting = asyncio.ensure_future(wait(connection, cursor, [1]))
        (slow,) = await pull_jobs(connection, queue, 1)
        (other,) = await pull_jobs(connection, queue, 1)
        steps: list[Callable[[], Awaitable[Any]]] = [
            other.ack_sync,
            lambda: connection.client.publish(slow.reply, b"+TERM gave up"),
        ]
        if evidence == "completion":
            steps[0] = lambda: connection.client.jetstream().publish(
                f"completed.q.{CONSUMER}.1", completion_body("q", 1)
            )
        elif order == "terminated first":
            # The server reports no acknowledgement of a job that is gone: it is terminated instead.
            steps[0] = other.ack
        for step in steps if order == "acknowledged first" else reversed(steps):
            await step()
            await connection.client.flush()

        async def entered() -> bool:
            return await stored_count(connection, "q-dead") == 1

        await eventually(entered)
        findings = await find_dead_letters(connection, queue)
        late = asyncio.ensure_future(wait(connection, cursor, [1]))
        if (evidence, order) == ("ack metric", "terminated first"):
            assert [letter.sequence for letter in findings.letters] == [1]
            assert [set((await found).dead) for found in (waiting, late)] == [{1}, {1}]
            return
        assert (await late).completed == {1}
        await waiting
        assert findings.letters == ()
        assert [job.status for job in findings.dismissed] == [Status.COMPLETED]
        assert findings.uncertain == 0
        assert (await redrive_dead_letters(connection, queue)).redriven == {}
        assert await stored_count(connection, "q") == 0


@pytest.mark.parametrize("others", [0, 2])
async def test_a_letter_whose_new_job_a_loss_of_power_took_is_redriven_once_more(
    server: NatsServer, others: int
) -> None:
    """The audit says that it was redriven; but the queue has neither the new job nor that the letter was removed."""
    streams, kept = server.store / "jetstream" / "$G" / "streams", server.folder / "before"
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        queue = await make_queue(connection, "q")
        await make_dead_letters(connection, queue, ["a"])
        assert len((await find_dead_letters(connection, queue)).letters) == 1
        await asyncio.sleep(0.4)
        for stream in ("q", "q-dead"):
            shutil.copytree(streams / stream, kept / stream)
        assert (await redrive_dead_letters(connection, queue)).redriven == {1: 2}
    server.kill()
    for stream in ("q", "q-dead"):
        shutil.rmtree(streams / stream)
        shutil.copytree(kept / stream, streams / stream)
    server.start()
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        if others:
            # Another job has the sequence of the one that is lost.
            await publish_jobs(connection, queue, ["b"] * others)
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        assert report.redriven == {1: 2 + others}
        bodies = {message.data for message in await pull_jobs(connection, queue, 1 + others)}
        assert bodies == ({b"a", b"b"} if others else {b"a"})


@pytest.mark.parametrize("is_parked", [False, True])
async def test_an_account_names_the_terminated_jobs_whose_entries_a_loss_of_power_took(
    server: NatsServer, *, is_parked: bool
) -> None:
    """An account had read the entries, and is stored in the audit, whose file is newer than the dead letter queue's."""
    folder, kept = server.store / "jetstream" / "$G" / "streams" / "q-dead", server.folder / "before"
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        queue = await make_queue(connection, "q", archive=True, consumer={"sample_freq": "100%"})
        await publish_jobs(connection, queue, ["early", "redriven", "lost"])
        early, redriven, lost = await pull_jobs(connection, queue, 3)
        await early.term()
        await _wait_for(connection, 1)
        await asyncio.sleep(0.4)
        shutil.copytree(folder, kept)
        await redriven.term()
        await lost.term()
        await _wait_for(connection, 3)
        assert (await account_for_jobs(connection, queue)).unaccounted == ()
        assert (await redrive_dead_letters(connection, queue, request_for([2]))).redriven == {2: 4}
        if is_parked:
            parked = await redrive_dead_letters(connection, queue, request_for([3], max_redrives=0))
            assert list(parked.parked) == [3]
        # The first account reads the entries, the second one also what was done with them.
        assert (await account_for_jobs(connection, queue)).unaccounted == ()
    server.kill()
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    server.start()
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1]
        for _ in range(2):
            account = await account_for_jobs(connection, queue)
            assert (account.unaccounted, account.unknown) == (((3, 3),), ())
        assert (await redrive_dead_letters(connection, queue, request_for([3]))).redriven == {3: 5}
        assert {message.data for message in await pull_jobs(connection, queue, 2)} == {b"redriven", b"lost"}
        assert (await account_for_jobs(connection, queue)).unaccounted == ()


async def _wait_for(connection: NatsPyConnection, entries: int) -> None:
    async def entered() -> bool:
        return await stored_count(connection, "q-dead") >= entries

    await eventually(entered)
