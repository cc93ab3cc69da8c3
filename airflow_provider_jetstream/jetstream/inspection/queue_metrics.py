"""Queues and their redrives as metrics: names, labels and values, for whatever collects them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState, list_redrives
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.dead_letters.account import last_account
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues
from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueState, QueueWatch
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.account import JobAccount
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_REDRIVES = 20
# Configurations of streams are read again after so many samples: an audit may have been added.
_DISCOVERED_FOR = 20


class Metric(NamedTuple):
    """The kind, the text and the labels of a metric.

    :param labels: the names of its labels
    """

    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...]


class Sample(NamedTuple):
    """A value of a metric."""

    metric: str
    labels: tuple[str, ...]
    value: float


_QUEUE: Final = ("queue",)
_CONSUMER: Final = ("queue", "consumer")

# A counter's name has no _total here; Prometheus adds it.
METRICS: Final[Mapping[str, Metric]] = {
    "jetstream_queue_messages": Metric("gauge", "Messages that the work queue stores", _QUEUE),
    "jetstream_queue_bytes": Metric("gauge", "Bytes that the work queue stores", _QUEUE),
    "jetstream_queue_fill_ratio": Metric("gauge", "How full it is, by its nearest limit; absent without one", _QUEUE),
    "jetstream_queue_oldest_seconds": Metric("gauge", "Age of its first message", _QUEUE),
    "jetstream_queue_stored_jobs": Metric("counter", "Messages that it has ever stored", _QUEUE),
    "jetstream_queue_dead_letters": Metric("gauge", "Stored jobs that are never delivered again", _QUEUE),
    "jetstream_queue_undeliverable_jobs": Metric("gauge", "Jobs that match no consumer", _QUEUE),
    "jetstream_queue_due_jobs": Metric(
        "gauge", "Scheduled jobs that are due and that no mover has moved to it", _QUEUE
    ),
    "jetstream_queue_consumers": Metric("gauge", "Its consumers", _QUEUE),
    "jetstream_queue_dead_letter_entries": Metric("gauge", "Entries of its dead letter queue", _QUEUE),
    "jetstream_queue_dead_letter_entries_stored": Metric("counter", "Entries that were ever stored there", _QUEUE),
    "jetstream_queue_counted": Metric("gauge", "1 where dead and undeliverable jobs are counted, else 0", _QUEUE),
    "jetstream_queue_known": Metric("gauge", "1 where the numbers of its consumers are known, else 0", _QUEUE),
    "jetstream_queue_state": Metric("gauge", "1 for the state that the queue is in, else 0", ("queue", "state")),
    "jetstream_consumer_pending_jobs": Metric("gauge", "Jobs that wait for their first delivery", _CONSUMER),
    "jetstream_consumer_in_flight_jobs": Metric("gauge", "Deliveries that haven't ended", _CONSUMER),
    "jetstream_consumer_redelivered_jobs": Metric("gauge", "Those delivered more than once", _CONSUMER),
    "jetstream_consumer_open_pulls": Metric("gauge", "Open pull requests of workers", _CONSUMER),
    "jetstream_consumer_paused": Metric("gauge", "1 while it is paused, else 0", _CONSUMER),
    "jetstream_consumer_deliveries": Metric("counter", "Deliveries, repeats included", _CONSUMER),
    "jetstream_queue_account_age_seconds": Metric("gauge", "Age of the last account; absent without one", _QUEUE),
    "jetstream_queue_unaccounted_jobs": Metric("gauge", "Jobs gone without evidence of their end, by that", _QUEUE),
    "jetstream_queue_unknown_ends": Metric("gauge", "Jobs gone whose end isn't known, by that", _QUEUE),
    "jetstream_redrives": Metric("gauge", "The latest 20 redrives by state", ("queue", "state")),
    "jetstream_redrive_letters": Metric("gauge", "Letters of the latest redrive", ("queue", "outcome")),
}


@dataclass(slots=True)
class _Discovered:
    created: str
    queue: WorkQueue | None
    samples: int = 0


@dataclass(slots=True)
class QueueSampler:
    """Samples all queues of a server again and again; what doesn't change is read once.

    :param redrives: whether redrives and the last account are read too
    """

    redrives: bool = True
    _before: dict[str, QueueOverview] = field(default_factory=dict)
    _discovered: dict[str, _Discovered] = field(default_factory=dict)
    _watches: dict[str, QueueWatch] = field(default_factory=dict)

    async def sample(self, connection: Connection) -> list[Sample]:
        """Read the metrics of now.

        :raises ApiError: the server refused
        :raises TransientError: the server doesn't answer
        """
        overviews = await inspect_all_queues(connection, self._before)
        self._before = {overview.name: overview for overview in overviews}
        self._discovered = {name: known for name, known in self._discovered.items() if name in self._before}
        self._watches = {name: self._watches.get(name) or QueueWatch() for name in self._before}
        samples = [sample for overview in overviews for sample in queue_samples(overview)]
        for overview in overviews:
            watch = self._watches[overview.name]
            watch.compare(overview)
            samples += [
                Sample("jetstream_queue_state", (overview.name, state.value), float(state == watch.state))
                for state in QueueState
            ]
        if self.redrives:

            async def read(overview: QueueOverview) -> list[Sample]:
                redrives, account = await self._redrives(connection, overview)
                return [*redrive_samples(overview.name, redrives), *account_samples(overview, account)]

            for found in await map_concurrently(read, overviews):
                samples += found
        return samples

    async def _redrives(
        self, connection: Connection, overview: QueueOverview
    ) -> tuple[list[Redrive], JobAccount | None]:
        queue = await self._queue(connection, overview)
        if queue is None or queue.audit is None or overview.health is None:
            return [], None
        try:
            redrives = await list_redrives(connection, queue, limit=_REDRIVES)
            return redrives, await last_account(connection, queue, overview.health.created)
        except (JetStreamProviderError, ApiError):
            # A missing permission, or the audit is being removed: the other numbers are worth having all the same.
            return [], None

    async def _queue(self, connection: Connection, overview: QueueOverview) -> WorkQueue | None:
        created = overview.health.created if overview.health else ""
        known = self._discovered.get(overview.name)
        if known is None or known.created != created or known.samples >= _DISCOVERED_FOR:
            try:
                found = await discover_queue(connection, overview.name)
            except JetStreamProviderError:
                # Made by hand so that jobs would be lost, or just removed.
                found = None
            known = self._discovered[overview.name] = _Discovered(created, found)
        known.samples += 1
        return known.queue


def queue_samples(overview: QueueOverview) -> Iterator[Sample]:
    """Yield the metrics of a queue and its consumers; none whose value isn't known."""
    labels, state, health = (overview.name,), overview.state, overview.health
    yield Sample("jetstream_queue_known", labels, float(health is not None))
    yield Sample("jetstream_queue_messages", labels, state["messages"])
    yield Sample("jetstream_queue_bytes", labels, state["bytes"])
    yield Sample("jetstream_queue_stored_jobs", labels, state["last_seq"])
    ratios = [
        state[used] / overview.config[limit]
        for used, limit in (("messages", "max_msgs"), ("bytes", "max_bytes"))
        if overview.config.get(limit, -1) > 0
    ]
    if ratios:
        yield Sample("jetstream_queue_fill_ratio", labels, max(ratios))
    if letters := overview.dead_letter_queue:
        yield Sample("jetstream_queue_dead_letter_entries", labels, letters["state"]["messages"])
        yield Sample("jetstream_queue_dead_letter_entries_stored", labels, letters["state"]["last_seq"])
    if left_over := overview.left_over:
        yield Sample("jetstream_queue_dead_letters", labels, left_over.dead)
        yield Sample("jetstream_queue_undeliverable_jobs", labels, sum(left_over.undeliverable.values()))
    if health is None:
        return
    yield Sample("jetstream_queue_counted", labels, float(left_over is not None))
    yield Sample("jetstream_queue_due_jobs", labels, overview.due.count if overview.due else 0)
    age = (health.taken_at - health.oldest).total_seconds() if health.oldest else 0.0
    yield Sample("jetstream_queue_oldest_seconds", labels, max(0.0, age))
    yield Sample("jetstream_queue_consumers", labels, len(health.consumers))
    for consumer in health.consumers.values():
        named = (overview.name, consumer.name)
        yield Sample("jetstream_consumer_pending_jobs", named, consumer.pending)
        yield Sample("jetstream_consumer_in_flight_jobs", named, consumer.in_flight)
        yield Sample("jetstream_consumer_redelivered_jobs", named, consumer.redelivered)
        yield Sample("jetstream_consumer_open_pulls", named, consumer.pulls)
        yield Sample("jetstream_consumer_paused", named, float(consumer.paused))
        yield Sample("jetstream_consumer_deliveries", named, consumer.deliveries)


def account_samples(overview: QueueOverview, account: JobAccount | None) -> Iterator[Sample]:
    """Yield the metrics of the last account of a queue's jobs; none where there is none."""
    if account is None or overview.health is None:
        return
    labels, age = (overview.name,), (overview.health.taken_at - account.at).total_seconds()
    yield Sample("jetstream_queue_account_age_seconds", labels, max(0.0, age))
    yield Sample("jetstream_queue_unaccounted_jobs", labels, account.unaccounted_count)
    yield Sample("jetstream_queue_unknown_ends", labels, account.unknown_count)


def redrive_samples(queue: str, redrives: list[Redrive]) -> Iterator[Sample]:
    """Yield the metrics of a queue's redrives, and of the latest one.

    :param redrives: the latest first
    """
    for state in RedriveState:
        count = sum(redrive.state == state for redrive in redrives)
        yield Sample("jetstream_redrives", (queue, state.value), count)
    if not redrives:
        return
    latest = redrives[0]
    counts = {name: getattr(latest, name) for name in ("redriven", "parked", "discarded", "failed")}
    for outcome, count in (counts | latest.outcomes.model_dump()).items():
        yield Sample("jetstream_redrive_letters", (queue, outcome), count)
