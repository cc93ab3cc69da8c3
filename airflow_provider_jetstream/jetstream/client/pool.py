"""A pool with one connection per settings and event loop, which all users share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.connect import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.client.outage import RenewSettings
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings


@dataclass
class _Shared:
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


@asynccontextmanager
async def shared_connection(
    settings: ConnectionSettings, renew: RenewSettings | None = None
) -> AsyncIterator[NatsPyConnection]:
    """Use the event loop's connection with these settings; the last user closes it.

    Where that connection is lost, its restoration is waited for within the time limit of the settings.

    :param renew: reads the settings again, where a lost connection can't be restored by the ones known
    :raises JetStreamProviderError: as :func:`~airflow_provider_jetstream.jetstream.client.connect.connect` does
    """
    pool = _loops.setdefault(asyncio.get_running_loop(), {})
    shared = pool.setdefault(settings, _Shared())
    shared.users += 1
    try:
        # Shielded: a user that is cancelled while it waits must not cancel the attempt of the others.
        connection = await asyncio.shield(shared.open_attempt(settings, renew))
        if not await connection.wait_until_connected(settings.timeout):
            raise connection.loss
        yield connection
    finally:
        shared.users -= 1
        if shared.users == 0:
            if pool.get(settings) is shared:
                del pool[settings]
            await shared.close()
