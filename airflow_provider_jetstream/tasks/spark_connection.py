"""Where and how Spark is started, read from an Airflow connection of type ``spark``; needs no Spark provider."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_provider_jetstream.airflow_compat import AirflowNotFoundException
from airflow_provider_jetstream.spark.errors import SparkSettingsError

if TYPE_CHECKING:
    from airflow.sdk import Connection

log = logging.getLogger(__name__)

DEFAULT_SPARK_CONNECTION = "spark_default"
LOCAL = "local[*]"

_MASTER = re.compile(r"local(\[[^\]]+\])?|local-cluster\[[^\]]+\]|spark://.+|yarn|k8s://.+")
# Fields of the Spark provider's form and Spark's own names for them.
_PROPERTIES = {
    "queue": "spark.yarn.queue",
    "namespace": "spark.kubernetes.namespace",
    "principal": "spark.kerberos.principal",
    "keytab": "spark.kerberos.keytab",
}
# Only spark-submit, which isn't used here, takes these.
_UNUSED = ("spark-binary", "spark-home")
_CONF, _DEPLOY_MODE = "conf", "deploy-mode"
# Properties that are set from something else, which they would override silently.
_RESERVED = {"spark.master": "the connection's host", "spark.app.name": "DAG, run and task"}


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

    :param conn_id: the default connection needn't exist
    :param conf: properties that override the connection's, as a mapping or its text
    :raises SparkSettingsError: the settings can't be used
    """
    overrides = spark_properties(conf)
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        if conn_id != DEFAULT_SPARK_CONNECTION:
            raise SparkSettingsError(
                f"expected an Airflow connection {conn_id!r} of type spark, found none: create it, or leave"
                " spark_conn_id out"
            ) from None
        log.info("There is no Airflow connection %s, so Spark runs on this machine: %s", conn_id, LOCAL)
        return SparkSettings(LOCAL, overrides)
    return SparkSettings(_master(connection), {**_extras(connection), **overrides})


def spark_properties(conf: object) -> dict[str, str]:
    """Parse properties of Spark, as a mapping or its text.

    :raises SparkSettingsError: they can't be used
    """
    return _properties(conf, "spark_conf")


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
        # Airflow drops the scheme of a connection that was defined as a URI.
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


def _properties(value: object, where: str) -> dict[str, str]:
    properties: Any = value
    if isinstance(value, str):
        try:
            properties = json.loads(value or "{}")
        except (ValueError, RecursionError):
            properties = None
    elif value is None:
        properties = {}
    if not isinstance(properties, Mapping):
        raise SparkSettingsError(
            f'{where}: expected properties such as {{"spark.executor.memory": "2g"}}, found others'
        )
    conf: dict[str, str] = {}
    for name, property_value in properties.items():
        if not str(name).startswith("spark."):
            raise SparkSettingsError(f"{where}: expected a property of Spark, spark.…, found {name!r}: correct it")
        if source := _RESERVED.get(str(name)):
            raise SparkSettingsError(f"{where}: expected no {name}, which is set from {source}; remove it")
        # Java writes true and false in lower case.
        text = str(property_value)
        conf[str(name)] = text.lower() if isinstance(property_value, bool) else text
    return conf
