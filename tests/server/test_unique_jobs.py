"""Unique jobs: of the jobs of a key, at most one waits, runs or is a dead letter at a time."""

from __future__ import annotations

import ast
import asyncio
import io
import re
from contextlib import redirect_stdout
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Job,
    Origin,
    PublishRefusedError,
    RedriveRequest,
    Selection,
    combined_policy,
    connect,
    find_dead_letters,
    permissions,
    provision,
    publish,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.worker import GiveUpError, Worker
from testbed.code_blocks import code_blocks
from testbed.dead_letters import stream_messages
from testbed.face import authorization, stream_info
from testbed.foreign_programs import acknowledge
from testbed.nats_binaries import nats_server_of
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_queue,
    pull_jobs,
    running_worker,
    small_queue,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Policy, PublishReport, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection


async def send(connection: NatsPyConnection, queue: WorkQueue, *jobs: Job, **options: Any) -> PublishReport:
    return await publish(connection, queue, jobs, subject=f"{queue.name}.jobs.sync", **options)


async def send_one(connection: NatsPyConnection, queue: WorkQueue, key: str = "ann") -> dict[int, int]:
    """Publish a job with a key, and return by whom it was held up, by its index."""
    report = await send(connection, queue, Job({"customer": key}, unique=key))
    assert report.stored + len(report.held) == 1
    assert report.duplicates == 0
    return report.held


def give_up(_job: Delivery) -> None:
    raise GiveUpError("no such customer")


async def terminate(
    connection: NatsPyConnection, queue: WorkQueue, settings: ConnectionSettings, left: int = 0
) -> None:
    async with running_worker(Worker(queue, CONSUMER, give_up, settings)):
        await until_stored(connection, queue.name, left)


async def letters_of(connection: NatsPyConnection, queue: WorkQueue) -> list[int]:
    return [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters]


