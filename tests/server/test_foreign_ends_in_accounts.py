"""What a worker of another consumer states of a job that it never had is no end of that job in an account."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Consumer, WorkQueue, account_for_jobs, provision, redrive_dead_letters
from testbed.dead_letters import request_for
from testbed.queues import completion_body, eventually, publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import JobAccount
    from testbed.face import NatsPyConnection

_KINDS = ("a completion", "a cancelled job", "a termination")


async def _queue(connection: NatsPyConnection, name: str, *, archive: bool = True, ack_wait: str = "30s") -> WorkQueue:
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[
            Consumer(name=one, filter_subject=f"{name}.jobs.{one}", max_deliver=2, ack_wait=ack_wait)
            for one in ("own", "other")
        ],
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
        archive=archive,
        audit=True,
    )
    await provision(connection, queue)
    return queue


async def _state(connection: NatsPyConnection, name: str, what: str, sequence: int, consumer: str) -> None:
    """Do what a worker of a consumer may do, whatever job it is."""
    if what == "a termination":
        before = await stored_count(connection, f"{name}-dead")
        await connection.publish(f"$JS.ACK.{name}.{consumer}.1.{sequence}.1.0.0", b"+TERM forged")

        async def announced() -> bool:
            return await stored_count(connection, f"{name}-dead") > before

        await eventually(announced)
        return
    kind = "cancelled" if what == "a cancelled job" else "completion"
    body = json.loads(completion_body(name, sequence, consumer)) | {"type": f"io.airflow.jetstream.v1.{kind}"}
    await connection.publish_acknowledged(f"completed.{name}.{consumer}.{sequence}", json.dumps(body).encode(), {})


async def _delete(connection: NatsPyConnection, name: str, sequence: int) -> None:
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})


def _numbers(account: JobAccount) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    return account.ended, list(account.unaccounted), list(account.unknown)


@pytest.mark.slow
@pytest.mark.parametrize("what", _KINDS)
@pytest.mark.parametrize("stated_first", [True, False])
async def test_a_deleted_job_is_unaccounted_whatever_another_consumers_worker_states(
    connection: NatsPyConnection, name: str, what: str, *, stated_first: bool
) -> None:
    queue = await _queue(connection, name, ack_wait="1s")
    await publish_jobs(connection, queue, ["job"], kind="own")
    for step in (True, False):
        if step is stated_first:
            await _state(connection, name, what, 1, "other")
        else:
            await _delete(connection, name, 1)
        await account_for_jobs(connection, queue)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [])
    report = await redrive_dead_letters(connection, queue, request_for([1]))
    assert set(report.redriven) == {1}
    assert _numbers(await account_for_jobs(connection, queue)) == (1, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("what", _KINDS)
@pytest.mark.parametrize("stated_first", [True, False])
async def test_without_an_archive_it_is_not_known_whether_a_deleted_job_has_ended(
    connection: NatsPyConnection, name: str, what: str, *, stated_first: bool
) -> None:
    queue = await _queue(connection, name, archive=False)
    await publish_jobs(connection, queue, ["job"], kind="own")
    if not stated_first:
        await _delete(connection, name, 1)
    await _state(connection, name, what, 1, "other")
    if stated_first:
        # Whose job it is shows as long as it is stored.
        await account_for_jobs(connection, queue)
        await _delete(connection, name, 1)
    account = await account_for_jobs(connection, queue)
    assert _numbers(account) == ((0, [(1, 1)], []) if stated_first else (0, [], [(1, 1)]))
    assert ("no archive shows whose they were" in "".join(account.why_unknown)) is not stated_first
    assert _numbers(await account_for_jobs(connection, queue)) == _numbers(account)


@pytest.mark.slow
async def test_what_is_stated_of_an_unaccounted_job_makes_its_end_unknown_at_most(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name, archive=False)
    await publish_jobs(connection, queue, ["first", "second"], kind="own")
    for sequence in (1, 2):
        await _delete(connection, name, sequence)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 2)], [])
    await _state(connection, name, "a completion", 2, "other")
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [(2, 2)])


@pytest.mark.slow
async def test_the_audits_copy_of_a_termination_by_another_consumer_ends_no_job(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    await publish_jobs(connection, queue, ["job"], kind="own")
    await _state(connection, name, "a termination", 1, "other")
    await connection.api(f"STREAM.PURGE.{name}-dead")
    await _delete(connection, name, 1)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [])


@pytest.mark.slow
async def test_a_job_that_comes_after_the_queue_was_read_is_judged_as_any_other(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    await publish_jobs(connection, queue, ["job"], kind="own")
    # Of a job that doesn't exist yet, as of one that does.
    for sequence in (1, 2, 3):
        await _state(connection, name, "a completion", sequence, "other")
    await account_for_jobs(connection, queue)
    await publish_jobs(connection, queue, ["later"], kind="own")
    for sequence in (1, 2):
        await _delete(connection, name, sequence)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 2)], [])


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("what", _KINDS)
async def test_a_job_that_was_done_has_ended_whatever_another_consumers_worker_states(
    connection: NatsPyConnection, name: str, what: str, *, archive: bool
) -> None:
    queue = await _queue(connection, name, archive=archive)
    await publish_jobs(connection, queue, ["before", "after"], kind="own")
    first, second = await pull_jobs(connection, queue, 2, consumer="own")
    await _state(connection, name, what, 1, "other")
    await first.ack_sync()
    await second.ack_sync()
    await _state(connection, name, what, 2, "other")
    assert _numbers(await account_for_jobs(connection, queue)) == (2, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("what", _KINDS)
async def test_what_the_jobs_own_worker_states_counts(connection: NatsPyConnection, name: str, what: str) -> None:
    queue = await _queue(connection, name)
    await connection.api(
        f"CONSUMER.CREATE.{name}.own",
        {"stream_name": name, "config": await _unsampled(connection, name), "action": "update"},
    )
    await publish_jobs(connection, queue, ["job"], kind="own")
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    for consumer in ("other", "own", "other"):
        await _state(connection, name, what, 1, consumer)
    await message.ack_sync()
    assert _numbers(await account_for_jobs(connection, queue)) == (1, [], [])


async def _unsampled(connection: NatsPyConnection, name: str) -> dict[str, object]:
    info = await connection.api(f"CONSUMER.INFO.{name}.own")
    return {key: value for key, value in info["config"].items() if key != "sample_freq"}


@pytest.mark.slow
async def test_an_acknowledgement_of_another_consumers_job_makes_no_metric(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    await publish_jobs(connection, queue, ["job"], kind="own")
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await connection.publish(f"$JS.ACK.{name}.other.1.1.1.0.0", b"+ACK")
    await connection.publish(f"$JS.ACK.{name}.other.1.1.1.{message.metadata.timestamp.timestamp():.0f}.0", b"+ACK")
    await connection.api(f"STREAM.INFO.{name}")
    await _delete(connection, name, 1)
    assert await stored_count(connection, f"{name}-events") == 0
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [])
