from __future__ import annotations

import asyncio
import json
import re
from hashlib import sha256
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    PublishIncompleteError,
    PublishRefusedError,
    get_message,
    publish,
)
from airflow_provider_jetstream.jetstream.errors import (
    JobError,
    JobNotSerializableError,
    JobTooLargeError,
    QueueFullError,
    UnreachableError,
)
from airflow_provider_jetstream.worker import Worker
from testbed.face import Destination, prepare_jobs, publish_prepared
from testbed.queues import CONSUMER, eventually, make_queue, pull_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings, PublishReport
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection, OutgoingJob


def _jobs(name: str, items: Iterable[object], **changes: Any) -> Iterable[OutgoingJob]:
    return prepare_jobs(items, **{"subject": f"{name}.jobs.a", "origin": None, "batch": name} | changes)


def _errors(report: PublishReport) -> dict[int, str]:
    return {failure.index: str(failure.error) for failure in report.failures}


async def test_five_thousand_jobs_are_stored_in_order(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m", "max_ack_pending": -1})
    bodies = [f"job {number}" for number in range(5_000)]
    report = await publish_prepared(connection, _jobs(name, bodies))
    assert (report.stream, report.stored, report.duplicates, report.failures) == (name, 5_000, 0, [])
    assert list(report.sequences) == list(range(1, 5_001))
    delivered = await pull_jobs(connection, queue, 5_000, within=20)
    assert [message.data.decode() for message in delivered] == bodies
    report.raise_for_failures()


async def test_publishing_the_same_jobs_again_stores_nothing_and_counts_them(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name)
    origin = Origin("dag", "run", "task")
    first = await publish_prepared(connection, _jobs(name, range(300), origin=origin))
    again = await publish_prepared(connection, _jobs(name, range(350), origin=origin))
    assert again.duplicates == 300
    assert list(again.sequences)[:300] == list(first.sequences)
    assert await stored_count(connection, name) == 350


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 7, 100])
async def test_no_more_jobs_than_the_window_are_unacknowledged_and_the_input_is_read_no_faster(
    connection: NatsPyConnection, name: str, window: int
) -> None:
    waiting: list[Msg] = []
    read = acknowledged = 0

    async def answer_as_the_stream(message: Msg) -> None:
        waiting.append(message)

    def items() -> Iterator[int]:
        nonlocal read
        for read in range(1, 201):
            # The job that waits until the window has space, and about a window that is read ahead.
            assert read - acknowledged <= window + 1 + max(2, window)
            yield read

    subscription = await connection.client.subscribe(f"{name}.jobs.>", cb=answer_as_the_stream)
    task = asyncio.create_task(publish_prepared(connection, _jobs(name, items()), window=window, ack_timeout=30))
    while acknowledged < 200:
        full = min(window, 200 - acknowledged)
        await eventually(lambda full=full: len(waiting) == full)  # type: ignore[misc]
        acknowledged += 1
        await waiting.pop(0).respond(json.dumps({"stream": name, "seq": acknowledged}).encode())
    report = await task
    assert report.stored == 200
    await subscription.unsubscribe()


@pytest.mark.parametrize("attempts", [1, 3])
async def test_a_job_without_an_answer_is_sent_as_often_as_asked_for(
    connection: NatsPyConnection, name: str, attempts: int
) -> None:
    sent: list[Msg] = []

    async def stay_silent(message: Msg) -> None:
        sent.append(message)

    await connection.client.subscribe(f"{name}.jobs.>", cb=stay_silent)
    report = await publish_prepared(connection, _jobs(name, ["abc"]), attempts=attempts, ack_timeout=0.1)
    await connection.client.flush()
    assert len(sent) == attempts
    (failure,) = report.failures
    assert isinstance(failure.error, UnreachableError)
    assert not failure.certain


async def test_a_job_whose_last_attempt_is_answered_is_stored(connection: NatsPyConnection, name: str) -> None:
    sent: list[Msg] = []

    async def answer_the_third(message: Msg) -> None:
        sent.append(message)
        if len(sent) == 3:
            await message.respond(json.dumps({"stream": name, "seq": 1}).encode())

    await connection.client.subscribe(f"{name}.jobs.>", cb=answer_the_third)
    report = await publish_prepared(connection, _jobs(name, ["abc"]), attempts=3, ack_timeout=0.5)
    assert (report.stored, report.failures) == (1, [])


async def test_no_more_jobs_than_the_window_are_unacknowledged_at_a_rate(
    connection: NatsPyConnection, name: str
) -> None:
    waiting: list[Msg] = []
    most = 0

    async def answer_late(message: Msg) -> None:
        nonlocal most
        waiting.append(message)
        most = max(most, len(waiting))
        await asyncio.sleep(0.02)
        await waiting.pop(0).respond(json.dumps({"stream": name, "seq": 1}).encode())

    for _ in range(6):
        await connection.client.subscribe(f"{name}.jobs.>", queue="stream", cb=answer_late)
    report = await publish_prepared(connection, _jobs(name, range(60)), window=3, rate=100_000)
    assert (report.stored, most) == (60, 3)


