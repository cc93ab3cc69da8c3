"""The blocking connection of Spark's driver and tasks, opened from the data source's options."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.gc_tuning import relaxed_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

_Result = TypeVar("_Result")


def run_on_own_connection(
    options: Mapping[str, str], work: Callable[[BlockingConnection], Coroutine[Any, Any, _Result]]
) -> _Result:
    """Ask the server over a connection of its own.

    :param given: where and as whom, as the data source's options say it
    :param work: a coroutine function
    :return: its result
    :raises Exception: what it raises
    """

    def ask() -> _Result:
        with relaxed_gc(), blocking_connection(options) as connection:
            return connection.run(work(connection))

    # In a thread, since a notebook has an event loop of its own, and nothing here is for that.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


@contextmanager
def blocking_connection(options: Mapping[str, str]) -> Iterator[BlockingConnection]:
    """Connect, and hang up at the end.

    :param given: where and as whom, as the data source's options say it
    :return: the open connection
    :raises UnreachableError: no server answered
    :raises AuthenticationError: the credentials were refused
    :raises TLSError: no encrypted connection came about
    :raises ServerTooOldError: the server is older than 2.10.27
    """
    wire = NatsSocket(socket_settings(options))
    try:
        yield BlockingConnection(wire)
    finally:
        wire.close()
