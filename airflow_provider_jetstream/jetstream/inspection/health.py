"""A queue's health as numbers, by one request for its stream and one per 256 consumers.

Inspecting changes nothing, reads no job and sends no probe: advisories that are due stay unpublished, see
:mod:`~airflow_provider_jetstream.jetstream.client.advisory_probe`.

Jobs that match no consumer may be dead: those of consumers that are gone, or take other subjects. An advisory about
used-up deliveries that was stored after such a job proves its death, as for a scan.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.advisories import MaxDeliveries
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import (
    list_consumers,
    list_streams,
    stored_sequences,
    stream_info,
    subject_counts,
)
from airflow_provider_jetstream.jetstream.client.streams import get_message, read_range
from airflow_provider_jetstream.jetstream.client.subjects import subject_matcher
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, PARTITIONS
from airflow_provider_jetstream.jetstream.errors import NotFoundError, PermissionDeniedError
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.task_values import TaskReport
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection


# Few, since an overview is made every few seconds.
_MOST_ENTRIES: Final = 10_000
_MOST_JOBS: Final = 2_000
# With more subjects, programs that inspect again and again don't count what is left over. Measured with 200,000: 0.3 s
# of CPU here, and up to 2 s of a busy server.
MAX_SUBJECTS = 250_000
# Subjects are compared with filters in Python; other tasks of the event loop run in between.
_SUBJECTS_AT_ONCE = 2_000
_LONGEST_NUMBER = 9


async def count_absent_letters(
    connection: Connection, queue: str, consumers: Collection[str], undeliverable: Mapping[str, int]
) -> Counter[str]:
    """Return by subject how many of the jobs that match no consumer are dead letters.

    10,000 advisories are read, first those of absent consumers, and 2,000 jobs that they are about. Where the user may
    not read the dead letter queue or the jobs, none are found.

    :param consumers: the consumers that exist
    :param undeliverable: subjects that match no consumer, with their number of jobs
    :raises ApiError: the server refused
    """

    async def dead_on(sequence: int) -> str | None:
        message = await get_message(connection, queue, sequence)
        return message.subject if message and message.stored_at <= died_at[sequence] else None

    try:
        died_at = await _deaths(connection, queue, consumers)
        stored = await stored_sequences(connection, queue) if died_at else ()
        jobs = [sequence for sequence in sorted(died_at) if sequence in stored][:_MOST_JOBS]
        subjects = await map_concurrently(dead_on, jobs)
    except (NotFoundError, PermissionDeniedError):
        return Counter()
    return Counter(subject for subject in subjects if subject is not None and subject in undeliverable)


async def _deaths(connection: Connection, queue: str, consumers: Collection[str]) -> dict[int, datetime]:
    """Return by stream sequence when the last advisory about a job that used up its deliveries was stored."""
    prefix, died_at = f"{MAX_DELIVERIES}.{queue}.", dict[int, "datetime"]()
    for info in await list_streams(connection, f"{prefix}*"):
        name = info["config"]["name"]
        subjects = [subject async for subject, _ in subject_counts(connection, name, f"{prefix}*")]
        for subject in sorted(subjects, key=lambda subject: subject.removeprefix(prefix) in consumers):
            async for message in read_range(connection, name, subject):
                if len(died_at) == _MOST_ENTRIES:
                    return died_at
                event = event_of(message, queue, connection.domain)
                if isinstance(event, MaxDeliveries):
                    died_at[event.stream_seq] = message.stored_at
    return died_at


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """A consumer as numbers.

    :param name: its name
    :param created: when it was created, in the server's own text
    :param filters: its filter subjects
    :param pending: jobs it has yet to deliver for the first time
    :param in_flight: jobs that it delivered and that haven't ended: workers have them, they wait to be delivered again,
        or they used up their deliveries and no pull request has come since
    :param redelivered: how many of those in flight were delivered more than once
    :param pulls: open pull requests of workers
    :param paused: whether it is paused
    :param deliveries: how often it delivered a job, repeats included
    :param delivered: the highest stream sequence that it delivered
    :param ack_floor: the stream sequence up to which every delivery ended
    :param paused_until: until when it is paused
    :param max_in_flight: the limit of jobs in flight; ``None`` where there is none
    :param ack_wait: after so many seconds, a delivery counts as failed; the longest of its backoff
    :param partition: its number among the consumers that divide the queue's jobs, if it is one of them
    :param partitions: the number of these
    """

    name: str
    created: str
    filters: tuple[str, ...]
    pending: int
    in_flight: int
    redelivered: int
    pulls: int
    paused: bool
    deliveries: int
    delivered: int
    ack_floor: int
    paused_until: datetime | None = None
    max_in_flight: int | None = None
    ack_wait: float = 0.0
    partition: int | None = None
    partitions: int | None = None

    def __str__(self) -> str:
        counts = [f"{self.pending} pending", f"{self.in_flight} in flight", *(["paused"] if self.paused else [])]
        return f"{self.name}: {', '.join(counts)}"


@dataclass(frozen=True, slots=True)
class QueueHealth(TaskReport):
    """A work queue as numbers.

    The numbers of the stream and of each consumer are of slightly different moments, so sums are exact only while
    nothing moves.

    :param queue: its name
    :param created: when it was created, in the server's own text
    :param consumers: its consumers by name
    :param stored: messages in the stream: jobs, and dead letters that used up their deliveries
    :param oldest: when the first message was stored
    :param last_sequence: the sequence of the last message ever stored
    :param taken_at: when this was so, by the server's clock
    """

    queue: str
    created: str
    consumers: Mapping[str, ConsumerHealth]
    stored: int
    oldest: datetime | None
    last_sequence: int
    taken_at: datetime

    @property
    def pending(self) -> int:
        """Jobs that were never delivered, of all consumers."""
        return sum(consumer.pending for consumer in self.consumers.values())

    @property
    def in_flight(self) -> int:
        """Jobs that were delivered and haven't ended, of all consumers."""
        return sum(consumer.in_flight for consumer in self.consumers.values())

    @property
    def redelivered(self) -> int:
        """Jobs in flight that were delivered more than once, of all consumers."""
        return sum(consumer.redelivered for consumer in self.consumers.values())

    @property
    def left_over(self) -> int:
        """What else is stored: dead letters, and jobs that match no consumer."""
        return max(0, self.stored - self.pending - self.in_flight)


