"""Plans how a consumer passes a part of its subjects on to others, with the jobs that are stored on them.

So a queue with one consumer for everything gets partitions, or several filtered consumers. An undeclared consumer
keeps the jobs that nobody else takes, and is removed if there are none: a program that creates its consumer when it
starts, as those of the source documents do, would give it all subjects again, and jobs would be delivered twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.jetstream.client.consumer_pause import PAUSE_LEVEL
from airflow_provider_jetstream.jetstream.client.stream_api import subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import MIGRATION, handed_over_subject
from airflow_provider_jetstream.jetstream.provisioning.consumer_order import (
    MULTIPLE_UNFILTERED,
    NOT_UNIQUE,
    filter_text,
    is_internal,
    overlap_any,
)
from airflow_provider_jetstream.jetstream.provisioning.plan import Migration, Step, job_count, listed
from airflow_provider_jetstream.jetstream.provisioning.remaining_filters import remaining_filters
from airflow_provider_jetstream.jetstream.publishing.schedules import scheduled_subjects
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.differences import Difference, consumer_differences, merged_consumer
from airflow_provider_jetstream.jetstream.queue.snapshot import count_consumers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_UNFILTERED = (">",)


def is_handing_over(config: Mapping[str, Any]) -> bool:
    """Return whether a consumer's configuration says that it hands jobs over."""
    return MIGRATION in (config.get("metadata") or {})


