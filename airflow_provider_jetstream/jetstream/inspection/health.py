"""A queue's health as numbers, for one request about its stream and one for each 256 of its consumers.

Looking changes nothing, reads no job, and has the server say nothing that it wouldn't say by itself: see
:mod:`~airflow_provider_jetstream.jetstream.client.advisory_probe` for what that leaves out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, covers
from airflow_provider_jetstream.jetstream.contract import reserved_subjects, schedule_filter
from airflow_provider_jetstream.jetstream.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# Subjects are compared with filters in Python; an event loop with other work gets its turn in between.
_SUBJECTS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """A consumer as numbers.

    :param name: its name
    :param created: when it was created, in the server's own text
    :param filters: the subjects it takes
    :param pending: jobs it has yet to deliver for the first time
    :param in_flight: jobs that it delivered and that haven't ended: workers have them, they wait to be delivered again,
        or they used up their deliveries and nobody has asked for a job since
    :param redelivered: how many of those in flight were delivered more than once
    :param pulls: requests of workers that wait for a job
    :param paused: whether it delivers nothing for now
    :param deliveries: how often it delivered a job, repeats included
    :param delivered: the highest stream sequence it has delivered
    :param ack_floor: every job up to here has ended
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

    def __str__(self) -> str:
        counts = [f"{self.pending} pending", f"{self.in_flight} in flight", *(["paused"] if self.paused else [])]
        return f"{self.name}: {', '.join(counts)}"


@dataclass(frozen=True, slots=True)
class QueueHealth:
    """A work queue as numbers.

    The stream's and each consumer's numbers are of slightly different moments, so sums are exact only while nothing
    moves.

    :param queue: its name
    :param created: when it was created, in the server's own text
    :param consumers: its consumers by name
    :param stored: messages in the stream: jobs, dead letters that used up their deliveries, schedules, markers
    :param oldest: when the first of them was stored
    :param last_sequence: the sequence of the last message ever stored
    :param seen_at: when this was so, by the server's clock
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
        return sum(each.pending for each in self.consumers.values())

    @property
    def in_flight(self) -> int:
        """Jobs that were delivered and haven't ended, of all consumers."""
        return sum(each.in_flight for each in self.consumers.values())

    @property
    def redelivered(self) -> int:
        """Jobs in flight that were delivered more than once, of all consumers."""
        return sum(each.redelivered for each in self.consumers.values())

    @property
    def left_over(self) -> int:
        """What is stored beside these: dead letters, jobs that no consumer takes, schedules, markers."""
        return max(0, self.stored - self.pending - self.in_flight)


@dataclass(frozen=True, slots=True)
class LeftOver:
    """What a queue holds beside the jobs that are pending or in flight.

    :param undeliverable: subjects that no consumer takes, with their number of jobs
    :param schedules: jobs for later
    :param dead: jobs that will never be delivered again; terminated ones aren't stored, so they aren't among them
    """

    undeliverable: Mapping[str, int]
    schedules: int
    dead: int


async def inspect_queue(connection: Connection, queue: str) -> QueueHealth:
    """Look at a queue.

    :param connection: the server
    :param queue: the work queue
    :return: its numbers
    :raises NotFoundError: the queue doesn't exist
    :raises UnreachableError: a consumer's numbers are missing, since its server is away
    """
    return await inspect_consumers(connection, await stream_info(connection, queue))


async def inspect_consumers(connection: Connection, info: Mapping[str, Any]) -> QueueHealth:
    """Look at the consumers of a queue whose stream was looked at just before.

    :param connection: the server
    :param info: what the server tells of the stream
    :return: the queue's numbers
    :raises NotFoundError: the queue doesn't exist any more
    :raises UnreachableError: a consumer's numbers are missing, since its server is away
    """
    queue, state = info["config"]["name"], info["state"]
    return QueueHealth(
        queue=queue,
        created=info["created"],
        consumers={each["name"]: _health(each) for each in await _consumers(connection, queue)},
        stored=state["messages"],
        oldest=datetime.fromisoformat(state["first_ts"]) if state["messages"] else None,
        last_sequence=state["last_seq"],
        taken_at=datetime.fromisoformat(info["ts"]),
    )


async def count_left_over(connection: Connection, health: QueueHealth) -> LeftOver:
    """Tell what :attr:`QueueHealth.left_over` consists of; costs a request for each 100,000 subjects, if there is any.

    :param connection: the server
    :param health: the queue's numbers of just now
    :return: counts, exact while nothing moves
    :raises ApiError: the server refused to tell
    """
    if not health.left_over:
        return LeftOver({}, 0, 0)
    filters = [each for consumer in health.consumers.values() for each in consumer.filters]
    reserved = [each.subjects for each in reserved_subjects(health.queue)]
    untaken: Counter[str] = Counter()
    schedules = markers = looked_at = 0
    async for subject, count in subject_counts(connection, health.queue, ">"):
        if covers(schedule_filter(health.queue), subject):
            schedules += count
        elif covered_by_any(reserved, subject):
            markers += count
        elif not covered_by_any(filters, subject):
            untaken[subject] = count
        looked_at += 1
        if looked_at % _SUBJECTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    dead = health.left_over - untaken.total() - schedules - markers
    return LeftOver(dict(untaken.most_common()), schedules, max(0, dead))


async def _consumers(connection: Connection, queue: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        answer = await connection.api(f"CONSUMER.LIST.{queue}", {"offset": len(found)})
        if missing := answer.get("missing"):
            raise UnreachableError(
                f"expected the numbers of every consumer of {queue}, found none of {', '.join(missing)}: their servers"
                " are away or elect a leader; try again"
            )
        page: list[dict[str, Any]] = answer.get("consumers") or []
        found += page
        if not page or len(found) >= answer.get("total", 0):
            return found


def _health(info: Mapping[str, Any]) -> ConsumerHealth:
    config = info["config"]
    return ConsumerHealth(
        name=info["name"],
        created=info["created"],
        filters=tuple(config.get("filter_subjects") or [config.get("filter_subject") or ">"]),
        pending=info["num_pending"],
        in_flight=info["num_ack_pending"],
        redelivered=info["num_redelivered"],
        pulls=info["num_waiting"],
        paused=bool(info.get("paused")),
        deliveries=info["delivered"]["consumer_seq"],
        delivered=info["delivered"]["stream_seq"],
        ack_floor=info["ack_floor"]["stream_seq"],
    )
