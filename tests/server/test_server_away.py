"""Publishing while the server can't store a job just now: it shuts down gracefully, elects a leader, or is full."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import PublishIncompleteError, connect, connection_settings, publish
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueFullError, TransientError, UnreachableError
from testbed.face import PreparedJobs, publish_prepared
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_queue, process_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from nats.aio.msg import Msg

    from testbed.face import NatsPyConnection

_NAME = "q"
_SECONDS = 60
# The shortest times that the server accepts, so that it closes its clients' connections soon.
_LAME_DUCK = 'lame_duck_grace_period: "2s"\nlame_duck_duration: "30s"'


@asynccontextmanager
async def _connected(*servers: str, **settings: Any) -> AsyncIterator[NatsPyConnection]:
    async with connect(connection_settings({"servers": servers, "timeout": 5} | settings)) as opened:
        yield opened


def _jobs(count: int, batch: str = _NAME) -> Iterable[Any]:
    return PreparedJobs([f"job {n}" for n in range(count)], subject=f"{_NAME}.jobs.a", origin=None, batch=batch)


@pytest.mark.slow
async def test_a_server_in_lame_duck_mode_is_a_transient_error() -> None:
    with NatsServer(config=_LAME_DUCK.replace('"2s"', '"25s"')) as server:
        async with _connected(server.url) as connection:
            await make_queue(connection, _NAME)
            await _begin_lame_duck(server)
            report = await asyncio.wait_for(publish_prepared(connection, _jobs(600), away_timeout=1), _SECONDS)
            with pytest.raises(
                PublishIncompleteError, match=r"no stream answers on q\.jobs\.a just now, and whether one"
            ):
                report.raise_for_failures()
            assert len(report.failures) == 600
            assert all(isinstance(failure.error, UnreachableError) for failure in report.failures)
            # They got an answer: that nobody takes them.
            assert all(failure.certain for failure in report.failures)
            server.kill()


async def _begin_lame_duck(server: NatsServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGUSR2)
    # Its connections are open, and nothing stores jobs any more.
    await eventually(lambda: "] JetStream Shutdown" in server.log(), within=_SECONDS)


@pytest.mark.slow
async def test_a_stream_without_a_leader_gets_its_jobs_when_it_has_one_again() -> None:
    with NatsCluster() as cluster:
        meta_leader = await asyncio.to_thread(cluster.meta_leader)
        kept_on, client_on = (name for name in cluster.servers if name != meta_leader)
        async with _connected(cluster.server(client_on).url) as connection:
            config = {"name": _NAME, "subjects": [f"{_NAME}.>"], "placement": {"tags": [kept_on]}}
            await connection.api(f"STREAM.CREATE.{_NAME}", config)
            assert (await publish_prepared(connection, _jobs(5, "first"))).stored == 5
            await asyncio.to_thread(cluster.kill, kept_on)
            failed = await publish_prepared(connection, _jobs(3, "failed"), away_timeout=1)
            with pytest.raises(PublishIncompleteError, match=r"q captures q\.jobs\.a and doesn't answer just now"):
                failed.raise_for_failures()
            publishing = asyncio.create_task(publish_prepared(connection, _jobs(5, "second")))
            await asyncio.to_thread(cluster.restart, kept_on)
            report = await asyncio.wait_for(publishing, _SECONDS)
            report.raise_for_failures()
            assert list(report.sequences) == [6, 7, 8, 9, 10]


async def test_a_server_that_can_store_nothing_for_too_long_ends_the_call(
    connection: NatsPyConnection, name: str
) -> None:
    refusal = {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}

    async def answer_as_a_server_without_a_leader(message: Msg) -> None:
        await message.respond(json.dumps({"error": refusal, "stream": name}).encode())

    await connection.client.subscribe(f"{name}.>", cb=answer_as_a_server_without_a_leader)
    jobs = PreparedJobs(["a", "b"], subject=f"{name}.jobs.a", origin=None, batch=name)
    report = await asyncio.wait_for(publish_prepared(connection, jobs, away_timeout=0.5), _SECONDS)
    assert report.stored == 0
    assert [failure.certain for failure in report.failures] == [True, True]
    assert all(isinstance(failure.error, UnreachableError) for failure in report.failures)
    assert "can't store it just now" in str(report.failures[0].error)


@pytest.mark.parametrize("storage", ["file", "memory"])
async def test_an_account_that_may_store_no_more_is_a_transient_error_and_its_jobs_wait_for_room(storage: str) -> None:
    limits = "accounts { A { jetstream { max_file: 200KB, max_mem: 200KB }, users [{user: a, password: a}] } }"
    with NatsServer(config=limits) as server:
        async with _connected(server.url, user="a", password="a") as connection:
            # Reports of acknowledgements would take of the account's room, too.
            consumer = {"ack_wait": "1m", "sample_freq": "0"}
            queue = await make_queue(connection, _NAME, storage=storage, consumer=consumer)
            bodies = [f"{number:01000}" for number in range(300)]
            with pytest.raises(TransientError, match=r"account may store no more \(resource limits exceeded") as caught:
                await publish(connection, queue, bodies, subject=f"{_NAME}.jobs.a")
            assert isinstance(caught.value, PublishIncompleteError)
            assert {type(failure.error) for failure in caught.value.report.failures} == {QueueFullError}
            await process_all(connection, queue)
            more = asyncio.create_task(
                publish(connection, queue, bodies, subject=f"{_NAME}.jobs.a", room_timeout=_SECONDS)
            )
            while not more.done():
                await process_all(connection, queue)
            assert (await more).stored == 300


async def test_a_subject_that_no_stream_captures_is_looked_up_rather_than_tried_for_each_job(
    own_nats: NatsServer,
) -> None:
    async with _connected(own_nats.url) as connection:
        await connection.api("INFO")
        before = own_nats.monitor("varz")["in_msgs"]
        report = await publish_prepared(connection, _jobs(3_000))
        assert {type(failure.error) for failure in report.failures} == {NotFoundError}
        assert len(report.failures) == 3_000
        assert own_nats.monitor("varz")["in_msgs"] - before < 3_000
