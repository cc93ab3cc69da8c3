"""What anybody may store in a dead letter queue, an events stream or an audit: scan and redrive pass it by."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import find_dead_letters, redrive_dead_letters
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED
from testbed.dead_letters import publish_raw
from testbed.queues import CONSUMER, make_dead_letters, make_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_DIGITS = "9" * 5_000
_BLOCKS = [
    f"Dead-Letter-Sequence: {_DIGITS}",
    "Dead-Letter-Sequence: 99\r\nDead-Letter-Time: 9999-12-31T23:59:59-23:59\r\nDead-Letter-Stream-Created: \x0b",
    "Dead-Letter-Sequence: 99\r\nDead-Letter-Last-Failure: 0001-01-01T00:00:00+23:59\r\nDead-Letter-Reason: \x1b[2K",
    f"Dead-Letter-Kept-Headers: {'[' * 50_000}",
    f"Dead-Letter-Origin: {'{' * 50_000}",
    'Dead-Letter-Kept-Headers: [["\\ud800", "\\udfff"]]\r\nDead-Letter-Subject: a b',
    f"Dead-Letter-Error-Message: {'x' * 50_000}\r\n{'  y' * 100}",
    "no colon\r\n: nameless\r\n\udcff: \udcff",
]
_VALUES: dict[str, list[Any]] = {
    "stream_seq": [-1, 0, 2**64, 10**400, "x", None, 1e999],
    "deliveries": [-1, 2**63, 10**400],
    "timestamp": ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", -1e300, "2026-01-01T00:00:00"],
    "consumer": ["x" * 5_000, "", ">", "\x0b"],
    "reason": ["a\nb" * 5_000],
}


@pytest.mark.slow
async def test_a_scan_and_a_redrive_pass_by_what_somebody_hostile_has_stored(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a", "b"])
    created = (await connection.api(f"STREAM.INFO.{name}"))["created"]
    advisory = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "id": "x",
        "timestamp": created,
        "stream": name,
        "consumer": CONSUMER,
        "stream_seq": 77,
        "deliveries": 1,
    }
    bodies = [json.dumps(advisory | {field: value}).encode() for field, values in _VALUES.items() for value in values]
    bodies += [b"", b"\xff", b"[" * 50_000, b'{"type": "\\ud800"}', b"null", b"9" * 50_000]
    for number, block in enumerate(_BLOCKS):
        for place in (f"dead.{name}.{CONSUMER}.{number}", f"parked.{name}.{CONSUMER}.{_DIGITS[:30]}"):
            await publish_raw(nats, place, block.encode("utf-8", "surrogateescape"), b"forged")
    for part in ("\x0b", "\x0c.\x1c", "\udcff", "x" * 3_000, "worker.-1", "worker.\u0663"):
        await publish_raw(nats, f"dead.{name}.{part}", b"A: 1", b"forged")
    for body in bodies:
        for kind in (MAX_DELIVERIES, TERMINATED):
            await publish_raw(nats, f"{kind}.{name}.{CONSUMER}", b"A: 1", body)
        for place in (
            *(
                f"completed.{name}.{CONSUMER}.99",
                f"handled.{name}.99",
                f"audit.{name}.letters.1",
                f"audit.{name}.account",
            ),
            *(f"audit.{name}.intents.x", f"audit.{name}.runs.x", f"cancelled.{name}.x", f"published.{name}.x"),
        ):
            await publish_raw(nats, place, b"A: 1", body)
    letters = (await find_dead_letters(connection, queue)).letters
    assert [(letter.sequence, letter.body) for letter in letters] == [(1, b"a"), (2, b"b")]
    report = await redrive_dead_letters(connection, queue)
    assert sorted(report.redriven) == [1, 2]
    assert not (await find_dead_letters(connection, queue)).letters
    assert connection.reconnects == 0
