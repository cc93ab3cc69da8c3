"""Finding dead letters: read what the dead letter queue holds, and prove each entry before anyone acts on it.

An advisory is a hint, not the truth. The job may have been finished by a slow worker since, its stream or consumer may
have been recreated with the same sequences, or the server may have repeated itself. Only an entry about the very
message that is stored now is a dead letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import MaxDeliveries, Terminated, parse_advisory
from airflow_provider_jetstream.jetstream.completions import DELETED_IN_FLIGHT
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.names import JOB_ID, REDRIVE_COUNT, death_filter
from airflow_provider_jetstream.jetstream.pump import pump_all
from airflow_provider_jetstream.jetstream.stored import (
    StoredMessage,
    consumer_info,
    get_message,
    next_message,
    stream_info,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import DeadLetterQueue, WorkQueue


class Verdict(StrEnum):
    """What an entry of the dead letter queue turned out to be."""

    DEAD = "dead"
    GONE = "gone"
    """The job is no longer stored: finished late, redriven before, terminated or deleted."""
    STALE = "stale"
    """Stream, consumer or message is younger than the advisory: it was about another message."""
    ALIVE = "alive"
    """The consumer is about to deliver it again: it was reset, or its server crashed and forgot the death."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the dead letter queue says about one job, repeats collapsed.

    :param stream: the job's stream
    :param sequence: the job's stream sequence
    :param consumer: who delivered it
    :param deliveries: how often
    :param died_at: the advisory's time
    :param reason: the worker's reason where it terminated the job
    :param entry_sequences: where the dead letter queue holds this
    """

    stream: str
    sequence: int
    consumer: str
    deliveries: int
    died_at: datetime
    reason: str | None
    entry_sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that is dead beyond doubt, with everything needed to bring it back.

    :param entry: what the dead letter queue says
    :param stream_created: the server's text of when the job's stream was created; part of its identity
    :param message: the job as it is stored
    :param ready_at: from when on no worker can be presumed to be still at it
    """

    entry: Entry
    stream_created: str
    message: StoredMessage
    ready_at: datetime

    @property
    def job_id(self) -> str:
        """The job's own id, or its sequence where it has none."""
        return self.message.header(JOB_ID) or str(self.entry.sequence)

    @property
    def redrives(self) -> int:
        """How often it was redriven before."""
        count = self.message.header(REDRIVE_COUNT) or "0"
        return int(count) if count.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at the dead letter queue found.

    :param letters: dead letters, oldest death first
    :param dismissed: the other entries, and what they are
    """

    letters: tuple[DeadLetter, ...]
    dismissed: tuple[tuple[Entry, Verdict], ...]


async def find_dead_letters(connection: Connection, queue: WorkQueue) -> Findings:
    """Have the server tell of every death that it knows, read the dead letter queue, and prove every entry.

    :param connection: the server
    :param queue: the work queue
    :return: dead letters, and what the other entries are
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    letters: list[DeadLetter] = []
    dismissed: list[tuple[Entry, Verdict]] = []
    require_dead_letters(queue)
    stream_created = (await stream_info(connection, queue.name))["created"]
    await pump_all(connection, queue.name)
    consumers: dict[str, _ConsumerFacts | None] = {}
    for entry in await read_entries(connection, queue):
        if entry.consumer not in consumers:
            consumers[entry.consumer] = await _consumer_facts(connection, queue.name, entry.consumer)
        found = await _prove(connection, entry, stream_created, consumers[entry.consumer])
        if isinstance(found, DeadLetter):
            letters.append(found)
        else:
            dismissed.append((entry, found))
    return Findings(tuple(letters), tuple(dismissed))


async def read_entries(connection: Connection, queue: WorkQueue) -> list[Entry]:
    """Read what the dead letter queue says, in the order of the deaths.

    :param connection: the server
    :param queue: the work queue
    :return: one entry per job and consumer
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the dead letter queue doesn't exist
    """
    entries: dict[tuple[str, int], Entry] = {}
    async for message in _advisories(connection, require_dead_letters(queue).name, queue.name):
        advisory = parse_advisory(message.data)
        if not isinstance(advisory, MaxDeliveries | Terminated) or advisory.stream != queue.name:
            continue
        reason = advisory.reason if isinstance(advisory, Terminated) else None
        if reason == DELETED_IN_FLIGHT:
            continue
        key = (advisory.consumer, advisory.stream_seq)
        earlier = entries.pop(key, None)
        entries[key] = Entry(
            stream=advisory.stream,
            sequence=advisory.stream_seq,
            consumer=advisory.consumer,
            deliveries=advisory.deliveries,
            died_at=advisory.timestamp,
            reason=reason,
            entry_sequences=(*(earlier.entry_sequences if earlier else ()), message.sequence),
        )
    return list(entries.values())


def require_dead_letters(queue: WorkQueue) -> DeadLetterQueue:
    """Give a queue's dead letter queue.

    :param queue: the work queue
    :return: its dead letter queue
    :raises QueueDeclarationError: if it declares none
    """
    if queue.dead_letters is None:
        raise QueueDeclarationError(
            queue.name, ["expected dead_letters, so that there is something to look at: declare a dead letter queue"]
        )
    return queue.dead_letters


async def _advisories(connection: Connection, stream: str, queue: str) -> AsyncIterator[StoredMessage]:
    start = 1
    while (message := await next_message(connection, stream, start, death_filter(queue))) is not None:
        yield message
        start = message.sequence + 1


@dataclass(frozen=True, slots=True)
class _ConsumerFacts:
    created: datetime
    patience: timedelta
    delivered: int


async def will_deliver(connection: Connection, stream: str, consumer: str, sequence: int) -> bool:
    """Tell whether a consumer has yet to deliver a job for the first time, as far as it knows.

    :param connection: the server
    :param stream: the job's stream
    :param consumer: the consumer
    :param sequence: the job's stream sequence
    :return: whether it has
    :raises NotFoundError: the stream or the consumer doesn't exist
    """
    info = await consumer_info(connection, stream, consumer)
    return sequence > int(info["delivered"]["stream_seq"])


async def _consumer_facts(connection: Connection, stream: str, consumer: str) -> _ConsumerFacts | None:
    try:
        info = await consumer_info(connection, stream, consumer)
    except NotFoundError:
        return None
    config = info["config"]
    patience = max([config.get("ack_wait", 0), *(config.get("backoff") or [])])
    return _ConsumerFacts(
        created=datetime.fromisoformat(info["created"]),
        patience=timedelta(microseconds=patience / 1_000),
        delivered=info["delivered"]["stream_seq"],
    )


async def _prove(
    connection: Connection, entry: Entry, stream_created: str, consumer: _ConsumerFacts | None
) -> DeadLetter | Verdict:
    if datetime.fromisoformat(stream_created) > entry.died_at or consumer is None:
        return Verdict.STALE
    # A recreated consumer delivers every stored job again, so a death under its predecessor no longer counts.
    if consumer.created > entry.died_at:
        return Verdict.STALE
    message = await get_message(connection, entry.stream, entry.sequence)
    if message is None:
        return Verdict.GONE
    if message.stored_at > entry.died_at:
        return Verdict.STALE
    if entry.sequence > consumer.delivered:
        return Verdict.ALIVE
    return DeadLetter(entry, stream_created, message, entry.died_at + consumer.patience)
