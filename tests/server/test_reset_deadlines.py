"""A reset arrives while its consumer is paused, or it isn't sent; one that isn't answered is looked up."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    connection_settings,
    redrive_dead_letters,
)
from testbed import seams
from testbed.face import consumer_info
from testbed.queues import make_dead_letters, make_queue, process_all
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer
    from testbed.tcp_proxy import TcpProxy

IN_PLACE = RedriveRequest(protocol=Protocol.IN_PLACE)


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that fails after a fraction of a second, and a pause that outlasts it by a little."""
    for name, seconds in (("_RESET_SECONDS", 0.3), ("_LATE_SECONDS", 3.0), ("_CHECK_SECONDS", 1.0)):
        monkeypatch.setattr(f"{seams.IN_PLACE}.{name}", seconds)


@asynccontextmanager
async def proxied(nats: NatsServer) -> AsyncIterator[tuple[TcpProxy, NatsPyConnection]]:
    async with (
        tcp_proxy(nats.port) as proxy,
        connect(connection_settings({"servers": (proxy.url,), "timeout": 5})) as connection,
    ):
        yield proxy, connection


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.usefixtures("short_times")
async def test_a_reset_whose_answer_is_late_is_found_to_be_done(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    async with proxied(nats) as (proxy, redriving):
        proxy.pause_at(b".CONSUMER.RESET.")
        redrive = asyncio.create_task(redrive_dead_letters(redriving, queue, IN_PLACE))
        await asyncio.wait_for(proxy.found.wait(), 10)
        await asyncio.sleep(0.5)
        proxy.resume()
        report = await redrive
    assert (dict(report.redriven), report.failures) == ({1: 1, 2: 2}, 0)
    assert not (await consumer_info(connection, name, "worker")).get("paused")
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.usefixtures("short_times")
async def test_a_reset_that_never_arrives_leaves_the_consumer_paused_for_as_long_as_it_might(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    async with proxied(nats) as (proxy, redriving):
        proxy.pause_at(b".CONSUMER.RESET.")
        redrive = asyncio.create_task(redrive_dead_letters(redriving, queue, IN_PLACE))
        await asyncio.wait_for(proxy.found.wait(), 10)
        proxy.cut()
        proxy.drop()
        proxy.mend()
        report = await redrive
        assert (dict(report.redriven), sorted(report.failed)) == ({}, [1, 2])
        expected = "consumer worker isn't known to be reset (no answer on $JS.API.CONSUMER.RESET."
        assert report.failed[1].startswith(expected)
        assert "it stays paused for at most 6.3 s" in report.failed[1]
    info = await consumer_info(connection, name, "worker")
    assert info["paused"]
    assert info["pause_remaining"] < 6.3e9
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_nothing_is_reset_in_a_pause_that_is_too_short(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")

    async def leave_as_it_is(*_: object) -> None:
        return

    with monkeypatch.context() as patch:
        patch.setattr(seams.CONSUMER_PAUSE_PROLONG, leave_as_it_is)
        report = await redrive_dead_letters(connection, queue, IN_PLACE)
    assert re.match(r"expected consumer worker to be paused for \d+ s more, found \d", report.failed[1])
    assert await process_all(connection, queue) == {}
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_pause_of_somebody_else_is_never_shortened(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    await connection.api(f"CONSUMER.PAUSE.{name}.worker", {"pause_until": until})
    before = (await consumer_info(connection, name, "worker"))["config"]["pause_until"]
    write, seen = seams.current(seams.LETTER_RECORDS_WRITE_REQUEUED), []

    async def look(*arguments: object) -> None:
        seen.append((await consumer_info(connection, name, "worker"))["config"]["pause_until"])
        await write(*arguments)

    monkeypatch.setattr(seams.LETTER_RECORDS_WRITE_REQUEUED, look)
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert seen == [before]
    assert (await consumer_info(connection, name, "worker"))["config"]["pause_until"] == before
