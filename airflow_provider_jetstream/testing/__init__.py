"""A fixture for tests of DAGs and handlers: queues on a real nats-server, which each test has for itself.

It needs pytest, psutil and a nats-server; the extra ``dev`` brings the last two. The server is the connection
``nats_default`` while the test runs, and is gone with what it stored afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

from airflow_provider_jetstream.dev.errors import DevStackError
from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.worker.bounded_run import BoundedRun
from airflow_provider_jetstream.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource

__all__ = ["LiveQueue", "queue"]

_Result = TypeVar("_Result")

_START_SECONDS = 60.0
_POLL = 0.02


class LiveQueue:
    """A provisioned work queue on the server of one test.

    :param declaration: the queue
    :param settings: of connections to the server
    """

    def __init__(self, declaration: WorkQueue, settings: ConnectionSettings) -> None:
        self.declaration = declaration
        self.settings = settings

    def context(self, task_id: str = "task", run_id: str = "test") -> Context:
        """Return the least context with which ``execute`` of an operator of this package works.

        :param task_id: of the task as whose jobs they are known
        :param run_id: a task publishes its jobs once in each run
        """
        task = SimpleNamespace(
            dag_id="dag", run_id=run_id, task_id=task_id, map_index=-1, try_number=1, max_tries=0, start_date=None
        )
        return cast("Context", {"ti": task})

    def bodies(self) -> list[bytes]:
        """Return the bodies of the jobs that are stored, in their order."""

        async def read(connection: Connection) -> list[bytes]:
            return [message.data async for message in read_range(connection, self.declaration.name)]

        return self._with_connection(read)

    def work(self, handler: Callable[..., Any], consumer: str | None = None) -> dict[str, int]:
        """Do the jobs that wait, as a worker does them, and return how many deliveries had which outcome.

        :param handler: as of :class:`~airflow_provider_jetstream.worker.Worker`
        :param consumer: the name of a consumer; the queue's first one where absent
        """
        name, bounds = consumer or self.declaration.consumers[0].name, BoundedRun()
        worker = Worker(self.declaration, name, handler, self.settings)
        _in_a_thread(worker.run(bounds))
        return {str(outcome): count for outcome, count in bounds.counts.items()}

    def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters in circulation."""

        async def find(connection: Connection) -> list[DeadLetter]:
            return list((await find_dead_letters(connection, self.declaration)).letters)

        return self._with_connection(find)

    def provision(self) -> None:
        """Create the queue's streams and consumers, as the fixture has done."""

        async def create(connection: Connection) -> None:
            await provision(connection, self.declaration)

        self._with_connection(create)

    def _with_connection(self, operation: Callable[[Connection], Coroutine[Any, Any, _Result]]) -> _Result:
        async def run() -> _Result:
            async with connect(self.settings) as connection:
                return await operation(connection)

        return _in_a_thread(run())


@pytest.fixture
def queue(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[QueueSource], LiveQueue]]:
    """Start a nats-server, and return a function that provisions a queue on it.

    The function takes a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path, which
    is relative to the working directory.
    """
    folder = tmp_path_factory.mktemp("nats-server")
    # The server chooses the port, and writes it to a file: two tests at the same time choose no same one.
    options = ["-a", "127.0.0.1", "-p", "-1", "-js", "-sd", str(folder), "--ports_file_dir", str(folder)]
    server = Process.start([find_nats_server(), *options], log_file=folder / "nats-server.log")
    try:
        url = _address(server, folder)
        monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps({"conn_type": "nats", "host": url}))
        settings = ConnectionSettings(servers=(url,))

        def provisioned(source: QueueSource) -> LiveQueue:
            live = LiveQueue(WorkQueue.load(source), settings)
            live.provision()
            return live

        yield provisioned
    finally:
        server.kill()


def _address(server: Process, folder: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and server.alive:
        for file in folder.glob("*.ports"):
            # It may be written at this moment.
            if (text := file.read_text(encoding="utf-8")).endswith("}"):
                return str(json.loads(text)["nats"][0])
        time.sleep(_POLL)
    raise DevStackError(
        f"expected nats-server to listen within {_START_SECONDS:g} s, found that it doesn't; its last lines:"
        f"\n{server.tail()}"
    )


def _in_a_thread(operation: Coroutine[Any, Any, _Result]) -> _Result:
    # A test may be asynchronous, and its event loop stands still meanwhile.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(operation)).result()
