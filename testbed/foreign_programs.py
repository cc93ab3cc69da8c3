"""What programs need that know nothing of this package: bare nats-py, and JetStream's subjects written out.

The programs of the source documents are in ``tests/documents/foreign_….py``. Each runs with ``NATS_URL``, ``NATS_USER``
and ``NATS_PASSWORD`` in its environment, and appends what it has done to the file of ``FOREIGN_LEDGER``.
"""

import asyncio
import base64
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeoutError

from airflow_provider_jetstream.dev.process import Process

LEDGER = "FOREIGN_LEDGER"
ROOT = Path(__file__).resolve().parent.parent


@asynccontextmanager
async def connected() -> AsyncIterator[Client]:
    """Connect as the environment says; the error of a subscription ends the program, as in the documents."""

    async def fail(error: Exception) -> None:
        print(f"connection error: {error!r}", flush=True)
        os._exit(1)

    client = await nats.connect(
        os.environ["NATS_URL"].split(","),
        user=os.environ.get("NATS_USER"),
        password=os.environ.get("NATS_PASSWORD"),
        error_cb=fail,
    )
    try:
        yield client
    finally:
        await client.close()


async def api(client: Client, subject: str, body: object = None) -> dict[str, Any]:
    """Send a JetStream API request; raises RuntimeError with the server's error."""
    payload = b"" if body is None else json.dumps(body).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{subject}", payload, timeout=5)).data)
    if "error" in answer:
        raise RuntimeError(f"{subject}: {answer['error']}")
    return answer


async def create_or_update_consumer(client: Client, stream: str, config: Mapping[str, Any]) -> None:
    """Do what ``CreateOrUpdateConsumer`` of the Go client does: what ``config`` doesn't name gets its default."""
    subject = f"CONSUMER.CREATE.{stream}.{config['durable_name']}"
    if filter_subject := config.get("filter_subject"):
        subject += f".{filter_subject}"
    full = {"name": config["durable_name"], "deliver_policy": "all", "ack_policy": "explicit"}
    body = {"stream_name": stream, "config": full | {"replay_policy": "instant"} | dict(config), "action": ""}
    await api(client, subject, body)


async def get_message(client: Client, stream: str, sequence: int) -> bytes | None:
    """Get a message's body as ``GetMsg`` of the Go client does: directly where the stream allows it."""
    request = json.dumps({"seq": sequence}).encode()
    info = await api(client, f"STREAM.INFO.{stream}")
    if info["config"].get("allow_direct"):
        message = await client.request(f"$JS.API.DIRECT.GET.{stream}", request, timeout=5)
        return None if status_of(message) else message.data
    try:
        answer = await api(client, f"STREAM.MSG.GET.{stream}", {"seq": sequence})
    except RuntimeError:
        return None
    return base64.b64decode(answer["message"].get("data", ""))


async def pull(client: Client, stream: str, consumer: str, *, batch: int, expires: float) -> AsyncIterator[Msg]:
    """Send one pull request and yield its messages, until it is used up or has expired."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    request = {"batch": batch, "expires": int(expires * 1e9)}
    try:
        await client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", json.dumps(request).encode(), reply=inbox
        )
        for _ in range(batch):
            try:
                message = await subscription.next_msg(timeout=expires + 2)
            except NatsTimeoutError:
                return
            if status := status_of(message):
                # Without the consumer the server answers at once.
                await asyncio.sleep(0.1 if status == "503" else 0)
                return
            yield message
    finally:
        await subscription.unsubscribe()


async def consume(
    client: Client, stream: str, consumer: str, handle: Callable[[Msg], Awaitable[None]], *, batch: int = 500
) -> None:
    """Pull messages for ever and handle one after the other, as ``Consume`` of the Go client does."""
    while True:
        async for message in pull(client, stream, consumer, batch=batch, expires=5):
            await handle(message)


async def acknowledge(client: Client, message: Msg, answer: bytes = b"+ACK") -> None:
    """Answer a delivery: ``+ACK``, ``-NAK``, ``-NAK {"delay": …}``, ``+TERM``, or nothing, which acknowledges too."""
    await client.publish(message.reply, answer)
    await client.flush()


def status_of(message: Msg) -> str | None:
    """Return the status of a message that the server made itself, such as ``408`` for an expired request."""
    return message.headers.get("Status") if message.headers and not message.data else None


def attempt_of(message: Msg) -> int:
    """Return which delivery of its job this is."""
    return message.metadata.num_delivered


def sequence_of(message: Msg) -> int:
    """Return the stream sequence of a delivered message."""
    return message.metadata.sequence.stream


def record(**line: object) -> None:
    """Append a line to the ledger, whole even beside other programs."""
    if path := os.environ.get(LEDGER):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"process": os.getpid(), "time": time.time()}) + "\n")
    print(*line.values(), flush=True)


def start_program(
    name: str,
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    logs: Path,
    restarted: bool = False,
) -> Process:
    """Start a program of a source document.

    :param module: such as ``foreign_images``
    :param env: what its environment has besides this process's own: the connection, the ledger
    :param restarted: start it again whenever it ends, as the documents' platforms do with a worker that crashes
    """
    command = [sys.executable, str(ROOT / "tests" / "documents" / f"{module}.py"), *arguments]
    if restarted:
        command = ["sh", "-c", f"while :; do {shlex.join(command)}; done"]
    python_path = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    return Process.start(command, env={**os.environ, "PYTHONPATH": python_path, **env}, log_file=logs / f"{name}.log")
