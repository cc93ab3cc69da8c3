"""Workers that outrun their ack wait run jobs twice, which nobody can prevent: everybody who looks is warned."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    find_dead_letters,
    get_message,
    preview,
    redrive_dead_letters,
)
from testbed.face import stream_info, summarise_dead_letters
from testbed.queues import (
    eventually,
    make_queue,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
    wait_for_entries,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import Finding, NatsPyConnection

JOBS = 50
SENTENCE = (
    "ended after the server had reported that their deliveries were used up: workers take longer than its ack wait of"
    " 500ms and report no progress"
)


def late(risks: Iterable[Finding | str]) -> list[str]:
    return [str(risk) for risk in risks if SENTENCE in risk]


async def slow_workers(connection: NatsPyConnection, name: str) -> tuple[WorkQueue, Sequence[Msg]]:
    """Have two slow workers after each other get all jobs, until the server has given up on each job."""
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "500ms"})
    await publish_jobs(connection, queue, map(str, range(JOBS)))
    working = await pull_jobs(connection, queue, JOBS)
    await pull_jobs(connection, queue, JOBS)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, JOBS)
    return queue, working


@pytest.mark.slow
async def test_jobs_that_slow_workers_end_late_are_warned_of(connection: NatsPyConnection, name: str) -> None:
    queue, working = await slow_workers(connection, name)
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.letters), late(findings.risks)) == (JOBS, [])
    for message in working:
        await store_completion(connection, queue, message.metadata.sequence.stream)
        await message.ack_sync()
    findings = await find_dead_letters(connection, queue)
    (risk,) = late(findings.risks)
    assert risk.startswith(f"jobs of consumer worker of {name} {SENTENCE}")
    assert (findings.letters, len(findings.dismissed)) == ((), JOBS)
    assert late((await summarise_dead_letters(connection, queue)).risks) == [risk]
    report = await redrive_dead_letters(connection, queue)
    assert late(report.risks) == [risk]
    assert await stored_count(connection, name) == 0


@pytest.mark.slow
async def test_jobs_that_run_beside_their_copies_are_warned_of_when_they_end(
    connection: NatsPyConnection, name: str
) -> None:
    queue, _ = await slow_workers(connection, name)
    assert len((await redrive_dead_letters(connection, queue)).redriven) == JOBS
    # The copies are as slow as the originals.
    working = await pull_jobs(connection, queue, JOBS)
    await pull_jobs(connection, queue, JOBS)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, JOBS)
    for message in working:
        await store_completion(connection, queue, message.metadata.sequence.stream)
        await message.ack_sync()
    assert len(late((await find_dead_letters(connection, queue)).risks)) == 1


@pytest.mark.slow
async def test_a_completion_after_the_last_delivery_has_run_out_is_warned_of(
    connection: NatsPyConnection, name: str
) -> None:
    queue, _ = await slow_workers(connection, name)
    await store_completion(connection, queue, 7)
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.letters), len(late(findings.risks))) == (JOBS - 1, 1)
    assert len(late((await preview(connection, queue, RedriveRequest())).risks)) == 1


@pytest.mark.slow
async def test_a_worker_that_is_stopped_between_completion_and_acknowledgement_is_not_late(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    (sequence,) = await publish_jobs(connection, queue, ["a"])
    await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, sequence)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.dismissed), late(findings.risks)) == (1, [])


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_is_done_after_it_was_requeued_in_place_is_not_late(
    connection: NatsPyConnection, name: str
) -> None:
    # The entry stays.
    letters = {"name": f"{name}-dead", "deny_delete": True, "deny_purge": True}
    queue = await make_queue(connection, name, dead_letters=letters)
    (sequence,) = await publish_jobs(connection, queue, ["a"])
    await pull_jobs(connection, queue, 1)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, 1)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert list(report.redriven) == [sequence]
    (message,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, sequence)
    await message.ack_sync()
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.dismissed), late(findings.risks)) == (1, [])


async def evict(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await publish_jobs(connection, queue, map(str, range(JOBS)))


async def expire(connection: NatsPyConnection, queue: WorkQueue) -> None:
    config = (await stream_info(connection, queue.name))["config"]
    await connection.api(f"STREAM.UPDATE.{queue.name}", config | {"max_age": 10**8, "duplicate_window": 10**8})


async def purge(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"STREAM.PURGE.{queue.name}")


async def roll_up(connection: NatsPyConnection, queue: WorkQueue) -> None:
    config = (await stream_info(connection, queue.name))["config"]
    await connection.api(f"STREAM.UPDATE.{queue.name}", config | {"allow_rollup_hdrs": True})
    await publish_jobs(connection, queue, ["rolled up"], headers={"Nats-Rollup": "all"})


async def delete(connection: NatsPyConnection, queue: WorkQueue) -> None:
    for sequence in range(2, JOBS + 1):
        await connection.api(f"STREAM.MSG.DELETE.{queue.name}", {"seq": sequence})


async def remove_the_consumer_and_purge(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"CONSUMER.DELETE.{queue.name}.worker")
    await purge(connection, queue)


@pytest.mark.slow
@pytest.mark.parametrize("remove", [evict, expire, purge, roll_up, delete, remove_the_consumer_and_purge])
async def test_nobody_is_blamed_for_jobs_that_no_worker_ended(
    connection: NatsPyConnection,
    name: str,
    remove: Callable[[NatsPyConnection, WorkQueue], Awaitable[None]],
) -> None:
    limits = {"max_msgs": JOBS, "discard": "old"}
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, **limits)
    # Of an earlier job, which a worker acknowledged in time.
    await publish_jobs(connection, queue, ["done", *map(str, range(JOBS - 1))])
    done, *_ = await pull_jobs(connection, queue, JOBS)
    await done.ack_sync()
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, JOBS - 1)
    await remove(connection, queue)
    await eventually(lambda: _is_gone(connection, queue, JOBS))
    findings = await find_dead_letters(connection, queue)
    assert len(findings.dismissed) == JOBS - 1
    assert late(findings.risks) == late((await summarise_dead_letters(connection, queue)).risks) == []


async def _is_gone(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> bool:
    return await get_message(connection, queue.name, sequence) is None
