"""Jobs of somebody who may publish jobs and nothing else: nothing in them harms a worker, its server or other jobs."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import nats
import pytest
from nats.js.errors import APIError

from airflow_provider_jetstream.jetstream import (
    Job,
    Protocol,
    RedriveRequest,
    Selection,
    WaitPolicy,
    connect,
    connection_settings,
    find_dead_letters,
    permissions,
    plan,
    provision,
    publish,
    redrive_dead_letters,
    running_warnings,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker
from testbed.dead_letters import letter_records, publish_raw, stream_messages
from testbed.face import authorization, last_message, stream_info
from testbed.nats_server import NatsServer
from testbed.queues import (
    completion_count,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    running_mover,
    running_worker,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

_CONSUMER = {"max_deliver": 5, "ack_wait": "30s"}


async def completion(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> dict[str, Any]:
    message = await last_message(connection, f"{queue.name}-events", f"completed.{queue.name}.worker.{sequence}")
    assert message is not None
    event: dict[str, Any] = json.loads(message.data)
    return event


@pytest.mark.slow
@pytest.mark.parametrize("declared", [(), ("advisory.>",)], ids=["undeclared", "declared"])
async def test_a_job_does_not_choose_where_its_worker_publishes(name: str, declared: tuple[str, ...]) -> None:
    # The newest server refuses the body of these requests; older ones take any, so make test-servers runs this too.
    with NatsServer() as server:
        settings = connection_settings({"servers": (server.url,), "timeout": 5})
        async with connect(settings) as connection:
            queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=declared)
            received = await connection.client.subscribe(f"{name}-other.>")
            inbox = await connection.client.subscribe("_INBOX.somebody")
            held = asyncio.Event()
            targets = [
                f"$JS.API.STREAM.PURGE.{name}",
                f"$JS.API.STREAM.DELETE.{name}-dead",
                f"$JS.API.CONSUMER.DELETE.{name}.worker",
                "_INBOX.somebody",
                f"{name}-other.a",
                f"{name}.jobs.again",
                f"completed.{name}.worker.99",
                "advisory.*",
            ]
            bodies = [json.dumps({"id": str(index), "advisory": target}) for index, target in enumerate(targets)]
            await publish_jobs(connection, queue, bodies)
            await publish_jobs(connection, queue, ["innocent"] * 20)

            async def handle(job: Delivery) -> None:
                if job.body == b"innocent":
                    await held.wait()

            async with running_worker(Worker(queue, "worker", handle, settings, concurrency=4)):
                await until_stored(connection, name, 20, within=30)
                assert await completion_count(connection, name) == len(targets)
                held.set()
                await until_stored(connection, queue.name, 0, within=30)
            await connection.client.flush()
            assert (received.pending_msgs, inbox.pending_msgs) == (0, 0)


async def test_an_advisory_subject_that_the_events_do_not_capture_is_not_used(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=(f"{name}-a.>",))
    # Another program has taken the subject for a stream of its own.
    config = (await connection.api(f"STREAM.INFO.{name}-events"))["config"]
    config["subjects"].remove(f"{name}-a.>")
    await connection.api(f"STREAM.UPDATE.{name}-events", config)
    await connection.api(f"STREAM.CREATE.{name}-other", {"name": f"{name}-other", "subjects": [f"{name}-a.>"]})
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        await publish_jobs(connection, queue, [json.dumps({"id": "1", "advisory": f"{name}-a.1"})])
        await until_stored(connection, queue.name, 0, within=30)
    assert await stored_count(connection, f"{name}-other") == 0
    assert f"aren't reported on {name}-a.>, which {name}-events doesn't capture" in caplog.text


async def test_no_job_disturbs_the_next_ones_or_ends_the_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=(f"{name}-a.>",))
    long = f"{name}-a." + "x" * 3_000
    # The server stores headers of at most 64 KiB.
    blocks = [
        f"Job-Advisory: {long}{'y' * 3_000}".encode(),
        f"Job-Advisory: {name}-a.\udcff\x0b".encode("utf-8", "surrogateescape"),
        b"Job-Deadline: " + b"9" * 12_000 + b"!",
        b"Job-Deadline: " + b"1s" * 30_000,
        b"Job-Deadline: 99999999999w",
        b"Job-Expires: " + b"9" * 60_000,
        b"Job-Id: a\n2026-01-01 00:00:00 INFO job ended worker=w job_id=forged",
        b"traceparent: " + b"0" * 60_000,
        b"tracestate: a\x1b[2K\xff",
        b"Nats-Msg-Id: \xff",
        b"A: b\r\n" + b" c\r\n" * 15_000,
        b"a: b\r\n" * 10_000,
        b"Redrive-Count: " + b"9" * 10_000,
    ]
    bodies = [
        b'{"id": "\\ud800"}',
        b'{"id": "a\\n2026-01-01 00:00:00 INFO job ended", "advisory": "\\udfff"}',
        b'{"id": ' + b"[" * 100_000,
        b'{"id": ' + b"9" * 100_000 + b"}",
        b'{"id": NaN, "advisory": [1]}',
        json.dumps({"id": "1", "advisory": long}).encode(),
    ]
    subjects = ["\x0b", "a\x0cb", "\x1c\x1d", "\udcff\x85", "\0", "x" * 3_000]
    before = connection.reconnects
    plain = f"{name}.jobs.plain"
    for block in blocks:
        await publish_raw(nats, plain, block, b"hostile")
    for body in bodies:
        await publish_raw(nats, plain, b"A: 1", body)
    for part in subjects:
        await publish_raw(nats, f"{name}.jobs.{part}", b"A: 1", b"hostile")
    await publish_jobs(connection, queue, ["innocent"] * 3)
    attempts: list[tuple[bytes, int]] = []
    longest, began = 0.0, time.monotonic()

    async def handle(job: Delivery) -> Any:
        attempts.append((job.body, job.attempt))
        return job.json() if job.body.startswith(b'{"id": "') else job.subject

    async def measure() -> None:
        nonlocal longest
        while True:
            woken = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - woken)

    watch = asyncio.create_task(measure())
    async with running_worker(Worker(queue, "worker", handle, settings, name="w")):
        await until_stored(connection, queue.name, 0, within=60)
    watch.cancel()
    assert attempts.count((b"innocent", 1)) == 3
    # An id that can't be shown doesn't keep a job from being done, and no job was done twice.
    assert len(attempts) == len(blocks) + len(bodies) + len(subjects) + 3, time.monotonic() - began
    assert {attempt for _, attempt in attempts} == {1}
    assert connection.reconnects == before
    assert (await completion(connection, queue, len(blocks) + 1))["result"] == {"id": "\ufffd"}
    # A pattern whose time grows with the square of the length takes minutes.
    assert longest < 10.0


@pytest.mark.slow
async def test_a_worker_reads_the_id_that_everybody_else_reads(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str
) -> None:
    queue, dying = await make_queue(connection, name, consumer=_CONSUMER), await make_queue(connection, f"{name}-dying")
    blocks = [
        b"Job-Id: one\r\nJob-Id: two",
        b"A: b\r\n Job-Id: forged\r\nJob-Id: one",
        b": x\r\nno colon\r\nJob-Id: one",
    ]
    for block in blocks:
        await publish_raw(nats, f"{name}.jobs.plain", block, b"{}")
        await publish_raw(nats, f"{name}-dying.jobs.plain", block, b"{}")
    jobs: list[Delivery] = []
    async with running_worker(Worker(queue, "worker", jobs.append, settings)):
        await until_stored(connection, queue.name, 0, within=30)
    assert [job.id for job in jobs] == ["one"] * 3
    await exhaust_deliveries(connection, dying, 3)
    assert [letter.job_id for letter in (await find_dead_letters(connection, dying)).letters] == ["one"] * 3


@pytest.mark.slow
async def test_subjects_on_the_events_do_not_end_the_connection_of_whoever_waits(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_CONSUMER, advisory_subjects=(f"{name}-a.>",))
    cursor = await take_cursor(connection, queue)
    (sequence,) = await publish_jobs(connection, queue, ["a"])
    waiting = asyncio.create_task(wait(connection, cursor, [sequence]))
    for part in ("\x0b", "\x0c1", "\udcff", "x" * 3_000):
        await publish_raw(nats, f"{name}-a.{part}", b"A: 1", b'{"id": "1"}')
    for body in (b"[" * 100_000, b'{"id": 1e999}', b'{"id": ' + b"9" * 90_000 + b"}", b"\xff", b""):
        await publish_raw(nats, f"completed.{name}.worker.{sequence}", b"A: 1", body)
        await publish_raw(nats, f"{name}-a.x", b"A: 1", body)
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        report = await asyncio.wait_for(waiting, 60)
    assert report.completed == {sequence}


async def test_what_would_end_the_connection_is_refused_before_it_is_sent(connection: NatsPyConnection) -> None:
    with pytest.raises(ConnectionError, match="nothing was sent"):
        await connection.publish("x" * 4_000, b"")
    with pytest.raises(ConnectionError, match="nothing was sent"):
        await connection.publish("x", b"", {"A": "b" * connection.max_payload})
    await connection.api("INFO")
    assert connection.is_connected


# What a publisher's headers say removes, replaces and places no other message.


QUEUE = small_queue("orders", schedules=True)
OTHER = small_queue("bills", schedules=True)
STREAMS = tuple(stream.name for queue in (QUEUE, OTHER) for stream in (queue, *queue.companions()))
_SECRET = "of-every-user"
SOON = (datetime.now(UTC) + timedelta(milliseconds=500)).isoformat().replace("+00:00", "Z")


def _scheduled(target: str, **headers: str) -> dict[str, str]:
    return {"Nats-Schedule": f"@at {SOON}", "Nats-Schedule-Target": target} | headers


HEADERS = [
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"nats-rollup": "all"},
    _scheduled("orders.jobs.b"),
    _scheduled("completed.orders.worker.1"),
    _scheduled("requeued.orders.1"),
    _scheduled("bills.jobs.a"),
    _scheduled("due.orders.orders.jobs.b"),
    {"Nats-Schedule-Next": "purge", "Nats-Scheduler": "orders.jobs.a"},
    {"Nats-Schedule-Next": "purge", "Nats-Scheduler": "archive.orders.orders.jobs.a"},
    {"Nats-Stream-Source": "orders-schedules 99 due.orders.> > due.orders.orders.jobs.a"},
    {"Scheduled-Msg-Id": "of-another-job"},
    {"KV-Operation": "PURGE"},
    {"KV-Operation": "DEL", "Nats-Rollup": "sub"},
    {"Nats-Incr": "+1"},
    {"Nats-Marker-Reason": "Purge"},
    {"Nats-TTL": "1s"},
    {"Nats-Expected-Last-Sequence": "0"},
    {"Nats-Expected-Last-Subject-Sequence": "0", "Nats-Expected-Last-Subject-Sequence-Subject": "orders.jobs.b"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1", "Nats-Rollup": "all"},
    {"Nats-Batch-Id": "c", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1", "Nats-Rollup": "sub"},
]


@pytest.fixture
def server() -> Iterator[NatsServer]:
    roles = [permissions(QUEUE, role) for role in ("publisher", "scheduler")]
    config = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*roles))
    admin = f'users: [\n    {{ user: "admin", password: "{_SECRET}" }}'
    with NatsServer(config=config.replace("users: [", admin, 1), user="admin", password=_SECRET) as running:
        yield running


async def _stored(connection: NatsPyConnection) -> dict[str, int]:
    return {name: await stored_count(connection, name) for name in STREAMS}


@pytest.mark.slow
async def test_no_header_of_a_publisher_removes_or_places_anything_else(server: NatsServer) -> None:
    settings = connection_settings({"servers": (server.url,), "user": "admin", "password": _SECRET})
    async with connect(settings) as connection:
        for queue in (QUEUE, OTHER):
            await provision(connection, queue)
            await make_dead_letters(connection, queue, ["dead"])
            await publish_jobs(connection, queue, ["a", "b"])
            await publish(connection, queue, [Job(b"later", f"{queue.name}.jobs.a", delay="1h")])
        await eventually(lambda: _copied(connection))
        before = await _stored(connection)
        denied: list[str] = []

        async def note(error: Exception) -> None:
            denied.append(str(error))

        user = permissions(QUEUE, "publisher")
        prefix = user.inbox_prefix.encode()
        publisher = await nats.connect(server.url, user=user.user, password=_SECRET, inbox_prefix=prefix, error_cb=note)
        accepted = 0
        for headers in HEADERS:
            try:
                await publisher.jetstream().publish("orders.jobs.a", b"x", headers=headers, timeout=5)
                accepted += 1
            except APIError:
                pass
        for subject in ("scheduled.orders.once.a", "due.orders.orders.jobs.a", "archive.orders.orders.jobs.a"):
            await publisher.publish(subject, b"x", headers=_scheduled("due.orders.orders.jobs.b"))
        await publisher.flush()
        await eventually(lambda: len(denied) == 3)
        await asyncio.sleep(0.5)
        after = await _stored(connection)
        await publisher.close()
        lost = {name: count for name, count in after.items() if count < before[name]}
        assert lost == {}
        grown = {name: count - before[name] for name, count in after.items() if count > before[name]}
        # What is no header of the server's is a job like others, with its copy; a copy with one may be refused.
        assert grown.pop("orders") == accepted < len(HEADERS) / 2
        assert grown.pop("orders-archive", 0) <= accepted
        assert grown == {}


async def _copied(connection: NatsPyConnection) -> bool:
    return [await stored_count(connection, f"{queue.name}-archive") for queue in (QUEUE, OTHER)] == [3, 3]


@pytest.mark.slow
async def test_who_may_schedule_places_jobs_on_the_subjects_of_the_queue_only(server: NatsServer) -> None:
    settings = connection_settings({"servers": (server.url,), "user": "admin", "password": _SECRET})
    async with connect(settings) as connection:
        for queue in (QUEUE, OTHER):
            await provision(connection, queue)
        before = await _stored(connection)
        placed: list[bytes] = []
        user = permissions(QUEUE, "scheduler")
        scheduler = await nats.connect(
            server.url, user=user.user, password=_SECRET, inbox_prefix=user.inbox_prefix.encode()
        )
        js, own = scheduler.jetstream(), "scheduled.orders.once.a"
        for target in ("completed.orders.worker.1", "requeued.orders.1", "bills.jobs.a", "due.bills.bills.jobs.a"):
            with pytest.raises(APIError, match="target is invalid"):
                await js.publish(own, b"x", headers=_scheduled(target))
        async with running_mover(connection, QUEUE):
            for body, more in (
                (b"x", {"Nats-Schedule-Rollup": "sub"}),
                # Nothing of the server's reaches the queue but the message id.
                (b"y", {"Nats-Schedule-TTL": "1s", "Nats-Expected-Last-Sequence": "0", "Nats-Rollup": "sub"}),
                (b"z", {"Nats-Marker-Reason": "Purge", "KV-Operation": "PURGE"}),
            ):
                with suppress(APIError):
                    await js.publish(own, body, headers=_scheduled("due.orders.orders.jobs.b", **more))
                    placed.append(body)
                    await until_stored(connection, "orders", len(placed))
        await scheduler.close()
        after = await _stored(connection)
        changed = {name for name in STREAMS if after[name] != before[name]}
        assert changed == {"orders", "orders-archive"}
        for message in await stream_messages(connection, "orders"):
            assert [name for name, _ in message.headers if name.startswith("Nats-")] == ["Nats-Msg-Id"]
        assert len(placed) >= 2


@pytest.mark.parametrize("flag", ["allow_msg_schedules", "allow_rollup_hdrs"])
async def test_a_queue_whose_publishers_can_purge_it_is_named_with_the_way_out(
    connection: NatsPyConnection, name: str, flag: str
) -> None:
    queue = small_queue(name)
    own = {"name": name, "subjects": [f"{name}.jobs.>"], "retention": "workqueue", flag: True}
    await connection.api(f"STREAM.CREATE.{name}", own)
    forever = flag == "allow_msg_schedules"
    planned = str(await plan(connection, queue))
    assert ("remove it by hand, and provision it again" if forever else "allow_rollup_hdrs: True → False") in planned
    await provision(connection, queue)
    await provision(connection, queue)
    assert (await stream_info(connection, name))["config"]["allow_rollup_hdrs"] is forever
    for found in ((await find_dead_letters(connection, queue)).risks, await running_warnings(connection, queue)):
        assert any("Nats-Rollup" in str(text) for text in found) is forever
    blocked = (await plan(connection, small_queue(name, schedules=True))).blocked
    assert [step.name for step in blocked] == ([name] if forever else [])


# Subjects and headers that aren't UTF-8, or in no form that a client sends: they come back as they were.


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
async def test_a_job_comes_back_byte_by_byte(connection: NatsPyConnection, nats: NatsServer, name: str) -> None:
    queue = await make_queue(connection, name)
    subject = f"{name}.jobs.K\udcf6ln"
    await publish_raw(nats, subject, b"\r\n".join([*LINES, b"Nats-Msg-Id: first"]), b"odd")
    await publish_jobs(connection, queue, ["plain"])
    await exhaust_deliveries(connection, queue, 2)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))
    assert (set(report.redriven), report.failed) == ({1, 2}, {})
    block = await header_block(connection, name, report.redriven[1])
    assert block.startswith(b"\r\n".join([b"NATS/1.0", *LINES, b"Redrive-Count: 1\r\n"]))
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

    if source == "record":
        async with running_worker(Worker(queue, "worker", give_up, settings)):
            await until_stored(connection, f"{name}-dead", 2 * 41)
    else:
        for message in await pull_jobs(connection, queue, 41):
            await message.respond(b"+TERM bad printer")
        await until_stored(connection, f"{name}-dead", 41)
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
    queue = await make_queue(connection, name, allow_direct=False, jobs="ab")
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

    await connection.client.subscribe(f"{name}.>", cb=receive)
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
