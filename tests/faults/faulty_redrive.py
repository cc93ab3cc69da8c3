"""The redrive that the processes of the fault suite run, and in which they are killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest, redrive_dead_letters

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection, WorkQueue


def redrive_request(protocol: str) -> RedriveRequest:
    """Return a request for all letters; its run key lets the second redrive continue the first."""
    return RedriveRequest(protocol=Protocol(protocol), run="run-twice", who={"task_id": "faults"})


async def redrive_by(connection: Connection, queue: WorkQueue, protocol: str) -> None:
    report = await redrive_dead_letters(connection, queue, redrive_request(protocol))
    report.raise_for_failures()
