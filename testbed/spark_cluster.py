"""A standalone Spark cluster on this machine: a master and some workers, from PySpark's own jars."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from airflow_provider_jetstream.dev.process import Process, terminate_all
from testbed.ports import LOOPBACK, free_port

_HOME = Path(pyspark.__file__).parent


class SparkCluster:
    """A cluster whose executors have an environment of their own, as on other machines.

    :param folder: for logs and for the workers' files
    :param env: the workers' whole environment, which executors inherit
    :param hosts: of the workers, which have one core each; Spark takes two addresses of this machine for two hosts
    """

    def __init__(self, folder: Path, env: Mapping[str, str], hosts: Sequence[str] = (LOOPBACK, LOOPBACK)) -> None:
        self._folder = folder
        # The variables that Spark's start scripts would set.
        (core,) = (_HOME / "jars").glob("spark-core_*.jar")
        self._env = {"SPARK_HOME": str(_HOME), "SPARK_SCALA_VERSION": core.name.split("_")[1].split("-")[0], **env}
        self._hosts = hosts
        self._port = free_port()
        self._processes: list[Process] = []

    @property
    def url(self) -> str:
        """The master's address."""
        return f"spark://{LOOPBACK}:{self._port}"

    def pids(self) -> list[int]:
        """Return the ids of all processes, executors included."""
        return [pid for process in self._processes for pid in process.pids()]

    def __enter__(self) -> Self:
        master = self._start("master.Master", LOOPBACK, "--port", str(self._port))
        self._wait(master, "I have been elected leader")
        for number, host in enumerate(self._hosts):
            folder = str(self._folder / f"worker-{number}")
            self._start("worker.Worker", host, "--cores", "1", "--memory", "600m", "--work-dir", folder, self.url)
        for process in self._processes[1:]:
            self._wait(process, "Successfully registered with master")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        terminate_all(self._processes, 5)
        self._processes.clear()

    def output(self) -> str:
        """Return all that master, workers and executors have written."""
        files = [*self._folder.rglob("stderr"), *self._folder.rglob("stdout"), *self._folder.glob("*.log")]
        return "".join(file.read_text(errors="replace") for file in files)

    def _start(self, component: str, host: str, *args: str) -> Process:
        java = Path(os.environ["JAVA_HOME"]) / "bin" / "java" if os.environ.get("JAVA_HOME") else "java"
        command = [str(java), "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", f"{_HOME / 'conf'}:{_HOME / 'jars'}/*"]
        command += [f"org.apache.spark.deploy.{component}", "--host", host, "--webui-port", "0", *args]
        log_file = self._folder / f"{component}-{len(self._processes)}.log"
        process = Process.start(command, env={**self._env, "SPARK_LOCAL_IP": host}, log_file=log_file, cwd=self._folder)
        self._processes.append(process)
        return process

    def _wait(self, process: Process, text: str, timeout: float = 90.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in process.output():
            if not process.alive or time.monotonic() > deadline:
                raise RuntimeError(f"expected {text!r} from {process.args[-1]}, found:\n{process.tail()}")
            time.sleep(0.1)
