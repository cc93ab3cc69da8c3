"""The record of a dead letter through a real server: built, stored, read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Death, Reason, get_message
from testbed.dead_letters import publish_raw
from testbed.face import read_record, record_headers
from testbed.queues import eventually, make_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer


async def stored(connection: NatsPyConnection, stream: str, sequence: int) -> StoredMessage:
    # A publisher that asks for no acknowledgement doesn't learn when its message is stored.
    message = await eventually(lambda: get_message(connection, stream, sequence))
    assert message is not None
    return message


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"", bytes(range(256))], ids=["empty", "binary"])
@pytest.mark.parametrize(
    "headers",
    [
        b"Tag: b\r\nTag: a\r\nTag: b",
        "City: Köln\r\nName: 大阪 👍".encode(),
        b"Nats-Msg-Id: order-1\r\nNats-Expected-Last-Sequence: 0\r\nnats-odd: 1",
        b"City: K\xf6ln\r\nTag: 1\r\nCity: Bonn",
        b"Two Words: x\r\nSt\xc3\xa4dt: y\r\nTag:z\r\nEmpty:",
        b"Lines: a\nb\rc",
        b"Dead-Letter-Reason: mine\r\nDead-Letter-Sequence: 99\r\nTag: a",
    ],
    ids=["repeated", "beyond ASCII", "the server's", "no UTF-8", "odd names", "line breaks", "looks like a record"],
)
async def test_a_job_comes_back_from_its_record_as_it_was_stored(
    nats: NatsServer, connection: NatsPyConnection, name: str, headers: bytes, body: bytes
) -> None:
    await make_queue(connection, name)
    await publish_raw(nats, f"{name}.jobs.a", headers, body)
    original = await stored(connection, name, 1)
    assert len(original.headers) >= 1
    death = Death(name, "2026-11-20T00:00:00.1Z", 1, "worker", Reason.TERMINATED, datetime.now(UTC), None, 2, "größe")
    fields = record_headers(
        death, subject=original.subject, time=original.time, headers=original.headers, writer="worker"
    )
    ack = await connection.client.jetstream().publish(f"dead.{name}.worker.1", original.data, headers=fields)
    record = read_record(await stored(connection, f"{name}-dead", ack.seq), name)
    assert record is not None
    recorded, job, parked, _ = record
    assert (recorded, parked) == (death, None)
    assert (job.subject, job.sequence, job.time, job.data) == (original.subject, 1, original.time, body)
    assert sorted(job.headers) == sorted(original.headers)
    for repeated in {key for key, _ in original.headers}:
        values = [value for key, value in original.headers if key == repeated]
        assert [value for key, value in job.headers if key == repeated] == values


async def test_a_record_sent_twice_is_stored_once(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    death = Death(name, "", 1, "worker", Reason.TERMINATED, datetime.now(UTC), deliveries=1)
    headers = record_headers(death, subject="a", time="2026-11-20T00:00:00.1Z", headers=(), writer="worker")
    publish = connection.client.jetstream().publish
    first, second = [await publish(f"dead.{name}.worker.1", b"a", headers=headers) for _ in range(2)]
    assert (second.seq, second.duplicate) == (first.seq, True)


async def test_a_foreign_copy_in_another_encoding_is_read(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name)
    headers = b"Dead-Letter-Sequence: 7\r\nDead-Letter-Explanation: K\xf6ln\r\nDead-Letter-Subject: K\xf6ln\r\nA: \xf6"
    await publish_raw(nats, f"dead.{name}.worker", headers, b"x")
    record = read_record(await stored(connection, f"{name}-dead", 1), name)
    assert record is not None
    death, job, *_ = record
    assert (death.sequence, death.consumer, death.explanation) == (7, "worker", "K\ufffdln")
    assert (job.subject, job.headers) == ("K\udcf6ln", (("A", "\udcf6"),))
