"""From one consumer to several on a queue with jobs in it, while foreign workers run: each job is done once.

Provisioning with ``drain`` waits until the old consumers have nothing left, parks what is dead, and switches.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    RedriveRequest,
    Selection,
    WorkQueue,
    apply,
    connect,
    connection_settings,
    find_dead_letters,
    plan,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream import publish as publish_jobs
from airflow_provider_jetstream.jetstream.errors import DeadlineError, DriftError, TransientError
from testbed import seams
from testbed.crash_points import crash_at_every_call
from testbed.dead_letters import change_consumer
from testbed.face import consumer_info
from testbed.foreign_programs import acknowledge, attempt_of, create_or_update_consumer, pull
from testbed.queues import eventually, exhaust_deliveries, pull_jobs, running_mover, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

JOBS = 200
PARTITIONS = 3
DEAD = "dead"
CHANGES = {"$JS.API.CONSUMER.CREATE", "$JS.API.CONSUMER.DELETE", "$JS.API.STREAM.UPDATE"}


def unfiltered(name: str, **fields: Any) -> WorkQueue:
    """Declare the queue as the document begins: one consumer for everything."""
    worker = {"name": "worker", "max_deliver": 5, "ack_wait": "2s"} | fields.pop("consumer", {})
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [worker]} | fields)


def partitioned(name: str, **fields: Any) -> WorkQueue:
    """Declare it as the document goes on."""
    worker = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": PARTITIONS, "max_deliver": 5}
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [worker]} | fields)


class Workers:
    """Foreign workers of every consumer that there may be: each fetches ten; a tenth of the jobs fails at first.

    While ``failing``, one kind of job fails at every attempt.
    """

    def __init__(self, connection: NatsPyConnection, queue: str) -> None:
        self._client = connection.client
        self._queue = queue
        self.done: Counter[str] = Counter()
        self.by_consumer: Counter[str] = Counter()
        self.pace = 0.01
        self.failing = True

    async def work(self, consumer: str) -> None:
        while True:
            # Without the consumer the server answers at once.
            async for message in pull(self._client, self._queue, consumer, batch=10, expires=1):
                body = message.data.decode()
                await asyncio.sleep(self.pace)
                if (body.endswith("0") and attempt_of(message) == 1) or (body == DEAD and self.failing):
                    await acknowledge(self._client, message, b"-NAK")
                    continue
                self.done[body] += 1
                self.by_consumer[consumer] += 1
                await acknowledge(self._client, message)
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def running(self, *consumers: str) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.work(consumer)) for consumer in consumers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


ALL = ("worker", "worker", *(f"worker-{number}" for number in range(PARTITIONS)))


async def publish(connection: NatsPyConnection, name: str, numbers: Iterable[int], kind: str = "{}.email") -> None:
    jetstream = connection.client.jetstream(timeout=10)
    for number in numbers:
        await jetstream.publish(f"{name}.{kind.format(number % PARTITIONS)}", str(number).encode())


async def until_empty(connection: NatsPyConnection, name: str) -> None:
    async def empty() -> bool:
        return not await stored_count(connection, name)

    await eventually(empty, 120)


async def consumer_names(connection: NatsPyConnection, name: str) -> list[str]:
    return list((await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"] or ())


async def state(connection: NatsPyConnection, name: str) -> dict[str, Any]:
    return {consumer: (await config(connection, name, consumer)) for consumer in await consumer_names(connection, name)}


async def config(connection: NatsPyConnection, name: str, consumer: str = "worker") -> dict[str, Any]:
    found = dict((await consumer_info(connection, name, consumer))["config"])
    found.pop("pause_until", None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("old_subjects", [False, True], ids=["all-partitioned", "some-without-partition"])
async def test_one_unfiltered_consumer_becomes_partitions_and_each_job_is_done_once(
    any_nats: NatsServer, name: str, *, old_subjects: bool
) -> None:
    async with connect(connection_settings({"servers": (any_nats.url,), "timeout": 10})) as connection:
        # The document's own consumer has no more than a name.
        await connection.api(f"STREAM.CREATE.{name}", unfiltered(name).config())
        await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})
        await publish(connection, name, range(JOBS))
        if old_subjects:
            await publish(connection, name, range(1000, 1000 + JOBS // 4), "email")
        queue, workers = partitioned(name), Workers(connection, name)
        with pytest.raises(DriftError, match=r"not possible: its filter > overlaps .* worker-0.*10100.*--drain"):
            await provision(connection, queue)
        async with workers.running(*ALL):
            await eventually(lambda: sum(workers.done.values()) > 5)
            publisher = asyncio.create_task(publish(connection, name, range(JOBS, JOBS + 100)))
            done = await provision(connection, queue, drain=True)
            await publisher
            assert await consumer_names(connection, name) == [f"worker-{number}" for number in range(PARTITIONS)]
            await publish(connection, name, range(JOBS + 100, JOBS + 130))
            await until_empty(connection, name)
        expected = [*range(JOBS + 130), *(range(1000, 1000 + JOBS // 4) if old_subjects else ())]
        assert workers.done == Counter(map(str, expected))
        assert len(workers.by_consumer) == 1 + PARTITIONS
        first = next(step for step in done.steps if step.kind == "consumer")
        assert (first.action, first.name) == ("remove", f"{name}/worker")
        assert "then gives its subjects to worker-0, worker-1, worker-2" in str(first)
        assert (await plan(connection, queue)).changes == ()
        # A program that creates the old consumer when it starts is refused rather than given the partitions' jobs.
        with pytest.raises(RuntimeError, match="10099"):
            await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})


async def drain(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await provision(connection, queue, drain=True)


@pytest.mark.slow
async def test_a_drain_that_is_killed_anywhere_is_continued_by_the_next(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, tmp_path: Path
) -> None:
    workers: dict[str, Workers] = {}

    async def prepare(call: int) -> WorkQueue:
        own = f"{name}k{call}"
        await provision(connection, unfiltered(own, dead_letters=f"{own}-dead", consumer={"max_deliver": 2}))
        await publish(connection, own, range(40))
        await publish(connection, own, range(1000, 1004), "email")
        await connection.client.jetstream().publish(f"{own}.0.email", DEAD.encode())
        workers[own] = Workers(connection, own)
        await stack.enter_async_context(workers[own].running("worker"))
        return partitioned(own, dead_letters=f"{own}-dead")

    async def finish(queue: WorkQueue) -> None:
        own = workers[queue.name]
        async with own.running(*ALL[2:]):
            await provision(connection, queue, drain=True)
            assert (await plan(connection, queue)).changes == ()
            assert await consumer_names(connection, queue.name) == [f"worker-{n}" for n in range(PARTITIONS)]
            own.failing = False
            parked = RedriveRequest(Selection(parked=True))
            report = await redrive_dead_letters(connection, queue, parked)
            report.raise_for_failures()
            assert len(report.redriven) == 1
            await publish(connection, queue.name, range(40, 46))
            await until_empty(connection, queue.name)
        assert own.done == Counter([*map(str, [*range(46), *range(1000, 1004)]), DEAD])
        for found in (await state(connection, queue.name)).values():
            assert "drained" not in found["metadata"]

    async with AsyncExitStack() as stack:
        report = await crash_at_every_call(
            settings.servers,
            f"{__name__}:drain",
            prepare,
            logs=tmp_path,
            counted="changes",
            kinds=CHANGES,
            within=120,
        )
        await asyncio.gather(*map(finish, report.queues))
    assert len(report.queues) > 9
    assert set(report.killed_calls) > CHANGES


@pytest.mark.slow
async def test_partitions_become_one_consumer_without_a_filter(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, partitioned(name))
    await publish(connection, name, range(30))
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        with pytest.raises(DriftError, match="10099"):
            await provision(connection, unfiltered(name))
        await provision(connection, unfiltered(name), drain=True)
        await publish(connection, name, range(30, 60))
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(60)))
    assert await consumer_names(connection, name) == ["worker"]


@pytest.mark.slow
async def test_a_declared_consumer_that_gives_subjects_up_does_its_jobs_first(any_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (any_nats.url,), "timeout": 10})) as connection:
        await provision(connection, unfiltered(name))
        await publish(connection, name, range(30))
        consumers = [
            {"name": "worker-0", "filter_subject": f"{name}.0.>", "max_deliver": 5},
            {"name": "worker", "filter_subjects": [f"{name}.1.>", f"{name}.2.>"], "max_deliver": 5, "ack_wait": "2s"},
        ]
        queue, workers = unfiltered(name, consumers=consumers), Workers(connection, name)
        async with workers.running("worker", "worker-0"):
            with pytest.raises(DriftError, match="or provision with drain=True"):
                await provision(connection, queue)
            await provision(connection, queue, drain=True)
            assert workers.by_consumer == {"worker": 30}
            await publish(connection, name, range(30, 60))
            await until_empty(connection, name)
        assert workers.done == Counter(map(str, range(60)))
        assert workers.by_consumer == {"worker": 50, "worker-0": 10}
        assert (await plan(connection, queue)).changes == ()


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [2, 5])
async def test_another_number_of_partitions_waits_for_the_jobs_of_all_of_them(
    connection: NatsPyConnection, name: str, partitions: int
) -> None:
    await provision(connection, partitioned(name))
    await publish(connection, name, range(30))
    consumer = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": partitions}
    queue = partitioned(name, consumers=[consumer | {"max_deliver": 5}])
    with pytest.raises(DriftError, match=f"from 3 to {partitions} partitions while 30 jobs are stored.*--drain"):
        await provision(connection, queue)
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        await provision(connection, queue, drain=True)
    assert workers.done == Counter(map(str, range(30)))
    assert (await plan(connection, queue)).changes == ()
    assert len(await consumer_names(connection, name)) == max(partitions, PARTITIONS)


def command(url: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "airflow_provider_jetstream.command.program", *arguments],
        capture_output=True,
        check=True,
        timeout=60,
        env={"NATS_URL": url, "COLUMNS": "200"},
    )
    return done.stdout.decode()


def dying(name: str) -> WorkQueue:
    return unfiltered(name, consumer={"max_deliver": 1, "ack_wait": "300ms"}, dead_letters=f"{name}-dead")


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["with-entry", "without-entry"])
async def test_dead_letters_are_parked_and_come_back_by_the_command_that_is_printed(
    nats: NatsServer, connection: NatsPyConnection, name: str, tmp_path: Path, *, known: bool
) -> None:
    await provision(connection, dying(name))
    await publish(connection, name, range(3))
    await exhaust_deliveries(connection, dying(name), 3)
    if not known:
        await connection.api(f"STREAM.PURGE.{name}-dead")
    queue, file = partitioned(name, dead_letters=f"{name}-dead"), tmp_path / "queue.yaml"
    file.write_text(queue.to_yaml())
    printed = await asyncio.to_thread(command, nats.url, "queue", "apply", str(file), "--drain")
    # None of the new consumers runs them.
    assert await stored_count(connection, name) == 0
    (line,) = [line for line in printed.splitlines() if "redriven by: " in line]
    said, _, redriven_by = line.partition(", redriven by: ")
    assert said == "parked 3 dead letters"
    assert redriven_by == f"jetstream-queue redrive start {name} --parked --sequence 1-3"
    await asyncio.to_thread(command, nats.url, *shlex.split(redriven_by)[1:])
    workers = Workers(connection, name)
    async with workers.running(*ALL[2:]):
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(3)))
    assert (await find_dead_letters(connection, queue, Selection(parked=True))).letters == ()


async def test_a_dead_job_that_nothing_can_park_is_named_and_nothing_is_changed(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, unfiltered(name, consumer={"max_deliver": 1, "ack_wait": "300ms"}))
    await publish(connection, name, range(2))
    for message in await pull_jobs(connection, unfiltered(name), 2):
        await message.nak()
    before = await state(connection, name)
    with pytest.raises(DriftError, match=r"found sequence 1, which worker-0, .*nothing was changed before that"):
        await provision(connection, partitioned(name), drain=True)
    assert await state(connection, name) == before


async def test_dead_letters_on_subjects_that_nobody_gets_stay(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, dying(name))
    await publish(connection, name, range(2), "email")
    await exhaust_deliveries(connection, dying(name), 2)
    done = await provision(connection, partitioned(name, dead_letters=f"{name}-dead"), drain=True)
    assert done.parked == ()
    letters = (await find_dead_letters(connection, partitioned(name, dead_letters=f"{name}-dead"))).letters
    assert [(letter.sequence, letter.consumer_absent) for letter in letters] == [(1, True), (2, True)]


@pytest.mark.slow
async def test_a_publisher_that_does_not_stop_is_named_with_what_it_has_added(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.DRAIN_ADDED_SECONDS, 0.5)
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(20))
    before, workers, added = await state(connection, name), Workers(connection, name), count(20)
    stopped = asyncio.Event()

    async def add() -> None:
        # More than the workers do.
        while not stopped.is_set():
            await publish(connection, name, [next(added)])
            await asyncio.sleep(0.002)

    publisher = asyncio.create_task(add())
    async with workers.running("worker", *ALL[2:]):
        with pytest.raises(DeadlineError) as caught:
            await provision(connection, partitioned(name), drain=True)
        assert "jobs added to" in str(caught.value)
        assert "a program that names no Airflow task added the last one, sequence" in str(caught.value)
        assert "stop the publisher, then provision again; nothing was changed before that" in str(caught.value)
        assert isinstance(caught.value, TransientError)
        assert await state(connection, name) == before
        stopped.set()
        await publisher
        await provision(connection, partitioned(name), drain=True)
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(next(added))))


@pytest.mark.slow
async def test_a_job_that_stays_in_flight_stops_the_drain_and_nothing_is_changed(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.DRAIN_STALLED_SECONDS, 1.0)
    queue = unfiltered(name, consumer={"ack_wait": "500ms"})
    await provision(connection, queue)
    await publish(connection, name, range(12))
    before = await state(connection, name)
    await pull_jobs(connection, queue, 2)
    with pytest.raises(DeadlineError) as caught:
        await provision(connection, partitioned(name), drain=True)
    assert str(caught.value) == (
        f"expected the jobs of {name} to be done before its consumers change, found 10 pending and 2 in flight of"
        " worker without any change for 1 s: make sure that workers pull them, or wait for jobs that are to be tried"
        " again later, and provision again; nothing was changed before that"
    )
    assert await state(connection, name) == before
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        await provision(connection, partitioned(name), drain=True)
    assert workers.done == Counter(map(str, range(12)))


@pytest.mark.slow
async def test_a_cancelled_drain_leaves_the_consumer_as_it_was(connection: NatsPyConnection, name: str) -> None:
    queue = unfiltered(name, consumer={"max_ack_pending": 7})
    await provision(connection, queue)
    await publish(connection, name, range(12))
    before = await state(connection, name)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await provision(connection, partitioned(name), drain=True)
    assert await state(connection, name) == before


def before_request(
    connection: NatsPyConnection,
    monkeypatch: pytest.MonkeyPatch,
    request: str,
    first: Callable[[], Awaitable[object]],
    *,
    after: bool = False,
) -> None:
    """Have something happen once, just before a request reaches the server, or after its answer."""
    send = connection.api
    waiting = [first]

    async def api(subject: str, *arguments: Any, **options: Any) -> Any:
        is_due = subject.startswith(request) and waiting
        if is_due and not after:
            await waiting.pop()()
        answer = await send(subject, *arguments, **options)
        if is_due and after:
            await waiting.pop()()
        return answer

    monkeypatch.setattr(connection, "api", api)


@pytest.mark.parametrize("fate", ["done", "again", "dead"])
async def test_a_job_that_comes_and_is_taken_before_the_switch_is_run_by_its_consumer_alone(
    any_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    async with connect(connection_settings({"servers": (any_nats.url,), "timeout": 10})) as connection:
        queue = unfiltered(name, consumer={"max_deliver": 2, "ack_wait": "1s"}, dead_letters=f"{name}-dead")
        await provision(connection, queue)
        attempts: list[int] = []

        async def take(client: Any = connection.client) -> None:
            async for message in pull(client, name, "worker", batch=1, expires=5):
                attempts.append(attempt_of(message))
                finished = fate == "done" or (fate == "again" and attempts[-1] == 2)
                await acknowledge(client, message, b"+ACK" if finished else b"-NAK")

        async def straggler() -> None:
            await publish(connection, name, range(1))
            # In flight while the filter changes.
            async for message in pull(connection.client, name, "worker", batch=1, expires=5):
                attempts.append(attempt_of(message))
                held.append(message)

        held: list[Any] = []
        before_request(connection, monkeypatch, f"CONSUMER.CREATE.{name}.worker.handed_over", straggler)
        new = partitioned(name, dead_letters=f"{name}-dead")
        task = asyncio.create_task(provision(connection, new, drain=True))

        async def narrowed() -> bool:
            return bool(held) and "handed_over" in str(await config(connection, name))

        await eventually(narrowed)
        await acknowledge(connection.client, held[0], b"+ACK" if fate == "done" else b"-NAK")
        if fate != "done":
            await take()
        done = await task
        assert attempts == ([1] if fate == "done" else [1, 2])
        assert await stored_count(connection, name) == 0
        assert len(done.parked) == (fate == "dead")
        assert await consumer_names(connection, name) == [f"worker-{number}" for number in range(PARTITIONS)]


@pytest.mark.parametrize(
    "request_", ["CONSUMER.DELETE.{}.worker", "CONSUMER.CREATE.{}.worker-0", "CONSUMER.CREATE.{}.worker.handed_over"]
)
async def test_a_worker_of_the_old_consumer_that_comes_back_has_its_jobs_done_once(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    await provision(connection, unfiltered(name))
    workers = Workers(connection, name)

    async def come_back() -> None:
        await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})
        await publish(connection, name, range(9))

    before_request(connection, monkeypatch, request_.format(name), come_back)
    async with workers.running(*ALL):
        await provision(connection, partitioned(name), drain=True)
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(9)))
    assert await consumer_names(connection, name) == [f"worker-{number}" for number in range(PARTITIONS)]


async def test_a_consumer_whose_subjects_were_taken_back_keeps_what_it_has_in_flight(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provision(connection, unfiltered(name))
    held: list[Any] = []

    async def come_back() -> None:
        await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})
        await publish(connection, name, range(1))
        held.extend(await pull_jobs(connection, unfiltered(name), 1))

    before_request(connection, monkeypatch, f"CONSUMER.CREATE.{name}.worker.handed_over", come_back, after=True)
    task = asyncio.create_task(provision(connection, partitioned(name), drain=True))
    await eventually(lambda: held)
    await asyncio.sleep(0.3)
    assert await consumer_names(connection, name) == ["worker"]
    await held[0].ack_sync()
    await task
    assert await stored_count(connection, name) == 0


async def test_a_declared_consumer_keeps_what_it_took_just_before_it_gave_the_subject_up(
    any_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(connection_settings({"servers": (any_nats.url,), "timeout": 10})) as connection:
        await provision(connection, unfiltered(name))
        await publish(connection, name, range(1))
        held: list[Any] = []

        async def take() -> None:
            await publish(connection, name, range(1))
            held.extend(await pull_jobs(connection, unfiltered(name), 1))

        before_request(connection, monkeypatch, f"CONSUMER.CREATE.{name}.worker", take)
        consumers = [
            {"name": "worker-0", "filter_subject": f"{name}.0.>", "max_deliver": 5},
            {"name": "worker", "filter_subjects": [f"{name}.1.>", f"{name}.2.>"], "max_deliver": 5, "ack_wait": "30s"},
        ]
        planned = await plan(connection, unfiltered(name, consumers=consumers), drain=True)
        task = asyncio.create_task(apply(connection, planned))
        for message in await pull_jobs(connection, unfiltered(name), 1):
            await message.ack_sync()
        await eventually(lambda: held)
        await asyncio.sleep(0.3)
        assert await consumer_names(connection, name) == ["worker"]
        await held[0].ack_sync()
        await task
        assert await stored_count(connection, name) == 0


async def test_an_interrupted_drain_is_continued_but_never_ignored(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(3))
    (message,) = await pull_jobs(connection, unfiltered(name), 1)
    before = (await state(connection, name))["worker"]
    unused = f"handed_over.{name}.worker"
    await change_consumer(connection, name, filter_subject=unused, metadata=before["metadata"] | {"drained": ">"})
    with pytest.raises(DriftError, match=r"a drain of its jobs was interrupted.*--drain"):
        await provision(connection, partitioned(name))
    task = asyncio.create_task(provision(connection, partitioned(name), drain=True))
    await asyncio.sleep(0.3)
    # No other consumer gets what this one has in flight.
    assert await consumer_names(connection, name) == ["worker"]
    await message.ack_sync()
    await task
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        await until_empty(connection, name)
    assert workers.done == Counter({"1": 1, "2": 1})


async def test_only_a_new_consumer_can_get_jobs(connection: NatsPyConnection, name: str) -> None:
    consumers: list[dict[str, Any]] = [
        {"name": kind, "filter_subject": f"{name}.{kind}.>", "max_deliver": 5} for kind in ("a", "b")
    ]
    await provision(connection, unfiltered(name, consumers=consumers))
    await publish(connection, name, range(2), "b.email")
    consumers[0] = {"name": "a", "filter_subjects": [f"{name}.a.>", f"{name}.b.>"], "max_deliver": 5}
    consumers[1] |= {"filter_subject": f"{name}.c.>"}
    exchanged = unfiltered(name, consumers=consumers)
    with pytest.raises(DriftError, match="a exists, and the server never delivers what a consumer has passed"):
        await provision(connection, exchanged, drain=True)
    await connection.api(f"STREAM.PURGE.{name}")
    await provision(connection, exchanged)


@pytest.mark.slow
async def test_a_scheduled_job_keeps_a_consumer(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, unfiltered(name, schedules=True))
    jobs = [Job(b"1", subject=f"{name}.0.email", delay="2s"), Job(b"2", subject=f"{name}.email", delay="2s")]
    await publish_jobs(connection, unfiltered(name, schedules=True), jobs)
    declared = partitioned(name, schedules=True).model_dump(exclude_unset=True)
    with pytest.raises(DriftError, match=rf"1 job on {name}.email would have no consumer"):
        await provision(connection, partitioned(name, schedules=True), drain=True)
    rest = {"name": "rest", "filter_subject": f"{name}.*", "max_deliver": 5}
    queue = WorkQueue(**declared | {"consumers": [*declared["consumers"], rest]})
    await provision(connection, queue, drain=True)
    workers = Workers(connection, name)
    async with running_mover(connection, queue), workers.running("rest", "worker-0"):
        await eventually(lambda: len(workers.done) == 2, 20)
    assert workers.by_consumer == {"rest": 1, "worker-0": 1}


@pytest.mark.slow
async def test_two_drains_at_once_do_no_harm(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(60))
    workers, queue = Workers(connection, name), partitioned(name)
    async with workers.running(*ALL), connect(settings) as other:
        await eventually(lambda: workers.done)
        await asyncio.gather(*(drain(own, queue) for own in (connection, other)), return_exceptions=True)
        await drain(connection, queue)
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(60)))
    assert (await plan(connection, queue)).changes == ()
