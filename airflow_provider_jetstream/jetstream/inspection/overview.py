"""All work queues of a server at a glance: a request per 256 streams, and one for each queue's consumers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.contract import is_schedules_stream, schedules_stream
from airflow_provider_jetstream.jetstream.errors import NotFoundError, PermissionDeniedError, UnreachableError
from airflow_provider_jetstream.jetstream.inspection.health import (
    MAX_SUBJECTS,
    LeftOver,
    QueueHealth,
    count_left_over,
    inspect_consumers,
)
from airflow_provider_jetstream.jetstream.publishing.schedules import DueJobs, inspect_due_jobs
from airflow_provider_jetstream.jetstream.queue.discovery import (
    ANY_QUEUE,
    captured_queues,
    dead_letter_stream,
    has_dead_letter_mark,
    is_bucket,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """A work queue at a glance.

    :param config: its stream's configuration, as the server returns it
    :param state: its stream's state, as the server returns it
    :param dead_letter_queue: the server's STREAM.INFO of the stream that captures its dead letters, if there is one
    :param health: its numbers; ``None`` where they are missing
    :param left_over: what it stores besides pending jobs and jobs in flight; ``None`` where that isn't known
    :param due: its scheduled jobs that are due and not moved yet; ``None`` where it has no scheduled jobs
    :param problem: why numbers are missing
    """

    config: Mapping[str, Any]
    state: Mapping[str, Any]
    dead_letter_queue: Mapping[str, Any] | None
    health: QueueHealth | None
    left_over: LeftOver | None
    problem: UnreachableError | PermissionDeniedError | None = None
    due: DueJobs | None = None

    @property
    def name(self) -> str:
        """The stream's name."""
        return str(self.config["name"])

    @property
    def uncounted(self) -> str:
        """A sentence that says why ``left_over`` is missing although the other numbers are known; empty if it isn't."""
        if self.health is None or self.left_over is not None:
            return ""
        return (
            f"dead and undeliverable jobs of {self.name}, up to {self.health.left_over:,}, aren't counted, since it has"
            f" {self.state['num_subjects']:,} subjects, more than {MAX_SUBJECTS:,}: jetstream-queue queue show"
            f" {self.name} counts them once"
        )

    @property
    def without_entry(self) -> str:
        """A sentence about the number of dead jobs without an entry; empty if there are none."""
        if self.left_over is None or self.dead_letter_queue is None:
            return ""
        name, stored = self.dead_letter_queue["config"]["name"], self.dead_letter_queue["state"]["messages"]
        if (missing := self.left_over.dead - stored) <= 0:
            return ""
        return (
            f"{missing:,} of the {self.left_over.dead:,} dead jobs of {self.name} have no entry in {name}:"
            f" jetstream-queue letters diagnose {self.name} says which of them are known to be dead"
        )

    @property
    def dead_letter_queue_state(self) -> tuple[int, int, str]:
        """A fingerprint of the dead letter queue: it changes when an entry is added or removed."""
        state = self.dead_letter_queue["state"] if self.dead_letter_queue else {}
        return (state.get("last_seq", 0), state.get("messages", 0), self.health.created if self.health else "")

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """A fingerprint of the queue: it changes when a job is stored, delivered or settled, or an entry is added."""
        state = self.state
        consumers = self.health.consumers.values() if self.health else ()
        return (
            *(state["last_seq"], state["messages"], state.get("num_subjects", 0), self.dead_letter_queue_state),
            *(
                (consumer.name, consumer.created, consumer.filters, consumer.deliveries, consumer.pending)
                for consumer in consumers
            ),
            *((consumer.in_flight, consumer.ack_floor) for consumer in consumers),
        )


async def inspect_all_queues(
    connection: Connection, before: Mapping[str, QueueOverview] | None = None
) -> list[QueueOverview]:
    """Inspect all streams of work-queue retention by name, streams that were made by hand included.

    Dead letter queues are left out, whatever their retention, and so are streams of schedules and buckets.

    :param before: the last overview by queue, so that an unchanged queue isn't counted again
    :raises ApiError: the server refused
    :raises TransientError: the server doesn't answer
    """
    streams = await list_streams(connection)
    by_name = {info["config"]["name"]: info for info in streams}
    configs = [info["config"] for info in streams]
    capturing, captured = _capturing_streams(configs), list(filter(is_schedules_stream, configs))

    async def inspect(info: Mapping[str, Any]) -> QueueOverview | None:
        config, state = info["config"], info["state"]
        stream = dead_letter_stream([*capturing[config["name"]], *capturing[ANY_QUEUE]], config["name"])
        dead_letter_queue = by_name[stream["name"]] if stream else None
        try:
            health = await inspect_consumers(connection, info)
            overview = QueueOverview(config, state, dead_letter_queue, health, None)
            schedules = by_name.get((schedules_stream(captured, config["name"]) or {}).get("name", ""))
            scheduled = schedules["state"]["messages"] if schedules else 0
            if schedules and scheduled:
                due = await inspect_due_jobs(connection, overview.name, schedules["config"]["name"])
                overview = replace(overview, due=due)
            return await _with_left_over(connection, overview, (before or {}).get(overview.name), scheduled)
        except NotFoundError:
            return None
        except (UnreachableError, PermissionDeniedError) as error:
            # The user's role may be for some of the server's queues only.
            return QueueOverview(config, state, dead_letter_queue, None, None, error)

    queues = [info for info in streams if is_work_queue(info["config"])]
    overviews = [overview for overview in await map_concurrently(inspect, queues) if overview is not None]
    return sorted(overviews, key=lambda overview: overview.name)


def is_work_queue(config: Mapping[str, Any]) -> bool:
    """Return whether a stream is a work queue, and no dead letter queue, stream of schedules or bucket."""
    is_companion = has_dead_letter_mark(config) or captured_queues(config) or is_schedules_stream(config)
    return config["retention"] == "workqueue" and not is_companion and not is_bucket(config)


def _capturing_streams(configs: Iterable[Mapping[str, Any]]) -> defaultdict[str, list[Mapping[str, Any]]]:
    """Return by queue the configurations of the streams that capture its dead letters; there may be many of both."""
    capturing: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for config in configs:
        for queue in captured_queues(config):
            capturing[queue].append(config)
    return capturing


async def _with_left_over(
    connection: Connection, overview: QueueOverview, before: QueueOverview | None, scheduled: int
) -> QueueOverview:
    health = overview.health
    if health is None or (health.left_over and overview.state.get("num_subjects", 0) > MAX_SUBJECTS):
        return overview
    is_unchanged = before is not None and before.fingerprint == overview.fingerprint
    left_over = before.left_over if before and is_unchanged else None
    left_over = left_over or await count_left_over(connection, health)
    return replace(overview, left_over=replace(left_over, schedules=scheduled))
