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

# What Airflow has fields of its own for, and what a person doesn't choose.
_OTHERS = {"servers", "user", "password", "name"}
EXTRAS = tuple(field for field in ConnectionSettings.model_fields if field not in _OTHERS)
# A URI's scheme is its connection's type: what tls://… asks for must not become plaintext.
_TYPES = {None: "nats", "": "nats", "nats": "nats", "tls": "tls"}
# Triggers that start later see a connection that was changed in Airflow in the meantime.
_CACHE_SECONDS = 30.0


def settings_from(connection: Connection, extras: Mapping[str, Any]) -> ConnectionSettings:
    """Read the settings from an Airflow connection.

    :param connection: its host may hold several addresses with commas, each with or without ``tls://`` and port; its
        type is ``nats``, or ``tls`` as of a URI that asks for TLS
    :param extras: its decoded extras, named as the fields of :class:`ConnectionSettings`
    :raises ConnectionSettingsError: an extra isn't known, or the settings contradict each other
    """
    where = f"connection {connection.conn_id!r}"
    values = {name: value for name, value in extras.items() if value not in (None, "")}
    if unknown := sorted(values.keys() - set(EXTRAS)):
        raise ConnectionSettingsError(
            f"{where}: expected extras among {', '.join(EXTRAS)}, found {', '.join(unknown)}; remove or correct them"
        )
    scheme = _TYPES.get(connection.conn_type)
    if scheme is None:
        raise ConnectionSettingsError(
            f"{where}: expected the type nats, or tls for encrypted connections, found {connection.conn_type!r}; set it"
        )
    if connection.schema:
        raise ConnectionSettingsError(f"{where}: expected nothing after host and port, found a schema; remove it")
    # Checked before the host is split at its commas: a comma may be part of a secret.
    if "@" in (connection.host or ""):
        raise ConnectionSettingsError(
            f"{where}: expected addresses without credentials, found an @ in its host: give them as login and password,"
            " or as token"
        )
    hosts = [host.strip() for host in (connection.host or "").split(",") if host.strip()]
    if not hosts:
        raise ConnectionSettingsError(f"{where}: expected a host, found none; set it")
    return connection_settings(
        {
            "servers": tuple(_address(host, connection.port, scheme) for host in hosts),
            "user": connection.login or None,
            "password": connection.password or None,
            **values,
        }
    )


def _address(host: str, port: int | None, scheme: str) -> str:
    if port is None and scheme == "nats":
        return host
    address = host if "://" in host else f"{scheme}://{host}"
    if scheme == "tls" and address.startswith("nats://"):
        raise ConnectionSettingsError(
            "expected addresses with tls://, or without a scheme, in a connection of type tls, found nats://"
        )
    try:
        has_port = port is None or urlsplit(address).port is not None
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


async def renewed_settings(conn_id: str) -> ConnectionSettings:
    """Read an Airflow connection anew, since what :func:`cached_settings` knows of it doesn't work any more.

    :raises ConnectionSettingsError: the connection can't be used
    """
    cache = _caches.setdefault(asyncio.get_running_loop(), _Cache())
    cache.settings.pop(conn_id, None)
    return await cache.get(conn_id)


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
