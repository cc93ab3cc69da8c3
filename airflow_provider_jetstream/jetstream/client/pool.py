"""A pool with one connection per settings and event loop, which all users share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.connect import connect

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.client.outage import RenewSettings
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings


@dataclass
class _Shared:
    settings: ConnectionSettings
    users: int = 0
    opening: asyncio.Task[NatsPyConnection] | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def open_attempt(self, settings: ConnectionSettings, renew: RenewSettings | None) -> asyncio.Task[NatsPyConnection]:
        """Return the one attempt to open that all waiting users share, its failure too; later users start another."""
        if self.opening is None or (self.opening.done() and not _is_usable(self.opening)):
            self.opening = asyncio.create_task(self._open(settings, renew))
        return self.opening

    async def close(self) -> None:
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
            await asyncio.gather(self.opening, return_exceptions=True)
        await self.stack.aclose()

    async def _open(self, settings: ConnectionSettings, renew: RenewSettings | None) -> NatsPyConnection:
        await self.stack.aclose()
        return await self.stack.enter_async_context(connect(settings, renew))


def _is_usable(opening: asyncio.Task[NatsPyConnection]) -> bool:
    return not opening.cancelled() and opening.exception() is None and not opening.result().is_closed


# Keyed by the loop itself: ids of closed loops are reused, and requests from another loop only time out.
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ConnectionSettings, _Shared]] = WeakKeyDictionary()


class SharedConnection:
    """Uses a connection of the pool while the block runs; see :func:`shared_connection`."""

    # Not a generator, nor an attribute more than needed: a triggerer has one for each of ten thousand waits.
    __slots__ = ("_shared", "_source")

    def __init__(self, settings: ConnectionSettings, renew: RenewSettings | None) -> None:
        self._source: tuple[ConnectionSettings, RenewSettings | None] | None = (settings, renew)
        self._shared: _Shared | None = None

    async def __aenter__(self) -> NatsPyConnection:
        if self._source is None:
            raise RuntimeError("a shared connection can be used once: call shared_connection again")
        (settings, renew), self._source = self._source, None
        pool = _loops.setdefault(asyncio.get_running_loop(), {})
        shared = pool.get(settings)
        if shared is None:
            shared = pool[settings] = _Shared(settings)
        shared.users += 1
        try:
            # Shielded: a user that is cancelled while it waits must not cancel the attempt of the others.
            connection = await asyncio.shield(shared.open_attempt(settings, renew))
            await _require_connected(connection, settings.timeout)
        except BaseException:
            await _leave(shared)
            raise
        self._shared = shared
        return connection

    async def __aexit__(self, *_: object) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            await _leave(shared)


def shared_connection(settings: ConnectionSettings, renew: RenewSettings | None = None) -> SharedConnection:
    """Use the event loop's connection with these settings, in an ``async with``; the last user closes it.

    Where that connection is lost, its restoration is waited for within the time limit of the settings.

    :param renew: reads the settings again, where a lost connection can't be restored by the ones known
    :raises JetStreamProviderError: as :func:`~airflow_provider_jetstream.jetstream.client.connect.connect` does
    """
    return SharedConnection(settings, renew)


async def _require_connected(connection: NatsPyConnection, seconds: float) -> None:
    if not await connection.wait_until_connected(seconds):
        raise connection.loss


async def _leave(shared: _Shared) -> None:
    shared.users -= 1
    if shared.users == 0:
        pool = _loops.get(asyncio.get_running_loop(), {})
        if pool.get(shared.settings) is shared:
            del pool[shared.settings]
        await shared.close()
