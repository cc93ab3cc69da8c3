"""Dead letters for tests: jobs that a worker terminates, what is written down about them, and what no client sends."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from airflow_provider_jetstream.jetstream.audit.log import LetterRecord, RunRecord
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.range_reader import read_range
from airflow_provider_jetstream.jetstream.client.stream_api import get_message, stream_info
from airflow_provider_jetstream.jetstream.contract import copy_filter, letter_audit_subject, run_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Death
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record
from airflow_provider_jetstream.jetstream.dead_letters.scan import require_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, put, stored_count, take


def order_for(sequences: Iterable[int], **fields: Any) -> RedriveRequest:
    """
    Ask for the letters of these sequences.

    :param sequences: stream sequences
    :param fields: what else is asked for
    """
    return RedriveRequest(Selection(sequences=frozenset(sequences)), **fields)


async def let_terminate(
    connection: Connection, queue: WorkQueue, bodies: Iterable[str], *, reason: str = "no such customer"
) -> list[int]:
    """
    Publish jobs and have a worker terminate each; return their stream sequences.

    :param connection: the server
    :param queue: a queue without other jobs
    :param bodies: one job each
    :param reason: what the worker says
    """
    letters = require_dead_letters(queue).name
    sequences, before = await put(connection, queue, bodies), await stored_count(connection, letters)
    for message in await take(connection, queue, len(sequences)):
        await message.respond(f"+TERM {reason}".encode())

    async def told() -> bool:
        return await stored_count(connection, letters) == before + len(sequences)

    await eventually(told)
    return sequences


async def messages_of(connection: Connection, stream: str, subject: str = ">") -> list[StoredMessage]:
    """
    Read all that a stream holds.

    :param connection: the server
    :param stream: the stream
    :param subject: a filter
    """
    return [message async for message in read_range(connection, stream, subject)]


async def stored(connection: Connection, stream: str, sequence: int) -> StoredMessage:
    """
    Read one message, which has to be there.

    :param connection: the server
    :param stream: the stream
    :param sequence: its sequence
    """
    message = await get_message(connection, stream, sequence)
    if message is None:
        raise LookupError(f"{stream} doesn't hold {sequence}")
    return message


async def letter_records(connection: Connection, queue: WorkQueue) -> list[LetterRecord]:
    """
    Read what is written down about letters.

    :param connection: the server
    :param queue: a queue with an audit
    """
    subject = letter_audit_subject(queue.name, 0).removesuffix("0") + "*"
    return [LetterRecord.model_validate_json(each.data) for each in await _audit(connection, queue, subject)]


async def run_records(connection: Connection, queue: WorkQueue, run: str) -> list[RunRecord]:
    """
    Read what is written down about a redrive.

    :param connection: the server
    :param queue: a queue with an audit
    :param run: its key
    """
    subject = run_audit_subject(queue.name, run)
    return [RunRecord.model_validate_json(each.data) for each in await _audit(connection, queue, subject)]


async def kept_records(connection: Connection, queue: WorkQueue) -> list[tuple[Death, StoredMessage]]:
    """
    Return the records that workers and scans have kept, each with the job as it says it was.

    :param connection: the server
    :param queue: the queue
    """
    found: list[tuple[Death, StoredMessage]] = []
    for message in await messages_of(connection, require_dead_letters(queue).name, copy_filter(queue.name)):
        if (record := read_record(message, queue.name)) is None:
            raise ValueError(f"expected a record that says which job it is about, found {message}")
        found.append(record[:2])
    return found


async def _audit(connection: Connection, queue: WorkQueue, subject: str) -> Sequence[StoredMessage]:
    if queue.audit is None:
        raise LookupError(f"{queue.name} has no audit")
    return await messages_of(connection, queue.audit.name, subject)


async def change_stream(connection: Connection, stream: str, **fields: Any) -> dict[str, Any]:
    """
    Change a stream behind everybody's back, and return the configuration that it had.

    :param connection: the server
    :param stream: the stream
    :param fields: other values of its configuration
    """
    config: dict[str, Any] = (await stream_info(connection, stream))["config"]
    await connection.api(f"STREAM.UPDATE.{stream}", config | fields)
    return config


async def deliver_all(connection: Connection, queue: WorkQueue, count: int, *, consumer: str = CONSUMER) -> list[int]:
    """
    Do so many jobs, and return their stream sequences in the order of their delivery.

    :param connection: the server
    :param queue: the queue
    :param count: how many
    :param consumer: the consumer to pull from
    """
    messages = await take(connection, queue, count, consumer=consumer)
    for message in messages:
        await message.ack_sync()
    return [message.metadata.sequence.stream for message in messages]


async def publish_raw(server: NatsServer, subject: str, headers: bytes, body: bytes) -> None:
    """
    Publish headers that no Python client would send.

    :param server: the server
    :param subject: the subject
    :param headers: header lines
    :param body: the body
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    head = b"NATS/1.0\r\n" + headers + b"\r\n\r\n"
    writer.write(b'CONNECT {"headers": true, "verbose": false}\r\n')
    writer.write(f"HPUB {subject} {len(head)} {len(head) + len(body)}\r\n".encode() + head + body + b"\r\nPING\r\n")
    if (answer := await reader.readline()) != b"PONG\r\n":
        raise ConnectionError(answer.decode())
    writer.close()
