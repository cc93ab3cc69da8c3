"""Connection options of the data source: server addresses and credentials, or the name of a connection.

Spark shows options in plans, its pages, its REST API and its event log. Secrets therefore come from the environment,
from files, or from a provider function; the options that take a secret directly have names that Spark redacts.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from airflow_provider_jetstream.jetstream.client.settings import VARIABLES as ENVIRONMENT
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, split_servers
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping


def _option(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


# The options that fill the fields of the settings, and those of them that only concern JetStream.
_FIELDS = {_option(field): field for field in ENVIRONMENT}
JETSTREAM_OPTIONS = ("jsDomain", "apiPrefix")
# Each option, and the suffix of its environment variable after NATS_ or NATS_<NAME>_.
VARIABLES = {option: ENVIRONMENT[field] for option, field in _FIELDS.items()}
NAMED_CONNECTION = ("connection", "connectionProvider")

_FIELD = re.compile(rf"\b(?:{'|'.join(field for field in ENVIRONMENT if '_' in field)})\b")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def socket_settings(options: Mapping[str, str]) -> ConnectionSettings:
    """Resolve addresses and credentials; called wherever a connection is made, so that no plan contains a secret.

    :param options: the data source's options, of which others are ignored
    :raises SparkOptionError: the options contradict each other
    :raises ConnectionSettingsError: the settings are incomplete or invalid
    """
    # Spark passes names in lower case.
    lowered = {name.lower(): value for name, value in options.items()}
    values = {name: lowered[name.lower()] for name in VARIABLES if name.lower() in lowered}
    names = {name: values.pop(name) for name in JETSTREAM_OPTIONS if name in values}
    connection, provider = lowered.get("connection"), lowered.get("connectionprovider")
    if connection is not None and values:
        raise SparkOptionError(f"expected either connection or {', '.join(sorted(values))}, found both: keep one")
    if connection is not None:
        values = _named_connection(connection, provider)
    elif provider is not None:
        raise SparkOptionError("expected connection (the argument of connectionProvider), found none")
    elif not values:
        values = _from_environment("NATS_")
    if names:
        values = {name: value for name, value in values.items() if name not in JETSTREAM_OPTIONS} | names
    return _settings(values)


def connection_options(settings: ConnectionSettings) -> dict[str, str]:
    """Return the options of which :func:`socket_settings` makes the same settings; they contain secrets."""
    options: dict[str, str] = {}
    for option, field in _FIELDS.items():
        value = getattr(settings, field)
        if value == ConnectionSettings.model_fields[field].default:
            continue
        match value:
            case SecretStr():
                options[option] = value.get_secret_value()
            case _:
                options[option] = str(value)
    return options | {"servers": ",".join(settings.servers), "timeout": f"{settings.timeout:g}"}


def _named_connection(name: str, provider: str | None) -> dict[str, str]:
    if not _NAME.fullmatch(name):
        # Not repeated: it may be an address with credentials.
        raise SparkOptionError("expected a connection's name of letters, digits, - and _, found other characters")
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


def _settings(values: Mapping[str, str]) -> ConnectionSettings:
    servers = split_servers(values.get("servers", ""))
    if not servers:
        raise ConnectionSettingsError(
            "expected servers, or connection, or NATS_URL in the environment of drivers and executors, found none"
        )
    fields: dict[str, Any] = {_FIELDS[option]: value for option, value in values.items() if option != "servers"}
    try:
        return ConnectionSettings(servers=servers, name="airflow-provider-jetstream-spark", **fields)
    except ConnectionSettingsError as error:
        problem = str(error)
    raise ConnectionSettingsError(_FIELD.sub(lambda match: _option(match[0]), problem))