async def test_a_key_is_free_again_once_its_job_has_ended(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    assert await send_one(connection, queue) == {}
    assert await send_one(connection, queue) == {0: 1}
    assert await send_one(connection, queue, "bob") == {}
    # It runs.
    (job,) = await pull_jobs(connection, queue, 1)
    assert await send_one(connection, queue) == {0: 1}
    await acknowledge(connection.client, job)
    await until_stored(connection, name, 1)
    assert await send_one(connection, queue) == {}
    assert await send_one(connection, queue) == {0: 3}
    # The archive has a copy of each.
    info = await stream_info(connection, f"{name}-archive")
    assert info["state"]["messages"] == 3


async def test_of_a_list_the_first_job_of_a_key_is_stored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    jobs = [Job({"n": number}, unique=f"customer-{number % 3}") for number in range(9)]
    report = await send(connection, queue, *jobs)
    assert list(report.sequences) == [1, 2, 3, 0, 0, 0, 0, 0, 0]
    assert report.held == {3: 1, 4: 2, 5: 3, 6: 1, 7: 2, 8: 3}
    assert (report.stored, report.as_json()["published"], report.as_json()["held"]) == (3, 3, 6)
    report.raise_for_failures()


async def test_of_many_publishers_one_stores_a_job_of_a_key(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)

    async def publish_all() -> PublishReport:
        async with connect(settings) as other:
            return await publish(
                other,
                queue,
                [Job(str(number), unique=str(number)) for number in range(50)],
                subject=f"{name}.jobs.sync",
            )

    reports = await asyncio.gather(*(publish_all() for _ in range(5)))
    assert sum(report.stored for report in reports) == 50
    assert sum(len(report.held) for report in reports) == 200
    messages = await stream_messages(connection, name)
    assert sorted(int(message.data) for message in messages) == list(range(50))


@pytest.mark.parametrize("key", ["a b", "ä", "x.y", "*", "sha256-0", "k" * 500, ">"])
async def test_a_key_may_be_any_text(connection: NatsPyConnection, name: str, key: str) -> None:
    queue = await make_queue(connection, name)
    assert await send_one(connection, queue, key) == {}
    assert await send_one(connection, queue, key) == {0: 1}
    (message,) = await stream_messages(connection, name)
    assert dict(message.headers)["Job-Unique"] == key


async def test_keys_of_another_subject_are_others(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    jobs = [Job("x", subject=f"{name}.jobs.{kind}", unique="ann") for kind in ("sync", "bill")]
    assert (await publish(connection, queue, jobs)).stored == 2


async def test_a_dead_letter_keeps_its_key_until_it_is_redriven_and_done(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "50ms"})
    await send_one(connection, queue)
    await exhaust_deliveries(connection, queue, 1)
    await eventually(lambda: letters_of(connection, queue))
    assert await send_one(connection, queue) == {0: 1}
    (await redrive_dead_letters(connection, queue, RedriveRequest())).raise_for_failures()
    ((index, new),) = (await send_one(connection, queue)).items()
    assert (index, new > 1) == (0, True)
    async with running_worker(Worker(queue, CONSUMER, lambda _: None, settings)):
        await until_stored(connection, name, 0)
    assert await send_one(connection, queue) == {}


@pytest.mark.parametrize("end", ["discarded", "parked", "redriven"])
async def test_a_letter_that_its_worker_terminated_keeps_its_key(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, end: str
) -> None:
    queue = await make_queue(connection, name)
    await send_one(connection, queue)
    await terminate(connection, queue, settings)
    assert await eventually(lambda: letters_of(connection, queue)) == [1]
    assert await send_one(connection, queue) == {0: 1}
    assert await send_one(connection, queue, "bob") == {}
    request = {
        "discarded": RedriveRequest(discard=True, why="a customer who left"),
        "parked": RedriveRequest(max_redrives=0),
        "redriven": RedriveRequest(),
    }[end]
    (await redrive_dead_letters(connection, queue, request)).raise_for_failures()
    held = await send_one(connection, queue)
    assert list(held) == ([0] if end == "redriven" else [])


async def test_a_retry_of_the_task_stores_nothing_twice_and_what_was_held_once(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    await send_one(connection, queue, "ann")
    jobs = [Job({"n": 1}, unique="ann"), Job({"n": 2}, unique="bob")]
    first = await send(connection, queue, *jobs, origin=Origin("dag", "run", "task", max_tries=3))
    assert (first.held, list(first.sequences)) == ({0: 1}, [0, 2])
    (ann,) = await pull_jobs(connection, queue, 1)
    await acknowledge(connection.client, ann)
    await until_stored(connection, name, 1)
    again = await send(connection, queue, *jobs, origin=Origin("dag", "run", "task", max_tries=3))
    assert list(again.sequences) == list(first.sequences) or list(again.sequences) == [3, 2]
    bodies = [message.data for message in await stream_messages(connection, name)]
    assert len(bodies) == len(set(bodies))


async def test_a_job_that_an_earlier_attempt_has_stored_is_a_duplicate(connection: NatsPyConnection, name: str) -> None:
    # Servers from 2.12 on look at the condition before they look at the message id.
    queue, job, task = await make_queue(connection, name), Job("x", unique="ann"), Origin("dag", "run", "task")
    assert list((await send(connection, queue, job, origin=task)).sequences) == [1]
    again = await send(connection, queue, job, origin=task)
    assert (list(again.sequences), again.duplicates, again.held, again.stored) == ([1], 1, {}, 1)
    other = await send(connection, queue, job, origin=Origin("dag", "another run", "task"))
    assert (list(other.sequences), other.held, other.stored) == ([0], {0: 1}, 0)


async def test_a_copy_that_a_redrive_makes_asks_for_no_key(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "50ms"})
    await send_one(connection, queue)
    await exhaust_deliveries(connection, queue, 1)
    await eventually(lambda: letters_of(connection, queue))
    (await redrive_dead_letters(connection, queue, RedriveRequest(selection=Selection()))).raise_for_failures()
    (copy,) = await stream_messages(connection, name)
    headers = dict(copy.headers)
    assert headers["Job-Unique"] == "ann"
    assert not [header for header in headers if header.startswith("Nats-Expected")]


async def test_jobs_whose_key_no_queue_can_keep_are_refused(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    narrow = small_queue(name, subjects=[f"{name}.jobs.sync"])
    bare = small_queue(name, archive=None)
    job = Job("x", unique="ann")
    subject = f"{name}.jobs.sync"
    with pytest.raises(JobError, match=f"declare {subject}.\\* as a subject of the queue and as a filter"):
        await publish(connection, narrow, [job], subject=subject)
    with pytest.raises(JobError, match="declare archive: true"):
        await publish(connection, bare, [job], subject=subject)
    with pytest.raises(JobError, match="expected the queue, found none"):
        await publish(connection, None, [job], subject=subject)
    with pytest.raises(JobError, match="and a schedule: expected one of them"):
        await publish(connection, queue, [Job("x", unique="ann", delay="1h")], subject=subject)
    with pytest.raises(JobError, match=r"give the key as Job\(unique=…\)"):
        await publish(connection, queue, [Job("x", headers={"Job-Unique": "ann"})], subject=subject)
    with pytest.raises(JobError, match="expected text as unique of a job, found ' '"):
        Job("x", unique=" ")
    with pytest.raises(JobError, match="in one line, without white space"):
        await publish(connection, queue, [Job("x", unique="a\nb")], subject=subject)
    assert (await stream_info(connection, name))["state"]["last_seq"] == 0


async def test_a_server_that_does_not_know_the_condition_is_refused() -> None:
    with NatsServer(binary=nats_server_of("2.10.27")) as server:
        async with connect(ConnectionSettings(servers=(server.url,))) as connection:
            queue = small_queue("old")
            await provision(connection, queue)
            with pytest.raises(PublishRefusedError, match=r"expected nats-server 2\.11 or later for the unique key"):
                await publish(connection, queue, [Job("x", unique="ann")], subject="old.jobs.sync")
            assert (await stream_info(connection, "old"))["state"]["last_seq"] == 0


async def test_a_publisher_without_the_right_to_read_letters_is_refused() -> None:
    queue = small_queue("guarded")
    publisher = permissions(queue, "publisher")
    both = combined_policy("both", publisher, permissions(queue, "monitor"))
    users = re.sub(r"password: \S+", 'password: "p"', authorization(publisher, both))
    admin = 'users: [ { user: admin, password: "p" }'
    with NatsServer(config=users.replace("users: [", admin, 1), user="admin", password="p") as server:

        def settings(user: str, **options: Any) -> ConnectionSettings:
            return ConnectionSettings(servers=(server.url,), user=user, password="p", **options)

        async def as_user(policy: Policy, *jobs: Job) -> PublishReport:
            async with connect(settings(policy.user, inbox_prefix=policy.inbox_prefix)) as connection:
                return await send(connection, queue, *jobs)

        async with connect(settings("admin")) as admin_connection:
            await provision(admin_connection, queue)
            job = Job("x", unique="ann")
            # Nobody has ever used the key.
            assert (await as_user(publisher, job)).stored == 1
            with pytest.raises(PublishRefusedError, match=r"STREAM\.INFO\.guarded-dead|CONSUMER") as refused:
                await as_user(publisher, Job("y"), job)
            # The job without a key is stored.
            assert (refused.value.report.stored, [failure.index for failure in refused.value.report.failures]) == (
                1,
                [1],
            )
            assert (await as_user(both, job)).held == {0: 1}


async def test_the_page_of_the_documentation_is_what_happens(connection: NatsPyConnection) -> None:
    declared, publishing, printed = (block for block in code_blocks() if block.page == "docs/unique.md")
    names: dict[str, Any] = {"connection": connection}
    exec(compile(declared.numbered_code, declared.page, "exec"), names)
    code = compile(publishing.numbered_code, publishing.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    output = io.StringIO()
    with redirect_stdout(output):
        await FunctionType(code, names)()
    assert printed.is_printed_in(output.getvalue())


@pytest.mark.slow
async def test_a_cluster_keeps_keys_while_its_leaders_change(name: str) -> None:
    with NatsCluster() as cluster:
        async with connect(ConnectionSettings(servers=cluster.urls)) as connection:
            queue = small_queue(name, num_replicas=3)
            await provision(connection, queue)

            async def publish_some(task: int) -> PublishReport:
                jobs = [Job(f"{task}", unique=str(number)) for number in range(40)]
                return await publish(connection, queue, jobs, subject=f"{name}.jobs.sync", rate=40)

            async def change_leaders() -> None:
                for _ in range(4):
                    await connection.api(f"STREAM.LEADER.STEPDOWN.{name}", {})
                    await asyncio.sleep(0.3)

            changing = asyncio.create_task(change_leaders())
            reports = await asyncio.gather(*map(publish_some, range(3)))
            await changing
            subjects = [message.subject for message in await stream_messages(connection, name)]
            assert len(subjects) == len(set(subjects)) == 40
            assert sum(report.stored for report in reports) == 40
