from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from fake_servers import fake_server

from airflow_provider_jetstream.jetstream import ConnectionSettings, connection_settings, shared_connection
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, UnreachableError
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import eventually

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from testbed.face import NatsPyConnection


def _settings(server: NatsServer, **values: Any) -> ConnectionSettings:
    return connection_settings({"servers": (server.url,), "timeout": 5, **values})


def _clients(server: NatsServer) -> int:
    return int(server.monitor("connz")["num_connections"])


class _User:
    """A user of the shared connection, until it leaves."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._context: AbstractAsyncContextManager[NatsPyConnection] = shared_connection(settings)
        self._leave = asyncio.Event()
        self.connection: asyncio.Future[NatsPyConnection] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._context as connection:
                self.connection.set_result(connection)
                await self._leave.wait()
        except JetStreamProviderError as error:
            self.connection.set_exception(error)

    async def leave(self) -> None:
        self._leave.set()
        await self._task

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_users_of_one_loop_share_one_connection_until_the_last_has_left(own_nats: NatsServer) -> None:
    users = [_User(_settings(own_nats)) for _ in range(20)]
    connections = await asyncio.gather(*(user.connection for user in users))
    assert len({id(connection) for connection in connections}) == 1
    assert _clients(own_nats) == 1
    await asyncio.gather(*(user.leave() for user in users[1:]))
    assert _clients(own_nats) == 1
    await connections[0].api("INFO")
    await users[0].leave()
    assert connections[0].client.is_closed
    await eventually(lambda: _clients(own_nats) == 0)


async def test_different_settings_get_different_connections(own_nats: NatsServer) -> None:
    one, other = _settings(own_nats), _settings(own_nats, name="another")
    async with shared_connection(one) as first, shared_connection(other) as second:
        assert first is not second
        assert _clients(own_nats) == 2


async def test_different_loops_get_different_connections(own_nats: NatsServer) -> None:
    entered, leave = threading.Event(), threading.Event()
    clients: list[object] = []

    async def use_in_other_loop() -> None:
        async with shared_connection(_settings(own_nats)) as connection:
            clients.append(connection.client)
            entered.set()
            await asyncio.to_thread(leave.wait, 10)
            await connection.api("INFO")

    async with shared_connection(_settings(own_nats)) as own:
        thread = asyncio.create_task(asyncio.to_thread(asyncio.run, use_in_other_loop()))
        await asyncio.to_thread(entered.wait, 10)
        assert clients[0] is not own.client
        assert _clients(own_nats) == 2
        leave.set()
        await thread
        await eventually(lambda: _clients(own_nats) == 1)
        await own.api("INFO")


async def test_a_failure_to_open_reaches_all_waiting_users_at_once_and_the_next_attempt_works() -> None:
    with NatsServer() as server:
        settings = _settings(server)
        server.stop()
        users = [_User(settings) for _ in range(10)]
        outcomes = await asyncio.gather(*(user.connection for user in users), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnreachableError] * 10
        server.start()
        async with shared_connection(settings) as connection:
            await connection.api("INFO")


@pytest.mark.slow
async def test_all_users_of_a_silent_server_wait_for_one_time_limit() -> None:
    async with fake_server() as fake:
        settings = connection_settings({"servers": (f"nats://{LOOPBACK}:{fake.port}",), "timeout": 1})
        users = [_User(settings) for _ in range(10)]
        outcomes = await asyncio.gather(*(user.connection for user in users), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {UnreachableError}
        # One attempt for all.
        assert fake.connections == 1


async def test_a_cancelled_user_does_not_cancel_the_attempt_of_the_others(own_nats: NatsServer) -> None:
    first, second = _User(_settings(own_nats)), _User(_settings(own_nats))
    await asyncio.sleep(0)
    await first.cancel()
    async with asyncio.timeout(5):
        connection = await second.connection
    await connection.api("INFO")
    assert _clients(own_nats) == 1
    await second.leave()
    await eventually(lambda: _clients(own_nats) == 0)


async def test_when_all_users_are_cancelled_nothing_is_left_open() -> None:
    async with fake_server() as fake:
        settings = connection_settings({"servers": (f"nats://{LOOPBACK}:{fake.port}",), "timeout": 30})
        users = [_User(settings) for _ in range(3)]
        await fake.connected.wait()
        others = asyncio.all_tasks()
        async with asyncio.timeout(5):
            await asyncio.gather(*(user.cancel() for user in users))
        await eventually(lambda: fake.open == 0)
        assert asyncio.all_tasks() <= others


async def test_a_closed_connection_is_replaced_while_it_has_users(own_nats: NatsServer) -> None:
    settings = _settings(own_nats)
    async with shared_connection(settings) as first:
        await first.client.close()
        async with shared_connection(settings) as second:
            assert second is not first
            await second.api("INFO")
    await eventually(lambda: _clients(own_nats) == 0)
