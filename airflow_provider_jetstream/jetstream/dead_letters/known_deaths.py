"""What looks know of a queue's dead jobs, as its consumers' numbers count them, and the deaths that they miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import REMOVAL_DELAY, KnownDeaths
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.letter_table import LetterTable
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


def known_deaths(
    table: LetterTable, open_jobs: Collection[NotDead], settled_before: Mapping[str, int], snapshot: QueueSnapshot
) -> KnownDeaths:
    """Count by consumer the jobs of which it is known that they are, or may be, dead.

    :param open_jobs: stored jobs with entries that are no dead letters
    :param settled_before: by consumer, up to which sequence its jobs were looked at
    """
    known = KnownDeaths()
    for name, consumer in snapshot.consumers.items():
        settled = max(consumer.settled, settled_before[name])
        of_consumer = [job for job in open_jobs if job.consumer == name]
        known.jobs[name] = table.count_taken(name) + sum(job.sequence <= settled for job in of_consumer)
        known.above_settled[name] = table.count_taken(name, above=consumer.settled)
        if consumer.up_since:
            known.disbelieved[name] = sum(job.status == Status.UNCERTAIN for job in of_consumer)
    return known


async def new_orphans(
    connection: Connection,
    snapshot: QueueSnapshot,
    known: KnownDeaths,
    settled_before: Mapping[str, int],
    index: EntryIndex,
) -> set[int]:
    """Return the jobs without an entry that have died since the last look, as the consumers' numbers prove.

    Where a consumer has as many dead jobs as are known, none is looked for.
    """
    orphans: set[int] = set()
    for name, consumer in snapshot.consumers.items():
        start, stop = settled_before[name] + 1, consumer.settled
        if start > stop or consumer.dead == known.jobs[name]:
            continue
        for subject in consumer.filters:
            async for message in read_range(connection, snapshot.queue, subject, start, stop):
                if message.sequence not in index:
                    orphans.add(message.sequence)
    if orphans:
        await sleep(REMOVAL_DELAY)
    return orphans
