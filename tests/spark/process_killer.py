"""Kills processes of Spark while they are connected to a server."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Until it is time to kill something: a driver that begins with an interrupted batch, or an executor that replaces
# another, has taken more than a minute on a busy machine.
_TIMEOUT = 300


def kill_worker(port: int, is_time: Callable[[], bool]) -> int:
    """Kill a Python worker of this process's Spark that is connected to a server; return its process id.

    :param port: the server's
    :param is_time: whether to kill it now
    """
    return _kill(psutil.Process(), port, is_time, lambda worker: worker)


def kill_executor(driver: int, port: int, is_time: Callable[[], bool]) -> int:
    """Kill the JVM of an executor that has a worker connected to a server; return its process id.

    :param driver: the process id of the driver
    :param port: the server's
    :param is_time: whether to kill it now
    """
    return _kill(psutil.Process(driver), port, is_time, _executor_of)


def kill_driver(driver: int, is_time: Callable[[], bool]) -> None:
    """Kill a driver, its JVM and its workers when it is time, which it still is while none of them runs.

    :param driver: its process id
    :param is_time: whether to kill it now
    """
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        if psutil.Process(driver).status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError("the driver ended before it was killed")
        if is_time():
            processes = [*psutil.Process(driver).children(recursive=True), psutil.Process(driver)]
            _each(processes, psutil.Process.suspend)
            if is_time():
                _each(processes, psutil.Process.kill)
                psutil.wait_procs(processes[:-1], _TIMEOUT)
                return
            _each(processes, psutil.Process.resume)
        time.sleep(0.005)
    raise TimeoutError("it wasn't time to kill the driver in time")


def _each(processes: Iterable[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            do(process)


def _kill(
    parent: psutil.Process,
    port: int,
    is_time: Callable[[], bool],
    target_of: Callable[[psutil.Process], psutil.Process | None],
) -> int:
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        if parent.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError("the driver ended before anything was killed")
        # Listed before the time has come: listing processes takes as long as a short read.
        workers = list(_workers(parent))
        for _ in range(50):
            if is_time():
                break
            time.sleep(0.002)
        else:
            continue
        # Stopped workers stay connected until the one to kill is found.
        _each(workers, psutil.Process.suspend)
        try:
            for worker in workers:
                if _is_connected(worker, port) and (target := target_of(worker)):
                    target.kill()
                    return target.pid
        finally:
            _each(workers, psutil.Process.resume)
    raise TimeoutError("no process to kill in time")


def _workers(parent: psutil.Process) -> Iterator[psutil.Process]:
    for process in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "pyspark.daemon" in process.cmdline():
                yield process


def _is_connected(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(connection.raddr and connection.raddr.port == port for connection in process.net_connections("tcp"))
    return False


def _executor_of(worker: psutil.Process) -> psutil.Process | None:
    for ancestor in worker.parents():
        if "CoarseGrainedExecutorBackend" in " ".join(ancestor.cmdline()):
            return ancestor
    return None
