"""Terminations and records that come late, or of jobs that were redriven or requeued before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest, find_dead_letters, redrive_dead_letters
from testbed.dead_letters import make_terminated_letters, stream_messages
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue, pull_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

_COPY = RedriveRequest(protocol=Protocol.COPY)


async def _terminate(connection: NatsPyConnection, queue: WorkQueue) -> int:
    """Terminate the next job, and return its sequence once the server has announced that."""
    letters = f"{queue.name}-dead"
    before = await stored_count(connection, letters)
    (message,) = await pull_jobs(connection, queue, 1, within=30)
    await message.respond(b"+TERM not wanted")

    async def announced() -> bool:
        return await stored_count(connection, letters) > before

    await eventually(announced)
    return message.metadata.sequence.stream


async def _store_record(connection: NatsPyConnection, queue: WorkQueue, sequence: int, body: bytes) -> None:
    headers = {"Dead-Letter-Subject": f"{queue.name}.jobs.plain", "Dead-Letter-Error-Class": "app.Late"}
    await connection.client.jetstream().publish(f"dead.{queue.name}.{CONSUMER}.{sequence}", body, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
async def test_a_record_that_is_stored_after_the_redrive_makes_no_second_letter(
    connection: NatsPyConnection, name: str, *, archive: bool
) -> None:
    queue = await make_queue(connection, name, archive=archive)
    await make_terminated_letters(connection, queue, ["a"])
    if not archive:
        await _store_record(connection, queue, 1, b"a")
    assert list((await redrive_dead_letters(connection, queue, _COPY)).redriven) == [1]
    await _store_record(connection, queue, 1, b"a")
    assert (await find_dead_letters(connection, queue)).letters == ()
    assert (await redrive_dead_letters(connection, queue, _COPY)).redriven == {}
    assert [job.data for job in await stream_messages(connection, name)] == [b"a"]


@pytest.mark.slow
@pytest.mark.since_server("2.14", "consumers that can be reset")
async def test_a_job_that_was_requeued_in_place_and_then_terminated_is_a_letter_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=True)
    await make_dead_letters(connection, queue, ["a"])
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert list(report.redriven) == [1]
    assert await _terminate(connection, queue) == 1
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.sequence, letter.body, letter.death.reason) == (1, b"a", "terminated")
    assert list((await redrive_dead_letters(connection, queue, _COPY)).redriven) == [1]
    assert [job.data for job in await stream_messages(connection, name)] == [b"a"]
