"""The redrive that the processes of the fault suite run, and in which they are killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest, list_redrives, redrive_dead_letters

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection, WorkQueue


def redrive_request(protocol: str) -> RedriveRequest:
    """Return a request for all letters; its run key lets the second redrive continue the first."""
    return RedriveRequest(protocol=Protocol(protocol), run="run-twice", who={"task_id": "faults"})


async def discard_id(connection: Connection, queue: WorkQueue) -> str:
    """Return the id of the queue's only redrive that discards letters."""
    (discard,) = [redrive for redrive in await list_redrives(connection, queue) if redrive.plan.get("discard")]
    return discard.id


async def discard(connection: Connection, queue: WorkQueue) -> None:
    report = await redrive_dead_letters(connection, queue, RedriveRequest(discard=True))
    report.raise_for_failures()


async def undo(connection: Connection, queue: WorkQueue) -> None:
    request = RedriveRequest(undo=await discard_id(connection, queue))
    (await redrive_dead_letters(connection, queue, request)).raise_for_failures()


async def redrive_by(connection: Connection, queue: WorkQueue, protocol: str) -> None:
    report = await redrive_dead_letters(connection, queue, redrive_request(protocol))
    report.raise_for_failures()
