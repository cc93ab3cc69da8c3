"""Dead letters for tests: terminated jobs, the records about dead letters, and headers that no client sends."""

import asyncio
import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from airflow_provider_jetstream.jetstream import (
    Connection,
    Death,
    Origin,
    RedriveRequest,
    Selection,
    WorkQueue,
    get_message,
)
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, RunRecord
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.contract import copy_filter, run_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record
from airflow_provider_jetstream.jetstream.errors import ApiError
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, publish_jobs, pull_jobs, stored_count, unhurried


def request_for(sequences: Iterable[int], **fields: Any) -> RedriveRequest:
    """Build a redrive request for the dead letters with these stream sequences."""
    return RedriveRequest(Selection(sequences=frozenset(sequences)), **fields)


async def make_terminated_letters(
    connection: NatsPyConnection, queue: WorkQueue, bodies: Iterable[str | bytes], *, reason: str = "no such customer"
) -> list[int]:
    """Publish jobs to an empty queue and terminate each with ``reason``; return their stream sequences."""
    letters = require_dead_letters(queue).name
    sequences, before = await publish_jobs(connection, queue, bodies), await stored_count(connection, letters)
    async with unhurried(connection, queue):
        for message in await pull_jobs(connection, queue, len(sequences)):
            await message.respond(f"+TERM {reason}".encode())

        async def all_captured() -> bool:
            return await stored_count(connection, letters) == before + len(sequences)

        await eventually(all_captured)
    return sequences


async def stream_messages(connection: Connection, stream: str, subject: str = ">") -> list[StoredMessage]:
    """Read all messages of a stream, or those on ``subject``."""
    return [message async for message in read_range(connection, stream, subject)]


async def stored_message(connection: NatsPyConnection, stream: str, sequence: int) -> StoredMessage:
    """Read one message; raises LookupError where the stream doesn't hold it."""
    message = await get_message(connection, stream, sequence)
    if message is None:
        raise LookupError(f"{stream} doesn't hold {sequence}")
    return message


async def letter_records(connection: NatsPyConnection, queue: WorkQueue) -> list[LetterRecord]:
    """Read the audit's records about dead letters."""
    audit = await AuditLog.open(connection, queue, (await stream_info(connection, queue.name))["created"])
    return [record async for record in audit.letters()] if audit else []


async def run_records(connection: NatsPyConnection, queue: WorkQueue, run: str) -> list[RunRecord]:
    """Read the audit's records about one redrive."""
    subject = run_audit_subject(queue.name, run)
    return [RunRecord.model_validate_json(each.data) for each in await _audit(connection, queue, subject)]


async def dead_letter_records(connection: NatsPyConnection, queue: WorkQueue) -> list[tuple[Death, StoredMessage]]:
    """Return the dead letter records that workers and scans have stored, each with the job that it describes."""
    found: list[tuple[Death, StoredMessage]] = []
    for message in await stream_messages(connection, require_dead_letters(queue).name, copy_filter(queue.name)):
        if (record := read_record(message, queue.name)) is None:
            raise ValueError(f"expected a record that says which job it is about, found {message}")
        found.append(record[:2])
    return found


async def _audit(connection: NatsPyConnection, queue: WorkQueue, subject: str) -> Sequence[StoredMessage]:
    if queue.audit is None:
        raise LookupError(f"{queue.name} has no audit")
    return await stream_messages(connection, queue.audit.name, subject)


async def change_stream(connection: NatsPyConnection, stream: str, **fields: Any) -> dict[str, Any]:
    """Update a stream's configuration directly, and return the previous configuration."""
    config: dict[str, Any] = (await stream_info(connection, stream))["config"]
    await connection.api(f"STREAM.UPDATE.{stream}", config | fields)
    return config


async def change_consumer(
    connection: NatsPyConnection, stream: str, consumer: str = CONSUMER, **fields: Any
) -> dict[str, Any]:
    """Update a consumer's configuration directly, and return the previous one; a field of ``None`` is left out."""
    config: dict[str, Any] = (await connection.api(f"CONSUMER.INFO.{stream}.{consumer}"))["config"]
    changed = {key: value for key, value in (config | fields).items() if value is not None}
    filters = f".{changed['filter_subject']}" if changed.get("filter_subject") else ""
    request = {"stream_name": stream, "config": changed, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{stream}.{consumer}{filters}", request)
    return config


async def acknowledge_jobs(
    connection: NatsPyConnection, queue: WorkQueue, count: int, *, consumer: str = CONSUMER
) -> list[int]:
    """Pull and acknowledge ``count`` jobs, and return their stream sequences in the order of delivery."""
    messages = await pull_jobs(connection, queue, count, consumer=consumer)
    for message in messages:
        await message.ack_sync()
    return [message.metadata.sequence.stream for message in messages]


async def publish_raw(server: NatsServer, subject: str, headers: bytes, body: bytes) -> None:
    """Publish header lines, or on a subject, that no Python client would send; U+DCFF stands for the byte ``ff``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    head = b"NATS/1.0\r\n" + headers + b"\r\n\r\n"
    writer.write(b'CONNECT {"headers": true, "verbose": false}\r\n')
    line = f"HPUB {subject} {len(head)} {len(head) + len(body)}\r\n".encode("utf-8", "surrogateescape")
    writer.write(line + head + body + b"\r\nPING\r\n")
    if (answer := await reader.readline()) != b"PONG\r\n":
        raise ConnectionError(answer.decode())
    writer.close()


def task_key(origin: Origin) -> str:
    """Compute the key of a task as docs/contracts.md describes it."""
    names = [origin.dag_id, origin.run_id, origin.task_id, origin.map_index]
    return sha256(json.dumps(names).encode()).hexdigest()[:32]


async def store_task(connection: NatsPyConnection, queue: WorkQueue, origin: Origin, **fields: Any) -> None:
    """Store the publish record of a task, as any client that may publish there; ``fields`` override its values."""
    record = {
        "type": "io.airflow.jetstream.v1.published",
        "stream": queue.name,
        "created": "2026-01-01T00:00:00Z",
        "began_at": "2026-01-01T00:00:00Z",
        "queue_from": 1,
        "dag_id": origin.dag_id,
        "run_id": origin.run_id,
        "task_id": origin.task_id,
        "map_index": origin.map_index,
        "first_job": 1,
        "rows": "",
    }
    subject = f"published.{queue.name}.{task_key(origin)}"
    await connection.client.jetstream().publish(subject, json.dumps(record | fields).encode())


async def sampled_dead(connection: NatsPyConnection, name: str) -> int | None:
    """Return how many dead letters a queue has in the last sample of the page."""
    try:
        answer = await connection.api("STREAM.MSG.GET.airflow_monitor", {"last_by_subj": "airflow_monitor.samples"})
    except ApiError:
        return None
    sample = json.loads(zlib.decompress(base64.b64decode(answer["message"]["data"])))
    dead_letters: int | None = sample["queues"].get(name, [None] * 7)[5]
    return dead_letters
