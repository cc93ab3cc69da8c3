"""Dead letters that nobody told of: found by comparing what is stored with what a consumer still has to do.

A stored job is waiting, in flight, or dead; so ``stored - num_pending - num_ack_pending`` counts the dead, whatever
became of their advisories. Which ones they are is certain only below the point that the consumer has left behind: up to
its last delivery where nothing is in flight, up to its ack floor otherwise.
"""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.connection import ReadPlan
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.dead_letters.entry import death_entries, valid_since
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.queue.snapshot import consumer_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.queue.snapshot import ConsumerState, QueueSnapshot

_Item = TypeVar("_Item")

# An acknowledged job leaves the stream a moment after the consumer's state has moved on.
_SECOND_LOOK = 0.25
_BYTES_AT_A_TIME = 16 << 20


@dataclass(slots=True)
class Reconciliation:
    """How a queue's dead letters add up.

    :param orphans: stream sequences of dead letters that nobody told of, in order
    :param uncertain: how many more there are whose sequences can't be told while jobs are in flight
    :param doubted: consumers that hold more of the jobs said to be dead than can be: a crash made them alive again
    """

    orphans: array[int] = field(default_factory=lambda: array("Q"))
    uncertain: int = 0
    inconsistent_consumers: set[str] = field(default_factory=set)


async def reconcile(
    connection: Connection, around: QueueSnapshot, index: EntryIndex, audit: AuditLog | None
) -> Reconciliation:
    """Compare what the dead letter queue says with what the consumers' numbers say.

    :param connection: the server
    :param around: how the queue is
    :param index: what the dead letter queue says
    :param audit: the audit, if it exists
    :return: what doesn't agree
    """
    reckoning = Reconciliation()
    # One that was too busy to be counted may have dead letters all the same.
    relevant = [each for each in around.consumers.values() if each.dead != 0 or each.in_flight]
    if not relevant:
        return reckoning
    known = await _count_known(connection, around, index, audit)
    orphans: list[int] = []
    for consumer in relevant:
        if consumer.dead is not None and consumer.dead <= known[consumer.name] and consumer.in_flight == 0:
            continue
        certain = await _find(connection, around, consumer, index)
        orphans += certain
        if consumer.dead is None:
            continue
        unknown = consumer.dead - known[consumer.name] - len(certain)
        if unknown < 0:
            reckoning.inconsistent_consumers.add(consumer.name)
        if unknown > 0:
            reckoning.uncertain += await _settle(connection, around, consumer, unknown)
    reckoning.orphans = array("Q", sorted(orphans))
    return reckoning


async def _settle(connection: Connection, around: QueueSnapshot, consumer: ConsumerState, unknown: int) -> int:
    """Count a second time, since a job that was just acknowledged looks dead until it is removed."""
    with suppress(NotFoundError):
        later = await consumer_state(connection, around.queue, consumer.name)
        if later.dead is not None:
            return max(0, min(unknown, unknown + later.dead - (consumer.dead or 0)))
    return unknown


async def _count_known(
    connection: Connection, around: QueueSnapshot, index: EntryIndex, audit: AuditLog | None
) -> Counter[str]:
    """Count the jobs that were dead when the consumers were counted, as far as the dead letter queue tells of them."""

    async def taker(job: tuple[int, tuple[Entry, ...]]) -> str | None:
        sequence, mentions = job
        message = await get_message(connection, around.queue, sequence)
        consumer = around.consumer_for(message.subject) if message else None
        if message is None or consumer is None or sequence > consumer.delivered:
            return None
        if sequence <= consumer.settled:
            return consumer.name
        done = await audit.last_record(sequence) if audit else None
        since = valid_since(message, consumer, done)
        return (
            consumer.name
            if any(since <= each.recorded_at <= consumer.taken_at for each in death_entries(mentions))
            else None
        )

    only = _only_taker(around)
    present = await stored_sequences(connection, around.queue) if only else None
    known: Counter[str] = Counter()
    jobs = index.jobs()
    if only and present and present.exact:
        # Whoever takes them all needn't be found by their subjects.
        known[only.name] = sum(each in present for each in index.sequences(only.settled))
        jobs = index.jobs(only.settled)
    for batch in _batches(jobs, _at_a_time(around)):
        async with connection.prefetch([ReadPlan(around.queue, [sequence for sequence, _ in batch])]):
            known.update(name for name in await map_concurrently(taker, batch) if name)
    return known


def _only_taker(around: QueueSnapshot) -> ConsumerState | None:
    """Give the consumer that takes whatever the queue holds, where one does."""
    if len(around.consumers) != 1 or around.unconsumed:
        return None
    (consumer,) = around.consumers.values()
    every = all(covered_by_any(consumer.filters, each) for each in around.config.get("subjects") or [])
    return consumer if every else None


def _at_a_time(around: QueueSnapshot) -> int:
    """Tell how many jobs may be held at once: fewer where they are large."""
    each = around.state["bytes"] / max(1, around.state["messages"])
    return max(1, min(MAX_CONCURRENT, int(_BYTES_AT_A_TIME / max(1.0, each))))


async def _find(connection: Connection, around: QueueSnapshot, consumer: ConsumerState, index: EntryIndex) -> list[int]:
    candidates: list[int] = []
    for subject in consumer.filters:
        candidates += [
            message.sequence
            async for message in read_range(connection, around.queue, subject, stop=consumer.settled)
            if message.sequence not in index
        ]
    if not candidates:
        return []
    await sleep(_SECOND_LOOK)

    async def still_stored(sequence: int) -> bool:
        return await get_message(connection, around.queue, sequence) is not None

    certain: list[int] = []
    for batch in _batches(candidates):
        stored = await map_concurrently(still_stored, batch)
        certain += [sequence for sequence, there in zip(batch, stored, strict=True) if there]
    return certain


def _batches(items: Iterable[_Item], size: int = 1_000) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
