"""One dead letter, by its job's stream sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


async def read_letter(connection: Connection, queue: WorkQueue, sequence: int) -> DeadLetter:
    """Read a dead letter, parked ones included.

    :raises DeadLetterGoneError: the job is no dead letter, with what it is
    """
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead

    scan = await Scan.begin(connection, queue)
    (result,) = await scan.classify([sequence])
    if isinstance(result, NotDead):
        why = result.status.meaning if result.entries else f"{queue.name} has no dead job and no entry of it"
        raise DeadLetterGoneError(f"expected a dead letter of {queue.name} at sequence {sequence}, found none: {why}")
    return result