@dataclass(frozen=True, slots=True)
class LeftOver:
    """What is stored of a queue besides the jobs that are pending or in flight.

    :param undeliverable: subjects that match no consumer, with their number of jobs that aren't dead
    :param schedules: scheduled jobs, and due jobs that no mover has stored in the queue yet
    :param dead: jobs that will never be delivered again, those of absent consumers included; terminated jobs aren't
        stored and aren't counted
    """

    undeliverable: Mapping[str, int]
    schedules: int
    dead: int

    @property
    def warning(self) -> str:
        """A sentence about jobs that match no consumer; empty where there are none."""
        if not self.undeliverable:
            return ""
        subject, count = next(iter(self.undeliverable.items()))
        return (
            f"{sum(self.undeliverable.values()):,} jobs match no consumer and stay for ever, such as {count:,} on"
            f" {subject}: add a consumer, or correct the publisher; those among them that used up the deliveries of a"
            " consumer which is gone, and have no entry, would run again"
        )


async def inspect_queue(connection: Connection, queue: str) -> QueueHealth:
    """Read a queue's numbers.

    :raises NotFoundError: the queue doesn't exist
    :raises UnreachableError: the server of a consumer is away or elects a leader
    """
    return await inspect_consumers(connection, await stream_info(connection, queue))


async def inspect_consumers(connection: Connection, info: Mapping[str, Any]) -> QueueHealth:
    """Read the numbers of a queue whose stream was just read.

    :param info: the server's STREAM.INFO
    :raises NotFoundError: the queue doesn't exist any more
    :raises UnreachableError: the server of a consumer is away or elects a leader
    """
    queue, state = info["config"]["name"], info["state"]
    return QueueHealth(
        queue=queue,
        created=info["created"],
        consumers={name: _health(consumer) for name, consumer in (await list_consumers(connection, queue)).items()},
        stored=state["messages"],
        oldest=datetime.fromisoformat(state["first_ts"]) if state["messages"] else None,
        last_sequence=state["last_seq"],
        taken_at=datetime.fromisoformat(info["ts"]),
    )


async def count_left_over(connection: Connection, health: QueueHealth, schedules: str | None = None) -> LeftOver:
    """Count what :attr:`QueueHealth.left_over` consists of, by a request per 100,000 subjects if it isn't 0.

    Jobs that match no consumer are checked for dead letters.

    :param health: the queue's numbers, just read; the counts are exact while nothing moves
    :param schedules: the stream of its schedules, whose messages are counted too
    :raises ApiError: the server refused
    """
    scheduled = await _count_scheduled(connection, schedules) if schedules else 0
    if not health.left_over:
        return LeftOver({}, scheduled, 0)
    is_consumed = subject_matcher(filter_ for consumer in health.consumers.values() for filter_ in consumer.filters)
    undeliverable: Counter[str] = Counter()
    compared = 0
    async for subject, count in subject_counts(connection, health.queue, ">"):
        if not is_consumed(subject):
            undeliverable[subject] = count
        compared += 1
        if compared % _SUBJECTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    if undeliverable:
        undeliverable -= await count_absent_letters(connection, health.queue, health.consumers, undeliverable)
    dead = health.left_over - undeliverable.total()
    return LeftOver(dict(undeliverable.most_common()), scheduled, max(0, dead))


async def _count_scheduled(connection: Connection, stream: str) -> int:
    try:
        return int((await stream_info(connection, stream))["state"]["messages"])
    except NotFoundError:
        return 0


def _health(info: Mapping[str, Any]) -> ConsumerHealth:
    config = info["config"]
    partitions, partition = (config.get("metadata") or {}).get(PARTITIONS, ""), info["name"].rpartition("-")[2]
    if not (_is_number(partitions) and _is_number(partition)):
        partitions = ""
    return ConsumerHealth(
        name=info["name"],
        created=info["created"],
        filters=filter_subjects(config),
        pending=info["num_pending"],
        in_flight=info["num_ack_pending"],
        redelivered=info["num_redelivered"],
        pulls=info["num_waiting"],
        paused=bool(info.get("paused")),
        deliveries=info["delivered"]["consumer_seq"],
        delivered=info["delivered"]["stream_seq"],
        ack_floor=info["ack_floor"]["stream_seq"],
        paused_until=datetime.fromisoformat(until) if (until := config.get("pause_until")) else None,
        max_in_flight=most if (most := config.get("max_ack_pending", -1)) > 0 else None,
        ack_wait=max([config.get("ack_wait", 0), *(config.get("backoff") or [])]) / NANOSECONDS,
        partition=int(partition) if partitions else None,
        partitions=int(partitions) if partitions else None,
    )


def _is_number(text: object) -> bool:
    # Anybody may write a consumer's metadata.
    return isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER
