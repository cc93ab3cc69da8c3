"""Whether a queue is drained: nothing pending, nothing in flight, and if that is asked for, nothing dead.

No answer of the server tells it. Each consumer is counted at a moment of its own, a cluster's consumers may not have
seen yet what the stream has stored, and a worker that acknowledges one job before it publishes the next leaves the
queue empty in between. A queue is therefore drained only if two looks, a pause apart, find nothing to do, and find that
nothing was stored and nothing delivered between them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.inspection.health import count_left_over, inspect_queue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.health import ConsumerHealth, QueueHealth
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

PAUSE = 0.5
_LOOKS = 5
_NAMED = 10


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What was found of a queue that may be drained.

    :param queue: its name
    :param drained: whether it is
    :param consumers: the consumers that were looked at
    :param stored: messages in the stream: jobs, dead letters, schedules, markers
    :param undeliverable: subjects that no consumer takes, with their number of jobs; known once nothing is pending or
        in flight, if all consumers are looked at
    :param schedules: jobs for later, known likewise
    :param dead_in_queue: stored jobs that will never be delivered again, known likewise
    :param dead_letters: dead letters in circulation, terminated ones among them; known if they were asked for and
        nothing else is left
    :param uncertain: how many more dead letters there may be, known likewise
    :param risks: what a look for dead letters found that could be lost as things are, a sentence each
    """

    queue: str
    drained: bool
    consumers: tuple[ConsumerHealth, ...]
    stored: int
    undeliverable: Mapping[str, int] | None = None
    schedules: int | None = None
    dead_in_queue: int | None = None
    dead_letters: int | None = None
    uncertain: int = 0
    risks: tuple[str, ...] = ()

    def __str__(self) -> str:
        untaken = self.undeliverable or {}
        subjects = _named([f"{subject}: {count}" for subject, count in untaken.items()])
        dead = [f"{self.dead_letters} dead letters"]
        if self.dead_letters is None:
            dead = [f"{self.dead_in_queue} dead letters in the queue"]
        told = [
            *(
                [_named([str(each) for each in self.consumers if _busy(each)])]
                if any(map(_busy, self.consumers))
                else []
            ),
            *([f"{sum(untaken.values())} jobs that no consumer takes ({subjects})"] if untaken else []),
            *(dead if self.dead_letters or self.dead_in_queue else []),
            *([f"{self.uncertain} dead letters that can't be told yet"] if self.uncertain else []),
            *([f"{self.schedules} jobs for later"] if self.schedules else []),
        ]
        if not self.drained and not told:
            told = ["jobs came and went between two looks"]
        end = "drained" if self.drained else "not drained"
        return f"{self.queue} is {end}{': ' if told else ''}{'; '.join(told)}"

    def as_json(self) -> dict[str, Any]:
        """Give the report in a form that fits an event or an XCom.

        :return: counts, and the names of the consumers that were looked at
        """
        untaken = self.undeliverable
        return {
            "queue": self.queue,
            "drained": self.drained,
            "consumers": [each.name for each in self.consumers],
            "stored": self.stored,
            "pending": sum(each.pending for each in self.consumers),
            "in_flight": sum(each.in_flight for each in self.consumers),
            "undeliverable": None if untaken is None else sum(untaken.values()),
            "undeliverable_subjects": dict(list((untaken or {}).items())[:_NAMED]),
            "schedules": self.schedules,
            "dead_in_queue": self.dead_in_queue,
            "dead_letters": self.dead_letters,
            "uncertain": self.uncertain,
            "risks": list(self.risks),
        }


