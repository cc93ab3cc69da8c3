"""Whether a queue is drained: nothing pending, nothing in flight, and on request nothing dead.

No single answer of the server proves it: each consumer is counted at a moment of its own, a cluster's consumers may not
know yet what the stream has stored, and a worker that acknowledges one job before it publishes the next leaves the
queue empty in between. A queue is therefore drained only if two inspections, a pause apart, find no job, and nothing
was stored or delivered between them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import due_subject
from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.inspection.health import count_left_over, inspect_queue
from airflow_provider_jetstream.jetstream.queue.work_queue import chosen_consumers, require_dead_letters
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.health import ConsumerHealth, QueueHealth
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

PAUSE = 0.5
_MAX_INSPECTIONS = 5
_NAMED = 10


@dataclass(frozen=True, slots=True)
class DrainReport(TaskReport):
    """Whether a queue is drained, and what is left in it.

    :param queue: its name
    :param drained: whether it is drained
    :param consumers: the consumers that were inspected
    :param stored: messages in the stream: jobs and dead letters
    :param undeliverable: subjects that match no consumer, with their number of jobs; known once nothing is pending or
        in flight, if all consumers are inspected
    :param schedules: scheduled jobs, known likewise
    :param dead_in_queue: stored jobs that will never be delivered again, known likewise
    :param dead_letters: dead letters in circulation, terminated ones included; known if they were requested and nothing
        else is left
    :param due: scheduled jobs that are due and not moved to the queue yet, for consumers that are inspected
    :param uncertain: how many more dead letters there may be, known likewise
    :param risks: what could be lost with the queue as it is, and what isn't known of it, known likewise
    """

    queue: str
    drained: bool
    consumers: tuple[ConsumerHealth, ...]
    stored: int
    undeliverable: Mapping[str, int] | None = None
    schedules: int | None = None
    dead_in_queue: int | None = None
    dead_letters: int | None = None
    due: int = 0
    uncertain: int = 0
    risks: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether the queue is drained, so that a function of ``@task.sensor`` may return the report itself."""
        return self.drained

    def __str__(self) -> str:
        undeliverable = self.undeliverable or {}
        subjects = _joined([f"{subject}: {count}" for subject, count in undeliverable.items()])
        dead = [f"{self.dead_letters} dead letters"]
        if self.dead_letters is None:
            dead = [f"{self.dead_in_queue} dead letters in the queue"]
        busy = [str(consumer) for consumer in self.consumers if _is_busy(consumer)]
        causes = [
            *([_joined(busy)] if busy else []),
            *([f"{sum(undeliverable.values())} jobs that no consumer takes ({subjects})"] if undeliverable else []),
            *(dead if self.dead_letters or self.dead_in_queue else []),
            *([f"{self.due} scheduled jobs that are due"] if self.due else []),
            *([f"{self.uncertain} jobs that may be dead"] if self.uncertain else []),
            *([f"{self.schedules} jobs for later"] if self.schedules else []),
        ]
        if not self.drained and not causes:
            causes = ["jobs came and went between two inspections"]
        verdict = "drained" if self.drained else "not drained"
        return f"{self.queue} is {verdict}{': ' if causes else ''}{'; '.join(causes)}"

    def as_json(self) -> dict[str, Any]:
        """Return the report in a form that fits an event or an XCom."""
        undeliverable = self.undeliverable
        return {
            "queue": self.queue,
            "drained": self.drained,
            "consumers": [consumer.name for consumer in self.consumers],
            "stored": self.stored,
            "pending": sum(consumer.pending for consumer in self.consumers),
            "in_flight": sum(consumer.in_flight for consumer in self.consumers),
            "undeliverable": None if undeliverable is None else sum(undeliverable.values()),
            "undeliverable_subjects": dict(list((undeliverable or {}).items())[:_NAMED]),
            "schedules": self.schedules,
            "due": self.due,
            "dead_in_queue": self.dead_in_queue,
            "dead_letters": self.dead_letters,
            "uncertain": self.uncertain,
            "risks": [str(risk) for risk in self.risks],
        }


