"""The blocking connection of Spark's driver and tasks, opened from the data source's options."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

_Result = TypeVar("_Result")

# New objects between two collections. A task makes hundreds of thousands of small objects and hardly a cycle: Python's
# own threshold costs a sixth of its CPU.
_GC_THRESHOLD: Final = 100_000

_gc_lock = threading.Lock()
_gc_thresholds: list[tuple[int, int, int]] = []


def run_on_own_connection(
    options: Mapping[str, str], function: Callable[[BlockingConnection], Coroutine[Any, Any, _Result]]
) -> _Result:
    """Run a coroutine function over a new connection, and return its result.

    :param options: connection options of the data source
    :raises Exception: what the coroutine raises
    """

    def run() -> _Result:
        with blocking_connection(options) as connection:
            return connection.run(function(connection))

    # In a thread: a notebook's own thread already runs an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@contextmanager
def blocking_connection(options: Mapping[str, str]) -> Iterator[BlockingConnection]:
    """Open a connection, with relaxed garbage collection, until the block ends.

    :param options: connection options of the data source
    :raises UnreachableError: no server answered
    :raises AuthenticationError: the credentials were refused
    :raises TLSError: TLS failed
    :raises ServerTooOldError: the server is older than 2.10.27
    """
    with relaxed_gc():
        socket = NatsSocket(socket_settings(options))
        try:
            yield BlockingConnection(socket)
        finally:
            socket.close()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise the garbage collector's threshold for the whole process until the block ends; blocks may overlap."""
    with _gc_lock:
        _gc_thresholds.append(_gc_thresholds[0] if _gc_thresholds else gc.get_threshold())
        gc.set_threshold(_GC_THRESHOLD, *_gc_thresholds[0][1:])
    try:
        yield
    finally:
        with _gc_lock:
            original = _gc_thresholds.pop()
            if not _gc_thresholds:
                gc.set_threshold(*original)
