"""One connection per settings and event loop, shared by everything that asks for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.connection import Connection, ConnectionSettings, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class _Shared:
    users: int = 0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: Connection | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


# Keyed by the loop itself: ids of closed loops are reused, and a client used from another loop only times out.
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ConnectionSettings, _Shared]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_connection(settings: ConnectionSettings) -> AsyncIterator[Connection]:
    """Use the loop's connection with these settings; the last user closes it.

    :param settings: where and as whom
    :return: the shared connection
    :raises JetStreamProviderError: as :func:`~airflow_provider_jetstream.jetstream.connection.connect` does
    """
    pool = _loops.setdefault(asyncio.get_running_loop(), {})
    shared = pool.setdefault(settings, _Shared())
    shared.users += 1
    try:
        async with shared.opening:
            if shared.connection is None or shared.connection.client.is_closed:
                await shared.stack.aclose()
                shared.connection = await shared.stack.enter_async_context(connect(settings))
        yield shared.connection
    finally:
        shared.users -= 1
        if shared.users == 0:
            if pool.get(settings) is shared:
                del pool[settings]
            await shared.stack.aclose()
