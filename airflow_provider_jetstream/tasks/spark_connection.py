"""From an Airflow connection of type ``spark`` to where and how Spark is started; needs no provider for Spark."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook

from airflow_provider_jetstream.spark.errors import SparkSettingsError

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Connection

log = logging.getLogger(__name__)

DEFAULT_SPARK_CONNECTION = "spark_default"
LOCAL = "local[*]"

_MASTER = re.compile(r"local(\[[^\]]+\])?|local-cluster\[[^\]]+\]|spark://.+|yarn|k8s://.+")
# What the Spark provider's form calls otherwise than Spark.
_PROPERTIES = {
    "queue": "spark.yarn.queue",
    "namespace": "spark.kubernetes.namespace",
    "principal": "spark.kerberos.principal",
    "keytab": "spark.kerberos.keytab",
}
# For spark-submit alone, which isn't used here.
_UNUSED = ("spark-binary", "spark-home")
_CONF, _DEPLOY_MODE = "conf", "deploy-mode"
# These say it elsewhere, and would win silently.
_TAKEN = {"spark.master": "the connection's host", "spark.app.name": "DAG, run and task"}


@dataclass(frozen=True)
class SparkSettings:
    """Where and how Spark is started.

    :param master: such as ``local[*]`` or ``spark://host:7077``
    :param conf: Spark's properties
    """

    master: str
    conf: Mapping[str, str]

    @property
    def local(self) -> bool:
        """Whether everything runs on this machine, with this process's environment."""
        return self.master.startswith("local")


def spark_settings(conn_id: str, conf: object = None) -> SparkSettings:
    """Read the connection, and add properties to it.

    :param conn_id: its id; the default one needn't exist
    :param conf: properties that win over the connection's, as a mapping or its text
    :return: the settings
    :raises SparkSettingsError: they can't be used
    """
    more = _properties(conf, "spark_conf")
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        if conn_id != DEFAULT_SPARK_CONNECTION:
            raise SparkSettingsError(
                f"expected an Airflow connection {conn_id!r} of type spark, found none: create it, or leave"
                " spark_conn_id out"
            ) from None
        log.info("There is no Airflow connection %s, so Spark runs on this machine: %s", conn_id, LOCAL)
        return SparkSettings(LOCAL, more)
    return SparkSettings(_master(connection), {**_extras(connection), **more})


def _master(connection: Connection) -> str:
    where = f"connection {connection.conn_id!r}"
    if connection.conn_type != "spark":
        raise SparkSettingsError(
            f"{where}: expected the type spark, found {connection.conn_type!r}: correct it (Spark Connect isn't"
            " supported here, since the driver has to be the task)"
        )
    host = (connection.host or "").strip()
    if "@" in host:
        raise SparkSettingsError(f"{where}: expected a master without credentials, found an @ in its host: remove them")
    if not host:
        raise SparkSettingsError(f"{where}: expected a master as host, such as {LOCAL} or spark://host, found none")
    if connection.port and "://" not in host:
        # Airflow takes the scheme off an address that it was given as a URI.
        host = f"spark://{host}"
    master = f"{host}:{connection.port}" if connection.port else host
    if not _MASTER.fullmatch(master):
        raise SparkSettingsError(
            f"{where}: expected a master such as local[4], spark://host:7077, yarn or k8s://https://host, found"
            f" {master!r}: correct its host"
        )
    return master


def _extras(connection: Connection) -> dict[str, str]:
    where = f"connection {connection.conn_id!r}"
    conf: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in connection.extra_dejson.items():
        key = name.replace("_", "-")
        if value in (None, ""):
            continue
        if name == _CONF:
            conf.update(_properties(value, f"{where}: conf"))
        elif name.startswith("spark."):
            conf.update(_properties({name: value}, where))
        elif key in _PROPERTIES:
            conf[_PROPERTIES[key]] = str(value)
        elif key == _DEPLOY_MODE:
            if value != "client":
                raise SparkSettingsError(
                    f"{where}: expected deploy-mode client, found {value!r}: the task is the driver, so that killing it"
                    " stops the application; use SparkSubmitOperator to run a driver in the cluster"
                )
        elif key in _UNUSED:
            log.debug("%s: %s is for spark-submit only", where, name)
        else:
            unknown.append(name)
    if unknown:
        known = ", ".join((_CONF, _DEPLOY_MODE, *_PROPERTIES, *_UNUSED))
        raise SparkSettingsError(
            f"{where}: expected extras among {known} and Spark's own properties (spark.…), found"
            f" {', '.join(sorted(unknown))}; remove or correct them"
        )
    return conf


def _properties(given: object, where: str) -> dict[str, str]:
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(given or "{}")
        except ValueError:
            found = None
    elif given is None:
        found = {}
    if not isinstance(found, Mapping):
        raise SparkSettingsError(
            f'{where}: expected properties such as {{"spark.executor.memory": "2g"}}, found others'
        )
    conf: dict[str, str] = {}
    for name, value in found.items():
        if not str(name).startswith("spark."):
            raise SparkSettingsError(f"{where}: expected a property of Spark, spark.…, found {name!r}: correct it")
        if place := _TAKEN.get(str(name)):
            raise SparkSettingsError(f"{where}: expected no {name}, which {place} gives; remove it")
        # As Java writes them.
        conf[str(name)] = str(value).lower() if isinstance(value, bool) else str(value)
    return conf
