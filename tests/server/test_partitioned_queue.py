"""Partitions on the server: the same function as the publishers', and changes of their number."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from airflow_provider_jetstream.jetstream import Job, WorkQueue, get_message, plan, provision
from airflow_provider_jetstream.jetstream.errors import DriftError
from airflow_provider_jetstream.worker import Worker
from testbed.face import PreparedJobs, consumer_info, publish_prepared
from testbed.queues import pull_jobs, running_worker, stored_count, until_stored

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection


def _queue(name: str, partitions: int, **changes: Any) -> WorkQueue:
    worker = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": partitions, "max_deliver": 2}
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [worker]} | changes)


async def _publish(connection: NatsPyConnection, queue: WorkQueue, *keys: str) -> None:
    jobs = [Job(key, partition_key=key) for key in keys]
    subject = f"{queue.name}.{{partition}}.email"
    prepared = PreparedJobs(jobs, subject=subject, origin=None, batch=uuid4().hex, queue=queue)
    (await publish_prepared(connection, prepared)).raise_for_failures()


def partition_of(key: str, count: int) -> int:
    """Return the partition that a job is published to."""
    jobs = PreparedJobs(
        [Job(b"", partition_key=key)], subject="q.{partition}.x", origin=None, batch="", queue=_queue("q", count)
    )
    return int(next(iter(jobs)).subject.split(".")[1])


async def _by_hand(connection: NatsPyConnection, name: str, *partitions: int) -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "retention": "workqueue"})
    for number in partitions:
        config = {
            "durable_name": f"worker-{number}",
            "ack_policy": "explicit",
            "filter_subject": f"{name}.{number}.>",
            "max_deliver": 2,
        }
        body = {"stream_name": name, "config": config, "action": "create"}
        await connection.api(f"CONSUMER.CREATE.{name}.worker-{number}.{name}.{number}.>", body)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4, 10, 97])
async def test_the_partition_function_of_the_server_agrees(connection: NatsPyConnection, name: str, count: int) -> None:
    transform = {"src": f"{name}.*.*", "dest": f"{name}.{{{{partition({count},1,2)}}}}.{{{{wildcard(1)}}}}"}
    stream = {"name": name, "subjects": [f"{name}.>"], "subject_transform": transform}
    await connection.api(f"STREAM.CREATE.{name}", stream)
    keys = ["a", "email", "customer-17", "grün", "日本", *(uuid4().hex for _ in range(200))]
    jetstream = connection.client.jetstream()
    for key in keys:
        ack = await jetstream.publish(f"{name}.{key[:1]}.{key[1:] or '-'}", b"")
        message = await get_message(connection, name, ack.seq)
        assert message is not None
        # The server joins the tokens without a dot.
        assert message.subject.split(".")[1] == str(partition_of(key[:1] + (key[1:] or "-"), count))


async def test_the_jobs_of_a_key_go_to_the_one_consumer_of_their_partition(
    connection: NatsPyConnection, name: str
) -> None:
    queue = _queue(name, 4)
    await provision(connection, queue)
    assert sorted((await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"]) == [
        f"worker-{number}" for number in range(4)
    ]
    assert (await plan(connection, queue)).changes == ()
    keys = [f"customer-{number}" for number in range(40)]
    await _publish(connection, queue, *keys, *keys)
    for number in range(4):
        expected = [key for key in keys if partition_of(key, 4) == number] * 2
        messages = await pull_jobs(connection, queue, len(expected), consumer=f"worker-{number}")
        assert [message.data.decode() for message in messages] == expected
        assert (await consumer_info(connection, name, f"worker-{number}"))["num_pending"] == 0


async def test_partitions_made_by_hand_are_adopted_with_the_jobs_in_them(
    connection: NatsPyConnection, name: str
) -> None:
    await _by_hand(connection, name, 0, 1)
    queue = _queue(name, 2)
    await _publish(connection, queue, "a", "b")
    done = await provision(connection, queue)
    assert [str(step).splitlines()[0] for step in done.changes] == [
        f"update consumer {name}/worker-0",
        f"update consumer {name}/worker-1",
    ]
    assert (await consumer_info(connection, name, "worker-1"))["config"]["metadata"]["partitions"] == "2"
    assert (await plan(connection, queue)).changes == ()


@pytest.mark.parametrize("made_by_hand", [False, True])
@pytest.mark.parametrize("number", [2, 6])
async def test_the_number_of_partitions_changes_only_while_no_job_is_stored(
    connection: NatsPyConnection, name: str, number: int, *, made_by_hand: bool
) -> None:
    queue, resized = _queue(name, 4), _queue(name, number)
    if made_by_hand:
        await _by_hand(connection, name, 0, 1, 2, 3)
    else:
        await provision(connection, queue)
    keys = ["customer-17", "email", "grün"]
    await _publish(connection, queue, *keys)
    before = {
        consumer: (await consumer_info(connection, name, consumer))["config"]
        for consumer in (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"]
    }
    with pytest.raises(DriftError) as caught:
        await provision(connection, resized)
    assert (
        f"worker would go from 4 to {number} partitions while 3 jobs are stored in them, and the later jobs of a key"
        " would have another consumer than those; stop publishing, let workers finish and redrive or park its dead"
        " letters, then provision again; or provision with drain=True (apply --drain), which waits for that and parks"
        " what is dead; or declare a consumer of another name on other subjects"
    ) in str(caught.value)
    lost = (
        f"keep consumer {name}/worker-3\n    not possible: worker is declared with 2 partitions, and 2 jobs are stored"
    )
    assert (lost in str(caught.value)) == (number == 2)
    after = {
        consumer: (await consumer_info(connection, name, consumer))["config"]
        for consumer in (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"]
    }
    assert after == before
    for key in keys:
        (message,) = await pull_jobs(connection, queue, 1, consumer=f"worker-{partition_of(key, 4)}")
        await message.ack_sync()
    assert await stored_count(connection, name) == 0
    await provision(connection, resized)
    await _publish(connection, resized, *keys)
    assert (await plan(connection, resized)).changes == ()
    for key in keys:
        await pull_jobs(connection, resized, 1, consumer=f"worker-{partition_of(key, number)}")


async def test_jobs_in_a_partition_that_is_no_longer_declared_are_reported(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, _queue(name, 3))
    few = _queue(name, 2)
    await provision(connection, few)
    await connection.client.jetstream().publish(f"{name}.2.email", b"from a publisher of before")
    with pytest.raises(DriftError) as caught:
        await provision(connection, few)
    assert str(caught.value).endswith(
        f"keep consumer {name}/worker-2\n    not possible: worker is declared with 2 partitions, and 1 job is stored in"
        " this surplus one, from which no worker of this declaration pulls; run a worker with the earlier declaration"
        " until they are done"
    )


async def test_an_interrupted_provisioning_continues_although_jobs_were_stored(
    connection: NatsPyConnection, name: str
) -> None:
    queue = _queue(name, 4)
    await provision(connection, queue)
    for number in (2, 3):
        await connection.api(f"CONSUMER.DELETE.{name}.worker-{number}")
    await _publish(connection, queue, "a", "email", "日本")
    assert len((await provision(connection, queue)).changes) == 2


async def test_a_consumer_that_only_looks_like_a_partition_is_not_changed(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, _queue(name, 2))
    config = {"durable_name": "worker-7", "ack_policy": "explicit", "filter_subject": f"{name}.other.>"}
    body = {"stream_name": name, "config": config, "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{name}.worker-7.{name}.other.>", body)
    await connection.client.jetstream().publish(f"{name}.other.x", b"")
    assert (await plan(connection, _queue(name, 2))).changes == ()
    assert [step for step in (await plan(connection, _queue(name, 2))).steps if step.blocked] == []


@pytest.mark.slow
async def test_of_each_key_no_more_jobs_run_than_a_partition_has_in_flight(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    declared = {"filter_subject": f"{name}.{{partition}}.>", "partitions": 4, "max_ack_pending": 2, "max_deliver": 5}
    queue = _queue(name, 4, consumers=[{"name": "worker", **declared}])
    await provision(connection, queue)
    keys = [f"customer-{number // 13}" for number in range(200)]
    await _publish(connection, queue, *keys)
    running, most = Counter[str](), Counter[str]()

    async def handle(job: Delivery) -> None:
        key = job.body.decode()
        running[key] += 1
        most[key] = max(most[key], running[key])
        await asyncio.sleep(0.02)
        running[key] -= 1

    async with AsyncExitStack() as workers:
        for consumer in [*queue.consumers] * 3:
            worker = Worker(queue, consumer.name, handle, settings, concurrency=40)
            await workers.enter_async_context(running_worker(worker))
        await until_stored(connection, name, 0)
    assert set(most) == set(keys)
    assert max(most.values()) == 2
