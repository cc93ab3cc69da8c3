from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from nats.errors import Error as NatsError

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import ApiError, DeadlineError, UnreachableError
from testbed.queues import CONSUMER, eventually, make_queue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

    Attempt = Callable[[], Awaitable[object]]


async def test_a_refused_request_keeps_the_servers_codes(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(ApiError, match=f"stream not found .status 404, error 10059. in answer to STREAM.INFO.{name}"):
        await connection.api(f"STREAM.INFO.{name}")


async def test_a_request_without_a_responder_is_reported(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(UnreachableError, match=f"nobody answers on {name}: .* is away; try again"):
        await connection.request(name)


async def test_a_request_without_an_answer_ends_in_time(connection: NatsPyConnection, name: str) -> None:
    await connection.client.subscribe(name)
    connection.timeout = 0.2
    with pytest.raises(DeadlineError, match=f"no answer on {name} within 0.2 s"):
        await connection.request(name)


async def test_a_permanent_refusal_with_status_503_is_terminal(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(ApiError, match=r"clustering support required \(status 503, error 10010\)"):
        await connection.api(f"STREAM.PEER.REMOVE.{name}", {"peer": "n1"})


async def test_a_request_on_a_closed_connection_is_refused(nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (nats.url,)})) as opened:
        pass
    with pytest.raises(UnreachableError, match=r"the connection failed during a request on \$JS\.API\.INFO: "):
        await opened.api("INFO")
    assert opened.client.is_closed


async def test_leaving_with_an_error_closes_the_connection_and_keeps_the_error(nats: NatsServer) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with connect(connection_settings({"servers": (nats.url,)})) as opened:
            raise KeyError("mine")
    assert opened.client.is_closed


async def _publishing(connection: NatsPyConnection, name: str) -> Attempt:
    return lambda: connection.publish(name, b"")


async def _fetching(connection: NatsPyConnection, name: str) -> Attempt:
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=name)
    return lambda: pull.fetch(2, timeout=5)


async def _requesting(connection: NatsPyConnection, name: str) -> Attempt:
    return lambda: connection.api(f"STREAM.INFO.{name}")


WAYS = pytest.mark.parametrize("way", [_publishing, _fetching, _requesting])


@WAYS
async def test_who_tries_again_at_once_lets_a_lost_connection_come_back(
    own_nats: NatsServer, name: str, way: Callable[[NatsPyConnection, str], Awaitable[Attempt]]
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        await make_queue(connection, name, consumer={"ack_wait": "1m"}, jobs=["a", "b"])
        attempt, deadline = await way(connection, name), time.monotonic() + 30
        own_nats.kill()
        own_nats.restart()
        await eventually(lambda: not connection.is_connected)
        # Nothing in this loop waits, as in one around nats-py's fetch that ignores its errors.
        while not connection.is_connected:
            assert time.monotonic() < deadline, "the connection doesn't come back"
            with suppress(NatsError, UnreachableError):
                await attempt()


@WAYS
async def test_who_tries_again_at_once_on_a_closed_connection_can_be_cancelled(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    way: Callable[[NatsPyConnection, str], Awaitable[Attempt]],
) -> None:
    await make_queue(connection, name)
    async with connect(settings) as closed:
        attempt = await way(closed, name)
    attempts = itertools.count(1)

    async def insist() -> None:
        # A limit for the case that the task ignores its cancellation.
        for _ in zip(attempts, range(200_000), strict=False):
            with suppress(NatsError, UnreachableError):
                await attempt()

    insisting = asyncio.create_task(insist())
    await asyncio.sleep(0)
    insisting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await insisting
