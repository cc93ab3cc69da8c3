"""What a worker of another consumer states of a job hides no dead letter and brings back no job that was done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Consumer,
    Job,
    WorkQueue,
    account_for_jobs,
    find_dead_letters,
    provision,
    publish,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from testbed.foreign_programs import create_or_update_consumer, pull
from testbed.queues import (
    completion_body,
    eventually,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

_HANDLER = "handler"


async def _queue(
    connection: NatsPyConnection, name: str, *, ack_wait: str = "500ms", archive: bool = True
) -> WorkQueue:
    """Make a queue of two consumers whose acknowledgements leave no evidence, and whose entries a handler may take."""
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[
            Consumer(name=one, filter_subject=f"{name}.jobs.{one}", max_deliver=1, ack_wait=ack_wait, sample_freq="0")
            for one in ("own", "other")
        ],
        dead_letters={"name": f"{name}-dead", "retention": "workqueue"},
        events=f"{name}-events",
        archive=archive,
        audit=True,
    )
    await provision(connection, queue)
    return queue


async def _terminate(connection: NatsPyConnection, name: str, sequence: int) -> None:
    """Terminate a job that the other consumer never had, as its workers can."""
    before = await stored_count(connection, f"{name}-dead")
    await connection.publish(f"$JS.ACK.{name}.other.1.{sequence}.1.0.0", b"+TERM forged")

    async def is_announced() -> bool:
        return await stored_count(connection, f"{name}-dead") > before

    await eventually(is_announced)


async def _complete(connection: NatsPyConnection, name: str, sequence: int, consumer: str) -> None:
    body = completion_body(name, sequence, consumer)
    await connection.publish_acknowledged(f"completed.{name}.{consumer}.{sequence}", body, {})


async def _handle(connection: NatsPyConnection, name: str) -> None:
    """Have a handler take the announcements of terminations off the dead letter queue."""
    terminations = f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{name}.*"
    config = {"durable_name": _HANDLER, "filter_subject": terminations}
    await create_or_update_consumer(connection.client, f"{name}-dead", config)
    async for message in pull(connection.client, f"{name}-dead", _HANDLER, batch=1, expires=2):
        await connection.client.request(message.reply, b"+ACK", timeout=5)


async def _die(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await pull_jobs(connection, queue, 1, consumer="own")
    before = await stored_count(connection, f"{queue.name}-dead")

    async def is_dead() -> bool:
        await find_dead_letters(connection, queue)
        return await stored_count(connection, f"{queue.name}-dead") > before

    await eventually(is_dead)


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("handled_first", [True, False])
async def test_a_handler_that_acknowledges_a_forged_termination_hides_no_letter(
    connection: NatsPyConnection, name: str, *, archive: bool, handled_first: bool
) -> None:
    queue = await _queue(connection, name, archive=archive)
    await publish_jobs(connection, queue, ["job"], kind="own")
    if not handled_first:
        await _die(connection, queue)
    await _terminate(connection, name, 1)
    await _handle(connection, name)
    if handled_first:
        findings = await find_dead_letters(connection, queue)
        assert (findings.letters, findings.uncertain) == ((), 0)
        await _die(connection, queue)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.sequence, letter.death.reason) == (1, "max_deliveries")
    assert list((await redrive_dead_letters(connection, queue)).redriven) == [1]


async def test_a_handler_that_acknowledges_a_forged_termination_accounts_for_no_deleted_job(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    for consumer in ("own", "other"):
        await publish_jobs(connection, queue, ["done", "deleted"], kind=consumer)
        # Both consumers leave evidence, so that what has none is unaccounted.
        (message,) = await pull_jobs(connection, queue, 1, consumer=consumer)
        await _complete(connection, name, message.metadata.sequence.stream, consumer)
        await message.ack_sync()
    await _terminate(connection, name, 2)
    await _handle(connection, name)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 2})
    assert (await account_for_jobs(connection, queue)).unaccounted == ((2, 2),)


@pytest.mark.slow
async def test_a_done_job_is_not_run_again_where_the_consumer_that_states_its_death_is_gone(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name, ack_wait="30s")
    await publish_jobs(connection, queue, ["done"], kind="own")
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await message.ack_sync()
    await _terminate(connection, name, 1)
    await connection.api(f"CONSUMER.DELETE.{name}.other")
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, [job.status for job in findings.dismissed]) == ((), ["uncertain"])
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    account = await account_for_jobs(connection, queue)
    assert (account.ended, account.unknown) == (0, ((1, 1),))


async def test_letters_of_a_consumer_that_gave_its_subject_to_another_one_stay(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name, ack_wait="30s")
    await publish_jobs(connection, queue, ["mine"], kind="other")
    (message,) = await pull_jobs(connection, queue, 1, consumer="other")
    await connection.request(message.reply, b"+TERM mine")
    await connection.api(f"CONSUMER.DELETE.{name}.other")
    # The one that takes the subject now is younger than the job, or took other subjects then.
    config = (await connection.api(f"CONSUMER.INFO.{name}.own"))["config"] | {"filter_subject": f"{name}.jobs.*"}
    request = {"stream_name": name, "config": config, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{name}.own.{name}.jobs.*", request)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.body, letter.death.consumer) == (b"mine", "other")
    account = await account_for_jobs(connection, queue)
    assert (account.ended, account.unaccounted, account.unknown) == (1, (), ())


@pytest.mark.slow
async def test_a_worker_whose_consumer_is_gone_ends_no_wait(connection: NatsPyConnection, name: str) -> None:
    queue = await _queue(connection, name, ack_wait="30s")
    cursor = await take_cursor(connection, queue)
    report = await publish(connection, queue, [Job(b"body", subject=f"{name}.jobs.own")])
    await connection.api(f"CONSUMER.DELETE.{name}.other")
    waiting = asyncio.create_task(wait(connection, cursor, report.awaited()))
    await _complete(connection, name, 1, "other")
    await asyncio.wait([waiting], timeout=0.5)
    assert not waiting.done()
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await _complete(connection, name, 1, "own")
    await message.ack_sync()
    assert (await waiting).completed == {1}
