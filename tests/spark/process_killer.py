"""Kills processes of Spark while they are connected to a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 60


def kill_worker(port: int, is_time: Callable[[], bool]) -> int:
    """Kill a Python worker of this process's Spark that is connected to a server; return its process id.

    :param port: the server's
    :param is_time: whether to kill it now
    """
    return _kill(lambda process: _is_connected(process, port), is_time)


def kill_executor(driver: int, port: int, is_time: Callable[[], bool]) -> int:
    """Kill the JVM of an executor that has a worker connected to a server; return its process id.

    :param driver: the process id of the driver
    :param port: the server's
    :param is_time: whether to kill it now
    """

    def is_target(process: psutil.Process) -> bool:
        if "CoarseGrainedExecutorBackend" not in " ".join(process.cmdline()):
            return False
        return any(_is_connected(worker, port) for worker in process.children(recursive=True))

    return _kill(is_target, is_time, driver)


def _kill(is_target: Callable[[psutil.Process], bool], is_time: Callable[[], bool], parent: int | None = None) -> int:
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        # The search comes first: it lasts longer than a short read on a busy machine.
        for process in psutil.Process(parent).children(recursive=True):
            try:
                while is_target(process) and time.monotonic() < deadline:
                    if is_time():
                        process.kill()
                        return process.pid
                    time.sleep(0.002)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.005)
    raise TimeoutError("no process to kill in time")


def _is_connected(process: psutil.Process, port: int) -> bool:
    if "pyspark.daemon" not in process.cmdline():
        return False
    return any(connection.raddr and connection.raddr.port == port for connection in process.net_connections("tcp"))
