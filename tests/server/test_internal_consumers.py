"""Streams that source or mirror a queue have consumers on it, which are no worker's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Status, discover_queue, find_dead_letters, redrive_dead_letters
from testbed.queues import CONSUMER, eventually, make_queue, process_all, publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


@pytest.mark.parametrize("copying", ["mirror", "sources"])
async def test_live_jobs_of_a_queue_that_another_stream_copies_are_not_dead(
    connection: NatsPyConnection, name: str, copying: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, "abc")
    config: dict[str, Any] = {"name": f"{name}-copy"}
    config[copying] = {"name": name} if copying == "mirror" else [{"name": name}]
    await connection.api(f"STREAM.CREATE.{name}-copy", config)

    async def is_copied() -> bool:
        return bool((await connection.api(f"STREAM.INFO.{name}-copy"))["state"]["messages"] == 3)

    await eventually(is_copied, within=10)
    listed = (await connection.api(f"CONSUMER.LIST.{name}"))["consumers"]
    assert any(info["delivered"]["stream_seq"] == 3 for info in listed), "the copying stream's consumer"
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 0)
    assert not (await redrive_dead_letters(connection, queue)).redriven
    assert [consumer.name for consumer in (await discover_queue(connection, name)).consumers] == [CONSUMER]
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}


async def test_a_job_that_is_done_and_stays_stored_when_the_sourcing_stream_is_deleted_is_no_dead_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"})
    await connection.api(f"STREAM.CREATE.{name}-copy", {"name": f"{name}-copy", "sources": [{"name": name}]})

    async def sourcing_consumer() -> str | None:
        consumers = (await connection.api(f"CONSUMER.LIST.{name}"))["consumers"]
        return next((info["name"] for info in consumers if info["name"] != CONSUMER), None)

    source = await eventually(sourcing_consumer, within=10)
    # As a source that is away: it takes no job any more, so the jobs that are done stay stored.
    until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    await connection.api(f"CONSUMER.PAUSE.{name}.{source}", {"pause_until": until})
    jobs = await publish_jobs(connection, queue, "abc")
    for message in await pull_jobs(connection, queue, 3):
        await message.ack_sync()
    await connection.api(f"STREAM.DELETE.{name}-copy")
    assert await stored_count(connection, name) == len(jobs)
    findings = await find_dead_letters(connection, queue)
    assert [(job.sequence, job.status) for job in findings.dismissed] == [(job, Status.COMPLETED) for job in jobs]
    assert (findings.letters, findings.uncertain) == ((), 0)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), list(report.gone)) == (0, jobs)
    assert await stored_count(connection, name) == 0
