"""A task's Spark application: a process of its own that ends with the task; see ``docs/spark-airflow.md`` for why.

Its Spark and its properties come from an Airflow connection of type ``spark``; the credentials for NATS go into the
environments of its processes.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from airflow.sdk import BaseHook

from airflow_provider_jetstream.airflow_compat import AirflowFailException, AirflowNotFoundException
from airflow_provider_jetstream.spark.errors import SparkApplicationError, SparkSettingsError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import is_absent
from airflow_provider_jetstream.tasks.context import origin_of
from airflow_provider_jetstream.tasks.hook import hook_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow.sdk import Connection, Context

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

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


PREFIX = "spark.jetstream."

_NAME = "airflow"
# The options that name a connection.
_CONNECTION, _PROVIDER = "connection", "connectionProvider"
_SECRET = re.compile(r"(?i)secret|password$|token$")
# The file is where Airflow's tasks run, and perhaps nowhere else.
_SECRET_FILE = re.compile(r"^(?:password|token|nkeySeed|credentials|tlsCert|tlsKey)File$")


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
    options = runtime.connection_options(nats)
    if any(_SECRET.search(name) or _SECRET_FILE.search(name) for name in options):
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
        if name.startswith(PREFIX) and name not in runtime.POLICY_PROPERTIES
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
    known = (_CONNECTION, _PROVIDER, *(name for name in runtime.VARIABLES if not _SECRET.search(name)))
    if unknown := sorted(set(options) - set(known)):
        raise SparkSettingsError(f"expected {PREFIX}… of {', '.join(known)}, found {', '.join(unknown)}: correct it")
    return options


def _environment(name: str, nats: ConnectionSettings) -> dict[str, str]:
    prefix = f"NATS_{name.upper().replace('-', '_')}_"
    return {prefix + runtime.VARIABLES[option]: value for option, value in runtime.connection_options(nats).items()}


CONNECTION_FIELDS = ("nats_conn_id", "spark_conn_id", "spark_conf")

_PROGRAM = "airflow_provider_jetstream.spark.application"
_EXIT_SECONDS = 10.0


class TaskLog(Protocol):
    """The methods of a task's logger that are needed here."""

    def log(self, level: int, message: str, /, *values: object) -> object:
        """Write a line."""

    def warning(self, message: str, /, *values: object) -> object:
        """Write a line that is a warning."""


class SparkApplication:
    """A Spark application that may be killed before, while and after it runs.

    :param log: the task's log, which gets the application's log lines
    """

    def __init__(self, log: TaskLog) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def run_for(
        self,
        context: Context,
        operator: Any,
        command: str,
        arguments: Mapping[str, Any],
        function: Callable[..., Any] | None = None,
    ) -> dict[str, Any]:
        """Run a command on the Spark and the NATS server that an operator's :data:`CONNECTION_FIELDS` name.

        :param arguments: what JSON can hold
        :param function: a function of the DAG's author that the command calls
        :raises AirflowFailException: a retry can't succeed either
        :raises SparkApplicationError: Spark failed, or was stopped
        """
        conf = operator.spark_conf
        spark = spark_settings(operator.spark_conn_id, None if is_absent(conf) else conf)
        nats = executor_credentials(hook_for(operator.nats_conn_id).settings(), spark)
        result: dict[str, Any] = self.run(spark, nats, _name(context), command, arguments, function)
        return result

    def run(
        self,
        spark: SparkSettings,
        nats: ExecutorCredentials,
        name: str,
        command: str,
        arguments: Mapping[str, Any],
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Start the process, and wait until it has run the command.

        :param name: shown in Spark's pages
        """
        runtime.require_pyspark()
        assignment = {
            "name": name,
            "master": spark.master,
            "conf": dict(spark.conf),
            "connection": dict(nats.options),
            "command": command,
            "arguments": arguments,
            "function": function and _pickled(function),
        }
        with subprocess.Popen(
            [sys.executable, "-m", _PROGRAM],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_process_environment(spark, nats),
            # The task passes on the signals that it gets.
            start_new_session=True,
        ) as process:
            self._process = process
            try:
                if self._killed:
                    raise _stopped()
                return self._result(process, f"{json.dumps(assignment)}\n".encode())
            finally:
                self._end(process)

    def kill(self) -> None:
        """End the application; may be called from a signal handler, and at any time."""
        self._killed = True
        if self._process and self._process.stdin:
            # The application ends with its input, as it does when this process is killed.
            self._process.stdin.close()

    def _result(self, process: subprocess.Popen[bytes], assignment: bytes) -> Any:
        outcome: dict[str, Any] = {}
        if process.stdin is None or process.stdout is None:
            raise SparkApplicationError("expected pipes to the application, found none")
        with suppress(BrokenPipeError, ValueError):
            _write(process.stdin.fileno(), assignment)
        # Unbuffered reading of lines would read byte by byte.
        with os.fdopen(os.dup(process.stdout.fileno()), "rb") as lines:
            for line in lines:
                message = json.loads(line)
                if runtime.LOG in message:
                    self._log.log(message[runtime.LEVEL], "%s", message[runtime.LOG])
                else:
                    outcome = message
        if self._killed:
            raise _stopped()
        if runtime.RESULT in outcome:
            return outcome[runtime.RESULT]
        if runtime.ERROR in outcome:
            kind = AirflowFailException if outcome[runtime.TERMINAL] else SparkApplicationError
            raise kind(f"{outcome[runtime.CODE]} {outcome[runtime.ERROR]}".strip())
        raise SparkApplicationError(
            f"expected the Spark application to say how it ended, found that its process is gone (status"
            f" {process.wait()}); what it or the JVM wrote last stands above: too little memory is a frequent reason"
        )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._log.warning("The Spark application doesn't end by itself and is killed")
        with suppress(ProcessLookupError):
            # The JVM too, where it has outlived its driver.
            os.killpg(process.pid, signal.SIGKILL)


def _name(context: Context) -> str:
    origin = origin_of(context)
    mapped = f"[{origin.map_index}]" if origin.map_index >= 0 else ""
    return f"{origin.dag_id}.{origin.task_id}{mapped} {origin.run_id}"


def _stopped() -> SparkApplicationError:
    return SparkApplicationError("the Spark application was stopped, as the task was; running it again is safe")


def _process_environment(spark: SparkSettings, nats: ExecutorCredentials) -> dict[str, str]:
    # Airflow's own variables hold its keys, its database and its connections; a gateway would be another's JVM.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIRFLOW_", "_AIRFLOW_", "PYSPARK_GATEWAY_"))
    }
    return {
        **inherited,
        **nats.environment,
        "PYTHONPATH": os.pathsep.join(_own_paths()),
        "PYSPARK_PYTHON": spark.conf.get("spark.pyspark.python", sys.executable),
        "PYSPARK_DRIVER_PYTHON": spark.conf.get("spark.pyspark.driver.python", sys.executable),
    }


def _own_paths() -> list[str]:
    """Return the folders on this process's path that another of the same Python lacks, such as the DAGs' folder."""
    usual = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [path for path in sys.path if path and not path.startswith(usual) and not path.endswith(".zip")]


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _pickled(function: Callable[..., Any]) -> str:
    from pyspark import cloudpickle

    # Airflow loads DAG files under names that no other process can import.
    module = sys.modules.get(function.__module__)
    by_value = module is not None and module.__name__.partition(".")[0] not in ("pyspark", "airflow_provider_jetstream")
    if module and by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return base64.b64encode(cloudpickle.dumps(function)).decode()
    finally:
        if module and by_value:
            cloudpickle.unregister_pickle_by_value(module)