async def test_the_headers_are_stored_as_the_contract_says(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    job = Job({"id": "i1", "n": 1}, id="i1", advisory="done.i1", headers={"Colour": "grün"})
    origin = Origin("dag", "manual__2026-01-01T00:00:00+00:00", "task", 4)
    report = await publish_prepared(connection, _jobs(name, [job, b"plain"], origin=origin))
    stored = [await get_message(connection, name, sequence) for sequence in report.sequences]
    assert stored[0] is not None
    assert stored[1] is not None
    assert stored[0].subject == f"{name}.jobs.a"
    assert json.loads(stored[0].data) == {"id": "i1", "n": 1}
    assert stored[0].headers == (
        ("Colour", "grün"),
        ("Nats-Msg-Id", origin.message_id("i1")),
        ("Job-Advisory", "done.i1"),
        ("Airflow-Dag-Id", "dag"),
        ("Airflow-Run-Id", "manual__2026-01-01T00:00:00+00:00"),
        ("Airflow-Task-Id", "task"),
        ("Airflow-Map-Index", "4"),
    )
    content = sha256(f'["{name}.jobs.a", null]\nplain'.encode()).hexdigest()
    assert stored[1].header("Nats-Msg-Id") == origin.message_id(content, 0)
    assert stored[1].data == b"plain"


async def test_a_full_queue_is_reported_by_index_and_id_of_the_jobs_not_stored(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name, max_msgs=3, discard="new")
    report = await publish_prepared(connection, _jobs(name, [Job(b"x", id=f"order-{n}") for n in range(12)]))
    assert report.stored == 3
    assert list(report.sequences) == [1, 2, 3] + [0] * 9
    assert all(failure.certain and isinstance(failure.error, QueueFullError) for failure in report.failures)
    assert {failure.index: failure.job_id for failure in report.failures} == {
        index: f"order-{index}" for index in range(3, 12)
    }
    with pytest.raises(PublishIncompleteError) as caught:
        report.raise_for_failures()
    assert caught.value.report is report
    full = f"{name} is full (maximum messages exceeded): let workers or a redrive free space, or raise the limit, then"
    assert str(caught.value).startswith(
        f"3 of 12 jobs are stored in {name} (sequences 1-3); 9 are not known to be: job 3 (id order-3) is not"
        f" stored: {full} try again; job 4 (id order-4) is not stored: "
    )
    assert str(caught.value).endswith("try again; and 4 more")


async def test_a_job_beyond_the_streams_limit_is_named_while_the_others_are_stored(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name, max_msg_size=512)
    report = await publish_prepared(connection, _jobs(name, [b"a", b"x" * 600, b"b"]))
    assert _errors(report) == {
        1: f"body and headers exceed max_msg_size of {name}: send a reference instead of the data, or raise the limit"
    }
    assert isinstance(report.failures[0].error, JobTooLargeError)
    assert list(report.sequences) == [1, 0, 2]
    with pytest.raises(PublishRefusedError, match=f"2 of 3 jobs are stored in {name} .sequences 1-2.; 1 are not"):
        report.raise_for_failures()


@pytest.mark.parametrize("over", [1, -20], ids=["the body alone", "only body and headers together"])
async def test_a_job_beyond_the_servers_limit_is_named_and_the_connection_stays_open(
    connection: NatsPyConnection, name: str, over: int
) -> None:
    await make_queue(connection, name)
    limit = connection.client.max_payload
    report = await publish_prepared(connection, _jobs(name, [b"a", b"x" * (limit + over), b"b"]))
    assert _errors(report) == {
        1: f"body and headers exceed the server's limit of {limit} bytes: send a reference instead of the data, or"
        " raise the limit"
    }
    assert report.failures[0].certain
    assert list(report.sequences) == [1, 0, 2]
    assert connection.client.is_connected
    assert connection.client.stats["reconnects"] == 0


async def test_the_largest_job_that_the_server_accepts_is_stored(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    (small,) = _jobs(name, [b""])
    lines = sum(len(f"{key}: {value}\r\n") for key, value in small.headers.items())
    room = connection.client.max_payload - len("NATS/1.0\r\n\r\n") - lines
    report = await publish_prepared(connection, _jobs(name, [b"x" * room]))
    assert (report.stored, report.failures) == (1, [])
    over = await publish_prepared(connection, _jobs(name, [b"x" * (room + 1)], batch=name[::-1]))
    assert [type(failure.error) for failure in over.failures] == [JobTooLargeError]


async def test_a_body_that_cannot_be_serialised_is_named_while_the_others_are_stored(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name)
    bodies = [1, object(), {"a": float("nan")}, {1, 2}, "five"]
    report = await publish_prepared(connection, _jobs(name, bodies))
    assert list(report.sequences) == [1, 0, 0, 0, 2]
    assert all(isinstance(failure.error, JobNotSerializableError) for failure in report.failures)
    assert [type(bodies[failure.index]).__name__ in str(failure.error) for failure in report.failures] == [True] * 3
    with pytest.raises(PublishRefusedError, match=r"2 of 5 .* job 1 \(id [\w-]{22}\) is not stored: expected a body"):
        report.raise_for_failures()


@pytest.mark.parametrize("answer", [b"hello", b'{"ok": true}', b"[1]", b"\xff", b'{"stream":"q","seq":0}'])
async def test_an_answer_that_is_no_pub_ack_does_not_count(
    connection: NatsPyConnection, name: str, answer: bytes
) -> None:
    async def answer_as_another_subscriber(message: Msg) -> None:
        await message.respond(answer)

    await connection.client.subscribe(f"{name}.jobs.>", cb=answer_as_another_subscriber)
    report = await publish_prepared(connection, _jobs(name, [1]), ack_timeout=0.1, attempts=2)
    assert _errors(report) == {
        0: f"no acknowledgement after 2 attempts of 0.1 s: what answers on {name}.jobs.a isn't a stream; provision the"
        " queue first"
    }
    assert report.stored == 0
    assert isinstance(report.failures[0].error, UnreachableError)


async def test_an_earlier_answer_of_another_subscriber_does_not_hide_the_acknowledgement(
    connection: NatsPyConnection, name: str
) -> None:
    async def answer_as_another_subscriber(message: Msg) -> None:
        await message.respond(b"hello")

    await connection.client.subscribe(f"{name}.jobs.>", cb=answer_as_another_subscriber)
    await make_queue(connection, name)
    report = await publish_prepared(connection, _jobs(name, range(50)))
    assert list(report.sequences) == list(range(1, 51))


async def test_a_stream_that_appears_a_moment_later_still_gets_the_job(connection: NatsPyConnection, name: str) -> None:
    read, loop = asyncio.Event(), asyncio.get_running_loop()

    def items() -> Iterator[int]:
        yield 1
        loop.call_soon_threadsafe(read.set)

    task = asyncio.create_task(publish_prepared(connection, _jobs(name, items())))
    await read.wait()
    # On the same connection, so the server sees the job first.
    await make_queue(connection, name)
    assert (await task).stored == 1


async def test_a_bad_job_among_others_fails_the_call_with_its_index(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    report = await publish_prepared(connection, _jobs(name, [1, 2, Job(3, subject="a b")]))
    with pytest.raises(JobError, match="job 2 can't be published to 'a b': it contains white space"):
        report.raise_for_failures()


async def test_only_the_jobs_of_a_run_fail_that_can_not_be_sent(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    too_large = b"y" * (connection.max_payload + 1)
    bodies: list[object] = [*[b"x"] * 700, object(), "\ud800", *[b"z"] * 700, too_large, *[b"w"] * 700]
    # Without the queue's name, each answer is looked at by itself.
    for batch, destination in (("a", Destination(name)), ("b", None)):
        jobs = prepare_jobs(bodies, subject=f"{name}.jobs.a", origin=None, batch=batch)
        report = await publish_prepared(connection, jobs, destination=destination)
        assert sorted(failure.index for failure in report.failures) == [700, 701, 1402]
        assert [index for index, sequence in enumerate(report.sequences) if not sequence] == [700, 701, 1402]
        assert (report.stored, report.duplicates, report.stream) == (2_100, 0, name)


@pytest.mark.parametrize("given", [" a", "a ", "a\t", "\u00a0a", "a\n"])
async def test_an_id_with_white_space_at_its_ends_is_refused_and_one_in_a_body_is_exact(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, given: str
) -> None:
    """A header loses it on the way, and two jobs would have one id; a body keeps it."""
    queue = await make_queue(connection, name)
    wanted = re.escape(f"expected the id of a job without white space at its ends, found {given!r}: strip it")
    with pytest.raises(JobError, match=wanted):
        Job(b"x", id=given)
    for job_id in ("number", itemgetter("number"), lambda job: job["number"]):
        with pytest.raises(JobError, match=f"job 1: {wanted}"):
            await publish(
                connection, queue, [{"number": "a"}, {"number": given}], subject=f"{name}.jobs.x", job_id=job_id
            )
    assert await stored_count(connection, name) == 0
    await publish(connection, queue, [{"id": "a"}, {"id": given}], subject=f"{name}.jobs.x")
    ids: list[str] = []

    async def handle(job: Delivery) -> None:
        ids.append(job.id)

    async with running_worker(Worker(queue, CONSUMER, handle, settings)):
        await eventually(lambda: len(ids) == 2)
    assert sorted(ids) == sorted(["a", given])
