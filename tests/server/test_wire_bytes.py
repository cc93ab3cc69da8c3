"""Subjects and headers that aren't UTF-8, or in no form that a client sends: they come back as they were."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    WaitPolicy,
    find_dead_letters,
    publish,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker
from testbed.dead_letters import letter_records, publish_raw, stream_messages
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    running_worker,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

LINES = [
    b"Tag: b",
    b"Tag:a",
    b"Tag:  b \t",
    b"no colon",
    b"Folded: one\r\n two: three\r\n\tfour",
    b"City: K\xf6ln",
    b"St\xe4dte: \xff\xfe",
    b"Two Words: x",
    b"Lines: a\nb\rc",
    b"Empty:",
    b": nameless",
]
NO_ARCHIVE: dict[str, Any] = {"archive": None}


async def header_block(connection: NatsPyConnection, stream: str, sequence: int) -> bytes:
    answer = await connection.api(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
    return base64.b64decode(answer["message"]["hdrs"])


async def delivered_subjects(connection: NatsPyConnection, queue: Any, count: int) -> dict[bytes, str]:
    messages = await pull_jobs(connection, queue, count)
    for message in messages:
        await message.ack_sync()
    return {message.data: message.subject for message in messages}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.ATOMIC])
async def test_a_job_comes_back_byte_by_byte(
    connection: NatsPyConnection, nats: NatsServer, name: str, protocol: Protocol
) -> None:
    atomic: dict[str, Any] = {
        "atomic_redrive": protocol == Protocol.ATOMIC,
        "consumer": {"filter_subject": f"{name}.jobs.>"},
    }
    queue = await make_queue(connection, name, **atomic)
    subject = f"{name}.jobs.K\udcf6ln"
    await publish_raw(nats, subject, b"\r\n".join([*LINES, b"Nats-Msg-Id: first"]), b"odd")
    await publish_jobs(connection, queue, ["plain"])
    await exhaust_deliveries(connection, queue, 2)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=protocol))
    assert (set(report.redriven), report.failed) == ({1, 2}, {})
    block = await header_block(connection, name, report.redriven[1])
    assert block.startswith(b"\r\n".join([b"NATS/1.0", *LINES, b"Redrive-Count: 1\r\n"]))
    # The consumer may not take the markers of an atomic redrive.
    assert await delivered_subjects(connection, queue, 2) == {b"odd": subject, b"plain": f"{name}.jobs.plain"}
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_a_parked_job_comes_back_byte_by_byte(connection: NatsPyConnection, nats: NatsServer, name: str) -> None:
    queue = await make_queue(connection, name)
    subject = f"{name}.jobs.K\udcf6ln"
    await publish_raw(nats, subject, b"\r\n".join(LINES), b"odd")
    await exhaust_deliveries(connection, queue, 1)
    assert list((await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))).parked) == [1]
    report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(parked=True)))
    assert dict(report.redriven) == {1: 2}
    block = await header_block(connection, name, 2)
    # A record has its job's headers in any order, but all values of a name in theirs.
    assert all(line + b"\r\n" in block for line in LINES)
    assert block.index(b"Tag: b\r\n") < block.index(b"Tag:a\r\n") < block.index(b"Tag:  b \t\r\n")
    assert await delivered_subjects(connection, queue, 1) == {b"odd": subject}


@pytest.mark.slow
async def test_a_line_that_hides_a_header_of_the_server_has_no_effect(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name)
    config = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}", config | {"allow_rollup_hdrs": True})
    await publish_jobs(connection, queue, ["dead"])
    await exhaust_deliveries(connection, queue, 1)
    record = json.dumps([["A", "b\r\nNats-Rollup: all"], ["B", "c\nNats-Rollup: all", "B: c\nNats-Rollup: all"]])
    headers = f"Dead-Letter-Subject: {name}.jobs.a\r\nDead-Letter-Kept-Headers: {record}\r\nDead-Letter-Parked: x"
    await publish_raw(nats, f"parked.{name}.worker.7", headers.encode(), b"forged")
    await publish_jobs(connection, queue, ["alive"])
    report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(parked=True)))
    assert (list(report.redriven), report.failed) == ([7], {})
    assert await process_all(connection, queue) == {"alive": 1, "forged": 1}
    assert await stored_count(connection, name) == 1


@pytest.mark.slow
@pytest.mark.parametrize("source", ["archive", "record"])
async def test_one_subject_that_is_not_utf8_neither_deafens_a_worker_nor_stops_a_redrive(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str, source: str
) -> None:
    fields: dict[str, Any] = NO_ARCHIVE if source == "record" else {}
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3}, **fields)
    odd, bodies = f"{name}.jobs.K\udcf6ln", [str(number) for number in range(40)]
    await publish_jobs(connection, queue, bodies[:20])
    await publish_raw(nats, odd, b"A: 1", b"odd")
    await publish_jobs(connection, queue, bodies[20:])

    def give_up(_: Delivery) -> None:
        raise GiveUpError("bad printer")

    async def all_captured() -> bool:
        return await stored_count(connection, f"{name}-dead") == 2 * 41

    if source == "record":
        async with running_worker(Worker(queue, "worker", give_up, settings)):
            await eventually(all_captured)
    else:
        for message in await pull_jobs(connection, queue, 41):
            await message.respond(b"+TERM bad printer")

        async def all_terminated() -> bool:
            return await stored_count(connection, f"{name}-dead") == 41

        await eventually(all_terminated)
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.letters), findings.letters[20].subject) == (41, odd)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(run="first"))
    assert (len(report.redriven), report.failed, await stored_count(connection, name)) == (41, {}, 41)
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    assert await stored_count(connection, name) == 41
    assert {record.subject for record in await letter_records(connection, queue)} == {
        f"{name}.jobs.plain",
        f"{name}.jobs.K\ufffdln",
    }
    done: dict[bytes, str] = {}

    def work(job: Delivery) -> None:
        assert job.body not in done
        done[job.body] = job.subject

    async with running_worker(Worker(queue, "worker", work, settings)):
        await eventually(lambda: len(done) == 41)
    assert done.pop(b"odd") == odd
    assert set(done) == {body.encode() for body in bodies}


@pytest.mark.slow
async def test_a_job_whose_exact_subject_nothing_shows_is_set_aside_by_itself(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, allow_direct=False, **NO_ARCHIVE)
    await publish_jobs(connection, queue, "ab")
    await publish_raw(nats, f"{name}.jobs.K\udcf6ln", b"A: 1", b"odd")
    await publish_raw(nats, f"{name}.jobs.real\ufffd", b"A: 1", b"replacement")
    await exhaust_deliveries(connection, queue, 4)
    for request in (RedriveRequest(), RedriveRequest(max_redrives=0)):
        report = await redrive_dead_letters(connection, queue, request)
        assert list(report.failed) == [3]
        assert report.failed[3].startswith(
            f"expected the exact subject of job 3, found {name}.jobs.K\ufffdln: its bytes that aren't UTF-8 are shown"
        )
    report = await redrive_dead_letters(connection, queue, RedriveRequest(subject=f"{name}.jobs.other"))
    assert (set(report.redriven), report.failed) == ({3}, {})
    assert await delivered_subjects(connection, queue, 4) == {
        b"a": f"{name}.jobs.plain",
        b"b": f"{name}.jobs.plain",
        b"replacement": f"{name}.jobs.real\ufffd",
        b"odd": f"{name}.jobs.other",
    }


async def test_the_archive_shows_the_exact_subject_of_a_job_that_used_up_its_deliveries(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, allow_direct=False)
    await publish_jobs(connection, queue, "ab")
    await publish_raw(nats, odd := f"{name}.jobs.K\udcf6ln", b"A: 1", b"odd")
    await exhaust_deliveries(connection, queue, 3)
    findings = await find_dead_letters(connection, queue)
    assert [letter.subject for letter in findings.letters] == [f"{name}.jobs.plain", f"{name}.jobs.plain", odd]


@pytest.mark.slow
@pytest.mark.since_server("2.11", "the exact subject in direct gets")
async def test_direct_gets_show_the_exact_subject(connection: NatsPyConnection, nats: NatsServer, name: str) -> None:
    queue = await make_queue(connection, name, allow_direct=True, **NO_ARCHIVE)
    await publish_raw(nats, f"{name}.jobs.K\udcf6ln", b"A: 1", b"odd")
    await exhaust_deliveries(connection, queue, 1)
    assert list((await redrive_dead_letters(connection, queue)).redriven) == [1]
    assert [message.subject for message in await stream_messages(connection, name)] == [f"{name}.jobs.K\udcf6ln"]


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_the_jobs_of_an_odd_subject_can_be_requeued_in_place(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, **NO_ARCHIVE)
    await publish_raw(nats, f"{name}.jobs.K\udcf6ln", b"A: 1", b"odd")
    await publish_jobs(connection, queue, ["plain"])
    await exhaust_deliveries(connection, queue, 2)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert (set(report.redriven), report.failed) == ({1, 2}, {})
    assert await process_all(connection, queue) == {"odd": 1, "plain": 1}


async def test_an_odd_subject_whose_jobs_cannot_be_counted_drops_none(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, max_msgs_per_subject=2)
    subject = f"{name}.jobs.K\udcf6ln"
    await publish_raw(nats, subject, b"A: 1", b"dead")
    await exhaust_deliveries(connection, queue, 1)
    await publish_raw(nats, subject, b"A: 1", b"alive")
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), list(report.failed)) == ([], [1])
    assert "isn't UTF-8: its jobs can't be counted" in report.failed[1]
    assert await process_all(connection, queue) == {"alive": 1}


@pytest.mark.slow
async def test_odd_subjects_among_events_stop_neither_a_waiter_nor_a_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3}, advisory_subjects=f"{name}-advisory.>")
    started = asyncio.Event()

    async def work(_: Delivery) -> None:
        started.set()

    odd = [f"{name}-advisory.\udcff", f"cancelled.{name}.\udcff", f"completed.{name}.worker.\udcff"]
    async with running_worker(Worker(queue, "worker", work, settings)):
        for _ in range(2):
            cursor = await take_cursor(connection, queue)
            for subject in odd:
                await publish_raw(nats, subject, b"Nats-Msg-Id: \xff\xfe", b"\xff")
            report = await publish(connection, queue, ["job"], subject=f"{name}.jobs.plain")
            async with asyncio.timeout(5):
                await started.wait()
                outcome = await wait(connection, cursor, report.sequences, policy=WaitPolicy())
            assert outcome.completed == set(report.sequences)
            started.clear()


@pytest.mark.parametrize(
    "headers", [b"NATS/1.0 \xff\xff\r\n\r\n", b"NATS/1.0 503 \xff\r\n\r\n", b"NATS/1.0", b"\xff" * 20, b"\r\n\r\n"]
)
async def test_a_connection_goes_on_after_headers_that_are_none(
    connection: NatsPyConnection, nats: NatsServer, name: str, headers: bytes
) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(message: Any) -> None:
        await received.put(message.data)

    await connection.subscribe(f"{name}.>", receive)
    await connection.client.flush()
    reader, writer = await asyncio.open_connection("127.0.0.1", nats.port)
    await reader.readline()
    writer.write(b'CONNECT {"headers": true, "verbose": false}\r\n')
    for subject, reply in ((f"{name}.a\udcff", ""), (f"{name}.a", "inbox\udcff ")):
        line = f"HPUB {subject} {reply}{len(headers)} {len(headers) + 3}\r\n".encode("utf-8", "surrogateescape")
        writer.write(line + headers + b"odd\r\n")
    writer.write(f"PUB {name}.b 4\r\nlast\r\nPING\r\n".encode())
    assert await reader.readline() == b"PONG\r\n"
    writer.close()
    async with asyncio.timeout(5):
        while await received.get() != b"last":
            pass
