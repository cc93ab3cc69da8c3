"""Publishing that waits for room where not the queue alone is full: its account, its server, or one subject."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import ConnectionSettings, Job, PublishIncompleteError, connect, publish
from airflow_provider_jetstream.jetstream.errors import QueueFullError
from testbed.nats_server import NatsServer
from testbed.queues import make_queue, pull_jobs, stored_count

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

_LIMITS = "max_mem: 1MB\nmax_file: 1MB"
_ACCOUNT = (
    f"accounts {{\nA {{\njetstream {{\n{_LIMITS}\n}}\nusers = [{{user: u, password: p}}]\n}}\n}}\nno_auth_user: u"
)


@pytest.mark.parametrize(
    ("server", "found"),
    [
        (NatsServer(config=_ACCOUNT), "since its account may store no more (resource limits exceeded for account)"),
        (NatsServer(jetstream_config=_LIMITS), "since its server may store no more (insufficient resources)"),
    ],
    ids=["account", "server"],
)
async def test_the_limits_of_account_and_server_are_waited_for(server: NatsServer, found: str, name: str) -> None:
    with server:
        async with connect(ConnectionSettings(servers=(server.url,))) as connection:
            queue = await make_queue(connection, name, archive=False, consumer={"max_deliver": 3, "ack_wait": "1m"})
            jobs, subject = [Job(bytes(10_000)) for _ in range(110)], f"{name}.jobs.a"
            with pytest.raises(PublishIncompleteError) as caught:
                await publish(connection, queue, jobs, subject=subject)
            (failure, *_) = caught.value.report.failures
            assert isinstance(failure.error, QueueFullError)
            assert str(failure.error).startswith(f"{name} can't store it, {found}: let workers or a redrive free space")
            stored = await stored_count(connection, name)
            publishing = asyncio.create_task(publish(connection, queue, jobs[:8], subject=subject, room_timeout=20))
            for message in await pull_jobs(connection, queue, 10):
                await message.ack_sync()
            assert (await publishing).stored == 8
            assert await stored_count(connection, name) == stored - 2


@pytest.mark.slow
async def test_a_full_subject_holds_the_jobs_of_others_not_up(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(
        connection, name, archive=False, discard="new", consumer={"max_deliver": 3, "ack_wait": "1m"}
    )
    config = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}", config | {"max_msgs_per_subject": 1, "discard_new_per_subject": True})
    full, emptied = f"{name}.jobs.full", f"{name}.jobs.emptied"
    await publish(connection, queue, [Job(b"1", subject=emptied), Job(b"2", subject=full)])
    jobs = [Job(b"3", subject=full), *(Job(b"%d" % number, subject=emptied) for number in range(4, 9))]
    publishing = asyncio.create_task(publish(connection, queue, jobs, room_timeout=2))
    done: list[bytes] = []
    while len(done) < 6:
        (message,) = await pull_jobs(connection, queue, 1, within=10)
        if message.subject == emptied:
            done.append(message.data)
            await message.ack_sync()
    assert done == [b"1", *(b"%d" % number for number in range(4, 9))]
    with pytest.raises(PublishIncompleteError, match="maximum messages per subject exceeded") as caught:
        await publishing
    assert [failure.index for failure in caught.value.report.failures] == [0]
    assert await stored_count(connection, name) == 1
