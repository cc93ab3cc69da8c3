"""How executors come to know NATS: by options that Spark may show, and by an environment that it doesn't."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.spark.connection_options import CHOICES, VARIABLES
from airflow_provider_jetstream.spark.errors import SparkSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.tasks.spark_connection import SparkSettings

PREFIX = "spark.jetstream."

_NAME = "airflow"
_CONNECTION, _PROVIDER = CHOICES
_SECRET = re.compile(r"(?i)secret|password$|token$")
_ALLOWED = tuple(name for name in VARIABLES if not _SECRET.search(name))


@dataclass(frozen=True)
class ExecutorCredentials:
    """What is handed over.

    :param options: the data source's options; Spark shows them
    :param environment: variables of the driver, which executors on the same machine inherit
    """

    options: Mapping[str, str]
    environment: Mapping[str, str]


def executor_credentials(nats: ConnectionSettings, spark: SparkSettings) -> ExecutorCredentials:
    """Choose the way from an Airflow connection to executors, so that Spark never sees a secret.

    :param nats: the Airflow connection's settings
    :param spark: where Spark runs; its properties ``spark.jetstream.…`` say how executors find NATS by themselves,
        where a person has seen to that
    :return: what to hand over
    :raises SparkSettingsError: the executors would need a secret that has no way to them
    """
    if options := _given(spark.conf):
        name = options.get(_CONNECTION)
        return ExecutorCredentials(options, _environment(name, nats) if name and _PROVIDER not in options else {})
    if spark.local:
        return ExecutorCredentials({_CONNECTION: _NAME}, _environment(_NAME, nats))
    if nats.password or nats.token:
        raise SparkSettingsError(
            f"expected {PREFIX}… among Spark's properties to say how executors of {spark.master} find the credentials"
            " of NATS, found nothing: a secret isn't sent through Spark; set"
            f" {PREFIX}connection=orders where executors have NATS_ORDERS_URL and its like in their environment,"
            f" {PREFIX}connectionProvider beside it, or {PREFIX}servers with user and passwordFile, tokenFile or"
            " credentialsFile"
        )
    return ExecutorCredentials(
        {option: value for option, value in _settings(nats).items() if option not in ("password", "token")}, {}
    )


def _given(conf: Mapping[str, str]) -> dict[str, str]:
    given = {name.removeprefix(PREFIX): value for name, value in conf.items() if name.startswith(PREFIX)}
    if secret := sorted(name for name in given if _SECRET.search(name)):
        raise SparkSettingsError(
            f"expected {PREFIX}… without secrets, found {', '.join(secret)}: Spark shows its properties; name a file, a"
            " connection or a connectionProvider"
        )
    if unknown := sorted(set(given) - {*_ALLOWED, *CHOICES}):
        raise SparkSettingsError(
            f"expected {PREFIX}… of {', '.join((*CHOICES, *_ALLOWED))}, found {', '.join(unknown)}: correct it"
        )
    return given


def _environment(name: str, nats: ConnectionSettings) -> dict[str, str]:
    prefix = f"NATS_{name.upper().replace('-', '_')}_"
    return {prefix + VARIABLES[option]: value for option, value in _settings(nats).items()}


def _settings(nats: ConnectionSettings) -> dict[str, str]:
    found = {
        "servers": ",".join(nats.servers),
        "user": nats.user,
        "password": nats.password and nats.password.get_secret_value(),
        "token": nats.token and nats.token.get_secret_value(),
        "tlsCaFile": nats.tls_ca_file,
        "timeout": f"{nats.timeout:g}",
    }
    return {option: value for option, value in found.items() if value}