def without_record(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a consumer's configuration without the changes that a migration makes for a while."""
    metadata = dict(config.get("metadata") or {})
    max_ack_pending = metadata.pop(MIGRATION, None)
    if max_ack_pending is None:
        return dict(config)
    return {**config, "metadata": metadata, "max_ack_pending": int(max_ack_pending)}


def with_filters(config: Mapping[str, Any], filters: Sequence[str]) -> dict[str, Any]:
    """Return a consumer's configuration with other filters."""
    return merged_consumer(config, filter_fields(filters))


def filter_fields(filters: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a consumer's configuration for filters; a single one has a field of its own."""
    return {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": list(filters)}


class ConsumerChanges:
    """How the filters of a work queue's consumers change, and which stored jobs that concerns.

    :param declared: the declared configurations by name
    :param existing: the server's configurations by name
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        declared: Mapping[str, dict[str, Any]],
        existing: Mapping[str, dict[str, Any]],
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._interrupted = {name for name, config in existing.items() if is_handing_over(config)}
        self.existing = {name: without_record(config) for name, config in existing.items()}
        self._filters = {
            name: filter_subjects(config) for name, config in existing.items() if not is_internal(name, config)
        }
        self._targets = {name: filter_subjects(config) for name, config in declared.items()}
        self._changed = [
            name for name, target in self._targets.items() if sorted(target) != sorted(self._filters.get(name, ()))
        ]
        self._jobs: dict[str, Counter[str]] = {}
        self._scheduled: Counter[str] | None = None

    async def migrations(self) -> dict[str, Migration]:
        """Return by name what consumers have to pass on to declared ones, or began to pass on."""
        found = {name: await self._migration(name) for name in self._filters}
        return {name: migration for name, migration in found.items() if migration is not None}

    async def migration_step(self, name: str, migration: Migration, declared: Step | None, *, migrate: bool) -> Step:
        """Return the step of a consumer that passes jobs on.

        :param declared: the step as it would be without that; ``None`` for an undeclared consumer
        :param migrate: whether it may
        """
        step = declared or await self._undeclared_step(name, migration)
        if not migrate:
            if declared and not migration.jobs and name not in self._interrupted:
                # Without stored jobs it just gives its subjects up before others get them.
                return step
            blocked = (*step.blocked, self._permission_needed(name, migration))
            return Step("consumer", step.name, "keep", dict(self.existing[name]), (), blocked)
        action: Literal["update", "remove"] = "remove" if step.action == "remove" else "update"
        differences = step.differences
        if name in self._interrupted:
            differences = (Difference("max_ack_pending", 1, self.existing[name]["max_ack_pending"]), *differences)
        blocked = (*step.blocked, *[reason async for reason in self._obstacles(name, migration)])
        return replace(step, action=action, differences=differences, blocked=blocked, migration=migration)

    async def lost_jobs(self, name: str) -> AsyncIterator[str]:
        """Yield why the change of a declared consumer's filters would leave stored jobs undelivered."""
        before = self._filters.get(name)
        if before is None or name not in self._changed:
            return
        served = [subject for target in self._targets.values() for subject in target]
        served += [subject for other in self._filters.keys() - self._targets for subject in self._filters[other]]
        jobs = await self._stored(name)
        if lost := [subject for subject in jobs if not covered_by_any(served, subject)]:
            yield (
                f"{job_count(sum(jobs[subject] for subject in lost))} on {listed(lost)} would have no consumer: keep"
                " that filter until they are done, or declare a consumer for them"
            )
        gained = Counter[str]()
        for subject in self._targets[name]:
            if not covered_by_any(before, subject):
                gained |= await self._count(subject)
        # Observed with 2.10 to 2.15: it has passed them even where its state doesn't show that.
        if passed := [subject for subject in gained if not covered_by_any(before, subject)]:
            yield (
                f"{job_count(sum(gained[subject] for subject in passed))} on {listed(passed)} would never be delivered:"
                f" {name} has passed what it had no filter for; declare a consumer of another name for these subjects"
            )

    async def _migration(self, name: str) -> Migration | None:
        own = self._filters[name]
        taken = {
            receiver: [subject for subject in target if overlap_any(subject, own)]
            for receiver, target in self._targets.items()
            if receiver != name
        }
        receivers = tuple(receiver for receiver, filters in taken.items() if filters)
        if not receivers:
            return Migration() if name in self._interrupted else None
        filters = [subject for receiver in receivers if receiver in self._changed for subject in taken[receiver]]
        given = [subject for receiver in receivers for subject in taken[receiver]]
        others = [subject for other, target in self._targets.items() if other != name for subject in target]
        for other in self._filters.keys() - self._targets - {name}:
            others += self._filters[other]
        # Without a filter of its own it has the subjects of the queue's jobs.
        divided = () if name in self._targets else tuple(self._queue.subjects) if own == _UNFILTERED else own
        jobs = sum(n for subject, n in (await self._stored(name)).items() if covered_by_any(given, subject))
        return Migration(receivers, tuple(filters), tuple(others), divided, jobs)

    async def _undeclared_step(self, name: str, migration: Migration) -> Step:
        existing, label = self.existing[name], f"{self._queue.name}/{name}"
        unused, kept = handed_over_subject(self._queue.name, name), self._filters[name]
        if migration.receivers:
            kept = remaining_filters(migration.divided, migration.others, await self._stored(name)) or (unused,)
        config = with_filters(existing, kept)
        if kept == (unused,):
            return Step("consumer", label, "remove", config)
        return Step("consumer", label, "update", config, consumer_differences(existing, filter_fields(kept)))

    def _permission_needed(self, name: str, migration: Migration) -> str:
        if not migration.receivers:
            return (
                "a migration of its jobs was interrupted, and it delivers one job at a time since then: provision with"
                " migrate=True, the same declaration to go on, or the earlier one to undo it"
            )
        code = MULTIPLE_UNFILTERED if _UNFILTERED[0] in migration.others else NOT_UNIQUE
        return (
            f"{filter_text(self._filters[name])} overlaps with those declared for {listed(migration.receivers)}, and"
            f" the server gives a job one consumer (error {code}): provision with migrate=True to hand"
            f" {job_count(migration.jobs)} over to them; or declare {name} with filters that don't overlap"
        )

    async def _obstacles(self, name: str, migration: Migration) -> AsyncIterator[str]:
        if self._connection.api_level < PAUSE_LEVEL:
            yield "handing jobs over needs nats-server 2.11, which can pause a consumer: upgrade every server"
        for receiver in migration.receivers:
            if receiver in self._filters and receiver in self._changed:
                yield (
                    f"{receiver} exists, and the server never delivers what a consumer has passed: declare a consumer"
                    " of another name for the subjects that it is to get"
                )
        if migration.filters and migration.jobs == (await self._stored(name)).total():
            # Where it keeps jobs, its dead letters may be among those: checked when the migration is made.
            state = (await count_consumers(self._connection, self._queue.name)).get(name)
            if state and state.dead:
                yield dead_letters_text(state.dead)

    async def _stored(self, name: str) -> Counter[str]:
        """Return the subjects of a consumer's stored and scheduled jobs with their numbers."""
        if name not in self._jobs:
            scheduled = await self._scheduled_jobs()
            jobs = Counter({s: count for s, count in scheduled.items() if covered_by_any(self._filters[name], s)})
            for subject in self._filters[name]:
                jobs += await self._count(subject)
            self._jobs[name] = jobs
        return self._jobs[name]

    async def _scheduled_jobs(self) -> Counter[str]:
        if self._scheduled is None:
            self._scheduled = await scheduled_subjects(self._connection, self._queue.name)
        return self._scheduled

    async def _count(self, subject: str) -> Counter[str]:
        counts = subject_counts(self._connection, self._queue.name, subject)
        return Counter({name: count async for name, count in counts})


def dead_letters_text(count: int) -> str:
    """Return why a consumer with dead letters can't hand its jobs over, and what to do."""
    are = "is a dead letter" if count == 1 else "are dead letters"
    return f"{job_count(count)} of it {are}, which another consumer would run again: redrive or park them first"
