"""Consumers with priority groups: declaration, discovery, and every kind of pull request."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import discover_queue, find_dead_letters, plan, provision
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError, ServerTooOldError
from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from testbed.face import consumer_info, remove_entries
from testbed.priority_consumers import HIGH, LOW, priority_queue
from testbed.queues import (
    eventually,
    make_queue,
    probe,
    publish_jobs,
    running_worker,
    small_queue,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

GROUPS: dict[str, Any] = {"priority_groups": ["workers"], "priority_policy": "prioritized"}
POLICIES = pytest.mark.parametrize("policy", ["overflow", "prioritized"])


@pytest.mark.parametrize("policy", ["overflow", "prioritized", "pinned_client"])
async def test_groups_are_provisioned_discovered_and_changed_in_place(
    connection: NatsPyConnection, name: str, policy: str
) -> None:
    queue = await make_queue(connection, name, consumer={"priority_groups": ["workers"], "priority_policy": policy})
    config = (await consumer_info(connection, name, "worker"))["config"]
    assert (config["priority_groups"], config["priority_policy"]) == (["workers"], policy)
    assert (await plan(connection, queue)).changes == ()
    (discovered,) = (await discover_queue(connection, name)).consumers
    assert (discovered.priority_groups, discovered.priority_policy) == (("workers",), policy)
    others = {"priority_groups": ["a/b", "c_-="], "priority_policy": "overflow"}
    await make_queue(connection, name, consumer=others)
    config = (await consumer_info(connection, name, "worker"))["config"]
    assert (config["priority_groups"], config["priority_policy"]) == (["a/b", "c_-="], "overflow")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority_groups": ["workers"]}, "has priority groups (workers) without a policy"),
        ({"priority_policy": "overflow"}, "has the priority policy overflow without a group"),
        (
            GROUPS | {"priority_groups": [""]},
            "expected a priority group of 1 to 16 letters, digits, -, _, / and =, found ''",
        ),
        (GROUPS | {"priority_groups": ["two words"]}, "found 'two words'"),
        (GROUPS | {"priority_groups": ["x" * 17]}, f"found '{'x' * 17}'"),
        (GROUPS | {"priority_groups": ["a", "a"]}, "the priority group 'a' is named twice: keep one"),
        (GROUPS | {"priority_policy": "random"}, "should be 'overflow', 'prioritized' or 'pinned_client'"),
    ],
)
def test_groups_that_the_server_would_refuse_are_invalid(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QueueDeclarationError, match=re.escape(message)):
        small_queue(name, consumer=fields)


@pytest.mark.parametrize(
    ("policy", "level", "first"),
    [("overflow", 0, "2.11.0"), ("pinned_client", 0, "2.11.0"), ("prioritized", 1, "2.12.0")],
)
@pytest.mark.parametrize("location", ["queue", "dead letters"])
async def test_a_server_that_does_not_know_a_policy_is_refused_before_anything_is_changed(
    connection: NatsPyConnection, name: str, policy: str, level: int, first: str, location: str
) -> None:
    consumer = {"priority_groups": ["workers"], "priority_policy": policy}
    if location == "queue":
        queue = small_queue(name, consumer=consumer)
    else:
        queue = small_queue(name, dead_letters={"name": f"{name}-dead", "consumers": [small_consumer() | consumer]})
    connection.api_level = level
    message = (
        f"priority_policy {policy} of consumer worker: expected nats-server {first} or later (API level {level + 1})"
    )
    with pytest.raises(ServerTooOldError, match=re.escape(message)):
        await provision(connection, queue)
    streams = (await connection.api("STREAM.NAMES"))["streams"] or []
    assert [stream for stream in streams if stream.startswith(name)] == []


def small_consumer() -> dict[str, Any]:
    return {"name": "worker", "max_deliver": 2, "backoff": ["5s"]}


@pytest.mark.slow
@POLICIES
@pytest.mark.parametrize("fallbacks", [(), (LOW,)], ids=["one lane", "two lanes"])
async def test_a_worker_pulls_in_the_group_of_its_consumer(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, policy: str, fallbacks: tuple[str, ...]
) -> None:
    queue = priority_queue(name, **GROUPS | {"priority_policy": policy})
    await provision(connection, queue)
    jobs: list[bytes] = []
    async with running_worker(Worker(queue, HIGH, lambda job: jobs.append(job.body), settings, fallbacks=fallbacks)):
        for kind in (HIGH, *fallbacks):
            await publish_jobs(connection, queue, [kind], kind=kind)
        await eventually(lambda: len(jobs) == 1 + len(fallbacks))


class Hands:
    """Handlers that record which worker did a job, and can be paused."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.free = asyncio.Event()
        self.free.set()

    def of(self, worker: str) -> Any:
        async def handle(_: Delivery) -> None:
            self.done.append(worker)
            if worker == "own":
                await self.free.wait()

        return handle


