"""Connection options of the data source: server addresses and credentials, or the name of a connection.

Spark shows options in plans, its pages, its REST API and its event log. Secrets therefore come from the environment,
from files, or from a provider function; the options that take a secret directly have names that Spark redacts.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, SocketSettings
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Each option, and the suffix of its environment variable after NATS_ or NATS_<NAME>_.
VARIABLES = {
    "servers": "URL",
    "user": "USER",
    "password": "PASSWORD",
    "passwordFile": "PASSWORD_FILE",
    "token": "TOKEN",
    "tokenFile": "TOKEN_FILE",
    "nkeySeedSecret": "NKEY_SEED_SECRET",
    "nkeySeedFile": "NKEY_SEED_FILE",
    "credentialsSecret": "CREDENTIALS_SECRET",
    "credentialsFile": "CREDENTIALS_FILE",
    "tlsCaFile": "CA",
    "tlsCertFile": "CERT",
    "tlsKeyFile": "KEY",
    "timeout": "TIMEOUT",
}
NAMED_CONNECTION = ("connection", "connectionProvider")

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_SECRETS = ("password", "token", "nkeySeedSecret", "credentialsSecret")
_FILES = {
    "passwordFile": "password",
    "tokenFile": "token",
    "nkeySeedFile": "nkeySeedSecret",
    "credentialsFile": "credentialsSecret",
}
_FIELDS = {"user": "user", "password": "password", "token": "token", "tlsCaFile": "tls_ca_file", "timeout": "timeout"}


def socket_settings(options: Mapping[str, str]) -> SocketSettings:
    """Resolve addresses and credentials; called wherever a connection is made, so that no plan contains a secret.

    :param options: the data source's options, of which others are ignored
    :raises SparkOptionError: the options contradict each other
    :raises ConnectionSettingsError: the settings are incomplete or invalid
    """
    # Spark passes names in lower case.
    lowered = {name.lower(): value for name, value in options.items()}
    values = {name: lowered[name.lower()] for name in VARIABLES if name.lower() in lowered}
    connection, provider = lowered.get("connection"), lowered.get("connectionprovider")
    if connection is not None and values:
        raise SparkOptionError(f"expected either connection or {', '.join(sorted(values))}, found both: keep one")
    if connection is not None:
        values = _named_connection(connection, provider)
    elif provider is not None:
        raise SparkOptionError("expected connection (the argument of connectionProvider), found none")
    elif not values:
        values = _from_environment("NATS_")
    return _settings(values)


def _named_connection(name: str, provider: str | None) -> dict[str, str]:
    if not _NAME.fullmatch(name):
        raise SparkOptionError(f"expected a connection's name of letters, digits, - and _, found {name!r}")
    if provider is None:
        prefix = f"NATS_{name.upper().replace('-', '_')}_"
        if variables := _from_environment(prefix):
            return variables
        raise ConnectionSettingsError(
            f"expected variables such as {prefix}URL in the environment of drivers and executors, found none: set them"
            " there, or with spark.executorEnv.*"
        )
    module, _, function = provider.partition(":")
    try:
        provide = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError):
        raise SparkOptionError(
            f"expected connectionProvider as package.module:function, importable wherever tasks run, found {provider!r}"
        ) from None
    values = dict(provide(name))
    if unknown := sorted(set(values) - set(VARIABLES)):
        raise ConnectionSettingsError(
            f"expected {provider} to return only {', '.join(VARIABLES)}, found {', '.join(map(repr, unknown))}"
        )
    return values


def _from_environment(prefix: str) -> dict[str, str]:
    return {name: os.environ[prefix + suffix] for name, suffix in VARIABLES.items() if os.environ.get(prefix + suffix)}


def _settings(options: Mapping[str, str]) -> SocketSettings:
    values = dict(options)
    if "servers" not in values:
        raise ConnectionSettingsError(
            "expected servers, or connection, or NATS_URL in the environment of drivers and executors, found none"
        )
    for option, secret in _FILES.items():
        if option in values:
            if secret in values:
                raise ConnectionSettingsError(f"expected either {option} or {secret}, found both: keep one")
            values[secret] = _content(option, values.pop(option))
    secrets = [name for name in _SECRETS if name in values]
    if len(secrets) > 1:
        raise ConnectionSettingsError(f"expected one authentication option, found {' and '.join(secrets)}: keep one")
    if ("tlsCertFile" in values) != ("tlsKeyFile" in values):
        raise ConnectionSettingsError("expected tlsCertFile and tlsKeyFile together, found only one of them")
    fields: dict[str, Any] = {field: values[option] for option, field in _FIELDS.items() if option in values}
    servers = tuple(server for server in values["servers"].split(",") if server.strip())
    connection = ConnectionSettings(servers=servers, name="airflow-provider-jetstream-spark", **fields)
    return SocketSettings(
        connection,
        SecretStr(values["nkeySeedSecret"]) if "nkeySeedSecret" in values else None,
        SecretStr(values["credentialsSecret"]) if "credentialsSecret" in values else None,
        values.get("tlsCertFile"),
        values.get("tlsKeyFile"),
    )


def _content(option: str, path: str) -> str:
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    else:
        return content if option == "credentialsFile" else content.strip()
    raise ConnectionSettingsError(f"{option}: expected a readable file at {path} wherever tasks run, found: {problem}")
