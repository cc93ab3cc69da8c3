"""Streams that source or mirror a queue have consumers on it, which are no worker's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from testbed.queues import CONSUMER, eventually, make_queue, process_all, publish_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection


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
