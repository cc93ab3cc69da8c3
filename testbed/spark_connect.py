"""A Spark Connect server on this machine, from the jars of a PySpark in an environment of its own."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from airflow_provider_jetstream.dev.process import Process
from testbed.environments import create_environment
from testbed.ports import LOOPBACK, free_port

_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
_STARTED = "Spark Connect server started at"
_TIMEOUT = 120.0
# What tasks need to run this package, which they get as a zip.
_BESIDE_SPARK = ("numpy>=2", "pandas>=2.2,<3", "pyarrow>=18", "pydantic>=2.11", "PyYAML>=6")


def connect_environment(folder: Path, python: Path, spark: str, more: Sequence[str] = ()) -> Path:
    """Create an environment of a server and of its clients, without this package; return its interpreter.

    :param spark: the version of PySpark, such as ``4.1.*``
    :param more: requirements of the clients
    """
    return create_environment(folder, python, [f"pyspark[connect]=={spark}", *_BESIDE_SPARK, *more])


class SparkConnectServer:
    """A server that runs Python in its own environment.

    :param python: of an environment with ``pyspark[connect]``
    :param folder: for logs and tables
    :param properties: of Spark, in addition to those that keep it on this machine
    :param variables: of the environment, in addition to this process's
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        properties: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        all_properties = {
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.pyspark.python": str(python),
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.local.dir": str(folder / "local"),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.ui.enabled": "false",
            **(properties or {}),
        }
        options = [part for name, value in all_properties.items() for part in ("--conf", f"{name}={value}")]
        master = ["--master", "local[2]"]
        # Without cached bytecode, a process may outlast the ten seconds that Spark gives it to connect.
        left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._process = Process.start(
            [str(python.with_name("spark-submit")), *master, "--class", _SERVER, *options, "spark-internal"],
            env={**environment, "PYSPARK_PYTHON": str(python), **(variables or {})},
            log_file=folder / "server.log",
            cwd=folder,
        )

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"sc://{LOOPBACK}:{self.port}"

    def log(self) -> str:
        """Return the end of what the server has logged."""
        return self._process.tail()

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _TIMEOUT
        while _STARTED not in self._process.output():
            if not self._process.alive or time.monotonic() > deadline:
                self._process.terminate()
                raise RuntimeError(f"expected a Spark Connect server, found:\n{self.log()}")
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
