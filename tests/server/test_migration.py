"""From one consumer to several on a queue with jobs in it, while foreign workers run: each job is done once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Job, WorkQueue, apply, connect, plan, provision
from airflow_provider_jetstream.jetstream import publish as publish_jobs
from airflow_provider_jetstream.jetstream.errors import DeadlineError, DriftError, TransientError
from testbed import seams
from testbed.crash_points import crash_at_every_call
from testbed.dead_letters import change_consumer
from testbed.face import consumer_info
from testbed.foreign_programs import acknowledge, attempt_of, create_or_update_consumer, pull
from testbed.queues import eventually, exhaust_deliveries, probe, pull_jobs, running_mover, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

JOBS = 200
PARTITIONS = 3


def unfiltered(name: str, **fields: Any) -> WorkQueue:
    """Declare the queue as the document begins: one consumer for everything."""
    worker = {"name": "worker", "max_deliver": 5, "ack_wait": "2s"} | fields.pop("consumer", {})
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [worker]} | fields)


def partitioned(name: str, **fields: Any) -> WorkQueue:
    """Declare it as the document goes on."""
    worker = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": PARTITIONS, "max_deliver": 5}
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [worker]} | fields)


class Workers:
    """Foreign workers of every consumer that there may be: each fetches ten; a tenth of the jobs fails at first."""

    def __init__(self, connection: NatsPyConnection, queue: str) -> None:
        self._client = connection.client
        self._queue = queue
        self.done: Counter[str] = Counter()
        self.by_consumer: Counter[str] = Counter()
        self.pace = 0.01

    async def work(self, consumer: str) -> None:
        while True:
            # Without the consumer the server answers at once.
            async for message in pull(self._client, self._queue, consumer, batch=10, expires=1):
                body = message.data.decode()
                await asyncio.sleep(self.pace)
                if body.endswith("0") and attempt_of(message) == 1:
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


async def state(connection: NatsPyConnection, name: str) -> dict[str, Any]:
    names = (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"]
    return {consumer: (await config(connection, name, consumer)) for consumer in names}


async def config(connection: NatsPyConnection, name: str, consumer: str = "worker") -> dict[str, Any]:
    found = dict((await consumer_info(connection, name, consumer))["config"])
    found.pop("pause_until", None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("old_subjects", [False, True], ids=["all-partitioned", "some-without-partition"])
async def test_one_unfiltered_consumer_becomes_partitions_and_each_job_is_done_once(
    connection: NatsPyConnection, name: str, *, old_subjects: bool
) -> None:
    # The document's own consumer has no more than a name.
    await connection.api(f"STREAM.CREATE.{name}", unfiltered(name).config())
    await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})
    await publish(connection, name, range(JOBS))
    if old_subjects:
        await publish(connection, name, range(1000, 1000 + JOBS // 4), "email")
    queue, workers = partitioned(name), Workers(connection, name)
    with pytest.raises(
        DriftError, match=r"not possible: its filter > overlaps with those declared for worker-0.*10100"
    ):
        await provision(connection, queue)
    async with workers.running(*ALL):
        await eventually(lambda: sum(workers.done.values()) > 5)
        publisher = asyncio.create_task(publish(connection, name, range(JOBS, JOBS + 100)))
        done = await provision(connection, queue, migrate=True)
        await publisher
        await until_empty(connection, name)
    expected = [*range(JOBS + 100), *(range(1000, 1000 + JOBS // 4) if old_subjects else ())]
    assert workers.done == Counter(map(str, expected))
    assert len(workers.by_consumer) == 1 + PARTITIONS
    first = next(step for step in done.steps if step.kind == "consumer")
    assert first.name == f"{name}/worker"
    assert "over to worker-0, worker-1, worker-2, once none is in flight" in str(first)
    consumers = await state(connection, name)
    if old_subjects:
        assert consumers.pop("worker") | {"filter_subject": f"{name}.*", "max_ack_pending": 1000} == await config(
            connection, name
        )
    assert sorted(consumers) == [f"worker-{number}" for number in range(PARTITIONS)]
    assert (await plan(connection, queue)).changes == ()
    # A program that creates the old consumer when it starts is refused rather than given the jobs of the partitions.
    if not old_subjects:
        with pytest.raises(RuntimeError, match="10099"):
            await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})


async def migrate(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await provision(connection, queue, migrate=True)


@pytest.mark.slow
async def test_a_migration_that_is_killed_anywhere_is_continued_by_the_next(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, tmp_path: Path
) -> None:
    workers: dict[str, Workers] = {}

    async def prepare(call: int) -> WorkQueue:
        own = f"{name}k{call}"
        # Ten tasks at a time must not outlast the ack wait beside the other runs' workers.
        await provision(connection, unfiltered(own, consumer={"ack_wait": "30s"}))
        await publish(connection, own, range(150))
        await publish(connection, own, range(1000, 1004), "email")
        workers[own] = Workers(connection, own)
        workers[own].pace = 0.05
        await stack.enter_async_context(workers[own].running("worker"))
        return partitioned(own)

    async def finish(queue: WorkQueue) -> None:
        own = workers[queue.name]
        own.pace = 0.01
        async with own.running(*ALL[2:]):
            await provision(connection, queue, migrate=True)
            assert (await plan(connection, queue)).changes == ()
            await until_empty(connection, queue.name)
        assert own.done == Counter(map(str, [*range(150), *range(1000, 1004)]))
        for found in (await state(connection, queue.name)).values():
            assert ("migration" in found["metadata"], found["max_ack_pending"]) == (False, 1000)

    async with AsyncExitStack() as stack:
        report = await crash_at_every_call(
            settings.servers, f"{__name__}:migrate", prepare, logs=tmp_path, counted="changes", within=120
        )
        left = [await stored_count(connection, queue.name) for queue in report.queues]
        assert sum(left) > len(left)
        await asyncio.gather(*map(finish, report.queues))
    assert len(report.queues) > 6
    changes = {"$JS.API.CONSUMER.CREATE", "$JS.API.CONSUMER.PAUSE", "$JS.API.STREAM.UPDATE"}
    assert set(report.killed_calls) == changes


@pytest.mark.slow
async def test_partitions_become_one_consumer_without_a_filter(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, partitioned(name))
    await publish(connection, name, range(30))
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        with pytest.raises(DriftError, match="10099"):
            await provision(connection, unfiltered(name))
        await provision(connection, unfiltered(name), migrate=True)
        await publish(connection, name, range(30, 60))
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(60)))
    assert (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"] == ["worker"]


@pytest.mark.slow
async def test_a_declared_consumer_that_gives_jobs_up_hands_them_over(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(30))
    consumers = [
        {"name": "worker-0", "filter_subject": f"{name}.0.>", "max_deliver": 5},
        {"name": "worker", "filter_subjects": [f"{name}.1.>", f"{name}.2.>"], "max_deliver": 5, "ack_wait": "2s"},
    ]
    queue, workers = unfiltered(name, consumers=consumers), Workers(connection, name)
    async with workers.running("worker", "worker-0"):
        with pytest.raises(DriftError, match="provision with migrate=True to hand"):
            await provision(connection, queue)
        await provision(connection, queue, migrate=True)
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(30)))
    assert (await plan(connection, queue)).changes == ()


async def test_dead_letters_stay_where_they_are(connection: NatsPyConnection, name: str) -> None:
    once = unfiltered(name, consumer={"max_deliver": 1, "ack_wait": "300ms"}, dead_letters=f"{name}-dead")
    await provision(connection, once)
    await publish(connection, name, range(2))
    await exhaust_deliveries(connection, once, 2)
    await publish(connection, name, range(2, 5))
    before = await state(connection, name)
    with pytest.raises(
        DriftError, match="2 jobs of it are dead letters, which another consumer would run again: redrive"
    ):
        await provision(connection, partitioned(name), migrate=True)
    assert await state(connection, name) == before
    # Jobs that it keeps hide in the plan's numbers whose the dead letters are; under the pause they don't.
    await publish(connection, name, range(5, 6), "email")
    planned = await plan(connection, partitioned(name), migrate=True)
    assert planned.blocked == ()
    with pytest.raises(
        DriftError, match=r"is as before: 2 jobs of it are dead letters.*nothing was changed before that"
    ):
        await apply(connection, planned)
    assert await state(connection, name) == before


async def test_jobs_that_wait_for_their_next_consumer_are_no_dead_letters_of_another(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, partitioned(name))
    # A migration was killed after it had removed the first partition, whose jobs have no consumer since then.
    await connection.api(f"CONSUMER.DELETE.{name}.worker-0")
    await publish(connection, name, range(9))
    workers = Workers(connection, name)
    async with workers.running("worker-1", "worker-2"):
        await eventually(lambda: len(workers.done) == 6)
    await provision(connection, unfiltered(name), migrate=True)
    async with workers.running("worker"):
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(9)))


@pytest.mark.slow
async def test_a_worker_that_never_waits_for_jobs_is_given_time_to_ask(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MIGRATION_PAUSED_SECONDS, 0.3)
    await provision(connection, unfiltered(name, consumer={"max_deliver": 5, "ack_wait": "60s"}))
    await publish(connection, name, range(1))
    (message,) = await pull_jobs(connection, unfiltered(name), 1)
    await acknowledge(connection.client, message, b"-NAK")

    async def ask_too_late() -> None:
        """Ask for a job a second after the consumer goes on, and hardly wait for one."""
        while True:
            if not (await consumer_info(connection, name, "worker")).get("paused"):
                await asyncio.sleep(1)
                async for job in pull(connection.client, name, "worker", batch=1, expires=0.05):
                    await acknowledge(connection.client, job)
                    return
            await asyncio.sleep(0.02)

    worker = asyncio.create_task(ask_too_late())
    async with asyncio.timeout(40):
        await provision(connection, partitioned(name), migrate=True)
    await worker
    assert await stored_count(connection, name) == 0


async def test_a_job_that_dies_meanwhile_stays_a_dead_letter(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MIGRATION_PAUSED_SECONDS, 0.3)
    once = unfiltered(name, consumer={"max_deliver": 1, "ack_wait": "300ms"}, dead_letters=f"{name}-dead")
    await provision(connection, once)
    await publish(connection, name, range(3))
    before = await state(connection, name)
    (message,) = await pull_jobs(connection, once, 1)
    task = asyncio.create_task(provision(connection, partitioned(name), migrate=True))

    async def limited() -> bool:
        return bool((await config(connection, name))["max_ack_pending"] == 1)

    await eventually(limited)
    await message.nak()
    await eventually(lambda: probe_until(connection, once, task), 10)
    with pytest.raises(DriftError, match="1 job of it is a dead letter"):
        await task
    assert await state(connection, name) == before


async def probe_until(connection: NatsPyConnection, queue: WorkQueue, task: asyncio.Task[Any]) -> bool:
    # A worker's pull request: without any the server doesn't notice that the deliveries are used up.
    await probe(connection, queue)
    return task.done()


@pytest.mark.slow
async def test_a_job_that_stays_in_flight_stops_the_migration_and_nothing_is_changed(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MIGRATION_STALLED_SECONDS, 1.0)
    monkeypatch.setattr(seams.MIGRATION_PAUSED_SECONDS, 0.3)
    queue = unfiltered(name, consumer={"ack_wait": "500ms"})
    await provision(connection, queue)
    await publish(connection, name, range(12))
    before = await state(connection, name)
    await pull_jobs(connection, queue, 2)
    with pytest.raises(DeadlineError) as caught:
        await provision(connection, partitioned(name), migrate=True)
    assert str(caught.value) == (
        f"expected no job of consumer {name}/worker in flight, found 2 jobs without any change for 1 s: it is as"
        " before; make sure that workers pull from it, or wait for jobs that are to be tried again later, and provision"
        " again; nothing was changed before that"
    )
    assert isinstance(caught.value, TransientError)
    assert await state(connection, name) == before
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        await provision(connection, partitioned(name), migrate=True)
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(12)))


@pytest.mark.slow
async def test_a_cancelled_migration_leaves_the_consumer_as_it_was(connection: NatsPyConnection, name: str) -> None:
    queue = unfiltered(name, consumer={"max_ack_pending": 7})
    await provision(connection, queue)
    await publish(connection, name, range(12))
    before = await state(connection, name)
    (message,) = await pull_jobs(connection, queue, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await provision(connection, partitioned(name), migrate=True)
    assert await state(connection, name) == before
    assert (await consumer_info(connection, name, "worker")).get("paused") in (None, False)
    await message.ack_sync()


async def test_an_interrupted_migration_is_continued_or_undone_but_never_ignored(
    connection: NatsPyConnection, name: str
) -> None:
    queue = unfiltered(name, consumer={"max_ack_pending": 7})
    await provision(connection, queue)
    before = await state(connection, name)
    await publish(connection, name, range(3))
    await change_consumer(connection, name, max_ack_pending=1, metadata={"migration": "7"})
    with pytest.raises(DriftError, match="a migration of its jobs was interrupted, and it delivers one job at a time"):
        await provision(connection, queue)
    with pytest.raises(DriftError, match="migrate=True"):
        await provision(connection, partitioned(name))
    undone = await provision(connection, queue, migrate=True)
    assert "max_ack_pending: 1 → 7\n    ends a migration that was interrupted" in str(undone)
    assert await state(connection, name) == before


@pytest.mark.slow
async def test_a_worker_that_creates_its_consumer_meanwhile_does_not_disturb(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(40))
    workers = Workers(connection, name)
    (message,) = await pull_jobs(connection, unfiltered(name), 1)
    task = asyncio.create_task(provision(connection, partitioned(name), migrate=True))

    async def limited() -> bool:
        return bool((await config(connection, name))["max_ack_pending"] == 1)

    await eventually(limited)
    await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})
    assert not await limited()
    async with workers.running(*ALL):
        workers.done[message.data.decode()] += 1
        await message.ack_sync()
        await task
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(40)))
    assert "worker" not in (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"]


async def test_a_consumer_that_its_program_has_widened_again_is_reported_and_narrowed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = partitioned(name)
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(3))
    await publish(connection, name, range(1000, 1001), "email")
    await provision(connection, queue, migrate=True)
    # Belief: the server checks only the creation of a consumer without a filter, not an update to one.
    await create_or_update_consumer(connection.client, name, {"durable_name": "worker"})
    with pytest.raises(DriftError, match="its filter > overlaps with those declared for worker-0"):
        await provision(connection, queue)
    await provision(connection, queue, migrate=True)
    assert (await config(connection, name))["filter_subject"] == f"{name}.*"
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, [*range(3), 1000]))


async def test_jobs_that_are_stored_after_the_plan_was_made_have_a_consumer(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(3))
    planned = await plan(connection, partitioned(name), migrate=True)
    assert f"remove consumer {name}/worker" in str(planned)
    await publish(connection, name, range(1000, 1001), "email")
    await publish(connection, name, range(2000, 2001), "9.email")
    await apply(connection, planned)
    assert (await config(connection, name))["filter_subjects"] == [f"{name}.9.*", f"{name}.*"]
    workers = Workers(connection, name)
    async with workers.running(*ALL):
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, [*range(3), 1000, 2000]))


async def test_a_declared_consumer_is_not_narrowed_away_from_jobs_stored_after_the_plan_was_made(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(3))
    consumers = [
        {"name": "worker-0", "filter_subject": f"{name}.0.>", "max_deliver": 5},
        {"name": "worker", "filter_subjects": [f"{name}.1.>", f"{name}.2.>"], "max_deliver": 5, "ack_wait": "2s"},
    ]
    planned = await plan(connection, unfiltered(name, consumers=consumers), migrate=True)
    await publish(connection, name, range(1000, 1001), "email")
    before = await state(connection, name)
    with pytest.raises(DeadlineError, match=rf"jobs were stored on {name}.email after the plan was made"):
        await apply(connection, planned)
    assert await state(connection, name) == before
    with pytest.raises(DriftError, match=rf"1 job on {name}.email would have no consumer"):
        await provision(connection, unfiltered(name, consumers=consumers), migrate=True)


@pytest.mark.slow
async def test_a_scheduled_job_keeps_a_consumer(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, unfiltered(name, schedules=True))
    jobs = [Job(b"0", subject=f"{name}.0.email", delay="2s"), Job(b"1000", subject=f"{name}.email", delay="2s")]
    await publish_jobs(connection, unfiltered(name, schedules=True), jobs)
    others = [{"name": "first", "filter_subject": f"{name}.0.>", "max_deliver": 5}]
    narrower = {"name": "worker", "filter_subject": f"{name}.1.>", "max_deliver": 5, "ack_wait": "2s"}
    with pytest.raises(DriftError, match=rf"1 job on {name}.email would have no consumer"):
        await provision(connection, unfiltered(name, schedules=True, consumers=[*others, narrower]), migrate=True)
    planned = await plan(connection, partitioned(name, schedules=True), migrate=True)
    assert f"update consumer {name}/worker\n" in str(planned)
    await apply(connection, planned)
    assert (await config(connection, name))["filter_subject"] == f"{name}.*"
    workers = Workers(connection, name)
    async with running_mover(connection, partitioned(name, schedules=True)), workers.running("worker", "worker-0"):
        await eventually(lambda: len(workers.done) == 2, 20)
    assert workers.by_consumer == {"worker": 1, "worker-0": 1}


@pytest.mark.slow
async def test_two_migrations_at_once_do_no_harm(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    await provision(connection, unfiltered(name))
    await publish(connection, name, range(60))
    workers, queue = Workers(connection, name), partitioned(name)
    async with workers.running(*ALL), connect(settings) as other:
        await eventually(lambda: workers.done)
        await asyncio.gather(*(migrate(own, queue) for own in (connection, other)), return_exceptions=True)
        await migrate(connection, queue)
        await until_empty(connection, name)
    assert workers.done == Counter(map(str, range(60)))
    assert (await plan(connection, queue)).changes == ()


async def test_a_server_that_cannot_pause_a_consumer_is_refused(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, unfiltered(name))
    connection.api_level = 0
    planned = await plan(connection, partitioned(name), migrate=True)
    assert "not possible: handing jobs over needs nats-server 2.11" in str(planned)
