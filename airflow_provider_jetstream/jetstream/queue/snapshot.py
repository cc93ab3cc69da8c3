"""A queue's stream, companions and consumers as of one moment, read once and passed on to everything that needs them.

The numbers of stream and consumers are consistent: the stored jobs of a consumer are counted between two reads of the
consumer that agree, so nothing moved meanwhile.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumers
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, list_streams, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, covers
from airflow_provider_jetstream.jetstream.contract import companion_filter
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState, consumer_state, filter_subjects
from airflow_provider_jetstream.jetstream.queue.filter_marks import may_have_had
from airflow_provider_jetstream.jetstream.queue.paused_count import take_paused_count
from airflow_provider_jetstream.jetstream.queue.server_uptime import server_up_since, watch_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.stream_api import ListedConsumers
    from airflow_provider_jetstream.jetstream.queue.paused_count import PausedCount
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_MAX_COUNTS = 5
_COUNT_PAUSE = 0.05
# Filters are compared in Python; other tasks of the event loop run in between.
_SUBJECTS_AT_ONCE = 500


@dataclass(frozen=True)
class QueueSnapshot:
    """A work queue as of one moment.

    :param queue: its name
    :param created: when its stream was created, in the server's own text
    :param config: the stream's configuration, as the server returns it
    :param state: the stream's state, as the server returns it
    :param consumers: its consumers by name
    :param taken_at: when this was so, by the server's clock
    :param unconsumed: subjects that match no consumer's filter, with their number of jobs
    :param companions: by name the server's STREAM.INFO of each declared companion that exists
    :param audit: the audit's stream, if it exists
    :param paused_count: what a count under a pause has proved, where one was made
    :param reported: the server's whole STREAM.INFO
    """

    queue: str
    created: str
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    consumers: Mapping[str, ConsumerState]
    taken_at: datetime
    unconsumed: Mapping[str, int] = field(default_factory=dict)
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    audit: str | None = None
    paused_count: PausedCount | None = None
    reported: Mapping[str, Any] = field(default_factory=dict)

    @property
    def info(self) -> Mapping[str, Any]:
        """The stream's STREAM.INFO, as far as it is known."""
        return {"created": self.created, **self.reported, "config": self.config, "state": self.state}

    # Read for every dead letter.
    @cached_property
    def created_at(self) -> datetime:
        """When the stream was created."""
        return datetime.fromisoformat(self.created)

    @property
    def max_age(self) -> timedelta:
        """The age at which the stream deletes a job; zero where there is no limit."""
        return timedelta(microseconds=max(0, self.config.get("max_age", 0)) / 1_000)

    @property
    def held_above(self) -> int | None:
        """The sequence above which jobs that are done may be stored still, if there is one."""
        floors = (consumer.held_above for consumer in self.consumers.values())
        return min((floor for floor in floors if floor is not None), default=None)

    @property
    def empty_companions(self) -> frozenset[str]:
        """The names of the companions that stored no message."""
        return frozenset(name for name, info in self.companions.items() if not info["state"]["messages"])

    def may_have_had(
        self, consumer: str | None, sequence: int, subject: str, stored_at: datetime | None = None
    ) -> bool:
        """Return whether a consumer may have delivered a job; true where that can't be known.

        :param sequence: the job's stream sequence
        :param subject: the job's
        :param stored_at: when the job was stored, by the server's word
        """
        return may_have_had(self.config, self.consumers, consumer or "", sequence, subject, stored_at)

    def consumer_for(self, subject: str) -> ConsumerState | None:
        """Return the consumer whose filters match a subject, if there is one."""
        # Called for every dead letter: loops are faster here than nested generators.
        for consumer in self.consumers.values():
            for filter_ in consumer.filters:
                if covers(filter_, subject):
                    return consumer
        return None