@pytest.mark.slow
async def test_a_consumers_own_worker_is_served_before_a_fallback_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = priority_queue(name, **GROUPS)
    await provision(connection, queue)
    hands = Hands()
    helper = Worker(queue, HIGH, hands.of("helper"), settings, fallbacks=[LOW])
    own = Worker(queue, LOW, hands.of("own"), settings)
    # The fallback worker has been waiting for longer.
    async with running_worker(helper):
        await eventually(lambda: waiting(connection, name))
        async with running_worker(own):
            await eventually(lambda: waiting(connection, name, 2))
            for number in range(1, 21):
                await publish_jobs(connection, queue, ["a"], kind=LOW)
                await eventually(lambda number=number: len(hands.done) == number)  # type: ignore[misc]
                # As between two jobs of the consumer's own worker.
                await eventually(lambda: waiting(connection, name, 2))
            assert hands.done == ["own"] * 20
            hands.free.clear()
            await publish_jobs(connection, queue, ["a", "b"], kind=LOW)
            await eventually(lambda: hands.done[20:] == ["own", "helper"])
            hands.free.set()


async def waiting(connection: NatsPyConnection, name: str, count: int = 1) -> bool:
    return int((await consumer_info(connection, name, LOW))["num_waiting"]) >= count


async def test_a_consumer_for_one_pinned_client_is_refused_with_what_to_do(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = priority_queue(name, **GROUPS | {"priority_policy": "pinned_client"})
    await provision(connection, queue)
    for consumer, fallbacks in ((HIGH, ()), (LOW, (HIGH,))):
        with pytest.raises(WorkerSetupError) as caught:
            await Worker(queue, consumer, print, settings, fallbacks=fallbacks).run()
        assert str(caught.value) == (
            f"expected consumer {name}/{consumer} to share its jobs among workers, found the priority policy"
            " pinned_client: the server would give all jobs to one worker and leave the others idle; set"
            " priority_policy to overflow or prioritized, or do its jobs with a client that keeps pins"
        )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["overflow", "prioritized", "pinned_client"])
async def test_deaths_of_a_consumer_with_groups_are_found_while_no_worker_runs(
    connection: NatsPyConnection, name: str, policy: str
) -> None:
    groups = {"priority_groups": ["workers"], "priority_policy": policy}
    declared: dict[str, Any] = {"max_deliver": 2, "ack_wait": "1500ms", **groups}
    queue = await make_queue(connection, name, consumer=declared, jobs="abc")
    inbox = connection.client.new_inbox()
    subscription = await connection.client.subscribe(inbox)
    pin: dict[str, str] = {}
    for _ in range(2):
        request = {"batch": 3, "expires": 5_000_000_000, "group": "workers", **pin}
        await connection.client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{name}.worker", json.dumps(request).encode(), reply=inbox
        )
        for _ in range(3):
            delivery = await subscription.next_msg(timeout=5)
            pin = {"id": (delivery.headers or {})["Nats-Pin-Id"]} if policy == "pinned_client" else {}

    async def all_stored() -> bool:
        await probe(connection, queue)
        return await stored_count(connection, f"{name}-dead") == 3

    await eventually(all_stored)
    assert len((await find_dead_letters(connection, queue)).letters) == 3


@pytest.mark.slow
@POLICIES
async def test_entries_are_acknowledged_through_a_consumer_with_groups(
    connection: NatsPyConnection, name: str, policy: str
) -> None:
    reader = small_consumer() | {"priority_groups": ["readers"], "priority_policy": policy}
    dead_letters = {"name": f"{name}-dead", "retention": "workqueue", "deny_delete": True, "consumers": [reader]}
    queue = await make_queue(connection, name, dead_letters=dead_letters, dead="ab")
    assert await remove_entries(connection, queue, [1]) == 0
    assert await stored_count(connection, f"{name}-dead") == 1
