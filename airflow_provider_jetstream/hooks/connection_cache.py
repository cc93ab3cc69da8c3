"""Looking an Airflow connection up once for all triggers of an event loop.

A triggerer answers such lookups one after another, in some 40 ms each: ten thousand triggers that start together would
wait for minutes before the last could begin.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from airflow.providers.common.compat.connection import get_async_connection, get_async_extra_dejson

from airflow_provider_jetstream.hooks.connection_settings import settings_of

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

# Who starts later sees what was changed in Airflow meanwhile.
_KEPT_SECONDS = 30.0


@dataclass(slots=True)
class _Lookups:
    running: dict[str, asyncio.Task[ConnectionSettings]] = field(default_factory=dict)
    read: dict[str, tuple[float, ConnectionSettings]] = field(default_factory=dict)

    async def look_up(self, conn_id: str) -> ConnectionSettings:
        """Take what was read just before, or wait for the one who reads it."""
        at, settings = self.read.get(conn_id, (0.0, None))
        if settings is not None and time.monotonic() - at < _KEPT_SECONDS:
            return settings
        if conn_id not in self.running:
            self.running[conn_id] = asyncio.create_task(self._read(conn_id))
        # Shielded: one trigger that is cancelled mustn't take it from the others.
        return await asyncio.shield(self.running[conn_id])

    async def _read(self, conn_id: str) -> ConnectionSettings:
        try:
            connection = await get_async_connection(conn_id)
            settings = settings_of(connection, await get_async_extra_dejson(connection))
            self.read[conn_id] = (time.monotonic(), settings)
            return settings
        finally:
            del self.running[conn_id]


# Keyed by the loop itself: ids of closed loops are reused. What is kept of one mustn't hold it, as a done task would.
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Lookups] = WeakKeyDictionary()


async def cached_connection(conn_id: str) -> ConnectionSettings:
    """Read an Airflow connection, or take what was read for another just before.

    :param conn_id: its id
    :return: the settings of the NATS connection
    :raises ConnectionSettingsError: if it can't be used
    """
    return await _loops.setdefault(asyncio.get_running_loop(), _Lookups()).look_up(conn_id)