async def check_drained(
    connection: Connection,
    queue: WorkQueue,
    consumers: Sequence[str] | str | None = None,
    *,
    nothing_dead: bool = False,
) -> DrainReport:
    """Find out whether a queue is drained; takes half a second if it is.

    Jobs count that wait, that workers have, that were handed back and wait for their delay, and that no consumer takes.
    Jobs for later don't: they aren't jobs until their time has come.

    :param connection: the server
    :param queue: the work queue
    :param consumers: names of those to look at, or one name; all, and jobs that no consumer takes, where absent
    :param nothing_dead: whether dead letters in circulation keep it from being drained; with ``consumers``, theirs
    :return: what was found
    :raises QueueDeclarationError: dead letters are asked about, and the queue declares no dead letter queue
    :raises NotFoundError: the queue, its dead letter queue or a consumer that was named doesn't exist
    """
    names = chosen_consumers(consumers)
    if nothing_dead:
        await _require_letters(connection, queue)
    seen, report = await _look(connection, queue.name, names)
    for _ in range(_LOOKS):
        if any(map(_busy, report.consumers)):
            break
        if names is None:
            left = await count_left_over(connection, seen)
            report = replace(
                report, undeliverable=left.undeliverable, schedules=left.schedules, dead_in_queue=left.dead
            )
            if left.undeliverable:
                break
        if nothing_dead:
            report = await _with_dead(connection, queue, names, report)
            if report.dead_letters or report.uncertain:
                break
        await asyncio.sleep(PAUSE)
        before = _position(seen, names)
        seen, later = await _look(connection, queue.name, names)
        if _position(seen, names) == before:
            return replace(report, drained=True)
        report = later
    return report


def chosen_consumers(names: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Read which consumers are meant.

    :param names: their names, or one of them
    :return: the names, each once; ``None`` for all
    :raises NotFoundError: there is no name
    """
    if names is None:
        return None
    chosen = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    if not chosen or not all(isinstance(name, str) and name.strip() for name in chosen):
        raise NotFoundError(
            f"expected names of consumers to look at, found {names!r}: name some, or leave consumers out to look at all"
        )
    return chosen


async def _look(connection: Connection, queue: str, names: tuple[str, ...] | None) -> tuple[QueueHealth, DrainReport]:
    seen = await inspect_queue(connection, queue)
    chosen = _chosen(seen, names)
    stuck = [each for each in chosen if each.in_flight]
    if stuck and not any(each.pending for each in chosen):
        # Jobs that died after their last worker was gone stay in flight until somebody asks.
        for each in stuck:
            with suppress(NotFoundError):
                await probe_consumer(connection, queue, each.name)
        seen = await inspect_queue(connection, queue)
        chosen = _chosen(seen, names)
    return seen, DrainReport(queue, drained=False, consumers=chosen, stored=seen.stored)


def _chosen(seen: QueueHealth, names: tuple[str, ...] | None) -> tuple[ConsumerHealth, ...]:
    if unknown := [name for name in names or () if name not in seen.consumers]:
        known = ", ".join(sorted(seen.consumers)) or "none"
        raise NotFoundError(
            f"expected consumer {unknown[0]} of stream {seen.queue} on the server, found {known}: check the name, or"
            " provision the queue first"
        )
    return tuple(seen.consumers[name] for name in sorted(names if names is not None else seen.consumers))


def _position(seen: QueueHealth, names: tuple[str, ...] | None) -> tuple[object, ...]:
    consumers = tuple(
        # Without the workers' open requests, which come and go.
        replace(each, pulls=0)
        for each in _chosen(seen, names)
    )
    # What is stored for consumers that aren't looked at moves the stream too.
    return (seen.created, consumers, *((seen.last_sequence, seen.stored) if names is None else ()))


def _busy(consumer: ConsumerHealth) -> bool:
    return consumer.pending > 0 or consumer.in_flight > 0


async def _require_letters(connection: Connection, queue: WorkQueue) -> None:
    """Fail now rather than when all jobs are done."""
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import require_dead_letters

    await stream_info(connection, require_dead_letters(queue).name)


async def _with_dead(
    connection: Connection, queue: WorkQueue, names: tuple[str, ...] | None, report: DrainReport
) -> DrainReport:
    from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters

    found = await summarise_dead_letters(connection, queue, group_by=("consumer",))
    dead = sum(group.count for (name,), group in found.groups.items() if names is None or name in names)
    # Only a consumer with jobs in flight has dead letters that can't be told yet, so these are others'.
    uncertain = found.uncertain if names is None else 0
    return replace(report, dead_letters=dead, uncertain=uncertain, risks=found.risks)


def _named(parts: Sequence[str]) -> str:
    more = [f"{len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return "; ".join([*parts[:_NAMED], *more])
