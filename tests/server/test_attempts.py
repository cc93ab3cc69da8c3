"""What workers store of attempts at jobs: how far each is, and how it failed."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import threading
from contextlib import redirect_stdout
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest
from faulty_attempts import half
from process_handlers import progress_then_exit

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    WaitPolicy,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    provision,
    publish,
    read_attempts,
    read_job_reports,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.worker import GiveUpError, Worker
from testbed import seams
from testbed.code_blocks import code_blocks
from testbed.crash_points import crash_at_every_call
from testbed.dead_letters import stream_messages
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, running_worker, small_queue, until_stored
from testbed.seams import current

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import AttemptReport, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


def some(
    connection: NatsPyConnection, queue: WorkQueue, is_it: Callable[[list[AttemptReport]], bool]
) -> Callable[[], Awaitable[list[AttemptReport] | None]]:
    async def read() -> list[AttemptReport] | None:
        attempts = await read_attempts(connection, queue, 1)
        return attempts if is_it(attempts) else None

    return read


@pytest.mark.parametrize("form", ["thread", "task", "batch"])
async def test_the_last_progress_of_a_running_job_is_stored(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, form: str
) -> None:
    queue = await make_queue(connection, name, attempts=True)
    await publish_jobs(connection, queue, ["a job"])
    done = threading.Event()

    def say(job: Delivery) -> None:
        for page in range(30):
            job.progress(page / 30, f"page {page} of 30")
        done.wait(20)

    async def say_in_task(job: Delivery) -> None:
        job.progress(29 / 30, "page 29 of 30")
        await asyncio.to_thread(done.wait, 20)

    def say_of_all(jobs: list[Delivery]) -> None:
        say(jobs[0])

    handler: Any = {"thread": say, "task": say_in_task, "batch": say_of_all}[form]
    batch = 5 if form == "batch" else None
    async with running_worker(Worker(queue, "worker", handler, settings, name="press", batch=batch)):
        (attempt,) = await eventually(
            some(connection, queue, lambda found: [a.text for a in found] == ["page 29 of 30"])
        )
        assert (attempt.number, attempt.state, attempt.worker) == (1, "running", "press")
        assert attempt.fraction == pytest.approx(29 / 30)
        assert attempt.at is not None
        done.set()
        await until_stored(connection, name, 0)


@pytest.mark.slow
async def test_a_handler_that_reports_all_the_time_stores_one_message_a_second(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True)
    await publish_jobs(connection, queue, ["a job"])

    def say(job: Delivery) -> None:
        for step in range(30_000):
            job.progress(step / 30_000)

    async with running_worker(Worker(queue, "worker", say, settings)):
        await until_stored(connection, name, 0)
    state = (await connection.api(f"STREAM.INFO.{name}-attempts"))["state"]
    assert state["messages"] == 1
    assert state["last_seq"] < 100


@pytest.mark.slow
async def test_progress_of_a_handler_in_a_process_and_its_death(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True)
    await publish_jobs(connection, queue, ["a job"])
    async with running_worker(Worker(queue, "worker", progress_then_exit, settings, processes=True)):
        attempts = await eventually(some(connection, queue, lambda found: bool(found) and found[0].state == "failed"))
    first = attempts[0]
    assert (first.fraction, first.text) == (0.5, "half")
    assert first.error_class is not None
    assert first.error_class.endswith("HandlerDiedError")


@pytest.mark.slow
async def test_each_attempt_keeps_its_error(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 3})
    await publish_jobs(connection, queue, ["a job"])

    def fail(job: Delivery) -> None:
        job.progress(0.25, "reading")
        if job.attempt == 3:
            raise GiveUpError("no such customer")
        raise ValueError(f"attempt {job.attempt}")

    async with running_worker(Worker(queue, "worker", fail, settings, name="press")):
        await until_stored(connection, name, 0)
    attempts = await read_attempts(connection, queue, 1, deliveries=3)
    assert [(a.number, a.state, a.error_class, a.error_message) for a in attempts] == [
        (1, "failed", "ValueError", "attempt 1"),
        (2, "failed", "ValueError", "attempt 2"),
        (3, "failed", "airflow_provider_jetstream.worker.errors.GiveUpError", "no such customer"),
    ]
    for attempt in attempts:
        assert attempt.worker == "press"
        assert attempt.text == "reading"
        assert attempt.seconds is not None
        assert attempt.error_place is not None
        assert attempt.error_place.startswith("test_attempts:")


async def test_an_attempt_whose_worker_died_has_no_answer(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 5, "ack_wait": "500ms"})
    await publish_jobs(connection, queue, ["a job"])
    # As if the worker were killed before it said anything.
    await pull_jobs(connection, queue, 1)

    def fail(_: Delivery) -> None:
        raise ValueError("out of paper")

    async with running_worker(Worker(queue, "worker", fail, settings)):
        attempts = await eventually(some(connection, queue, lambda found: len(found) > 1))
    assert (attempts[0].state, attempts[0].error_message) == ("unanswered", "no answer within 0.5 s")
    assert (attempts[1].state, attempts[1].error_message) == ("failed", "out of paper")


@pytest.mark.parametrize(
    ("fraction", "text", "found"),
    [
        (float("nan"), "", "found nan"),
        (1.5, "", "found 1.5"),
        (-0.1, "", "found -0.1"),
        (True, "", "found True"),
        ("half", "", "found 'half'"),
        (10**400, "", "found a whole number of"),
        (0.5, b"\xff", "expected text"),
    ],
)
async def test_progress_that_can_not_be_is_an_error_of_the_handler(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, fraction: Any, text: Any, found: str
) -> None:
    # Also where nothing is stored: a handler works in each queue, or in none.
    queue = await make_queue(connection, name, consumer={"max_deliver": 1})
    await publish_jobs(connection, queue, ["a job"])
    errors: list[str] = []

    def say(job: Delivery) -> None:
        try:
            job.progress(fraction, text)
        except ValueError as error:
            errors.append(str(error))

    async with running_worker(Worker(queue, "worker", say, settings)):
        await until_stored(connection, name, 0)
    assert len(errors) == 1
    assert found in errors[0]


async def test_long_and_odd_text_is_cut_to_a_line(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 1})
    await publish_jobs(connection, queue, ["a job"])

    def say(job: Delivery) -> None:
        job.progress(1, "\ud800 page\n\x1b[2J" + "é" * 100_000)
        raise ValueError("x" * 100_000)

    async with running_worker(Worker(queue, "worker", say, settings)):
        (attempt,) = await eventually(some(connection, queue, lambda found: bool(found) and found[0].state == "failed"))
    assert attempt.text is not None
    assert attempt.text.startswith("\ufffd page \ufffd[2Jé")
    assert len(attempt.text) == 200
    assert len(attempt.error_message or "") == 1000


async def test_what_no_worker_has_written_is_no_attempt(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 1})
    subject = f"attempts.{name}.worker.1.1"
    # The server's answer to a publisher who has chosen that subject for it.
    await connection.client.publish(f"{name}.jobs.a", b"a job", reply=subject)
    await until_stored(connection, f"{name}-attempts", 1)
    (attempt,) = await read_attempts(connection, queue, 1)
    assert attempt.state == "unanswered"
    assert "replaced by a message that no worker has written" in (attempt.error_message or "")
    said: dict[str, Any] = {
        "type": "io.airflow.jetstream.v1.attempt",
        "timestamp": "2026-11-21T09:04:44Z",
        "stream": name,
        "consumer": "worker",
        "stream_seq": 1,
        "deliveries": 1,
        "fraction": 0.5,
    }
    wrong: list[dict[str, Any]] = [
        *({"fraction": value} for value in (1.5, -1, "NaN", "x")),
        *({"stream_seq": 2}, {"deliveries": 2}, {"consumer": "other"}, {"stream": "other"}, {"type": "other"}),
    ]
    bodies = [json.dumps(said | change).encode() for change in wrong]
    bodies += [b"", b"{}", b"\xff", json.dumps(said).encode().replace(b"0.5", b"NaN"), b"[" * 10_000]
    for body in bodies:
        await connection.client.request(subject, body)
        (attempt,) = await read_attempts(connection, queue, 1)
        assert (attempt.state, attempt.fraction) == ("unanswered", None), body
    await connection.client.request(subject, json.dumps(said).encode())
    (attempt,) = await read_attempts(connection, queue, 1)
    assert (attempt.state, attempt.fraction) == ("running", 0.5)


async def test_attempts_at_a_job_of_an_earlier_stream_do_not_count(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 1})
    await publish_jobs(connection, queue, ["a job"])

    def fail(_: Delivery) -> None:
        raise ValueError("of the earlier one")

    async with running_worker(Worker(queue, "worker", fail, settings)):
        await eventually(some(connection, queue, bool))
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    await publish_jobs(connection, queue, ["another job"])
    assert await read_attempts(connection, queue, 1) == []


async def test_a_worker_goes_on_where_attempts_can_not_be_stored(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = small_queue(name, attempts=True)
    await provision(connection, queue)
    await connection.api(f"STREAM.DELETE.{name}-attempts")
    await publish_jobs(connection, queue, ["a job"])
    async with running_worker(Worker(queue, "worker", lambda job: job.progress(1), settings)):
        await until_stored(connection, name, 0)
    assert f"progress and errors of attempts at jobs of {name} aren't stored" in caplog.text


async def test_the_stream_of_attempts_keeps_one_message_of_each(connection: NatsPyConnection, name: str) -> None:
    queue = small_queue(name, attempts=True)
    await provision(connection, queue)
    subject = f"attempts.{name}.worker.1.1"
    for number in range(5):
        await connection.client.request(subject, f'{{"n": {number}}}'.encode())
    assert [message.data for message in await stream_messages(connection, f"{name}-attempts")] == [b'{"n": 4}']


@pytest.mark.slow
async def test_the_page_of_the_documentation_is_what_happens(
    connection: NatsPyConnection, settings: ConnectionSettings
) -> None:
    declared, reading, printed, _ = (block for block in code_blocks() if block.page == "docs/attempts.md")
    names: dict[str, Any] = {"connection": connection}
    exec(compile(declared.numbered_code, declared.page, "exec"), names)
    queue = names["QUEUE"]
    await provision(connection, queue)
    await publish(connection, queue, [{"pages": 3}], subject="scans.a")
    async with running_worker(Worker(queue, "worker", names["read_pages"], settings)):
        await until_stored(connection, "scans", 0)
    code = compile(reading.numbered_code, reading.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    output = io.StringIO()
    with redirect_stdout(output):
        await FunctionType(code, names)()
    assert printed.is_printed_in(output.getvalue())


@pytest.mark.slow
async def test_the_log_of_a_wait_says_how_far_jobs_are(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(seams.WAIT_ATTEMPTS_SECONDS, 0.1)
    caplog.set_level("INFO")
    queue = await make_queue(connection, name, attempts=True)
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["a job"])
    done = threading.Event()

    def say(job: Delivery) -> None:
        job.progress(0.4, "page 12 of 30")
        done.wait(20)

    async with running_worker(Worker(queue, "worker", say, settings)):
        waiting = asyncio.create_task(wait(connection, cursor, [1]))
        await eventually(lambda: f"job 1 of {name}, attempt 1: 40%, page 12 of 30, 0 s ago" in caplog.text)
        done.set()
        assert (await waiting).completed == {1}


@pytest.mark.slow
async def test_the_report_on_a_dead_job_has_the_error_of_each_attempt(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 3})
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["a job"])
    # As if its worker were killed.
    await pull_jobs(connection, queue, 1)

    def fail(job: Delivery) -> None:
        raise ValueError(f"at attempt {job.attempt}")

    async with running_worker(Worker(queue, "worker", fail, settings)):
        ended = await wait(connection, cursor, [1], policy=WaitPolicy(max_dead=1))
    (report,) = [report async for report in read_job_reports(connection, cursor, ended.as_json())]
    assert report.errors == (
        "attempt 1: no answer",
        "attempt 2: ValueError: at attempt 2",
        "attempt 3: ValueError: at attempt 3",
    )


@pytest.mark.parametrize("step", ["before the error is stored", "after it is stored"])
@pytest.mark.slow
async def test_a_worker_that_is_killed_at_a_step_of_a_failure_loses_nothing(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 2})
    await publish_jobs(connection, queue, ["a job"])
    store, killed = current(seams.WORKER_ATTEMPTS_STORE), asyncio.Event()

    async def store_until_killed(*arguments: Any, **options: Any) -> Any:
        if killed.is_set():
            return await store(*arguments, **options)
        if step.startswith("after"):
            await store(*arguments, **options)
        killed.set()
        return await asyncio.sleep(3600)

    def fail(job: Delivery) -> None:
        job.progress(0.5)
        raise ValueError(f"at attempt {job.attempt}")

    monkeypatch.setattr(seams.WORKER_ATTEMPTS_STORE, store_until_killed)
    dying = asyncio.create_task(Worker(queue, "worker", fail, settings, name="first", grace=0).run())
    await asyncio.wait_for(killed.wait(), 20)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    async with running_worker(Worker(queue, "worker", fail, settings, name="second")):
        attempts = await eventually(
            some(connection, queue, lambda found: len(found) == 2 and found[1].state == "failed")
        )
    first = attempts[0]
    if step.startswith("after"):
        assert (first.state, first.error_message, first.worker) == ("failed", "at attempt 1", "first")
    else:
        assert (first.state, first.error_message) == ("unanswered", "no answer within 0.5 s")
    assert (attempts[1].error_message, attempts[1].worker) == ("at attempt 2", "second")
    letters = await find_dead_letters(connection, queue)
    assert [letter.sequence for letter in letters.letters] == [1]


@pytest.mark.slow
async def test_each_generation_of_servers_keeps_the_last_message_of_an_attempt(any_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (any_nats.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, attempts=True, consumer={"max_deliver": 2})
        await publish_jobs(connection, queue, ["a job", "another job"])

        def fail(job: Delivery) -> None:
            job.progress(0.5, "half")
            raise ValueError(f"at attempt {job.attempt}")

        async with running_worker(Worker(queue, "worker", fail, settings)):
            attempts = await eventually(
                some(connection, queue, lambda found: [attempt.state for attempt in found] == ["failed", "failed"])
            )
        assert [attempt.error_message for attempt in attempts] == ["at attempt 1", "at attempt 2"]
        found = (await discover_queue(connection, name)).attempts
        assert found is not None
        assert (found.name, found.subjects) == (f"{name}-attempts", (f"attempts.{name}.>",))


@pytest.mark.slow
async def test_a_worker_that_is_killed_before_any_of_its_calls_leaves_the_job_and_what_is_known_of_each_attempt(
    own_nats: NatsServer, tmp_path: Path
) -> None:
    consumer = {"max_deliver": 5, "ack_wait": "500ms"}
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 10})

    def check(attempts: list[AttemptReport]) -> None:
        """Each attempt is there: with its error, or as one that had no answer."""
        assert [attempt.number for attempt in attempts] == list(range(1, len(attempts) + 1))
        for attempt in attempts[:-1]:
            assert attempt.state in ("failed", "unanswered")
            assert attempt.error_message == (
                "at attempt 1" if attempt.state == "failed" else "no answer within 0.5 s"
            ), attempts

    async with connect(settings) as connection:
        crashes = await crash_at_every_call(
            [own_nats.url],
            "faulty_attempts:work_twice",
            lambda call: make_queue(connection, f"q{call}", attempts=True, consumer=consumer, jobs=["a job"]),
            logs=tmp_path,
        )
        # In place of a failure's record and of progress, too.
        assert "publish attempts.<queue>.worker.*.*" in {run.kind for run in crashes.runs}
        for run in crashes.runs:
            async with running_worker(Worker(run.queue, "worker", half, settings, name="second")):
                await until_stored(connection, run.queue.name, 0)
            check(await read_attempts(connection, run.queue, 1))
            letters = await find_dead_letters(connection, run.queue)
            assert (letters.letters, letters.uncertain) == ((), 0), run
