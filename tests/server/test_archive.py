"""The archive: finding a job's copy."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream import (
    WorkQueue,
    connect,
    connection_settings,
    get_message,
    plan,
    provision,
    running_warnings,
)
from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.intent import Target
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.errors import DriftError
from airflow_provider_jetstream.jetstream.redrive.copies import find_copies
from airflow_provider_jetstream.jetstream.redrive.redriven_job import content_of_copy
from testbed.face import Headers, stream_info
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_queue, process_all, publish_jobs, pull_jobs, stored_count, until_stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.face import NatsPyConnection


async def opened(connection: NatsPyConnection, queue: WorkQueue) -> ArchiveReader:
    archive = await ArchiveReader.open(connection, queue, await stream_info(connection, queue.name))
    assert archive is not None
    return archive


async def archived(connection: NatsPyConnection, queue: WorkQueue, bodies: list[str]) -> list[int]:
    before = await stored_count(connection, f"{queue.name}-archive")
    sequences = await publish_jobs(connection, queue, bodies)
    await until_stored(connection, f"{queue.name}-archive", before + len(bodies))
    return sequences


async def test_a_copy_is_found_at_the_first_guess_where_nothing_is_missing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await archived(connection, queue, [str(number) for number in range(100)])
    archive = await opened(connection, queue)
    for sequence in (1, 57, 100, 2):
        before = connection.client.stats["out_msgs"]
        copy = await archive.find(sequence)
        assert copy is not None
        assert (copy.sequence, copy.data, copy.subject) == (
            sequence,
            str(sequence - 1).encode(),
            f"{name}.jobs.plain",
        )
        assert connection.client.stats["out_msgs"] - before == 1
    assert await archive.find(101) is None
    assert await archive.find(0) is None


@pytest.mark.slow
async def test_copies_behind_gaps_are_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await archived(connection, queue, [str(number) for number in range(60)])
    gone = {1, 2, 3, 10, *range(20, 40), 60}
    for sequence in gone:
        await connection.api(f"STREAM.MSG.DELETE.{name}-archive", {"seq": sequence})
    archive = await opened(connection, queue)
    for place in range(60):
        sequence = place * 37 % 60 + 1
        copy = await archive.find(sequence)
        assert (copy.data if copy else None) == (None if sequence in gone else str(sequence - 1).encode())


async def test_copies_of_an_earlier_stream_are_not_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await archived(connection, queue, ["old 1", "old 2", "old 3"])
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    archive = await opened(connection, queue)
    assert [await archive.find(sequence) for sequence in (1, 2, 3)] == [None, None, None]
    await archived(connection, queue, ["new 1", "new 2"])
    archive = await opened(connection, queue)
    copies = [await archive.find(sequence) for sequence in (1, 2, 3)]
    assert [copy.data if copy else None for copy in copies] == [b"new 1", b"new 2", None]


async def test_messages_that_are_no_copies_are_skipped(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    for number in range(1, 21):
        await connection.client.jetstream().publish(f"archive.{name}.stray", b"stray")
        await archived(connection, queue, [str(number)])
        await connection.client.jetstream().publish(f"archive.{name}.stray", b"stray")
    archive = await opened(connection, queue)
    for number in range(1, 21):
        copy = await archive.find(number)
        assert copy is not None
        assert copy.data == str(number).encode()


@pytest.mark.parametrize("lost", [{6}, {6, 7}, {7}])
async def test_a_copy_from_before_a_loss_of_power_is_that_of_no_later_job(server: NatsServer, lost: set[int]) -> None:
    """Another loss took copies of the jobs that have the sequences since."""
    settings = connection_settings({"servers": (server.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q")
        await archived(connection, queue, [f"old{number}" for number in range(1, 5)])
        await asyncio.sleep(0.4)
        server.keep("q")
        await archived(connection, queue, [f"old{number}" for number in range(5, 11)])
        then = datetime.now(UTC)
    server.lose_power("q")
    async with connect(settings) as connection:
        assert await archived(connection, queue, [f"new{number}" for number in range(5, 9)]) == [5, 6, 7, 8]
        for sequence in lost:
            await connection.api("STREAM.MSG.DELETE.q-archive", {"seq": sequence + 6})
        archive = await opened(connection, queue)
        copies = {sequence: await archive.find(sequence) for sequence in range(1, 12)}
        wanted = {number: b"old%d" % number for number in range(1, 5)}
        wanted |= {number: b"new%d" % number for number in range(5, 9) if number not in lost}
        assert {sequence: copy.data for sequence, copy in copies.items() if copy} == wanted
        # Of what died before, those copies count that were stored before.
        copies = {sequence: await archive.find(sequence, then) for sequence in range(1, 12)}
        assert {sequence: copy.data for sequence, copy in copies.items() if copy} == {
            number: b"old%d" % number for number in range(1, 11)
        }


async def test_a_queue_without_an_archive_has_none(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False)
    assert await ArchiveReader.open(connection, queue, await stream_info(connection, queue.name)) is None
    declared = await make_queue(connection, f"{name}2")
    await connection.api(f"STREAM.DELETE.{name}2-archive")
    assert await ArchiveReader.open(connection, declared, await stream_info(connection, declared.name)) is None


# The limits of an archive: those of its queue where it is new, its own where it existed before.


_DAY = 86_400 * 1_000_000_000
_LIMITS = ("max_bytes", "max_msgs", "max_age")


def jobs_queue(name: str, **changes: Any) -> WorkQueue:
    """Declare the queue of the jobs document, with smaller limits."""
    values: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.jobs.>"],
        "discard": "new",
        "max_msgs": 20,
        "max_bytes": "1MB",
        "max_age": "7d",
        "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s"}],
        "dead_letters": f"{name}-dead",
    }
    return WorkQueue(**values | changes)


async def limits_of(connection: NatsPyConnection, name: str) -> tuple[int, ...]:
    config = (await stream_info(connection, f"{name}-archive"))["config"]
    return tuple(config[field] for field in _LIMITS)


@pytest.mark.slow
async def test_done_jobs_leave_no_more_copies_than_the_queue_may_hold(connection: NatsPyConnection, name: str) -> None:
    queue = jobs_queue(name)
    await provision(connection, queue)
    assert await limits_of(connection, name) == (1 << 20, 20, 14 * _DAY)
    assert (await plan(connection, queue)).changes == ()
    for start in range(0, 100, 20):
        await publish_jobs(connection, queue, map(str, range(start, start + 20)))
        await process_all(connection, queue)

    async def copied() -> Any:
        state = (await stream_info(connection, f"{name}-archive"))["state"]
        return state if state["last_seq"] == 100 else None

    state = await eventually(copied)
    assert (state["messages"], state["first_seq"]) == (20, 81)
    assert state["bytes"] <= 1 << 20


async def test_an_existing_archive_keeps_the_limits_that_are_not_declared_for_it(
    connection: NatsPyConnection, name: str
) -> None:
    own = {"name": f"{name}-archive", "subjects": [f"archive.{name}.>"], "max_age": 30 * _DAY}
    await connection.api(f"STREAM.CREATE.{name}-archive", own | {"duplicate_window": 100_000_000})
    await provision(connection, jobs_queue(name))
    assert await limits_of(connection, name) == (-1, -1, 30 * _DAY)
    await provision(connection, jobs_queue(name, archive={"max_bytes": "2MB"}))
    assert await limits_of(connection, name) == (2 << 20, -1, 30 * _DAY)
    await provision(connection, jobs_queue(name, archive={"max_bytes": "2MB", "max_age": "1d"}))
    assert await limits_of(connection, name) == (2 << 20, -1, _DAY)


async def test_an_archive_from_before_that_has_no_limit_of_size_is_warned_of(
    connection: NatsPyConnection, name: str
) -> None:
    await connection.api(
        f"STREAM.CREATE.{name}-archive", {"name": f"{name}-archive", "subjects": [f"archive.{name}.>"]}
    )
    queue = jobs_queue(name)
    await provision(connection, queue)
    assert "unbounded-archive" not in {warning.name for warning in queue.warnings()}
    unbounded = [
        warning for warning in await running_warnings(connection, queue) if warning.name == "unbounded-archive"
    ]
    assert [warning.split(" and holds")[0] for warning in unbounded] == [f"{name}-archive has no limit of size"]


# The server's copy of each job: which jobs get one, and how a queue is configured for it.


_BATCH, _NUMBER, _COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"


def _queue(name: str, **changes: Any) -> WorkQueue:
    values = {
        "name": name,
        "subjects": [f"{name}.jobs.>", f"{name}.more.*"],
        "consumers": [{"name": "w", "max_deliver": 2}],
        "dead_letters": f"{name}-dead",
    }
    return WorkQueue(**values | changes)


async def _config(connection: NatsPyConnection, name: str) -> dict[str, Any]:
    config: dict[str, Any] = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    return config


async def _publish(connection: NatsPyConnection, subject: str, body: bytes = b"job", **headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    answer = await connection.client.request(subject, body, timeout=5, headers=Headers(named) if named else None)
    ack: dict[str, Any] = json.loads(answer.data or b"{}")
    assert "error" not in ack
    return ack


async def _archived(connection: NatsPyConnection, name: str) -> list[str]:
    """Wait for the copy of a last plain job, which comes after all others, and return the bodies of the others."""
    await _publish(connection, f"{name}.more.last", b"last")
    bodies: list[str] = []
    sequence = 1

    async def arrived() -> bool:
        nonlocal sequence
        while (copy := await get_message(connection, f"{name}-archive", sequence)) is not None:
            bodies.append(copy.data.decode())
            sequence += 1
        return bodies[-1:] == ["last"]

    await eventually(arrived)
    return bodies[:-1]


async def test_the_queue_republishes_every_subject_with_one_rule(connection: NatsPyConnection, name: str) -> None:
    queue = _queue(name)
    await provision(connection, queue)
    assert (await _config(connection, name))["republish"] == {"src": ">", "dest": f"archive.{name}.>"}
    assert (await plan(connection, queue)).changes == ()
    await _publish(connection, f"{name}.jobs.a.b", b"one")
    await _publish(connection, f"{name}.more.c", b"two")
    assert await _archived(connection, name) == ["one", "two"]


async def test_a_copy_has_every_header_of_its_job_and_names_its_origin(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, _queue(name))
    pairs = [("K", "1"), ("K", "2"), ("k", "3"), ("Job-Id", "grün"), ("Nats-Msg-Id", "m")]
    answer = await connection.client.request(f"{name}.jobs.a", b"body", timeout=5, headers=Headers(pairs))
    sequence = json.loads(answer.data)["seq"]

    async def arrived() -> Any:
        return await stored_count(connection, f"{name}-archive")

    await eventually(arrived)
    copy = await get_message(connection, f"{name}-archive", 1)
    job = await get_message(connection, name, sequence)
    assert copy is not None
    assert job is not None
    assert list(copy.headers)[: len(pairs)] == pairs
    assert (copy.subject, copy.data) == (f"archive.{name}.{name}.jobs.a", b"body")
    origin = dict(list(copy.headers)[len(pairs) :])
    assert origin == {
        "Nats-Stream": name,
        "Nats-Subject": f"{name}.jobs.a",
        "Nats-Sequence": str(sequence),
        "Nats-Time-Stamp": job.time,
        "Nats-Last-Sequence": "0",
    }


async def test_jobs_of_any_size_that_the_queue_accepts_have_a_copy(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, _queue(name))
    body = b"x" * connection.client.max_payload
    await _publish(connection, f"{name}.jobs.a", body)
    assert [len(copy) for copy in await _archived(connection, name)] == [len(body)]


async def test_a_job_whose_headers_are_conditions_on_the_queue_alone_has_no_copy(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, _queue(name))
    await _publish(connection, f"{name}.jobs.a", b"id", Nats_Msg_Id="1")
    await _publish(connection, f"{name}.jobs.a", b"again", Nats_Msg_Id="1")
    await _publish(connection, f"{name}.jobs.a", b"stream", Nats_Expected_Stream=name)
    ack = await _publish(connection, f"{name}.jobs.b", b"first", Nats_Expected_Last_Subject_Sequence="0")
    await _publish(connection, f"{name}.jobs.b", b"sequence", Nats_Expected_Last_Sequence=str(ack["seq"]))
    await _publish(connection, f"{name}.jobs.b", b"second", Nats_Expected_Last_Subject_Sequence=str(ack["seq"] + 1))
    assert await _archived(connection, name) == ["id", "first"]


@pytest.mark.slow
@pytest.mark.since_server("2.11", "messages with a time to live")
async def test_the_copy_of_a_job_with_a_time_to_live_has_the_same_one(connection: NatsPyConnection, name: str) -> None:
    queue = _queue(name)
    await connection.api(f"STREAM.CREATE.{name}", queue.config() | {"allow_msg_ttl": True})
    await provision(connection, queue)
    await _publish(connection, f"{name}.jobs.a", b"short", Nats_TTL="1s")
    await _publish(connection, f"{name}.jobs.a", b"long", Nats_TTL="1h")
    assert await _archived(connection, name) == ["short", "long"]

    async def expired() -> bool:
        return await get_message(connection, f"{name}-archive", 1) is None

    await eventually(expired)
    assert await get_message(connection, f"{name}-archive", 2) is not None


async def test_jobs_of_an_atomic_batch_have_copies(connection: NatsPyConnection, name: str) -> None:
    queue = _queue(name)
    await connection.api(f"STREAM.CREATE.{name}", queue.config() | {"allow_msg_ttl": True, "allow_atomic": True})
    await provision(connection, queue)
    headers = {"Nats_Batch_Id": "b", "Nats_Batch_Sequence": "1"}
    await _publish(connection, f"{name}.jobs.a", b"first", Nats_TTL="86400", **headers)
    headers |= {"Nats_Batch_Sequence": "2", "Nats_Batch_Commit": "1", "Nats_Msg_Id": "other"}
    assert (await _publish(connection, f"{name}.jobs.a", b"second", **headers))["count"] == 2
    assert await _archived(connection, name) == ["first", "second"]


@pytest.mark.slow
async def test_a_job_that_is_stored_again_after_the_queue_forgot_its_id_has_a_copy_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = _queue(name, duplicate_window="400ms")
    await provision(connection, queue)
    stored = set()

    async def stored_twice() -> bool:
        stored.add((await _publish(connection, f"{name}.jobs.a", b"same", Nats_Msg_Id="1"))["seq"])
        return len(stored) == 2

    await eventually(stored_twice)
    assert await _archived(connection, name) == ["same", "same"]


async def test_an_archive_is_added_to_a_queue_that_exists_and_its_waiting_jobs_stay(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, _queue(name, archive=False))
    assert "republish" not in await _config(connection, name)
    await _publish(connection, f"{name}.jobs.a", b"early")
    done = await provision(connection, _queue(name))
    assert [str(step) for step in done.changes] == [
        f"create stream {name}-archive",
        f"update stream {name}\n    republish: unset → > to archive.{name}.>",
    ]
    await _publish(connection, f"{name}.jobs.a", b"late")
    assert await _archived(connection, name) == ["late"]
    assert await stored_count(connection, name) == 3


async def test_a_disabled_archive_gets_no_more_copies_and_keeps_the_stored_ones(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, _queue(name))
    await _publish(connection, f"{name}.jobs.a", b"one")
    assert await _archived(connection, name) == ["one"]
    without = _queue(name, archive=False)
    done = await provision(connection, without)
    assert [str(step) for step in done.changes] == [
        f"update stream {name}\n    republish: > to archive.{name}.> → unset"
    ]
    assert "republish" not in await _config(connection, name)
    await _publish(connection, f"{name}.jobs.a", b"two")
    assert await stored_count(connection, f"{name}-archive") == 2
    assert (await plan(connection, without)).changes == ()


async def test_a_declaration_without_an_archive_field_leaves_the_archive_enabled(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, _queue(name))
    silent = _queue(name, dead_letters=None)
    assert (await plan(connection, silent)).changes == ()
    await provision(connection, _queue(name, dead_letters=None, max_msgs=9))
    assert (await _config(connection, name))["republish"]["dest"] == f"archive.{name}.>"


async def test_a_queue_with_another_republish_rule_is_refused_and_not_changed(
    connection: NatsPyConnection, name: str
) -> None:
    rule = {"src": ">", "dest": f"theirs.{name}.>"}
    await connection.api(f"STREAM.CREATE.{name}", _queue(name, archive=False).config() | {"republish": rule})
    before = await connection.api("STREAM.NAMES")
    with pytest.raises(DriftError) as caught:
        await provision(connection, _queue(name))
    assert (
        f"republish: > to theirs.{name}.> → > to archive.{name}.>\n    not possible: {name} republishes to"
        f" theirs.{name}.>, and a stream republishes to one subject only; declare archive: false to keep that, or"
        f" remove it by hand for an archive on archive.{name}.>, then provision again"
    ) in str(caught.value)
    assert (await connection.api("STREAM.NAMES"))["streams"] == before["streams"]
    await provision(connection, _queue(name, archive=False))
    assert (await _config(connection, name))["republish"] == rule


@pytest.mark.since_server("2.12", "atomic batches")
async def test_an_older_server_gets_no_fields_that_it_does_not_know(connection: NatsPyConnection, name: str) -> None:
    connection.api_level = 0
    await provision(connection, _queue(name))
    archive = await _config(connection, f"{name}-archive")
    assert (archive.get("allow_msg_ttl", False), archive.get("allow_atomic", False)) == (False, False)
    connection.api_level = 5
    assert str(await provision(connection, _queue(name))).count("update") == 1
    archive = await _config(connection, f"{name}-archive")
    assert (archive["allow_msg_ttl"], archive["allow_atomic"]) == (True, True)


@pytest.fixture(params=["2.15.0", "2.12.8"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NatsServer]:
    binary = find_nats_server() if request.param == "2.15.0" else nats_server_of(request.param)
    with NatsServer(tmp_path / "server", binary=binary) as running:
        yield running


@pytest.mark.parametrize("stray", [False, True])
async def test_a_copy_of_a_lost_job_in_the_archive_is_no_copy_of_the_job_that_has_its_sequence(
    server: NatsServer, *, stray: bool
) -> None:
    """Neither for who looks for one job, nor for a redrive that looks for the new job that it had begun to store."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        queue = await make_queue(
            connection, "q", consumer={"max_deliver": 5, "ack_wait": "300ms", "sample_freq": "100%"}
        )
        await publish_jobs(connection, queue, ["early"])
        begun = (await stream_info(connection, "q"))["created"]
        await asyncio.sleep(0.4)
        server.keep("q")
        await publish_with_ids(connection, "old")
        if stray:
            await connection.client.jetstream().publish("archive.q.stray", b"stray")
        await until_stored(connection, "q-archive", 5 if stray else 4)
    server.lose_power("q")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        await publish_with_ids(connection, "new")
        for message in await pull_jobs(connection, queue, 4):
            await message.ack_sync()
        await until_stored(connection, "q-archive", 8 if stray else 7)
        archive = await ArchiveReader.open(connection, queue, await stream_info(connection, "q"))
        assert archive
        copies = [await archive.find(sequence) for sequence in (1, 2, 3, 4)]
        assert [copy and copy.data for copy in copies] == [b"early", b"new0", b"new1", b"new2"]
        content = {
            name: content_of_copy("q.jobs.plain", [(MSG_ID, name)], name.encode())
            for name in ("old0", "old1", "old2", "new0", "new1", "new2")
        }
        target = Target(stream="q", created=begun, last=1, archive="q-archive")
        wanted = {name: {digest} for name, digest in content.items()}
        search = await find_copies(connection, target, wanted, datetime.now(UTC) + timedelta(hours=1))
        assert {name: copy.sequence for (name, _), copy in search.found.items()} == {"new0": 2, "new1": 3, "new2": 4}
        assert search.complete


async def publish_with_ids(connection: NatsPyConnection, name: str) -> None:
    for number in range(3):
        job = f"{name}{number}"
        await connection.client.jetstream().publish("q.jobs.plain", job.encode(), headers={MSG_ID: job})
