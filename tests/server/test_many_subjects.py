"""Queues with thousands of subjects: monitoring counts their dead and undeliverable jobs, or says that it doesn't."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_command_line import as_json

from airflow_provider_jetstream.jetstream import running_warnings
from airflow_provider_jetstream.jetstream.inspection import overview as overviews
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import queue_samples
from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueState, QueueWatch
from testbed.face import inspect_all_queues
from testbed.queues import eventually, make_dead_letters, make_queue, stored_count

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_METRICS = ("jetstream_queue_counted", "jetstream_queue_dead_letters", "jetstream_queue_undeliverable_jobs")


async def queue_of_many_subjects(
    connection: NatsPyConnection, name: str, *, waiting: int = 2_050, unmatched: int = 3
) -> WorkQueue:
    """A queue with three dead letters, and one job each on many subjects."""
    queue = await make_queue(
        connection, name, subjects=[f"{name}.jobs.>", f"{name}.other.*"], consumer={"filter_subject": f"{name}.jobs.>"}
    )
    await make_dead_letters(connection, queue, "abc")
    for number in range(waiting):
        await connection.client.publish(f"{name}.jobs.{number}", b"{}")
    for number in range(unmatched):
        await connection.client.publish(f"{name}.other.{number}", b"{}")

    async def all_stored() -> bool:
        return await stored_count(connection, name) == 3 + waiting + unmatched

    await eventually(all_stored)
    return queue


async def metrics(connection: NatsPyConnection, name: str) -> dict[str, float]:
    (overview,) = [found for found in await inspect_all_queues(connection) if found.name == name]
    return {sample.metric: sample.value for sample in queue_samples(overview) if sample.metric in _METRICS}


@pytest.mark.slow
@pytest.mark.parametrize(("waiting", "unmatched"), [(2_050, 3), (0, 2_100), (2_050, 0)])
async def test_dead_and_undeliverable_jobs_are_counted_beyond_2000_subjects(
    nats: NatsServer, connection: NatsPyConnection, name: str, waiting: int, unmatched: int
) -> None:
    queue = await queue_of_many_subjects(connection, name, waiting=waiting, unmatched=unmatched)
    assert await metrics(connection, name) == dict(zip(_METRICS, (1, 3, unmatched), strict=True))
    (listed,) = [found for found in await as_json(nats, "queues") if found["queue"] == name]
    assert (listed["dead"], listed["undeliverable"], listed["problem"]) == (3, unmatched, None)
    names = {warning.name for warning in await running_warnings(connection, queue)}
    assert ("untaken-subjects" in names) == bool(unmatched)


async def test_beyond_the_bound_monitoring_says_that_it_does_not_count(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    # 250,000 subjects would take this test a minute.
    mocker.patch.object(overviews, "MAX_SUBJECTS", 5)
    await queue_of_many_subjects(connection, name, waiting=2, unmatched=2)
    assert await metrics(connection, name) == {"jetstream_queue_counted": 1, "jetstream_queue_dead_letters": 3} | {
        "jetstream_queue_undeliverable_jobs": 2
    }
    await connection.client.publish(f"{name}.jobs.one-more", b"{}")
    await connection.client.flush()
    assert await metrics(connection, name) == {"jetstream_queue_counted": 0}
    (overview,) = [found for found in await inspect_all_queues(connection) if found.name == name]
    assert "6 subjects, more than 5" in overview.uncounted
    assert "up to 5, aren't counted" in overview.uncounted
    found = QueueWatch().compare(overview)
    assert (QueueState.UNKNOWN, overview.uncounted) in [(part.state, part.evidence) for part in found]
    # A queue without anything left over needs no counting, however many subjects it has.
    await connection.api(f"STREAM.PURGE.{name}")
    for number in range(7):
        await connection.client.publish(f"{name}.jobs.{number}", b"{}")
    await connection.client.flush()
    assert await metrics(connection, name) == dict(zip(_METRICS, (1, 0, 0), strict=True))
