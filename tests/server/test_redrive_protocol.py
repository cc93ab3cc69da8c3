"""The choice of a redrive's protocol, and the requests that are refused before anything is done."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    PublishIncompleteError,
    RedriveRequest,
    Repair,
    Selection,
    WorkQueue,
    connect,
    connection_settings,
    find_dead_letters,
    preview,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import QueueFullError, RedriveRequestError
from testbed.dead_letters import (
    change_stream,
    letter_records,
    make_terminated_letters,
    publish_raw,
    stream_messages,
)
from testbed.face import PreparedJobs, publish_prepared, summarise_dead_letters
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    probe,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import PublishReport
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_RESETS = pytest.mark.since_server("2.14", "the reset of a consumer")
FULL: dict[str, Any] = {"discard": "new", "max_msgs": 2}


async def assert_refused(
    connection: NatsPyConnection, queue: WorkQueue, request: RedriveRequest, expected: str
) -> None:
    before = [await stream_messages(connection, stream) for stream in (queue.name, f"{queue.name}-dead")]
    for work in (redrive_dead_letters, preview):
        with pytest.raises(RedriveRequestError, match=expected):
            await work(connection, queue, request)
    assert [await stream_messages(connection, stream) for stream in (queue.name, f"{queue.name}-dead")] == before
    assert await letter_records(connection, queue) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "requested", "protocol"),
    [
        ({}, {}, Protocol.COPY),
        ({}, {"protocol": Protocol.IN_PLACE}, Protocol.IN_PLACE),
        pytest.param(FULL, {}, Protocol.IN_PLACE, marks=_RESETS),
        pytest.param({"discard": "old", "max_msgs": 2}, {}, Protocol.IN_PLACE, marks=_RESETS),
        pytest.param({"discard": "new", "max_bytes": 200}, {}, Protocol.IN_PLACE, marks=_RESETS),
        pytest.param({"discard": "new", "max_msgs": 3}, {}, Protocol.IN_PLACE, marks=_RESETS),
        ({"discard": "new", "max_msgs": 4}, {}, Protocol.COPY),
    ],
)
async def test_the_queue_decides_how_letters_come_back(
    connection: NatsPyConnection, name: str, fields: dict[str, Any], requested: dict[str, Any], protocol: Protocol
) -> None:
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>"}, **fields)
    await make_dead_letters(connection, queue, "ab")
    shown = await preview(connection, queue, RedriveRequest(**requested))
    assert shown.protocol == protocol
    assert ("archive" in shown.guarantee) == (protocol == Protocol.COPY)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(**requested))
    report.raise_for_failures()
    assert (report.protocol, report.guarantee) == (protocol, shown.guarantee)
    assert report.as_json()["protocol"] == protocol.value
    assert len(report.redriven) == 2
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
async def test_letters_that_cannot_be_stored_do_not_stop_the_others_of_their_batch(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(
        connection,
        name,
        max_msg_size=2_000,
        consumer={"filter_subject": f"{name}.jobs.>"},
        archive=None,
        allow_direct=False,
    )
    await publish_raw(nats, f"{name}.jobs.\udcff", b"A: 1", b"unknown subject")
    await publish_jobs(connection, queue, "abc")
    await exhaust_deliveries(connection, queue, 4)
    large = {b"b": Repair(body="x" * 3_000)}
    report = await redrive_dead_letters(
        connection, queue, RedriveRequest(transform=lambda letter: large.get(letter.body))
    )
    assert set(report.redriven) == {2, 4}
    assert report.failed == {
        1: f"expected the exact subject of job 1, found {name}.jobs.\ufffd: its bytes that aren't UTF-8 are shown by"
        " direct gets and by the archive only: set allow_direct on the queue (nats-server 2.11 or newer), give the"
        " redrive a subject, or redrive all letters in place; original kept",
        3: f"expected a copy of at most 2000 bytes (max_msg_size of {name}), found 3059 for job 3, 3000 of them its"
        " body: raise that limit, repair the body, or redrive all letters in place; original kept",
    }
    assert await process_all(connection, queue) == {"a": 1, "c": 1}
    report = await redrive_dead_letters(
        connection, queue, RedriveRequest(transform=lambda _: Repair(subject=f"{name}.jobs.plain"))
    )
    assert set(report.redriven) == {1, 3}
    assert await process_all(connection, queue) == {"unknown subject": 1, "b": 1}


@pytest.mark.slow
async def test_a_protocol_that_the_server_is_too_old_for_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="a")
    connection.api_level = 2
    expected = "expected a server that can reset a consumer, found otherwise: the server is older than 2.14"
    await assert_refused(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE), expected)
    report = await redrive_dead_letters(connection, queue)
    assert report.protocol == Protocol.COPY
    assert await process_all(connection, queue) == {"a": 1}


@pytest.mark.slow
async def test_a_full_queue_on_a_server_that_cannot_reset_keeps_its_letters_and_says_why(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **FULL)
    await make_dead_letters(connection, queue, "ab")
    connection.api_level = 2
    report = await redrive_dead_letters(connection, queue)
    assert (report.protocol, report.failures) == (Protocol.COPY, 2)
    assert report.failed[1] == f"{name} refused the copy of 1: maximum messages exceeded"


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_full_queue_that_discards_its_oldest_jobs_is_not_given_copies(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="old", max_msgs=3, dead="ab")
    await publish_jobs(connection, queue, "c")
    expected = f"^expected room for copies, found otherwise: {name} has no room for copies .*discards its oldest jobs"
    await assert_refused(connection, queue, RedriveRequest(Selection(consumer="worker")), expected)
    await assert_refused(connection, queue, RedriveRequest(protocol=Protocol.COPY), expected)
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 1, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}


@pytest.mark.slow
async def test_letters_go_to_another_subject_of_their_queue(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    report = await redrive_dead_letters(connection, queue, RedriveRequest(subject=f"{name}.jobs.slow"))
    assert report.redriven == {1: 3, 2: 4}
    assert {message.subject for message in await stream_messages(connection, name)} == {f"{name}.jobs.slow"}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [Protocol.AUTO, Protocol.COPY])
async def test_a_subject_without_a_consumer_is_refused(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    consumers = [{"name": "worker", "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.plain"}]
    queue = await make_queue(connection, name, consumers=consumers, dead="a")
    expected = (
        f"^expected a subject of {name} \\({name}.jobs.>\\), found elsewhere.a: a dead letter comes back as a job of"
    )
    await assert_refused(connection, queue, RedriveRequest(subject="elsewhere.a", protocol=protocol), expected)
    expected = (
        f"^expected a subject that a consumer of {name} takes, found {name}.jobs.b: no worker would get the jobs$"
    )
    await assert_refused(connection, queue, RedriveRequest(subject=f"{name}.jobs.b", protocol=protocol), expected)


# A redrive never drops live jobs, or other letters, for what it stores: it stores as many letters as have room.


LETTERS, LIVE = 15, 18
DEAD = [f"dead-{number:02}" for number in range(LETTERS)]
JOBS = [f"live-{number:02}" for number in range(LIVE)]


async def make_terminated(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    """Make a queue of terminated letters, whose bodies are in the archive, beside live jobs."""
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>"}, **fields)
    await publish_jobs(connection, queue, DEAD)
    for message in await pull_jobs(connection, queue, LETTERS):
        await message.term()

    async def are_known() -> bool:
        return (await summarise_dead_letters(connection, queue)).dead == LETTERS

    await eventually(are_known)
    await publish_jobs(connection, queue, JOBS)
    return queue


@pytest.mark.slow
async def test_only_as_many_terminated_letters_come_back_as_max_msgs_allows(
    connection: NatsPyConnection, name: str
) -> None:
    queue, stored = await make_terminated(connection, name, discard="old", max_msgs=20), 2
    shown = await preview(connection, queue, RedriveRequest())
    assert (shown.redriven, shown.failures) == (stored, LETTERS - stored)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failures) == (stored, LETTERS - stored)
    assert report.failed[LETTERS].startswith(f"{name} has no room for the copy of {LETTERS} (max_msgs 20, 20 used, ")
    assert await process_all(connection, queue) == dict.fromkeys([*JOBS, *DEAD[:stored]], 1)
    for _ in range(LETTERS):
        report = await redrive_dead_letters(connection, queue)
        done = await process_all(connection, queue)
        assert done.total() == len(report.redriven)
        if not report.redriven:
            break
        stored += len(report.redriven)
    assert stored == LETTERS


@pytest.mark.slow
async def test_only_as_many_terminated_letters_come_back_as_max_bytes_allows(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_terminated(connection, name, discard="old")
    used = (await connection.api(f"STREAM.INFO.{name}"))["state"]["bytes"]
    await change_stream(connection, name, max_bytes=used + 1_000)
    report = await redrive_dead_letters(connection, queue)
    assert 0 < len(report.redriven) < LETTERS
    assert f"{name} has no room for the copy of {LETTERS} (max_bytes {used + 1_000}, " in report.failed[LETTERS]
    assert await process_all(connection, queue) == dict.fromkeys([*JOBS, *DEAD[: len(report.redriven)]], 1)


@pytest.mark.slow
async def test_stored_letters_come_back_one_after_the_other_where_there_is_room_for_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="old", max_msgs=9, dead="abcde")
    await publish_jobs(connection, queue, "xyz")
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))
    assert report.redriven == {1: 9, 2: 10, 3: 11, 4: 12, 5: 13}
    assert await process_all(connection, queue) == dict.fromkeys("abcdexyz", 1)


@pytest.mark.slow
async def test_a_copy_drops_only_its_own_original_of_its_subject(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, discard="old")
    await make_dead_letters(connection, queue, "ab", kind="one")
    await make_dead_letters(connection, queue, "c", kind="two")
    await publish_jobs(connection, queue, ["live"], kind="two")
    await change_stream(connection, name, max_msgs_per_subject=2)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))
    assert (len(report.redriven), report.failures) == (3, 0)
    assert await process_all(connection, queue) == dict.fromkeys(["a", "b", "c", "live"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("discard", ["old", "new"])
async def test_a_copy_that_would_drop_a_live_job_of_its_subject_is_refused(
    connection: NatsPyConnection, name: str, discard: str
) -> None:
    queue = await make_queue(connection, name, discard=discard, max_msgs=100)
    await make_terminated_letters(connection, queue, "ab")
    await publish_jobs(connection, queue, ["live"])
    await change_stream(connection, name, max_msgs_per_subject=1)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failures) == (0, 2)
    assert f"(max_msgs_per_subject 1, 1 on {name}.jobs.plain, 1 needed)" in report.failed[1]
    assert await process_all(connection, queue) == {"live": 1}


async def test_parking_drops_no_other_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_terminated(connection, name)
    entries = await stream_messages(connection, f"{name}-dead")
    # As many entries as there are, and one more.
    await change_stream(connection, f"{name}-dead", discard="old", max_msgs=len(entries) + 1)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
    assert len(report.parked) + report.failures == LETTERS
    assert (
        f"{name}-dead has no room for the parked letter {LETTERS} (max_msgs {len(entries) + 1}, "
        in report.failed[LETTERS]
    )
    found = await find_dead_letters(connection, queue)
    assert len(found.letters) == report.failures
    for _ in range(LETTERS):
        report = await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
        if not report.failures:
            break
    assert await stored_count(connection, name) == LIVE
    parked = [
        message.data.decode() for message in await stream_messages(connection, f"{name}-dead", f"parked.{name}.>")
    ]
    assert sorted(parked) == DEAD


async def test_preserving_bodies_drops_no_other_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
    await make_dead_letters(connection, queue, "cdef")
    entries = await stored_count(connection, f"{name}-dead")
    await change_stream(connection, f"{name}-dead", discard="old", max_msgs=entries + 1)
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.preserved) == (4, 1)
    parked = await find_dead_letters(connection, queue, Selection(parked=True))
    assert [letter.body for letter in parked.letters] == [b"a", b"b"]


# The jobs queue of its source document, filled up by its dead letters.


# The document's limit is 20,000 jobs.
MANY = 5_000
ACKNOWLEDGED, FAILED = b"+ACK", b"-NAK"

QUEUE_JOBS = WorkQueue(
    name="jobs",
    subjects=["jobs.*.*"],
    discard="new",
    max_msgs=MANY,
    max_bytes="256MB",
    max_age="7d",
    duplicate_window="2m",
    consumers=[
        {
            "name": kind,
            "filter_subject": f"jobs.{kind}.*",
            "max_deliver": 1,
            "ack_wait": "5s",
            "max_ack_pending": -1,
        }
        for kind in ("high", "low")
    ],
    dead_letters="jobs_dlq",
)


async def publish_jobs_queue(connection: NatsPyConnection, kind: str, count: int) -> PublishReport:
    bodies = (f"{kind}-{number}" for number in range(count))
    jobs = PreparedJobs(bodies, subject=f"jobs.{kind}.my_job_id", origin=None, batch=f"{kind}-{count}")
    return await publish_prepared(connection, jobs)


async def answer_all(connection: NatsPyConnection, kind: str, answer: bytes) -> Counter[bytes]:
    """Settle every job that a consumer delivers, many at a time."""
    done: Counter[bytes] = Counter()
    pull = await connection.client.jetstream().pull_subscribe_bind(kind, stream="jobs")
    while (await pull.consumer_info()).num_pending:
        for message in await pull.fetch(1_000):
            done[message.data] += 1
            await connection.client.publish(message.reply, answer)
        await connection.client.flush()
    await pull.unsubscribe()
    return done


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_a_queue_filled_by_its_dead_letters_accepts_jobs_again(own_nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 10})) as connection:
        await provision(connection, QUEUE_JOBS)
        for kind in ("high", "low"):
            (await publish_jobs_queue(connection, kind, MANY // 2)).raise_for_failures()
            assert (await answer_all(connection, kind, FAILED)).total() == MANY // 2

        async def all_dead() -> bool:
            for kind in ("high", "low"):
                await probe(connection, QUEUE_JOBS, consumer=kind)
            return await stored_count(connection, "jobs_dlq") == MANY

        await eventually(all_dead)
        refused = await publish_jobs_queue(connection, "high", 3)
        assert all(isinstance(failure.error, QueueFullError) for failure in refused.failures)
        expected = (
            r"^0 of 3 jobs are stored; 3 are not known to be: job 0 .* is not stored: jobs is full \(maximum messages"
        )
        with pytest.raises(PublishIncompleteError, match=expected):
            refused.raise_for_failures()

        started = time.monotonic()
        report = await redrive_dead_letters(connection, QUEUE_JOBS, RedriveRequest(why="the workers are repaired"))
        print(f"{MANY} letters in place in {time.monotonic() - started:.1f} s")
        report.raise_for_failures()
        assert (report.protocol, len(report.redriven), len(report.gone)) == (Protocol.IN_PLACE, MANY, 0)
        assert await stored_count(connection, "jobs") == MANY
        for kind in ("high", "low"):
            done = await answer_all(connection, kind, ACKNOWLEDGED)
            assert done == {f"{kind}-{number}".encode(): 1 for number in range(MANY // 2)}
        await until_stored(connection, "jobs", 0)
        assert await stored_count(connection, "jobs_dlq") == 0
        (await publish_jobs_queue(connection, "high", 3)).raise_for_failures()
