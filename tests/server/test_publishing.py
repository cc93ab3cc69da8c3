"""Jobs are stored once and in order, or reported by their index."""

from __future__ import annotations

import asyncio
import json
import re
import time
from hashlib import sha256
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Job,
    Origin,
    PublishIncompleteError,
    PublishRefusedError,
    connect,
    get_message,
    publish,
)
from airflow_provider_jetstream.jetstream.errors import (
    JobError,
    JobNotSerializableError,
    JobTooLargeError,
    QueueFullError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.worker import Worker
from testbed.dead_letters import stream_messages
from testbed.face import PreparedJobs, publish_prepared, stream_info
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    pull_jobs,
    running_worker,
    stored_count,
    until_stored,
)
from testbed.rates import most_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import PublishReport, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection


def _jobs(name: str, items: Iterable[object], **changes: Any) -> Iterable[Any]:
    return PreparedJobs(items, **{"subject": f"{name}.jobs.a", "origin": None, "batch": name} | changes)


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
    full = f"{name} is full (maximum messages exceeded, error 10077): let workers or a redrive free space, or raise"
    assert str(caught.value).startswith(
        f"3 of 12 jobs are stored in {name} (sequences 1-3); 9 are not known to be: job 3 (id order-3) is not"
        f" stored: {full} the limit, then try again; job 4 (id order-4) is not stored: "
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
    for batch, stream in (("a", name), ("b", None)):
        jobs = PreparedJobs(bodies, subject=f"{name}.jobs.a", origin=None, batch=batch)
        report = await publish_prepared(connection, jobs, stream=stream)
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


# Publishing that waits for room in a full queue, and publishing at a rate.


FULL: dict[str, Any] = {"discard": "new", "consumer": {"ack_wait": "1m", "max_deliver": 3}, "archive": False}


async def _acknowledge_slowly(connection: NatsPyConnection, queue: WorkQueue, count: int) -> list[str]:
    done: list[str] = []
    while len(done) < count:
        for message in await pull_jobs(connection, queue, 1, within=20):
            done.append(message.data.decode())
            await message.ack_sync()
    return done


async def test_jobs_wait_for_room_and_are_stored_once_each(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=3, **FULL)
    worker = asyncio.create_task(_acknowledge_slowly(connection, queue, 60))
    bodies = [f"{number}" for number in range(60)]
    report = await publish(connection, queue, bodies, subject=f"{name}.jobs.a", room_timeout=20)
    assert (report.stored, report.duplicates, report.failures) == (60, 0, [])
    assert sorted(report.sequences) == list(range(1, 61))
    assert sorted(await worker, key=int) == bodies
    assert await stored_count(connection, name) == 0


async def test_a_queue_limited_by_bytes_stores_the_jobs_that_wait_in_their_order(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_bytes=3_000, **FULL)
    # The limit holds two of them, so that each of the others waits for room alone.
    jobs = [Job(f"{number}".encode() + bytes(1_000)) for number in range(12)]
    publishing = asyncio.create_task(publish(connection, queue, jobs, subject=f"{name}.jobs.a", room_timeout=20))
    done = await _acknowledge_slowly(connection, queue, 12)
    report = await publishing
    assert list(report.sequences) == list(range(1, 13))
    assert [text.rstrip("\0") for text in done] == [f"{number}" for number in range(12)]


async def test_a_queue_that_stays_full_ends_the_call_with_the_jobs_not_stored(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msgs=3, **FULL)
    with pytest.raises(PublishIncompleteError) as raised:
        await publish(connection, queue, range(1_300), subject=f"{name}.jobs.a", room_timeout=0.4)
    report = raised.value.report
    assert list(report.sequences) == [1, 2, 3] + [0] * 1_297
    assert [failure.index for failure in report.failures] == list(range(3, 1_300))
    assert all(failure.certain and isinstance(failure.error, QueueFullError) for failure in report.failures)
    full = (
        f"{name} is full (maximum messages exceeded, error 10077) and stored nothing for 0.4 s: let workers or a"
        " redrive free space, or raise the limit, then try again"
    )
    assert str(report.failures[0].error) == full
    # Of so many jobs no more than a window is sent to a full queue.
    assert str(report.failures[-1].error) == f"it was not sent: {full}"
    assert await stored_count(connection, name) == 3


@pytest.mark.slow
async def test_the_time_for_room_counts_anew_with_each_stored_job(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=1, **FULL)
    publishing = asyncio.create_task(publish(connection, queue, range(4), subject=f"{name}.jobs.a", room_timeout=1.0))
    started = time.monotonic()
    for _ in range(4):
        (message,) = await pull_jobs(connection, queue, 1)
        await asyncio.sleep(0.4)
        await message.ack_sync()
    assert (await publishing).stored == 4
    # Longer than the time for room in all.
    assert time.monotonic() - started > 1.0


async def test_dead_letters_give_no_room_until_they_are_gone(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=1, **FULL | {"consumer": {}})
    await make_dead_letters(connection, queue, ["dead"])
    with pytest.raises(PublishIncompleteError, match="let workers or a redrive free space"):
        await publish(connection, queue, ["a"], subject=f"{name}.jobs.a", room_timeout=0.2)


async def test_a_limit_of_each_subject_is_waited_for_too(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs_per_subject=1, **FULL)
    config = (await stream_info(connection, name))["config"] | {"discard_new_per_subject": True}
    await connection.api(f"STREAM.UPDATE.{name}", config)
    publishing = asyncio.create_task(publish(connection, queue, "abc", subject=f"{name}.jobs.a", room_timeout=20))
    assert await _acknowledge_slowly(connection, queue, 3) == ["a", "b", "c"]
    assert (await publishing).stored == 3


async def test_a_queue_without_room_is_not_waited_for_unless_asked(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, max_msgs=1, **FULL)
    with pytest.raises(PublishIncompleteError, match=r"full \(maximum messages exceeded, error 10077\): let workers"):
        await publish(connection, queue, "ab", subject=f"{name}.jobs.a")


async def test_a_server_that_goes_away_while_a_call_waits_for_room_ends_the_call(
    connection: NatsPyConnection, name: str
) -> None:
    full = json.dumps(
        {"error": {"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}, "stream": name}
    ).encode()
    answers = 0

    async def answer_as_a_stream_that_goes(message: Msg) -> None:
        nonlocal answers
        answers += 1
        if answers <= 3:
            await message.respond(full)

    await connection.client.subscribe(f"{name}.>", cb=answer_as_a_stream_that_goes)
    jobs = PreparedJobs("abc", subject=f"{name}.a", origin=None, batch=name)
    report = await publish_prepared(connection, jobs, ack_timeout=0.1, attempts=2, room_timeout=30)
    assert [failure.certain for failure in sorted(report.failures, key=lambda failure: failure.index)] == [
        False,
        True,
        True,
    ]
    assert all(isinstance(failure.error, UnreachableError) for failure in report.failures)


async def stored_times(connection: NatsPyConnection, name: str) -> list[float]:
    return [message.stored_at.timestamp() for message in await stream_messages(connection, name)]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "count", "most"), [(0.2, 3, 2), (1, 12, 10), (20, 230, 200), (400, 4_200, 4_000)])
async def test_ten_seconds_have_no_more_jobs_than_the_rate_allows(
    connection: NatsPyConnection, name: str, rate: float, count: int, most: int
) -> None:
    queue = await make_queue(connection, name, archive=False)
    await publish(connection, queue, range(count), subject=f"{name}.jobs.a", rate=rate)
    times = await stored_times(connection, name)
    assert len(times) == count
    assert most_within(times, 10.0) <= most
    assert (count - 1) / (times[-1] - times[0]) >= rate * 0.85


async def test_a_rate_counts_no_job_that_is_stored_already(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    jobs = PreparedJobs(range(1_000), subject=f"{name}.jobs.a", origin=None, batch=name)
    async with asyncio.timeout(60):
        report = await publish_prepared(
            connection, jobs, rate=1, known=lambda index, _: index + 1 if index < 999 else None
        )
    assert (report.stored, report.duplicates) == (1_000, 999)


@pytest.mark.parametrize(("arguments", "sent"), [({"rate": 0.01}, 1), ({"room_timeout": 1_000}, 2)])
async def test_a_call_that_is_stopped_leaves_the_other_jobs_unsent(
    connection: NatsPyConnection, name: str, arguments: dict[str, Any], sent: int
) -> None:
    await make_queue(connection, name, max_msgs=2, **FULL)
    stopped, read = False, 0

    def items() -> Iterator[int]:
        nonlocal read
        for number in range(1_000):
            read += 1
            yield number

    jobs = PreparedJobs(items(), subject=f"{name}.jobs.a", origin=None, batch=name)
    publishing = asyncio.create_task(publish_prepared(connection, jobs, stopped=lambda: stopped, **arguments))
    await eventually(lambda: read > sent)
    await until_stored(connection, name, sent)
    stopped = True
    report = await asyncio.wait_for(publishing, 10)
    assert list(report.sequences)[:sent] == [1, 2][:sent]
    assert all(type(failure.error) is TransientError and failure.certain for failure in report.failures)
    assert report.failures
    assert await stored_count(connection, name) == sent


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
async def test_a_rate_that_is_none_is_refused_before_anything_is_sent(
    connection: NatsPyConnection, name: str, rate: float
) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(JobError, match=f"expected a rate above 0 jobs a second, found {rate}"):
        await publish(connection, queue, "ab", subject=f"{name}.jobs.a", rate=rate)
    assert await stored_count(connection, name) == 0


# Publishing that waits for room where not the queue alone is full: its account, its server, or one subject.


_LIMITS = "max_mem: 1MB\nmax_file: 1MB"
_ACCOUNT = (
    f"accounts {{\nA {{\njetstream {{\n{_LIMITS}\n}}\nusers = [{{user: u, password: p}}]\n}}\n}}\nno_auth_user: u"
)


@pytest.mark.parametrize(
    ("server", "found"),
    [
        (
            NatsServer(config=_ACCOUNT),
            "its account may store no more (resource limits exceeded for account, error 10002)",
        ),
        (
            NatsServer(jetstream_config=_LIMITS),
            "its server may store no more (insufficient resources, error 10023)",
        ),
    ],
    ids=["account", "server"],
)
async def test_the_limits_of_account_and_server_are_waited_for(server: NatsServer, found: str, name: str) -> None:
    with server:
        async with connect(ConnectionSettings(servers=(server.url,))) as connection:
            queue = await make_queue(connection, name, archive=False, consumer={"max_deliver": 3, "ack_wait": "1m"})
            jobs, subject = [Job(bytes(10_000)) for _ in range(110)], f"{name}.jobs.a"
            with pytest.raises(PublishIncompleteError) as caught:
                await publish(connection, queue, jobs, subject=subject)
            (failure, *_) = caught.value.report.failures
            assert isinstance(failure.error, QueueFullError)
            assert str(failure.error).startswith(f"{name} can't store it, since {found}: let workers or a redrive")
            stored = await stored_count(connection, name)
            publishing = asyncio.create_task(publish(connection, queue, jobs[:8], subject=subject, room_timeout=20))
            for message in await pull_jobs(connection, queue, 10):
                await message.ack_sync()
            assert (await publishing).stored == 8
            assert await stored_count(connection, name) == stored - 2


@pytest.mark.slow
async def test_a_full_subject_holds_the_jobs_of_others_not_up(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(
        connection, name, archive=False, discard="new", consumer={"max_deliver": 3, "ack_wait": "1m"}
    )
    config = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}", config | {"max_msgs_per_subject": 1, "discard_new_per_subject": True})
    full, emptied = f"{name}.jobs.full", f"{name}.jobs.emptied"
    await publish(connection, queue, [Job(b"1", subject=emptied), Job(b"2", subject=full)])
    jobs = [Job(b"3", subject=full), *(Job(b"%d" % number, subject=emptied) for number in range(4, 9))]
    publishing = asyncio.create_task(publish(connection, queue, jobs, room_timeout=2))
    done: list[bytes] = []
    while len(done) < 6:
        (message,) = await pull_jobs(connection, queue, 1, within=10)
        if message.subject == emptied:
            done.append(message.data)
            await message.ack_sync()
    assert done == [b"1", *(b"%d" % number for number in range(4, 9))]
    with pytest.raises(PublishIncompleteError, match="maximum messages per subject exceeded") as caught:
        await publishing
    assert [failure.index for failure in caught.value.report.failures] == [0]
    assert await stored_count(connection, name) == 1
