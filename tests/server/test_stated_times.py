"""Times that anybody can write into entries: they count only as far as the server's own times allow."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED
from testbed.dead_letters import change_stream, make_terminated_letters, publish_raw
from testbed.queues import (
    CONSUMER,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

TIMES = [
    "2099-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T23:59:59-14:00",
    "0001-01-01T00:00:00+14:00",
    "0001-01-01T00:00:00Z",
    "2026-01-01T00:00:00",
]


async def publish_advisory(
    connection: NatsPyConnection, queue: WorkQueue, kind: str, sequence: int, timestamp: str, **fields: Any
) -> None:
    advisory = {
        "type": f"io.nats.jetstream.advisory.v1.{kind}",
        "timestamp": timestamp,
        "stream": queue.name,
        "consumer": CONSUMER,
        "stream_seq": sequence,
        "deliveries": 1,
    }
    subject = {"max_deliver": MAX_DELIVERIES, "terminated": TERMINATED}[kind]
    await connection.client.jetstream().publish(
        f"{subject}.{queue.name}.{CONSUMER}", json.dumps(advisory | fields).encode()
    )


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.IN_PLACE])
@pytest.mark.parametrize("timestamp", TIMES)
async def test_an_advisory_of_any_date_neither_stops_nor_delays_anything(
    connection: NatsPyConnection, name: str, timestamp: str, protocol: Protocol
) -> None:
    queue = await make_queue(connection, name, max_age="1h", dead="ab")
    await publish_advisory(connection, queue, "max_deliver", 1, timestamp)
    await publish_advisory(connection, queue, "terminated", 2, timestamp, reason="Unacknowledged message was deleted")
    await publish_advisory(connection, queue, "terminated", 77, timestamp, reason="Unacknowledged message was deleted")
    async with asyncio.timeout(5):
        findings = await find_dead_letters(connection, queue)
        assert [letter.sequence for letter in findings.letters] == [1, 2]
        assert all(letter.death.died_at <= letter.ready_at for letter in findings.letters)
        report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=protocol))
    assert (set(report.redriven), report.failed) == ({1, 2}, {})
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.parametrize("timestamp", TIMES)
async def test_a_record_of_any_date_neither_stops_nor_delays_anything(
    connection: NatsPyConnection, nats: NatsServer, name: str, timestamp: str
) -> None:
    queue = await make_queue(connection, name, max_age="1h")
    await change_stream(connection, name, allow_msg_ttl=True)
    await make_dead_letters(connection, queue, "a")
    await make_terminated_letters(connection, queue, "b")
    for sequence, reason in ((1, "max_deliveries"), (2, "terminated"), (3, "expired")):
        fields = {
            "Subject": f"{name}.jobs.a",
            "Reason": reason,
            "Time": timestamp,
            "First-Failure": timestamp,
            "Last-Failure": timestamp,
            "Kept-Headers": json.dumps([["Nats-TTL", "9" * 30]]),
        }
        lines = [f"Dead-Letter-{key}: {value}" for key, value in fields.items()]
        for head, writer in (("dead", "worker"), ("dead", "scan"), ("parked", "park")):
            message_id = f"Nats-Msg-Id: dead:{writer}:{sequence}"
            headers = "\r\n".join([*lines, message_id]).encode()
            await publish_raw(nats, f"{head}.{name}.{CONSUMER}.{sequence}", headers, b"forged")
    await publish_advisory(connection, queue, "terminated", 3, timestamp, reason="Unacknowledged message was deleted")
    async with asyncio.timeout(10):
        for selection in (Selection(), Selection(parked=True), Selection(unaccounted=True)):
            await find_dead_letters(connection, queue, selection)
        report = await redrive_dead_letters(connection, queue)
    assert 1 in report.redriven
    assert report.failed == {}


@pytest.mark.slow
@pytest.mark.parametrize("time", [b"", b"x", b"9999-12-31T23:59:59Z", b"2026-01-01T00:00:00", b"2099-01-01T00:00:00Z"])
@pytest.mark.parametrize("sequence", [b"5", b"9" * 5_000, b"x"])
async def test_a_forged_copy_in_the_archive_hides_no_other(
    connection: NatsPyConnection, nats: NatsServer, name: str, time: bytes, sequence: bytes
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, "ab")
    lines = [b"Nats-Stream: %b" % name.encode(), b"Nats-Subject: x", b"Nats-Sequence: %b" % sequence]
    await publish_raw(nats, f"archive.{name}.x", b"\r\n".join([*lines, b"Nats-Time-Stamp: %b" % time]), b"forged")
    await until_stored(connection, f"{name}-archive", 3)
    await make_terminated_letters(connection, queue, "cd")
    assert await stored_count(connection, name) == 0
    letters = (await find_dead_letters(connection, queue)).letters
    assert [letter.body for letter in letters] == [b"a", b"b", b"c", b"d"]
    await publish_jobs(connection, queue, "e")
    assert set((await redrive_dead_letters(connection, queue)).redriven) == {1, 2, 3, 4}