async def check_drained(
    connection: Connection,
    queue: WorkQueue,
    consumers: Sequence[str] | str | None = None,
    *,
    nothing_dead: bool = False,
) -> DrainReport:
    """Check whether a queue is drained; takes half a second if it is.

    These jobs keep a queue from being drained: pending jobs, jobs that workers have, nak'ed jobs that wait for their
    delay, and jobs that match no consumer. Scheduled jobs don't.

    :param consumers: the names of the consumers to inspect, or one name; where absent all, and jobs that match none
    :param nothing_dead: whether dead letters in circulation keep it from being drained; with ``consumers``, theirs
    :raises QueueDeclarationError: ``nothing_dead`` is set, and the queue declares no dead letter queue
    :raises NotFoundError: the queue, its dead letter queue or a named consumer doesn't exist
    """
    names = chosen_consumers(consumers)
    if nothing_dead:
        await _require_dead_letter_queue(connection, queue)
    health, report = await _inspect(connection, queue.name, names)
    for _ in range(_MAX_INSPECTIONS):
        if queue.schedules and (due := await _due_jobs(connection, queue.name, queue.schedules.name, report, names)):
            report = replace(report, due=due)
            break
        if any(map(_is_busy, report.consumers)):
            break
        if names is None:
            left = await count_left_over(connection, health, queue.schedules.name if queue.schedules else None)
            report = replace(
                report, undeliverable=left.undeliverable, schedules=left.schedules, dead_in_queue=left.dead
            )
            if left.undeliverable:
                break
        if nothing_dead:
            report = await _with_dead_letters(connection, queue, names, report)
            if report.dead_letters or report.uncertain:
                break
        await asyncio.sleep(PAUSE)
        before = _position(health, names)
        health, later = await _inspect(connection, queue.name, names)
        if _position(health, names) == before:
            return replace(report, drained=True)
        report = later
    return report


async def _due_jobs(
    connection: Connection, queue: str, schedules: str, report: DrainReport, names: Sequence[str] | None
) -> int:
    """Count the due jobs that no mover has stored yet; with names of consumers, those that they take."""
    filters = [filter_ for consumer in report.consumers for filter_ in consumer.filters]
    prefix, count = due_subject(queue, ""), 0
    async for subject, jobs in subject_counts(connection, schedules, due_subject(queue, ">")):
        if names is None or covered_by_any(filters, subject.removeprefix(prefix)):
            count += jobs
    return count


async def _inspect(
    connection: Connection, queue: str, names: tuple[str, ...] | None
) -> tuple[QueueHealth, DrainReport]:
    health = await inspect_queue(connection, queue)
    chosen = _chosen(health, names)
    in_flight = [consumer for consumer in chosen if consumer.in_flight]
    if in_flight and not any(consumer.pending for consumer in chosen):
        # Jobs that died after the last worker was gone stay in flight until a pull request comes.
        for consumer in in_flight:
            with suppress(NotFoundError):
                await probe_consumer(connection, queue, consumer.name)
        health = await inspect_queue(connection, queue)
        chosen = _chosen(health, names)
    return health, DrainReport(queue, drained=False, consumers=chosen, stored=health.stored)


def _chosen(health: QueueHealth, names: tuple[str, ...] | None) -> tuple[ConsumerHealth, ...]:
    if unknown := [name for name in names or () if name not in health.consumers]:
        known = ", ".join(sorted(health.consumers)) or "none"
        raise NotFoundError(
            f"expected consumer {unknown[0]} of stream {health.queue} on the server, found {known}: check the name, or"
            " provision the queue first"
        )
    return tuple(health.consumers[name] for name in sorted(names if names is not None else health.consumers))


def _position(health: QueueHealth, names: tuple[str, ...] | None) -> tuple[object, ...]:
    consumers = tuple(
        # Without the workers' open pull requests, which come and go.
        replace(consumer, pulls=0)
        for consumer in _chosen(health, names)
    )
    # Jobs for consumers that aren't inspected change the stream's numbers as well.
    return (health.created, consumers, *((health.last_sequence, health.stored) if names is None else ()))


def _is_busy(consumer: ConsumerHealth) -> bool:
    return consumer.pending > 0 or consumer.in_flight > 0


async def _require_dead_letter_queue(connection: Connection, queue: WorkQueue) -> None:
    """Fail now rather than after all jobs have ended."""
    await stream_info(connection, require_dead_letters(queue).name)


async def _with_dead_letters(
    connection: Connection, queue: WorkQueue, names: tuple[str, ...] | None, report: DrainReport
) -> DrainReport:
    summary = await summarise_dead_letters(connection, queue, group_by=("consumer",))
    dead = sum(group.count for (name,), group in summary.groups.items() if names is None or name in names)
    # Only a consumer with jobs in flight has dead letters that can't be identified; the named ones have none in flight.
    uncertain = summary.uncertain if names is None else 0
    return replace(report, dead_letters=dead, uncertain=uncertain, risks=summary.risks)


def _joined(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return "; ".join([*texts[:_NAMED], *more])
