"""The settings of a NATS connection, read from an Airflow connection of type ``nats``."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from airflow.sdk import BaseHook

from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, connection_settings
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Connection

_EXTRAS = ("token", "tls_ca_file", "timeout")
# Triggers that start later see a connection that was changed in Airflow in the meantime.
_CACHE_SECONDS = 30.0


def settings_from(connection: Connection, extras: Mapping[str, Any]) -> ConnectionSettings:
    """Read the settings from an Airflow connection.

    :param connection: its host may hold several addresses with commas, each with or without ``tls://`` and port
    :param extras: its decoded extras: ``token``, ``tls_ca_file``, ``timeout``
    :raises ConnectionSettingsError: an extra isn't known, or the settings contradict each other
    """
    values = {name: value for name, value in extras.items() if value not in (None, "")}
    if unknown := sorted(values.keys() - set(_EXTRAS)):
        raise ConnectionSettingsError(
            f"connection {connection.conn_id!r}: expected extras among {', '.join(_EXTRAS)}, found {', '.join(unknown)}"
            "; remove or correct them"
        )
    # Checked before the host is split at its commas: a comma may be part of a secret.
    if "@" in (connection.host or ""):
        raise ConnectionSettingsError(
            f"connection {connection.conn_id!r}: expected addresses without credentials, found an @ in its host: give"
            " them as login and password, or as token"
        )
    hosts = [host.strip() for host in (connection.host or "").split(",") if host.strip()]
    if not hosts:
        raise ConnectionSettingsError(f"connection {connection.conn_id!r}: expected a host, found none; set it")
    return connection_settings(
        {
            "servers": tuple(_with_port(host, connection.port) for host in hosts),
            "user": connection.login or None,
            "password": connection.password or None,
            **values,
        }
    )


def _with_port(host: str, port: int | None) -> str:
    if port is None:
        return host
    address = host if "://" in host else f"nats://{host}"
    try:
        has_port = urlsplit(address).port is not None
    except ValueError:
        return address
    return address if has_port else f"{address.rstrip('/')}:{port}"


async def cached_settings(conn_id: str) -> ConnectionSettings:
    """Read an Airflow connection once for all triggers of the event loop.

    A triggerer handles such lookups one after another, in some 40 ms each: ten thousand triggers that start together
    would wait for minutes before the last could begin.

    :raises ConnectionSettingsError: the connection can't be used
    """
    return await _caches.setdefault(asyncio.get_running_loop(), _Cache()).get(conn_id)


@dataclass(slots=True)
class _Cache:
    lookups: dict[str, asyncio.Task[ConnectionSettings]] = field(default_factory=dict)
    settings: dict[str, tuple[float, ConnectionSettings]] = field(default_factory=dict)

    async def get(self, conn_id: str) -> ConnectionSettings:
        read_at, settings = self.settings.get(conn_id, (0.0, None))
        if settings is not None and time.monotonic() - read_at < _CACHE_SECONDS:
            return settings
        if conn_id not in self.lookups:
            self.lookups[conn_id] = asyncio.create_task(self._look_up(conn_id))
        # Shielded: a trigger that is cancelled must not cancel the lookup of the others.
        return await asyncio.shield(self.lookups[conn_id])

    async def _look_up(self, conn_id: str) -> ConnectionSettings:
        try:
            connection = await BaseHook.aget_connection(conn_id)
            settings = settings_from(connection, await _extras(connection))
            self.settings[conn_id] = (time.monotonic(), settings)
            return settings
        finally:
            del self.lookups[conn_id]


# Keyed by the loop itself: ids of closed loops are reused. The values must not hold the loop, as a done task would.
_caches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Cache] = WeakKeyDictionary()


async def _extras(connection: Connection) -> Mapping[str, Any]:
    if hasattr(connection, "aextra_dejson"):
        extras: Mapping[str, Any] = await connection.aextra_dejson()
        return extras
    # Before Airflow 3.3.2 masking of secrets blocks, and fails beside another request of the same event loop. asgiref
    # rather than asyncio.to_thread: only so does the request run on the triggerer's own event loop.
    from asgiref.sync import sync_to_async

    return await sync_to_async(lambda: connection.extra_dejson)()
