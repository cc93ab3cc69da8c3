"""The classification of jobs with entries: dead letters, and each reason why a job is none."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Findings,
    Reason,
    Selection,
    Status,
    connect,
    connection_settings,
    find_dead_letters,
    get_message,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import copy_subject, late_ack_subject
from testbed import seams
from testbed.face import Headers, LetterRecord, consumer_info, open_audit, stream_info
from testbed.nats_cluster import NatsCluster
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    probe,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

# As the server stores them; the client library refuses to send some of these.
AWKWARD = (("Tag", "a"), ("Tag", "b"), ("Customer", "Ünal"), ("Trace", ""))


async def put_raw(
    connection: NatsPyConnection, queue: WorkQueue, body: bytes, headers: tuple[tuple[str, str], ...] = ()
) -> int:
    answer = await connection.client.request(
        f"{queue.name}.jobs.plain", body, timeout=connection.timeout, headers=Headers(headers)
    )
    return int(json.loads(answer.data)["seq"])


async def one_dismissed(connection: NatsPyConnection, queue: WorkQueue, selection: Selection | None = None) -> Status:
    findings = await find_dead_letters(connection, queue, selection)
    assert findings.letters == ()
    (dismissal,) = findings.dismissed
    return dismissal.status


async def one_letter(connection: NatsPyConnection, queue: WorkQueue, selection: Selection | None = None) -> DeadLetter:
    (letter,) = (await find_dead_letters(connection, queue, selection)).letters
    return letter


async def entries(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    async def there() -> bool:
        await probe(connection, queue)
        return await stored_count(connection, f"{queue.name}-dead") >= count

    await eventually(there)


async def terminate(connection: NatsPyConnection, queue: WorkQueue, answer: bytes = b"+TERM") -> None:
    """End the next job as a worker in any language does."""
    (message,) = await pull_jobs(connection, queue, 1)
    before = await stored_count(connection, f"{queue.name}-dead")
    await connection.request(message.reply, answer)
    await entries(connection, queue, before + 1)


def summary(findings: Findings) -> tuple[list[int], dict[int, Status]]:
    return [job.sequence for job in findings.letters], {job.sequence: job.status for job in findings.dismissed}


@pytest.mark.parametrize(("answer", "reason"), [(b"+TERM no such printer", "no such printer"), (b"+TERM", None)])
async def test_a_terminated_job_comes_back_from_the_archive(
    connection: NatsPyConnection, name: str, answer: bytes, reason: str | None
) -> None:
    queue = await make_queue(connection, name)
    body = bytes(range(256))
    sequence = await put_raw(connection, queue, body, AWKWARD)
    stored = await get_message(connection, name, sequence)
    assert stored is not None
    await terminate(connection, queue, answer)
    assert await get_message(connection, name, sequence) is None
    letter = await one_letter(connection, queue)
    assert (letter.body, letter.headers, letter.subject, letter.time) == (body, AWKWARD, stored.subject, stored.time)
    assert (letter.source, letter.preserved, letter.entries) == ("archive", False, (1,))
    death = letter.death
    assert (death.reason, death.explanation, death.consumer, death.deliveries) == (
        Reason.TERMINATED,
        reason,
        CONSUMER,
        1,
    )
    assert letter.ready_at == death.died_at


async def test_a_job_that_was_stored_raw_is_read_raw(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    message = b"NATS/1.0\r\nLatin: Gr\xf6\xdfe\r\n\r\nbody"
    # The client sends only UTF-8.
    server = connection.client.connected_url
    assert server is not None
    reader, writer = await asyncio.open_connection(server.hostname, server.port)
    sizes = f"{len(message) - len(b'body')} {len(message)}".encode()
    writer.write(b'CONNECT {"headers": true}\r\nHPUB ' + f"{name}.jobs.plain ".encode() + sizes + b"\r\n")
    writer.write(message + b"\r\nPING\r\n")
    await reader.readuntil(b"PONG\r\n")
    writer.close()
    await terminate(connection, queue)
    letter = await one_letter(connection, queue)
    assert letter.headers == (("Latin", b"Gr\xf6\xdfe".decode("utf-8", "surrogateescape")),)


async def test_a_jobs_own_headers_with_the_servers_names_are_preserved(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    forwarded = (("Nats-Stream", "elsewhere"), ("Nats-Sequence", "77"), ("Nats-Subject", "a.b"), ("Own", "x"))
    for number in range(3):
        await put_raw(connection, queue, str(number).encode(), forwarded)
        await terminate(connection, queue)
    letters = (await find_dead_letters(connection, queue)).letters
    assert [(letter.sequence, letter.body, letter.headers) for letter in letters] == [
        (1, b"0", forwarded),
        (2, b"1", forwarded),
        (3, b"2", forwarded),
    ]
    assert {letter.subject for letter in letters} == {f"{name}.jobs.plain"}


async def test_without_an_archive_a_terminated_job_is_lost_and_the_risk_was_named(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False)
    before = await find_dead_letters(connection, queue)
    await publish_jobs(connection, queue, ["a"])
    await terminate(connection, queue)
    findings = await find_dead_letters(connection, queue)
    assert summary(findings) == ([], {1: Status.LOST})
    assert any(risk.startswith(f"{name} has no archive") for risk in before.risks)


async def test_a_job_deleted_by_hand_in_flight_is_no_dead_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_age="1h", jobs=["a"])
    await pull_jobs(connection, queue, 1)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    await entries(connection, queue, 1)
    assert await one_dismissed(connection, queue) == Status.SPURIOUS


@pytest.mark.slow
async def test_a_job_that_expired_while_a_worker_had_it_is_a_dead_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(
        connection, name, max_age="1s", duplicate_window="1s", consumer={"ack_wait": "30s", "sample_freq": "100%"}
    )
    await publish_jobs(connection, queue, ["a"])
    await pull_jobs(connection, queue, 1)
    await entries(connection, queue, 1)
    letter = await one_letter(connection, queue)
    assert (letter.body, letter.death.reason, letter.source) == (b"a", Reason.EXPIRED, "archive")


@pytest.mark.since_server("2.11", "messages with a time to live")
async def test_a_job_that_expired_by_its_own_ttl_has_no_copy_left(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    config = (await stream_info(connection, name))["config"] | {"allow_msg_ttl": True}
    await connection.api(f"STREAM.UPDATE.{name}", config)
    await put_raw(connection, queue, b"a", (("Nats-TTL", "1s"),))
    await put_raw(connection, queue, b"b", (("Nats-TTL", "never"),))
    await pull_jobs(connection, queue, 2)
    await entries(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    assert summary(findings) == ([], {1: Status.LOST})
    assert any("Nats-TTL" in risk for risk in findings.risks)


@pytest.mark.slow
@pytest.mark.parametrize("sampled", ["100%", "0"])
async def test_a_metric_distinguishes_a_job_acknowledged_in_time_from_an_expired_one(
    connection: NatsPyConnection, name: str, sampled: str
) -> None:
    queue = await make_queue(connection, name, max_age="200ms", consumer={"ack_wait": "30s", "sample_freq": sampled})
    await publish_jobs(connection, queue, "abc")
    for message in await pull_jobs(connection, queue, 3):
        await message.ack_sync()
    # The server repeats the advisory in error, long after; no entry is about a time that is to come.
    await asyncio.sleep(0.25)
    deletion = {
        "type": "io.nats.jetstream.advisory.v1.terminated",
        "timestamp": datetime.now(UTC).isoformat(),
        "stream": name,
        "consumer": CONSUMER,
        "stream_seq": 2,
        "deliveries": 1,
        "reason": "Unacknowledged message was deleted",
    }
    subject = f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{name}.{CONSUMER}"
    await connection.client.jetstream().publish(subject, json.dumps(deletion).encode())
    letters, dismissed = summary(await find_dead_letters(connection, queue))
    assert (letters, dismissed) == (([], {2: Status.SPURIOUS}) if sampled == "100%" else ([2], {}))


# Older servers never end the deliveries of jobs that are gone: until the consumer is created anew, its dead letters are
# uncertain.
_ENDED = pytest.mark.since_server("2.12", "an end of open deliveries of jobs that are gone")


@pytest.mark.slow
@pytest.mark.parametrize("deliveries", [1, pytest.param(5, marks=_ENDED)])
@pytest.mark.parametrize("told_by", ["metrics", "completions", "nothing"])
async def test_jobs_acknowledged_right_before_a_kill_are_no_dead_letters(
    own_nats: NatsServer, name: str, told_by: str, deliveries: int
) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    consumer = {"ack_wait": "2s", "max_deliver": deliveries, "max_ack_pending": 1000}
    sampled: dict[str, Any] = {"sample_freq": "100%"} if told_by == "metrics" else {}
    # Only a metric or a completion distinguishes an acknowledged job from an expired one.
    limited: dict[str, Any] = {} if told_by == "nothing" else {"max_age": "20s", "duplicate_window": "20s"}
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer=consumer | sampled, **limited)
        # It keeps the ack floor below the others.
        await make_dead_letters(connection, queue, ["dead"])
        await publish_jobs(connection, queue, map(str, range(50)))
        messages = await pull_jobs(connection, queue, 50)
        # The server has time to persist the deliveries, and none to persist the acknowledgements.
        await asyncio.sleep(0.3)
        for message in messages:
            if told_by == "completions":
                await store_completion(connection, queue, message.metadata.sequence.stream)
            await message.ack_sync()
        own_nats.kill()
    own_nats.start()
    async with connect(settings) as connection:
        early = await find_dead_letters(connection, queue)
        assert {letter.sequence for letter in early.letters if letter.source != "queue"} == set()

        async def idle() -> bool:
            await probe(connection, queue)
            return bool((await consumer_info(connection, name, CONSUMER))["num_ack_pending"] == 0)

        # The server may have lost the last acknowledgement itself; that job is stored, and is delivered once more.
        returned = await stored_count(connection, name) - 1
        if deliveries > 1 and returned:
            (message,) = await pull_jobs(connection, queue, returned)
            await message.ack_sync()
        await eventually(idle, 60)
        findings = await find_dead_letters(connection, queue)
        letters, dismissed = summary(findings)
        assert returned <= 1
        assert letters[0] == 1
        assert len(letters) <= 1 + (returned if told_by != "completions" else 0)
        assert {letter.source for letter in findings.letters} == {"queue"}
        print(f"{told_by}, {deliveries} deliveries: {Counter(dismissed.values())}, early: {early.risks}")
        assert (
            set(dismissed.values())
            <= {
                "metrics": {Status.SPURIOUS, Status.UNACCOUNTED},
                "completions": {Status.COMPLETED},
                "nothing": {Status.SPURIOUS, Status.UNACCOUNTED},
            }[told_by]
        )
        if told_by == "metrics":
            again = await find_dead_letters(connection, queue, Selection(unaccounted=True))
            assert [letter.sequence for letter in again.letters] == letters


async def test_dead_letters_are_uncertain_while_deliveries_of_jobs_that_are_gone_are_open(
    own_nats: NatsServer, name: str
) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    consumer = {"ack_wait": "2s", "max_deliver": 5, "max_ack_pending": 1000}
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer=consumer, dead=["dead"])
        await publish_jobs(connection, queue, map(str, range(50)))
        messages = await pull_jobs(connection, queue, 50)
        # The server has time to persist the deliveries, and none to persist the acknowledgements.
        await asyncio.sleep(0.3)
        for message in messages:
            await message.ack_sync()
        own_nats.kill()
    own_nats.start()
    async with connect(settings) as connection:
        findings = await find_dead_letters(connection, queue)
        letters, dismissed = summary(findings)
        # A newer server may have ended the deliveries already.
        assert 1 in letters or (dismissed[1] == Status.UNCERTAIN and findings.uncertain >= 1)


@pytest.mark.slow
@pytest.mark.parametrize(("archive", "verdict"), [(True, Status.UNACCOUNTED), (False, Status.GONE)])
async def test_a_slow_worker_finished_the_job_after_its_death(
    connection: NatsPyConnection, name: str, *, archive: bool, verdict: Status
) -> None:
    queue = await make_queue(connection, name, archive=archive, dead="ab")
    await connection.request(late_ack_subject(name, CONSUMER, 1), b"+ACK")
    assert summary(await find_dead_letters(connection, queue)) == ([2], {1: verdict})
    again = await find_dead_letters(connection, queue, Selection(unaccounted=True))
    assert summary(again) == ([1, 2] if archive else [2], {} if archive else {1: verdict})
    await store_completion(connection, queue, 1)
    for selection in (Selection(), Selection(unaccounted=True)):
        findings = await find_dead_letters(connection, queue, selection)
        assert summary(findings) == ([2], {1: Status.COMPLETED})


@pytest.mark.slow
@pytest.mark.parametrize("end", [Status.COMPLETED, Status.REDRIVEN])
async def test_a_job_that_ends_just_after_its_stream_of_ends_was_found_empty(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, end: Status
) -> None:
    queue = await make_queue(connection, name, dead=["a"])

    list_streams = seams.current(seams.FACTS_LIST_STREAMS)

    async def list_and_end(*args: Any) -> Any:
        monkeypatch.undo()
        infos = await list_streams(*args)
        assert {info["config"]["name"]: info["state"]["messages"] for info in infos}[f"{name}-events"] == 0
        if end == Status.COMPLETED:
            await store_completion(connection, queue, 1)
            await connection.request(late_ack_subject(name, CONSUMER, 1), b"+ACK")
        else:
            await redrive_dead_letters(connection, queue)
        return infos

    # What the scan asks just before it reads the job.
    monkeypatch.setattr(seams.FACTS_LIST_STREAMS, list_and_end)
    assert await one_dismissed(connection, queue) == end


async def test_a_completion_of_an_earlier_stream_does_not_count(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await store_completion(connection, queue, 1)
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    await make_dead_letters(connection, queue, "a")
    assert summary(await find_dead_letters(connection, queue)) == ([1], {})


async def store_record(connection: NatsPyConnection, queue: WorkQueue, sequence: int, **headers: str) -> None:
    headers = {"Dead-Letter-Subject": f"{queue.name}.jobs.plain", "Dead-Letter-Reason": "terminated"} | {
        f"Dead-Letter-{key.replace('_', '-')}": value for key, value in headers.items()
    }
    subject = copy_subject(queue.name, CONSUMER, sequence)
    await connection.client.jetstream().publish(subject, b"kept", headers=headers)


async def test_a_workers_copy_and_the_advisory_are_one_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False, jobs=["kept"])
    await store_record(connection, queue, 1, Explanation="no paper", Error_Class="PaperError", Deliveries="1")
    await terminate(connection, queue, b"+TERM no paper at all")
    letter = await one_letter(connection, queue)
    assert (letter.body, letter.source, letter.preserved, letter.entries) == (b"kept", "copy", True, (1, 2))
    assert (letter.death.explanation, letter.death.error_class) == ("no paper", "PaperError")
    assert letter.death.reason == Reason.TERMINATED


async def test_a_worker_was_stopped_between_its_copy_and_the_termination(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "30s", "sample_freq": "0"})
    await publish_jobs(connection, queue, ["kept"])
    (message,) = await pull_jobs(connection, queue, 1)
    await store_record(connection, queue, 1)
    assert await one_dismissed(connection, queue) == Status.ALIVE
    # Another worker gets the job and finishes it without a completion.
    await message.ack_sync()
    assert await one_dismissed(connection, queue) == Status.UNACCOUNTED
    letter = await one_letter(connection, queue, Selection(unaccounted=True))
    assert (letter.body, letter.source) == (b"kept", "copy")


async def test_without_captured_terminations_a_workers_copy_proves_no_termination(
    connection: NatsPyConnection, name: str
) -> None:
    subjects = [f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{name}.*", f"dead.{name}.>", f"parked.{name}.>"]
    queue = await make_queue(connection, name, dead_letters={"name": f"{name}-dead", "subjects": subjects})
    await publish_jobs(connection, queue, ["kept", "done"])
    terminated, completed = await pull_jobs(connection, queue, 2)
    for sequence in (1, 2):
        await store_record(connection, queue, sequence)
    await terminated.term()
    # The worker was stopped after it had stored the record, and another one finished the job.
    await completed.ack_sync()
    await eventually(lambda: gone(connection, queue, 1))
    findings = await find_dead_letters(connection, queue)
    assert summary(findings) == ([], {1: Status.UNACCOUNTED, 2: Status.UNACCOUNTED})
    assert not (await redrive_dead_letters(connection, queue)).redriven
    assert any(risk.name == "terminations-uncaptured" for risk in findings.risks)


async def gone(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> bool:
    return await get_message(connection, queue.name, sequence) is None


async def test_a_workers_copy_of_a_stored_dead_job_adds_details_whatever_its_clock_says(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["kept", "kept"])
    await connection.api(f"STREAM.PURGE.{name}-dead")
    past, future = "2001-01-01T00:00:00Z", "2099-01-01T00:00:00Z"
    for sequence, clock in ((1, past), (2, future)):
        await store_record(connection, queue, sequence, Reason="max_deliveries", Last_Failure=clock, Explanation="eh")
    letters = (await find_dead_letters(connection, queue)).letters
    assert [(letter.sequence, letter.death.reason, letter.death.explanation) for letter in letters] == [
        (1, Reason.MAX_DELIVERIES, "eh"),
        (2, Reason.MAX_DELIVERIES, "eh"),
    ]
    assert letters[1].death.died_at <= datetime.now(UTC)


async def test_copies_of_an_earlier_stream_do_not_become_part_of_a_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    created = (await stream_info(connection, name))["created"]
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    # A slow worker of the earlier stream stores its copy after the new stream was created.
    await store_record(connection, queue, 1, Stream_Created=created, Explanation="about another job")
    await store_record(connection, queue, 2, Stream_Created=created)
    await publish_jobs(connection, queue, ["new"])
    await exhaust_deliveries(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    (letter,) = findings.letters
    assert (letter.body, letter.preserved, letter.death.explanation, letter.entries) == (b"new", False, None, (1, 3))
    assert summary(findings)[1] == {2: Status.STALE}


async def requeued(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> LetterRecord:
    return LetterRecord(
        stream=queue.name,
        created=(await stream_info(connection, queue.name))["created"],
        sequence=sequence,
        action="requeued",
        subject=f"{queue.name}.jobs.plain",
        reason="max_deliveries",
        fingerprint="",
    )


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_requeued_in_place_and_then_terminated_is_a_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    audit = await open_audit(connection, queue)
    records = [await requeued(connection, queue, sequence) for sequence in (1, 2)]
    assert await audit.write(records) == [None, None]
    await connection.api(f"CONSUMER.RESET.{name}.{CONSUMER}", {"seq": 1})
    alive = {1: Status.STALE, 2: Status.STALE}
    assert summary(await find_dead_letters(connection, queue)) == ([], alive)
    first, second = await pull_jobs(connection, queue, 2)
    assert summary(await find_dead_letters(connection, queue)) == ([], alive)
    await connection.request(first.reply, b"+TERM again")
    await second.ack_sync()
    await entries(connection, queue, 3)
    findings = await find_dead_letters(connection, queue)
    assert summary(findings) == ([1], {2: Status.REDRIVEN})
    assert findings.letters[0].death.explanation == "again"


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True], ids=["its termination is stored", "the dead letter queue is full"])
async def test_a_copy_that_another_servers_clock_dates_before_the_requeue_in_place_is_kept(*, is_full: bool) -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 5})) as connection:
            queue = await make_queue(connection, "orders", archive=False, jobs=["kept"])
            (message,) = await pull_jobs(connection, queue, 1)
            # One clock: so is the order of their times where that of the dead letter queue's server is behind.
            await store_record(connection, queue, 1)
            assert await (await open_audit(connection, queue)).write([await requeued(connection, queue, 1)]) == [None]
            if is_full:
                config = (await stream_info(connection, "orders-dead"))["config"]
                await connection.api("STREAM.UPDATE.orders-dead", config | {"max_msgs": 1, "discard": "new"})
            await connection.request(message.reply, b"+TERM again")
            selection = Selection(sequences=frozenset({1}), unaccounted=True)
            if is_full:
                assert await one_dismissed(connection, queue) == Status.UNACCOUNTED
                # Nor does a redrive of all remove it.
                assert (await redrive_dead_letters(connection, queue)).done == 0
            else:
                await entries(connection, queue, 2)
                selection = Selection()
            assert (await one_letter(connection, queue, selection)).body == b"kept"


@pytest.mark.slow
@pytest.mark.parametrize(
    "junk",
    [
        {"stream_seq": 2**70},
        {"stream_seq": -1},
        {"stream_seq": 0},
        {"timestamp": "2026-01-01T00:00:00"},
        {"timestamp": "0001-01-01T00:00:00Z"},
        {"deliveries": 2**80},
        {"deliveries": -5},
        {"consumer": "\x00"},
    ],
)
async def test_an_entry_with_any_content_does_not_stop_the_others_from_being_read(
    connection: NatsPyConnection, name: str, junk: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    advisory = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "timestamp": datetime.now(UTC).isoformat(),
        "stream": name,
        "consumer": CONSUMER,
        "stream_seq": 9,
        "deliveries": 1,
    }
    subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{name}.{CONSUMER}"
    await connection.client.jetstream().publish(subject, json.dumps(advisory | junk).encode())
    await store_record(connection, queue, 9, Sequence="9" * 20, Deliveries="9" * 20, Time="x", Stream_Created="y")
    findings = await find_dead_letters(connection, queue)
    assert [letter.sequence for letter in findings.letters] == [1]
