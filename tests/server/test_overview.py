"""Which streams of a server are work queues, and which stream has their dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from testbed.face import inspect_all_queues

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection


async def test_a_dead_letter_queue_is_no_work_queue_whatever_its_retention(connection: Connection, name: str) -> None:
    letters = f"{name}-dead"
    streams: dict[str, dict[str, Any]] = {
        name: {"subjects": [f"{name}.>"], "retention": "workqueue"},
        # As the source documents make it: only its subjects show what it is.
        letters: {"subjects": [f"{MAX_DELIVERIES}.{name}.*"], "retention": "workqueue"},
        f"{name}-marked": {
            "subjects": [f"dead.{name}.>"],
            "retention": "workqueue",
            "metadata": {"dead_letter_queue": "true"},
        },
        f"{name}-log": {"subjects": [f"log.{name}"], "retention": "limits"},
    }
    for stream, config in streams.items():
        await connection.api(f"STREAM.CREATE.{stream}", {"name": stream, "storage": "memory", **config})
    (look,) = [overview for overview in await inspect_all_queues(connection) if overview.name.startswith(name)]
    assert look.name == name
    assert look.dead_letter_queue is not None
    assert look.dead_letter_queue["config"]["name"] == letters
