"""A queue whose jobs are all dead letters, and figures of a program that runs in a process of its own."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import pull_request, pull_subject, stream_info
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue, require_dead_letters
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_IN_FLIGHT = 5_000
_PAUSE = 0.05
_MEBIBYTE = 2**20


def open_connection(url: str) -> AbstractAsyncContextManager[NatsPyConnection]:
    """Connect, with time for a server that is busy."""
    return connect(connection_settings({"servers": (url,), "timeout": 60}))


async def prepare(url: str, name: str, letters: int, body: bytes, **declared: Any) -> WorkQueue:
    """Make a queue whose jobs are dead by one delivery, their advisories captured.

    :param declared: more fields of the declaration, or others in place of these
    """
    declaration: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.jobs"],
        "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "1s", "max_ack_pending": -1}],
        "dead_letters": f"{name}-dead",
    }
    queue = WorkQueue(**declaration | declared)
    async with open_connection(url) as connection:
        await provision(connection, queue)
        jetstream, frame = connection.client.jetstream(timeout=60), encode_message(f"{name}.jobs".encode(), body)
        for start in range(0, letters, _IN_FLIGHT):
            # The last one's acknowledgement says that those before it are stored: they are read in order.
            before = min(_IN_FLIGHT, letters - start) - 1
            connection.write(frame * before, before)
            await jetstream.publish(f"{name}.jobs", body)
        await use_up(connection, queue, letters)
        found = [(await stream_info(connection, stream))["state"]["messages"] for stream in (name, f"{name}-dead")]
        if found != [letters, letters]:
            raise SystemExit(f"expected {letters} jobs and {letters} entries, found {found}")
    return queue


async def use_up(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Use up the one delivery of stored jobs, all acknowledgements of a pull in one write, until each has an entry."""
    received, replies = asyncio.Event(), list[bytes]()

    def note(_subject: bytes, reply: bytes, _headers: bytes | None, _body: bytes) -> None:
        if reply.startswith(b"$JS.ACK."):
            replies.append(reply)
        received.set()

    consumer, inbox = queue.consumers[0].name, connection.new_inbox()
    subscription = await connection.subscribe_raw(inbox, note)
    subject = pull_subject(queue.name, consumer, connection.api_prefix).encode()
    left = count
    while left:
        expected = min(left, _IN_FLIGHT)
        connection.write(encode_message(subject, pull_request(expected, expires=60.0), b"", inbox.encode()))
        while len(replies) < expected:
            received.clear()
            await received.wait()
        connection.write(b"".join([encode_message(reply, b"-NAK") for reply in replies]), len(replies))
        left -= len(replies)
        replies.clear()
    await subscription.unsubscribe()
    dead_letters = require_dead_letters(queue).name
    while (await stream_info(connection, dead_letters))["state"]["messages"] < count:
        await probe_consumer(connection, queue.name, consumer)
        await asyncio.sleep(_PAUSE)


@contextmanager
def prepared_store(name: str, letters: int, body: bytes, **declared: Any) -> Iterator[tuple[Path, WorkQueue]]:
    """Make a queue of dead letters in the store of a server that is stopped then; copies of it are fresh servers."""
    with tempfile.TemporaryDirectory() as folder:
        with NatsServer(Path(folder)) as server:
            queue = asyncio.run(prepare(server.url, name, letters, body, **declared))
        yield Path(folder), queue


@contextmanager
def server_with(store: Path) -> Iterator[NatsServer]:
    """Run a server on a copy of a store of :func:`prepared_store`."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "server"
        shutil.copytree(store, folder)
        with NatsServer(folder) as server:
            yield server


def measure_apart(module: str, url: str, variant: str, queue: WorkQueue) -> dict[str, float]:
    """Run ``python -m module --measure`` with the arguments that follow, and return the figures that it prints."""
    declaration = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-m", module, "--measure", url, variant, declaration]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(ended.stdout)
    return figures


def peak_memory() -> float:
    """Return the highest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEBIBYTE
