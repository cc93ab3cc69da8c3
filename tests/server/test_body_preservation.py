"""Copies of dead letters' bodies, stored before the server can lose the originals."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Death,
    Reason,
    Selection,
    Status,
    find_dead_letters,
    get_message,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, MSG_ID, TERMINATED, late_ack_subject
from testbed.dead_letters import dead_letter_records, publish_raw
from testbed.face import Headers, record_headers, summarise_dead_letters
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer

HEADERS = (
    ("Job-Id", "order-7"),
    ("Tag", "a"),
    ("Tag", "b"),
    ("Customer", "Ünal"),
    ("Nats-Expected-Last-Msg-Id", ""),
    ("Dead-Letter-Reason", "the job's own"),
    ("Nats-Foreign", "x"),
)


async def keep(connection: NatsPyConnection, queue: WorkQueue, selection: Selection | None = None) -> tuple[int, int]:
    """Preserve bodies; return how many were copied, and how many letters have no copy afterwards."""
    summary = await summarise_dead_letters(connection, queue, selection)
    return summary.preserved, sum(not letter.preserved for letter in await letters(connection, queue, selection))


async def letters(
    connection: NatsPyConnection, queue: WorkQueue, selection: Selection | None = None
) -> list[DeadLetter]:
    return list((await find_dead_letters(connection, queue, selection)).letters)


async def store_raw(connection: NatsPyConnection, subject: str, headers: bytes, body: bytes) -> None:
    """Store a message that the client library refuses to send."""
    server = connection.client.connected_url
    assert server is not None
    reader, writer = await asyncio.open_connection(server.hostname, server.port)
    head = b"NATS/1.0\r\n" + headers + b"\r\n"
    command = f"HPUB {subject} {len(head)} {len(head) + len(body)}\r\n".encode()
    writer.write(b'CONNECT {"headers": true}\r\n' + command + head + body + b"\r\nPING\r\n")
    await reader.readuntil(b"PONG\r\n")
    writer.close()


async def test_each_body_is_copied_once_and_unchanged(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    body = bytes(range(256))
    await connection.client.request(f"{name}.jobs.a", body, headers=Headers(HEADERS))
    await store_raw(connection, f"{name}.jobs.b", b"Latin: Gr\xf6\xdfe\r\nLatin: \xff\r\nPlain: x\r\n", b"raw")
    await until_stored(connection, name, 2)
    await exhaust_deliveries(connection, queue, 2)
    before = await letters(connection, queue)
    assert [letter.preserved for letter in before] == [False, False]
    assert await keep(connection, queue) == (2, 0)
    assert await keep(connection, queue) == (0, 0)
    after = await letters(connection, queue)
    assert [(letter.preserved, letter.entries) for letter in after] == [(True, (1, 3)), (True, (2, 4))]
    # The server deletes the originals, as it does after a change of leaders.
    for sequence in (1, 2):
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})
    findings = await find_dead_letters(connection, queue)
    assert findings.letters == ()
    assert {job.status for job in findings.dismissed} == {Status.UNACCOUNTED}
    back = await letters(connection, queue, Selection(unaccounted=True))
    for original, letter in zip(before, back, strict=True):
        assert (letter.source, letter.preserved) == ("copy", True)
        assert (letter.body, letter.subject, letter.time) == (original.body, original.subject, original.time)
        for header in {key for key, _ in original.headers}:
            assert [pair for pair in letter.headers if pair[0] == header] == [
                pair for pair in original.headers if pair[0] == header
            ]
        assert sorted(letter.headers) == sorted(original.headers)
        assert letter.death == original.death


async def test_a_terminated_letter_is_copied_from_the_archive_and_outlives_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, jobs=["a"])
    (message,) = await pull_jobs(connection, queue, 1)
    await connection.request(message.reply, b"+TERM no paper")
    await eventually(lambda: _any(connection, f"{name}-dead"))
    (before,) = await letters(connection, queue)
    assert before.source == "archive"
    assert await keep(connection, queue) == (1, 0)
    await connection.api(f"STREAM.PURGE.{name}-archive")
    (letter,) = await letters(connection, queue)
    assert (letter.source, letter.body, letter.death) == ("copy", b"a", before.death)
    # The server's advisory may be gone: the scan's copy proves the death.
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 1})
    (letter,) = await letters(connection, queue)
    assert (letter.death.reason, letter.death.explanation) == (Reason.TERMINATED, "no paper")
    assert letter.death.died_at == before.death.died_at


async def _any(connection: NatsPyConnection, stream: str) -> bool:
    return await stored_count(connection, stream) > 0


async def test_orphans_and_undeliverable_jobs_are_copied_and_keep_their_reason(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.plain"}, dead=["orphan"])
    await connection.api(f"STREAM.PURGE.{name}-dead")
    await publish_jobs(connection, queue, ["nobody's"], kind="other")
    both = Selection(reasons=frozenset({Reason.ORPHAN, Reason.UNDELIVERABLE}))
    assert await keep(connection, queue, both) == (2, 0)
    both_letters = await letters(connection, queue, both)
    assert [
        (letter.sequence, letter.death.reason, letter.preserved, len(letter.entries)) for letter in both_letters
    ] == [
        (1, Reason.ORPHAN, True, 1),
        (2, Reason.UNDELIVERABLE, True, 1),
    ]
    assert await keep(connection, queue, both) == (0, 0)
    assert [letter.sequence for letter in await letters(connection, queue)] == [1]
    assert (await get_message(connection, f"{name}-dead", 3) or both_letters[0]).subject == f"dead.{name}._.2"


async def test_a_letter_whose_copy_was_deleted_is_copied_again(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    assert await keep(connection, queue) == (1, 0)
    # The server remembers the copy's id for two minutes.
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 2})
    assert await keep(connection, queue) == (1, 0)
    (letter,) = await letters(connection, queue)
    assert (letter.preserved, letter.entries) == (True, (1, 3))
    assert await keep(connection, queue) == (0, 0)


async def test_concurrent_scans_store_one_copy(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await asyncio.gather(*(summarise_dead_letters(connection, queue) for _ in range(2)))
    assert await stored_count(connection, f"{name}-dead") == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"subjects": [f"{MAX_DELIVERIES}.{{name}}.*", f"{TERMINATED}.{{name}}.*"]},
        {"max_msg_size": 300},
        {"max_msgs": 2, "discard": "new"},
    ],
)
async def test_letters_that_cannot_be_copied_are_counted(
    connection: NatsPyConnection, name: str, fields: dict[str, object]
) -> None:
    fields = {
        key: [text.format(name=name) for text in value] if isinstance(value, list) else value
        for key, value in fields.items()
    }
    queue = await make_queue(connection, name, dead_letters={"name": f"{name}-dead"} | fields)
    await make_dead_letters(connection, queue, ["a" * 300, "b" * 300])
    assert await keep(connection, queue) == (0, 2)
    findings = await find_dead_letters(connection, queue)
    assert [(letter.sequence, letter.preserved) for letter in findings.letters] == [(1, False), (2, False)]
    if "subjects" in fields:
        assert any(f"doesn't capture dead.{name}.>" in risk for risk in findings.risks)


async def test_a_job_finished_late_after_it_was_copied_is_no_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False, dead=["a"])
    await keep(connection, queue)
    await connection.request(late_ack_subject(name, CONSUMER, 1), b"+ACK")
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, [job.status for job in findings.dismissed]) == ((), [Status.UNACCOUNTED])


async def test_a_forged_record_does_not_take_the_place_of_a_body(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="a")
    (letter,) = await letters(connection, queue)
    forged = record_headers(letter.death, subject="x", time=letter.time, headers=(), writer="scan")
    await connection.client.jetstream().publish(f"dead.{name}.x", b"forged", headers={"Nats-Msg-Id": forged[MSG_ID]})
    assert await keep(connection, queue) == (1, 0)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    assert [letter.body for letter in await letters(connection, queue, Selection(unaccounted=True))] == [b"a"]


# The record of a dead letter through a real server: built, stored, read.


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
    queue = await make_queue(connection, name)
    await publish_raw(nats, f"{name}.jobs.a", headers, body)
    original = await stored(connection, name, 1)
    assert len(original.headers) >= 1
    death = Death(name, "2026-11-20T00:00:00.1Z", 1, "worker", Reason.TERMINATED, datetime.now(UTC), None, 2, "größe")
    fields = record_headers(
        death, subject=original.subject, time=original.time, headers=original.headers, writer="worker"
    )
    await connection.client.jetstream().publish(f"dead.{name}.worker.1", original.data, headers=fields)
    ((recorded, job),) = await dead_letter_records(connection, queue)
    assert recorded == death
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
    queue = await make_queue(connection, name)
    headers = b"Dead-Letter-Sequence: 7\r\nDead-Letter-Explanation: K\xf6ln\r\nDead-Letter-Subject: K\xf6ln\r\nA: \xf6"
    await publish_raw(nats, f"dead.{name}.worker", headers, b"x")
    await stored(connection, f"{name}-dead", 1)
    ((death, job),) = await dead_letter_records(connection, queue)
    assert (death.sequence, death.consumer, death.explanation) == (7, "worker", "K\ufffdln")
    assert (job.subject, job.headers) == ("K\udcf6ln", (("A", "\udcf6"),))
