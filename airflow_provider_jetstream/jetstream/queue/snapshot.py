"""What a scan knows about a queue before it looks at single letters: its stream, its consumers, and how they add up."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.stream_api import (
    consumer_info,
    consumer_names,
    stream_info,
    subject_counts,
)
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, covers
from airflow_provider_jetstream.jetstream.contract import marker_filter, reserved_subjects
from airflow_provider_jetstream.jetstream.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

_TALLIES = 5
_TALLY_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer, as it was when a scan looked.

    :param name: its name
    :param created: when it was created
    :param filters: the subjects it takes
    :param patience: how long the server waits for a worker at most
    :param delivered: the highest stream sequence it has delivered
    :param ack_floor: every job up to here has ended
    :param pending: jobs it has yet to deliver for the first time
    :param in_flight: jobs that workers have
    :param stored: how many jobs it takes are stored
    :param dead: how many stored jobs it will never deliver again; ``None`` where it was too busy to tell
    :param quiet_since: when it last delivered a job, or the time of the look where the server doesn't know
    :param seen_at: the time of the look, by the server's clock as all the others
    """

    name: str
    created: datetime
    filters: tuple[str, ...]
    max_ack_wait: timedelta
    delivered: int
    ack_floor: int
    pending: int
    in_flight: int
    stored: int
    dead: int | None
    last_active: datetime
    taken_at: datetime

    @property
    def settled(self) -> int:
        """The highest sequence up to which every stored job of the consumer is dead."""
        return settled_sequence(self.delivered, self.ack_floor, self.in_flight)


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A work queue, as it was when a scan looked.

    :param queue: its name
    :param created: when it was created, in the server's own text
    :param config: its configuration, as the server gives it
    :param state: its state, as the server gives it
    :param consumers: its consumers by name
    :param seen_at: the time of the look, by the server's clock
    :param untaken: subjects that no consumer takes, with their number of jobs
    """

    queue: str
    created: str
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    consumers: Mapping[str, ConsumerState]
    taken_at: datetime
    unconsumed: Mapping[str, int] = field(default_factory=dict)

    @property
    def created_at(self) -> datetime:
        """When it was created."""
        return datetime.fromisoformat(self.created)

    @property
    def max_age(self) -> timedelta:
        """How old a job may become; zero where there is no limit."""
        return timedelta(microseconds=max(0, self.config.get("max_age", 0)) / 1_000)

    @property
    def captures_markers(self) -> bool:
        """Whether redrives leave markers in the queue."""
        return covered_by_any(self.config.get("subjects") or [], marker_filter(self.queue))

    def consumer_for(self, subject: str) -> ConsumerState | None:
        """Find who takes jobs of a subject.

        :param subject: the subject
        :return: the consumer, if there is one
        """
        # Asked of every letter, so without a generator within another.
        for each in self.consumers.values():
            for filter_ in each.filters:
                if covers(filter_, subject):
                    return each
        return None


def settled_sequence(delivered: int, ack_floor: int, in_flight: int) -> int:
    """Return the sequence up to which a consumer delivers nothing any more, as CONSUMER.INFO's numbers show it.

    A job that is stored at or below this sequence is dead: the consumer has passed the job, and no delivery of it is
    open. While jobs are in flight only the ack floor proves that.

    :param delivered: the highest stream sequence delivered
    :param ack_floor: the stream sequence up to which every delivery ended
    :param in_flight: the number of open deliveries (``num_ack_pending``)
    """
    return ack_floor if in_flight else delivered


async def take_snapshot(connection: Connection, queue: str) -> QueueSnapshot:
    """Look at a queue's stream and consumers; pump them first.

    :param connection: the server
    :param queue: the work queue
    :return: how things are
    :raises NotFoundError: the queue doesn't exist
    """
    consumers: dict[str, ConsumerState] = {}
    for name in await consumer_names(connection, queue):
        # One that is deleted meanwhile has no more deaths to tell.
        with suppress(NotFoundError):
            await probe_consumer(connection, queue, name)
            consumers[name] = await consumer_state(connection, queue, name)
    info = await stream_info(connection, queue)
    state, config = info["state"], info["config"]
    untaken: dict[str, int] = {}
    taken = [each for consumer in consumers.values() for each in consumer.filters]
    taken += [each.subjects for each in reserved_subjects(queue)]
    missed = [subject for subject in config.get("subjects") or [] if not covered_by_any(taken, subject)]
    # More jobs than consumers have: some are on subjects that the stream had once.
    if missed or state["messages"] > sum(each.stored for each in consumers.values()):
        untaken = {
            subject: count
            async for subject, count in subject_counts(connection, queue, ">")
            if not covered_by_any(taken, subject)
        }
    seen_at = datetime.fromisoformat(info["ts"])
    return QueueSnapshot(queue, info["created"], config, state, consumers, seen_at, untaken)


async def consumer_state(connection: Connection, queue: str, name: str) -> ConsumerState:
    """Look at one consumer, and count its dead.

    :param connection: the server
    :param queue: the work queue
    :param name: the consumer's name
    :return: how it is
    :raises NotFoundError: the queue or the consumer doesn't exist
    """
    info, stored, dead = await consumer_info(connection, queue, name), 0, None
    for _ in range(_TALLIES):
        stored = 0
        for subject in _filters(info["config"]):
            stored += sum([count async for _, count in subject_counts(connection, queue, subject)])
        later = await consumer_info(connection, queue, name)
        if _position(info) == _position(later):
            # Nothing moved while we counted, so the numbers belong together.
            dead = stored - later["num_pending"] - later["num_ack_pending"]
            break
        info = later
        await sleep(_TALLY_PAUSE)
    return _state(info, stored, dead)


async def refresh_snapshot(connection: Connection, snapshot: QueueSnapshot) -> QueueSnapshot | None:
    """Look at a queue's consumers once more, without counting what they hold.

    :param connection: the server
    :param around: how things were
    :return: how they are; ``None`` where the stream or a consumer isn't the one that it was, so that only a new look at
        the whole queue can tell
    """
    try:
        info = await stream_info(connection, snapshot.queue)
        consumers = {
            name: _state(await consumer_info(connection, snapshot.queue, name), before.stored, before.dead)
            for name, before in snapshot.consumers.items()
        }
    except NotFoundError:
        return None
    moved_back = any(
        state.created != snapshot.consumers[name].created
        or state.filters != snapshot.consumers[name].filters
        or state.delivered < snapshot.consumers[name].delivered
        for name, state in consumers.items()
    )
    if moved_back or info["created"] != snapshot.created or info["state"]["consumer_count"] != len(consumers):
        return None
    seen_at = datetime.fromisoformat(info["ts"])
    return replace(snapshot, config=info["config"], state=info["state"], consumers=consumers, seen_at=seen_at)


def _state(info: Mapping[str, Any], stored: int, dead: int | None) -> ConsumerState:
    config, seen_at = info["config"], datetime.fromisoformat(info["ts"])
    active = info["delivered"].get("last_active")
    patience = max([config.get("ack_wait", 0), *(config.get("backoff") or [])])
    return ConsumerState(
        name=info["name"],
        created=datetime.fromisoformat(info["created"]),
        filters=tuple(_filters(config)),
        max_ack_wait=timedelta(microseconds=patience / 1_000),
        delivered=info["delivered"]["stream_seq"],
        ack_floor=info["ack_floor"]["stream_seq"],
        pending=info["num_pending"],
        in_flight=info["num_ack_pending"],
        stored=stored,
        dead=dead,
        last_active=datetime.fromisoformat(active) if active else seen_at,
        taken_at=seen_at,
    )


def _position(info: Mapping[str, Any]) -> tuple[Any, ...]:
    last_ack = info["ack_floor"].get("last_active")
    return (info["delivered"], info["ack_floor"], last_ack, info["num_pending"], info["num_ack_pending"])


def _filters(config: Mapping[str, Any]) -> Iterator[str]:
    if several := config.get("filter_subjects"):
        yield from several
    else:
        yield config.get("filter_subject") or ">"
