"""Killing what Spark runs while it talks to a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE = 60


def kill_worker(port: int, ripe: Callable[[], bool]) -> int:
    """Kill a Python worker of this process's Spark that is connected to a server, at the right moment.

    :param port: the server's
    :param ripe: whether the moment has come
    :return: the worker's process id
    """
    return _kill(lambda process: _connected(process, port), ripe)


def kill_executor(driver: int, port: int, ripe: Callable[[], bool]) -> int:
    """Kill the JVM of an executor that has a worker connected to a server, at the right moment.

    :param driver: the process id of the driver
    :param port: the server's
    :param ripe: whether the moment has come
    :return: the executor's process id
    """

    def wanted(process: psutil.Process) -> bool:
        if "CoarseGrainedExecutorBackend" not in " ".join(process.cmdline()):
            return False
        return any(_connected(worker, port) for worker in process.children(recursive=True))

    return _kill(wanted, ripe, driver)


def _kill(wanted: Callable[[psutil.Process], bool], ripe: Callable[[], bool], parent: int | None = None) -> int:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if ripe():
            for process in psutil.Process(parent).children(recursive=True):
                try:
                    if wanted(process):
                        process.kill()
                        return process.pid
                except psutil.NoSuchProcess:
                    continue
        time.sleep(0.005)
    raise TimeoutError("found nothing to kill in time")


def _connected(process: psutil.Process, port: int) -> bool:
    if "pyspark.daemon" not in process.cmdline():
        return False
    return any(found.raddr and found.raddr.port == port for found in process.net_connections("tcp"))