async def take_snapshot(connection: Connection, queue: WorkQueue, *, count_under_pause: bool = False) -> QueueSnapshot:
    """Read a queue's stream, companions and consumers, after the server has published every advisory that is due.

    :param count_under_pause: pause consumers with open deliveries until they have none, so that numbers prove more
    :raises NotFoundError: the work queue doesn't exist
    :raises ServerTooOldError: a count under a pause needs a newer server
    """
    probed = await probe_consumers(connection, queue.name)
    taken = None
    if count_under_pause:
        taken = await take_paused_count(connection, queue.name, probed)
        probed = await probe_consumers(connection, queue.name)
    consumers, counts = await _count_between_reads(connection, queue.name, probed)
    # Read after the consumers: an advisory of each death that their numbers include is in the dead letter queue then.
    companions = await read_companions(connection, queue)
    info = counts.info
    audit = companions.get(queue.audit.name) if queue.audit else None
    if audit is not None:
        # Even if nothing is in flight: deaths from now on are believed by later scans.
        await watch_server(connection, audit)
        consumers = await _with_uptime(connection, consumers, audit, needed=taken is not None)
    return QueueSnapshot(
        queue=queue.name,
        created=info["created"],
        config=info["config"],
        state=info["state"],
        consumers={name: _with_settlement(consumer, taken) for name, consumer in consumers.items()},
        taken_at=datetime.fromisoformat(info["ts"]),
        unconsumed=counts.unconsumed,
        companions=companions,
        audit=audit["config"]["name"] if audit else None,
        paused_count=taken,
        reported=info,
    )


async def _with_uptime(
    connection: Connection, consumers: dict[str, ConsumerState], audit: Mapping[str, Any], *, needed: bool = False
) -> dict[str, ConsumerState]:
    """Add to the consumers since when the server has been up, where it matters: where deliveries are open."""
    alone = [consumer for consumer in consumers.values() if not consumer.clustered]
    if not alone or not (needed or any(consumer.in_flight for consumer in alone)):
        return consumers
    up_since = await server_up_since(connection, audit)
    return consumers | {consumer.name: replace(consumer, up_since=up_since) for consumer in alone}


def _with_settlement(consumer: ConsumerState, paused_count: PausedCount | None) -> ConsumerState:
    if paused_count is None or paused_count.created.get(consumer.name) != consumer.created:
        return consumer
    settlement = paused_count.settlements[consumer.name]
    # One that was reset since delivers jobs again.
    return replace(consumer, settlement=settlement) if consumer.delivered >= settlement.sequence else consumer


async def count_consumers(connection: Connection, queue: str) -> dict[str, ConsumerState]:
    """Read a queue's consumers and count the stored jobs of each.

    :raises NotFoundError: the queue doesn't exist
    """
    consumers, _ = await _count_between_reads(connection, queue, await list_consumers(connection, queue))
    return consumers


async def read_companions(connection: Connection, queue: WorkQueue) -> dict[str, Mapping[str, Any]]:
    """Read the STREAM.INFO of a queue's companions by name; a companion that doesn't exist is left out.

    One STREAM.LIST returns all companions that capture subjects of the contract. A dead letter queue that was made by
    hand may capture the server's advisories only: such a companion is read by a request of its own. Attempts are left
    out: nothing is decided by them.
    """
    names = tuple(stream.name for stream in queue.companions() if stream is not queue.attempts)
    listed: dict[str, Mapping[str, Any]] = {}
    if len(names) > 1:
        streams = await list_streams(connection, companion_filter(queue.name))
        listed = {info["config"]["name"]: info for info in streams}
    companions = {name: listed[name] for name in names if name in listed}

    async def read(name: str) -> None:
        with suppress(NotFoundError):
            companions[name] = await stream_info(connection, name)

    await map_concurrently(read, [name for name in names if name not in companions])
    return companions


async def refresh_snapshot(connection: Connection, snapshot: QueueSnapshot) -> QueueSnapshot | None:
    """Read a queue's consumers once more, without counting their jobs and without reading stream and companions.

    :return: the snapshot with the consumers' new states; ``None`` where stream or consumers aren't the same ones as
        before or have moved back, so that only a new snapshot is valid
    """
    try:
        infos = await list_consumers(connection, snapshot.queue)
        # A recreated stream shows in its consumers, which are new ones, if it has any.
        if not infos and (await stream_info(connection, snapshot.queue))["created"] != snapshot.created:
            return None
    except NotFoundError:
        return None
    if infos.keys() != snapshot.consumers.keys():
        return None
    consumers: dict[str, ConsumerState] = {}
    for name, before in snapshot.consumers.items():
        after = consumer_state(infos[name], before.stored, before.dead, infos.held_above)
        same = after.created == before.created and after.filters == before.filters
        if not same or moved_back(before, after):
            return None
        consumers[name] = after
    if snapshot.audit:
        needed = any(consumer.up_since for consumer in snapshot.consumers.values())
        audit = snapshot.companions[snapshot.audit]
        consumers = await _with_uptime(connection, consumers, audit, needed=needed)
    for name, before in snapshot.consumers.items():
        # A server that restarted, or another one, may have forgotten deaths that a count under a pause proved.
        after = consumers[name]
        if before.settlement and after.up_since == before.up_since and (after.up_since or not after.clustered):
            consumers[name] = replace(after, settlement=before.settlement)
    taken_at = max((consumer.taken_at for consumer in consumers.values()), default=snapshot.taken_at)
    return replace(snapshot, consumers=consumers, taken_at=taken_at)


