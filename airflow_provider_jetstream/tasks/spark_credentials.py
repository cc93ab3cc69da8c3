"""The NATS credentials of Spark executors: options that Spark may show, and variables that it doesn't show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.spark.connection_options import (
    NAMED_CONNECTION,
    POLICY_PROPERTIES,
    VARIABLES,
    connection_options,
)
from airflow_provider_jetstream.spark.errors import SparkSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.tasks.spark_connection import SparkSettings

PREFIX = "spark.jetstream."

_NAME = "airflow"
_CONNECTION, _PROVIDER = NAMED_CONNECTION
_SECRET = re.compile(r"(?i)secret|password$|token$")
# The file is where Airflow's tasks run, and perhaps nowhere else.
_SECRET_FILE = re.compile(r"^(?:password|token|nkeySeed|credentials|tlsCert|tlsKey)File$")
_SECRETS = {name for name in VARIABLES if _SECRET.search(name) or _SECRET_FILE.search(name)}
_ALLOWED = tuple(name for name in VARIABLES if not _SECRET.search(name))


@dataclass(frozen=True)
class ExecutorCredentials:
    """How executors connect to NATS.

    :param options: the data source's options; Spark shows them
    :param environment: variables of the driver, which executors on the same machine inherit
    """

    options: Mapping[str, str]
    environment: Mapping[str, str]


def executor_credentials(nats: ConnectionSettings, spark: SparkSettings) -> ExecutorCredentials:
    """Hand the credentials of an Airflow connection to executors without showing a secret to Spark.

    :param spark: its properties ``spark.jetstream.…`` say how executors find NATS by themselves, where a person has
        prepared that
    :raises SparkSettingsError: executors on other machines would need a secret, and no property says where they find it
    """
    if options := _options(spark.conf):
        name = options.get(_CONNECTION)
        return ExecutorCredentials(options, _environment(name, nats) if name and _PROVIDER not in options else {})
    if spark.local:
        return ExecutorCredentials({_CONNECTION: _NAME}, _environment(_NAME, nats))
    options = connection_options(nats)
    if not options.keys().isdisjoint(_SECRETS):
        raise SparkSettingsError(
            f"expected {PREFIX}… among Spark's properties to say how executors of {spark.master} find the credentials"
            " of NATS, found nothing: a secret isn't sent through Spark; set"
            f" {PREFIX}connection=orders where executors have NATS_ORDERS_URL and its like in their environment,"
            f" {PREFIX}connectionProvider beside it, or {PREFIX}servers with user and passwordFile, tokenFile or"
            " credentialsFile"
        )
    return ExecutorCredentials(options, {})


def _options(conf: Mapping[str, str]) -> dict[str, str]:
    options = {
        name.removeprefix(PREFIX): value
        for name, value in conf.items()
        if name.startswith(PREFIX) and name not in POLICY_PROPERTIES
    }
    if secret := sorted(name for name in options if _SECRET.search(name)):
        raise SparkSettingsError(
            f"expected {PREFIX}… without secrets, found {', '.join(secret)}: Spark shows its properties; name a file, a"
            " connection or a connectionProvider"
        )
    if with_credentials := [name for name in ("servers", _CONNECTION) if "@" in options.get(name, "")]:
        # Before Spark starts: it would show them.
        raise SparkSettingsError(
            f"expected {PREFIX}… without credentials, found an @ in {', '.join(with_credentials)}: Spark shows its"
            " properties; name a file, a connection or a connectionProvider"
        )
    if unknown := sorted(set(options) - {*_ALLOWED, *NAMED_CONNECTION}):
        raise SparkSettingsError(
            f"expected {PREFIX}… of {', '.join((*NAMED_CONNECTION, *_ALLOWED))}, found {', '.join(unknown)}: correct it"
        )
    return options


def _environment(name: str, nats: ConnectionSettings) -> dict[str, str]:
    prefix = f"NATS_{name.upper().replace('-', '_')}_"
    return {prefix + VARIABLES[option]: value for option, value in connection_options(nats).items()}
