"""From an Airflow connection of type ``nats`` to the settings of the ground floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, connection_settings
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.providers.common.compat.sdk import Connection

_EXTRAS = ("token", "tls_ca_file", "timeout")


def settings_of(connection: Connection, extras: Mapping[str, Any]) -> ConnectionSettings:
    """Read an Airflow connection.

    :param connection: host (several with commas, each with or without ``tls://`` and port), port, login and password
    :param extras: its decoded extras: ``token``, ``tls_ca_file``, ``timeout``
    :return: the settings
    :raises ConnectionSettingsError: if an extra isn't known, or the settings contradict each other
    """
    given = {name: value for name, value in extras.items() if value not in (None, "")}
    if unknown := sorted(given.keys() - set(_EXTRAS)):
        raise ConnectionSettingsError(
            f"connection {connection.conn_id!r}: expected extras among {', '.join(_EXTRAS)}, found {', '.join(unknown)}"
            "; remove or correct them"
        )
    # Before the commas are looked at: one may be part of a secret.
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
            **given,
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