def moved_back(before: ConsumerState, after: ConsumerState) -> bool:
    """Return whether a consumer was reset, or has lost state in a crash, also if it has delivered as far again."""
    pairs = (
        (before.delivered, after.delivered),
        (before.deliveries, after.deliveries),
        (before.ack_floor, after.ack_floor),
    )
    return any(later < earlier for earlier, later in pairs)


@dataclass(slots=True)
class _JobCounts:
    """A stream's answer to STREAM.INFO, and how many of its stored jobs match which consumer's filters."""

    info: Mapping[str, Any]
    stored: Counter[str]
    unconsumed: dict[str, int]


async def _count_between_reads(
    connection: Connection, queue: str, before: ListedConsumers
) -> tuple[dict[str, ConsumerState], _JobCounts]:
    """Count each consumer's stored jobs between two reads of the consumer that agree."""
    states: dict[str, ConsumerState] = {}
    calmest = dict(before)
    for attempt in range(_MAX_COUNTS):
        if attempt:
            await sleep(_COUNT_PAUSE)
        counts = await _count_jobs(connection, queue, before)
        after = await list_consumers(connection, queue)
        # A consumer that is deleted meanwhile has no more dead letters to report.
        states = {name: state for name, state in states.items() if name in after}
        for name in after.keys() - states.keys():
            if name in before and _position(before[name]) == _position(after[name]):
                info, stored = after[name], counts.stored[name]
                # Nothing moved while the jobs were counted, so the numbers belong together.
                dead = stored - info["num_pending"] - info["num_ack_pending"]
                # A job that is done may have left only after the jobs were counted.
                floors = [held for held in (before.held_above, after.held_above) if held is not None]
                states[name] = consumer_state(info, stored, dead, min(floors, default=None))
        calmest |= {
            name: info for name, info in after.items() if name not in calmest or not _is_calmer(calmest[name], info)
        }
        before = after
        if len(states) == len(after):
            break
    for name in before.keys() - states.keys():
        # The fewer deliveries are open, the more its numbers prove.
        states[name] = consumer_state(calmest[name], counts.stored[name], None, before.held_above)
    return {name: states[name] for name in before}, counts


async def _count_jobs(connection: Connection, queue: str, consumers: Mapping[str, Mapping[str, Any]]) -> _JobCounts:
    filters = {name: filter_subjects(info["config"]) for name, info in consumers.items()}
    counts: _JobCounts | None = None
    seen = 0
    async for info, subjects in _subject_pages(connection, queue):
        counts = counts or _JobCounts(info, Counter(), {})
        for subject, count in subjects.items():
            names = [name for name, patterns in filters.items() if covered_by_any(patterns, subject)]
            for name in names:
                counts.stored[name] += count
            if not names:
                counts.unconsumed[subject] = count
            seen += 1
            if seen % _SUBJECTS_AT_ONCE == 0:
                await sleep(0)
    if counts is None:
        raise AssertionError("expected at least one page of subjects")
    return counts


async def _subject_pages(
    connection: Connection, queue: str
) -> AsyncGenerator[tuple[Mapping[str, Any], Mapping[str, int]], None]:
    """Read all subjects of a stream with their numbers of messages, one STREAM.INFO per page."""
    offset = 0
    while True:
        info = await connection.api(f"STREAM.INFO.{queue}", {"subjects_filter": ">", "offset": offset})
        # Taken out: a state with all subjects is too large to be passed on.
        subjects: dict[str, int] = info["state"].pop("subjects", None) or {}
        yield info, subjects
        offset += len(subjects)
        if not subjects or offset >= info.get("total", 0):
            return


def _is_calmer(info: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Return whether a consumer had fewer deliveries open than later, and was the same one."""
    same = info["created"] == later["created"] and info["delivered"]["stream_seq"] <= later["delivered"]["stream_seq"]
    return same and bool(info["num_ack_pending"] < later["num_ack_pending"])


def _position(info: Mapping[str, Any]) -> tuple[Any, ...]:
    last_ack = info["ack_floor"].get("last_active")
    return (
        info["created"],
        info["delivered"],
        info["ack_floor"],
        last_ack,
        info["num_pending"],
        info["num_ack_pending"],
    )
