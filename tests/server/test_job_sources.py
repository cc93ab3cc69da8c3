"""Sources of jobs that block, are slow, fail, or never end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import PublishIncompleteError, PublishRefusedError, publish
from airflow_provider_jetstream.jetstream.errors import EventLoopError
from testbed.face import PreparedJobs, publish_prepared
from testbed.queues import eventually, make_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

    from nats.aio.msg import Msg

    from testbed.face import NatsPyConnection

_SECONDS = 30


def _jobs(name: str, items: Iterable[object] | AsyncIterable[object]) -> Iterable[Any]:
    return PreparedJobs(items, subject=f"{name}.jobs.a", origin=None, batch=name)


class _BlockingSource:
    """Jobs 0, 1, 2…: each comes when the test says so, and the thread that asks for it is blocked until then.

    :param count: how many there are
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = threading.Semaphore(0)
        self.requested = 0
        self.ended = threading.Event()

    def release(self) -> None:
        """Let the next job come."""
        self._next.release()

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self._count):
                self.requested += 1
                assert self._next.acquire(timeout=2 * _SECONDS)
                yield number
        finally:
            self.ended.set()


async def test_each_job_is_stored_when_it_comes_and_is_sent_once(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    sent: Counter[bytes] = Counter()

    async def count(message: Msg) -> None:
        sent[message.data] += 1

    await connection.client.subscribe(f"{name}.jobs.>", cb=count)
    source = _BlockingSource(20)
    publishing = asyncio.create_task(publish_prepared(connection, _jobs(name, iter(source)), ack_timeout=_SECONDS))
    for number in range(20):
        source.release()

        async def is_stored(number: int = number) -> bool:
            return await stored_count(connection, name) == number + 1

        await eventually(is_stored, within=_SECONDS)
        assert not publishing.done() or number == 19
    assert (await publishing).stored == 20
    await connection.client.flush()
    assert sent == {b"%d" % number: 1 for number in range(20)}


async def test_a_job_without_an_answer_is_sent_again_while_the_source_blocks(
    connection: NatsPyConnection, name: str
) -> None:
    sent: list[bytes] = []

    async def answer_the_second(message: Msg) -> None:
        sent.append(message.data)
        if len(sent) == 2:
            await message.respond(json.dumps({"stream": name, "seq": 1}).encode())

    await connection.client.subscribe(f"{name}.jobs.>", cb=answer_the_second)
    source = _BlockingSource(1)
    source.release()
    jobs = _endless_after(iter(source), blocked := threading.Event())
    publishing = asyncio.create_task(publish_prepared(connection, _jobs(name, jobs), ack_timeout=0.2, attempts=100))
    await eventually(lambda: sent[:2] == [b"0", b"0"], within=_SECONDS)
    blocked.set()
    assert (await publishing).stored == 1


def _endless_after(jobs: Iterable[int], released: threading.Event) -> Iterator[int]:
    yield from jobs
    released.wait(2 * _SECONDS)


@pytest.mark.slow
async def test_a_cancelled_call_ends_although_its_source_blocks_and_the_source_ends_when_it_returns(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await make_queue(connection, name)
    source = _BlockingSource(5)
    source.release()
    publishing = asyncio.create_task(publish_prepared(connection, _jobs(name, iter(source))))
    await eventually(lambda: source.requested == 2, within=_SECONDS)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert "The source of the jobs blocks, and is left behind in its thread" in caplog.text
    assert not source.ended.is_set()
    source.release()
    assert await asyncio.to_thread(source.ended.wait, _SECONDS)
    assert source.requested == 2


@pytest.mark.slow
async def test_a_call_is_stopped_although_its_source_blocks(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    source, stopped = _BlockingSource(5), False
    source.release()
    publishing = asyncio.create_task(publish_prepared(connection, _jobs(name, iter(source)), stopped=lambda: stopped))
    await eventually(lambda: source.requested == 2, within=_SECONDS)
    stopped = True
    report = await asyncio.wait_for(publishing, _SECONDS)
    assert list(report.sequences) == [1]
    source.release()


async def test_what_a_source_raises_comes_with_what_is_stored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)

    def items() -> Iterator[int]:
        yield from range(700)
        raise LookupError("the database went away")

    with pytest.raises(LookupError, match="the database went away") as caught:
        await publish(connection, queue, items(), subject=f"{name}.jobs.a")
    (note,) = caught.value.__notes__
    assert note.startswith("the source of the jobs, which is read in a thread of its own, ended there; 700 jobs before")
    assert note.endswith(f" are stored in {name} (sequences 1-700)")
    assert await stored_count(connection, name) == 700


async def test_an_asynchronous_source(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    loop = asyncio.get_running_loop()
    ended: list[bool] = []

    async def items() -> AsyncIterator[int]:
        for number in range(50):
            await asyncio.sleep(0)
            assert asyncio.get_running_loop() is loop
            yield number
        ended.append(True)

    report = await publish(connection, queue, items(), subject=f"{name}.jobs.a")
    assert (report.stored, ended) == (50, [True])
    assert list(report.sequences) == list(range(1, 51))


async def test_a_cancelled_call_ends_its_asynchronous_source(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    events: list[str] = []

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            events.append("waits")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            events.append("ended")

    source = items()
    publishing = asyncio.create_task(publish_prepared(connection, _jobs(name, source)))
    await eventually(lambda: events == ["waits"], within=_SECONDS)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert events == ["waits", "ended"]


async def test_an_asynchronous_source_is_read_by_nothing_else(name: str) -> None:
    async def items() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(EventLoopError, match="expected an asynchronous source of jobs to be read by publish"):
        list(_jobs(name, items()))


async def test_a_source_has_the_context_of_its_caller(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("the caller's")
    report = await publish_prepared(connection, _jobs(name, (variable.get() for _ in range(1))))
    assert report.stored == 1


@pytest.mark.slow
async def test_large_jobs_in_flight_and_read_ahead_are_bounded_by_their_bytes(
    connection: NatsPyConnection, name: str
) -> None:
    waiting: list[Msg] = []
    read = 0

    async def keep(message: Msg) -> None:
        waiting.append(message)

    def items() -> Iterator[bytes]:
        nonlocal read
        while read < 100:
            read += 1
            yield b"x" * (1 << 19)

    await connection.client.subscribe(f"{name}.jobs.>", cb=keep, pending_bytes_limit=1 << 30)
    publishing = asyncio.create_task(publish_prepared(connection, _jobs(name, items()), ack_timeout=_SECONDS))
    # 16 MiB in flight, and one that exceeds them.
    await eventually(lambda: len(waiting) == 33, within=_SECONDS)
    answered = 0
    while answered < 100:
        await eventually(lambda: len(waiting) > 0, within=_SECONDS)
        # 4 MiB each are read ahead and taken, and one is about to be sent.
        assert read - answered <= 33 + 2 * 8 + 1
        answered += 1
        await waiting.pop(0).respond(json.dumps({"stream": name, "seq": answered}).encode())
    assert (await publishing).stored == 100


async def test_other_tasks_run_while_a_list_is_sent(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    turn, turns = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def note_turn(_index: int, _job: object) -> None:
        turns.append(turn)

    counting = asyncio.create_task(count_turns())
    # All jobs at once, so that nothing waits for answers.
    jobs = _jobs(name, list(range(2_000)))
    report = await publish_prepared(connection, jobs, window=20_000, known=note_turn)
    counting.cancel()
    assert (report.stored, len(turns)) == (2_000, 2_000)
    assert max(Counter(turns).values()) <= 64


@pytest.mark.slow
async def test_a_source_is_read_no_more_when_nothing_is_sent_any_more(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    source = _BlockingSource(5)
    source.release()
    # Another stream has stored the first job, so none is sent any more, and the source still blocks.
    jobs = _jobs(name, iter(source))
    report = await asyncio.wait_for(publish_prepared(connection, jobs, stream="other"), _SECONDS)
    source.release()
    assert list(report.sequences) == [0]
    with pytest.raises(PublishRefusedError, match=r"; 1 are not known to be: .*, and the jobs after them, which were"):
        report.raise_for_failures()


async def test_so_many_failures_are_reported_that_they_fit_into_memory(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name, max_msgs=3, discard="new")
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for number in range(30_000):
            read += 1
            yield number

    report = await publish_prepared(connection, _jobs(name, items()))
    assert report.stored == 3
    assert 10_000 <= len(report.failures) < 12_000
    assert read < 12_000
    with pytest.raises(PublishIncompleteError, match=", and the jobs after them, which were not read"):
        report.raise_for_failures()
