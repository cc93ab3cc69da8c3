"""The redrive that is killed: what the processes of the fault suite run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


def order_by(protocol: str) -> RedriveRequest:
    """Ask for all letters; the key makes the second try go on with the first."""
    return RedriveRequest(protocol=Protocol(protocol), run="tried-twice", who={"task_id": "faults"})


async def redrive_by(connection: Connection, queue: WorkQueue, protocol: str) -> None:
    report = await redrive_dead_letters(connection, queue, order_by(protocol))
    report.raise_for_failures()
