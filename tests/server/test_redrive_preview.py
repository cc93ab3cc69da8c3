"""Previews of a redrive: what it would do, without changing anything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Repair,
    Selection,
    preview,
    redrive_dead_letters,
)
from testbed.dead_letters import make_terminated_letters, request_for, stream_messages
from testbed.face import GUARANTEES, consumer_info, stream_info, update_consumer
from testbed.queues import CONSUMER, exhaust_deliveries, make_dead_letters, make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import DeadLetter, WorkQueue
    from testbed.face import NatsPyConnection


async def everything(connection: NatsPyConnection, queue: WorkQueue) -> list[Any]:
    """Read everything on the server that a redrive could change."""
    streams = [queue.name, *(stream.name for stream in queue.companions())]
    consumer = await connection.api(f"CONSUMER.INFO.{queue.name}.worker")
    # The time of the answer, and the count of pull requests.
    del consumer["ts"], consumer["num_waiting"]
    infos = [await stream_info(connection, stream) for stream in streams]
    return [
        consumer,
        [(info["config"], info["state"]) for info in infos],
        [await stream_messages(connection, stream) for stream in streams],
    ]


async def set_ack_wait(connection: NatsPyConnection, queue: WorkQueue, *, seconds: float) -> None:
    """Change for how long the jobs in flight stay so."""
    config = (await consumer_info(connection, queue.name, CONSUMER))["config"]
    await update_consumer(connection, queue.name, config | {"ack_wait": round(seconds * 1e9)})


@pytest.mark.slow
async def test_a_preview_has_counts_groups_and_a_sample_and_changes_nothing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "a")
    await redrive_dead_letters(connection, queue)
    await exhaust_deliveries(connection, queue, 1)
    jobs = [f"job {number}" for number in range(7)]
    await make_dead_letters(connection, queue, jobs, headers={"Job-Id": "order"})
    await make_terminated_letters(connection, queue, ["terminated", "x" * 300])
    await set_ack_wait(connection, queue, seconds=30)
    await publish_jobs(connection, queue, ["waiting", "in flight"])
    running = await pull_jobs(connection, queue, 2)

    def repair(letter: DeadLetter) -> Repair | None:
        if letter.body == b"terminated":
            raise KeyError("customer")
        return Repair(letter.body + b"!") if letter.body.startswith(b"x") else None

    request = RedriveRequest(transform=repair, max_redrives=1, rate=0.1, run="never", why="to see")
    # The first preview makes the server publish the advisories that are due.
    await preview(connection, queue, request)
    before = await everything(connection, queue)
    shown = await preview(connection, queue, request)
    assert await everything(connection, queue) == before
    for message in running:
        await message.ack_sync()
    await set_ack_wait(connection, queue, seconds=0.5)
    assert (shown.protocol, shown.guarantee) == (Protocol.COPY, GUARANTEES[Protocol.COPY])
    assert (shown.redriven, shown.parked, shown.failures) == (8, 1, 1)
    cause = "the transform raised KeyError: 'customer'; the letter is untouched"
    assert shown.failed == {10: cause}
    reasons: Counter[str | None] = Counter()
    for key, group in shown.groups.items():
        reasons[key[0]] += group.count
    assert reasons == {"max_deliveries": 8, "terminated": 2}
    assert [letter["sequence"] for letter in shown.sample] == [3, 4, 5, 6, 7]
    first = shown.sample[0]
    assert (first["job_id"], first["body"], first["changes"], first["redrives"]) == ("order", "job 0", None, 0)
    long = await preview(connection, queue, request_for([11], transform=repair))
    (last,) = long.sample
    assert (last["body"], last["reason"]) == ("x" * 200, "terminated")
    assert last["changes"]["body"]["after"]["bytes"] == 301
    as_json = shown.as_json()
    assert (as_json["dry_run"], as_json["failed"], as_json["failures"]) == (True, 1, {10: cause})
    assert as_json["groups"][0]["count"] == 8
    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=repair, max_redrives=1))
    assert (len(report.redriven), len(report.parked), report.failed) == (8, 1, shown.failed)


@pytest.mark.slow
async def test_a_preview_counts_failures_beyond_those_it_names(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, map(str, range(120)))

    def refuse(_: DeadLetter) -> Repair:
        raise ValueError("no")

    shown = await preview(connection, queue, RedriveRequest(transform=refuse))
    assert (shown.failures, len(shown.failed), shown.redriven) == (120, 100, 0)
    assert (shown.as_json()["failed"], len(shown.as_json()["failures"])) == (120, 20)


@pytest.mark.slow
async def test_a_preview_groups_by_the_requested_fields(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab", headers={"Airflow-Dag-Id": "shop"})
    await make_dead_letters(connection, queue, "c", kind="other")
    shown = await preview(connection, queue, RedriveRequest(), ["dag_id", "subject"])
    assert {key: group.count for key, group in shown.groups.items()} == {
        ("shop", f"{name}.jobs.plain"): 2,
        (None, f"{name}.jobs.other"): 1,
    }
    shown = await preview(connection, queue, RedriveRequest(Selection(dag_id="shop")), ["consumer"])
    assert {key: group.count for key, group in shown.groups.items()} == {("worker",): 2}
