"""A task's Spark application: a process of its own that ends with the task; see ``docs/spark-airflow.md`` for why."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.spark.application.messages import (
    CODE,
    ERROR,
    LEVEL,
    LOG,
    RESULT,
    TERMINAL,
    require_pyspark,
)
from airflow_provider_jetstream.spark.errors import SparkApplicationError
from airflow_provider_jetstream.tasks.identity import origin_of
from airflow_provider_jetstream.tasks.spark_connection import spark_settings
from airflow_provider_jetstream.tasks.spark_credentials import executor_credentials
from airflow_provider_jetstream.tasks.template_values import is_absent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow.sdk import Context

    from airflow_provider_jetstream.tasks.spark_connection import SparkSettings
    from airflow_provider_jetstream.tasks.spark_credentials import ExecutorCredentials

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
        nats = executor_credentials(JetStreamHook(operator.nats_conn_id).settings(), spark)
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
        require_pyspark()
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
            env=_environment(spark, nats),
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
                if LOG in message:
                    self._log.log(message[LEVEL], "%s", message[LOG])
                else:
                    outcome = message
        if self._killed:
            raise _stopped()
        if RESULT in outcome:
            return outcome[RESULT]
        if ERROR in outcome:
            kind = AirflowFailException if outcome[TERMINAL] else SparkApplicationError
            raise kind(f"{outcome[CODE]} {outcome[ERROR]}".strip())
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


def _environment(spark: SparkSettings, nats: ExecutorCredentials) -> dict[str, str]:
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
