"""A task's Spark application, as the task sees it: started, listened to, and ended with the task."""

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

from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_provider_jetstream.spark.application.messages import CODE, ERROR, LEVEL, LOG, RESULT, TERMINAL
from airflow_provider_jetstream.spark.application.pyspark_check import require_pyspark
from airflow_provider_jetstream.spark.errors import SparkApplicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.tasks.spark_connection import SparkSettings
    from airflow_provider_jetstream.tasks.spark_credentials import ExecutorCredentials

_PROGRAM = "airflow_provider_jetstream.spark.application"
_LAST_SECONDS = 10.0


class TaskLog(Protocol):
    """As much of a task's logger as is needed here."""

    def log(self, level: int, message: str, /, *values: object) -> object:
        """Write a line."""

    def warning(self, message: str, /, *values: object) -> object:
        """Write a line that is a warning."""


class SparkApplication:
    """An application in a process of its own; see ``docs/spark-airflow.md`` for why.

    :param spark: where it runs
    :param nats: how it finds NATS
    :param log: where it tells how far it is
    """

    def __init__(self, spark: SparkSettings, nats: ExecutorCredentials, log: TaskLog) -> None:
        self._spark = spark
        self._nats = nats
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def run(self, name: str, work: str, orders: Mapping[str, Any], function: Callable[..., Any] | None = None) -> Any:
        """Start it, and wait until it has done its work.

        :param name: shown in Spark's pages
        :param work: what it does
        :param orders: how; what JSON can hold
        :param function: a function of the DAG's author that it needs
        :return: what it gave back
        :raises AirflowFailException: it can't succeed
        :raises SparkApplicationError: it didn't, or was stopped
        """
        require_pyspark()
        assignment = {
            "name": name,
            "master": self._spark.master,
            "conf": dict(self._spark.conf),
            "connection": dict(self._nats.options),
            "work": work,
            "orders": orders,
            "function": function and _pickled(function),
        }
        command = [sys.executable, "-m", _PROGRAM]
        with subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment(),
            # Signals that the task gets are for the task to hand on.
            start_new_session=True,
        ) as process:
            self._process = process
            try:
                if self._killed:
                    raise self._stopped()
                return self._listen(process, f"{json.dumps(assignment)}\n".encode())
            finally:
                self._end(process)

    def kill(self) -> None:
        """End it; may be called from a signal handler, and at any time."""
        self._killed = True
        if self._process and self._process.stdin:
            # It ends with its input, as it does when this process is killed.
            self._process.stdin.close()

    def _listen(self, process: subprocess.Popen[bytes], assignment: bytes) -> Any:
        told: dict[str, Any] = {}
        if process.stdin is None or process.stdout is None:
            raise SparkApplicationError("expected pipes to the application, found none")
        with suppress(BrokenPipeError, ValueError):
            _write(process.stdin.fileno(), assignment)
        # Unbuffered reading of lines would ask for each byte.
        with os.fdopen(os.dup(process.stdout.fileno()), "rb") as lines:
            for line in lines:
                message = json.loads(line)
                if LOG in message:
                    self._log.log(message[LEVEL], "%s", message[LOG])
                else:
                    told = message
        if self._killed:
            raise self._stopped()
        if RESULT in told:
            return told[RESULT]
        if ERROR in told:
            kind = AirflowFailException if told[TERMINAL] else SparkApplicationError
            raise kind(f"{told[CODE]} {told[ERROR]}".strip())
        raise SparkApplicationError(
            f"expected the Spark application to say how it ended, found that its process is gone (status"
            f" {process.wait()}); what it or the JVM wrote last stands above: too little memory is a frequent reason"
        )

    def _stopped(self) -> SparkApplicationError:
        return SparkApplicationError("the Spark application was stopped, as the task was; running it again is safe")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._log.warning("The Spark application doesn't end by itself and is killed")
        with suppress(ProcessLookupError):
            # The JVM too, where it has outlived its driver.
            os.killpg(process.pid, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        # Airflow's own variables hold its keys, its database and its connections; a gateway would be another's JVM.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AIRFLOW_", "_AIRFLOW_", "PYSPARK_GATEWAY_"))
        }
        python = self._spark.conf.get("spark.pyspark.python", sys.executable)
        return {
            **kept,
            **self._nats.environment,
            "PYTHONPATH": os.pathsep.join(_own_paths()),
            "PYSPARK_PYTHON": python,
            "PYSPARK_DRIVER_PYTHON": self._spark.conf.get("spark.pyspark.driver.python", sys.executable),
        }


def _own_paths() -> list[str]:
    """Give the folders that this process imports from and another of the same Python wouldn't, such as the DAGs'."""
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
