"""Makes a consumer pass a part of its jobs on to others: none is delivered by both, and none is lost.

What the server does, observed with 2.11 to 2.15: a consumer whose filter is narrowed still redelivers the jobs that it
has in flight, and a new consumer delivers those too. So the filter is narrowed while nothing is in flight:

1. ``max_ack_pending`` becomes 1: the consumer delivers nothing new while a job is in flight, but what failed is
   delivered again. The value of before is recorded in the consumer's metadata.
2. The consumer is paused; the last job ends, or the pause ends for a moment so that it can be delivered again.
3. Its filter is narrowed. If it delivered something all the same, because the pause had run out, step 2 is repeated.
4. It gets its ``max_ack_pending`` back, or is removed if nothing is left for it. Others can be created then.

Every step can be repeated. If this process is killed, the consumer goes on with one job at a time until provisioning
goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.consumer_pause import paused
from airflow_provider_jetstream.jetstream.client.message_reader import next_message
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import MIGRATION, handed_over_subject
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    DriftError,
    JetStreamProviderError,
    NotFoundError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.provisioning.consumer_order import consumer_of
from airflow_provider_jetstream.jetstream.provisioning.migration_plan import (
    dead_letters_text,
    with_filters,
    without_record,
)
from airflow_provider_jetstream.jetstream.provisioning.plan import Migration, job_count, listed
from airflow_provider_jetstream.jetstream.provisioning.remaining_filters import remaining_filters
from airflow_provider_jetstream.jetstream.publishing.schedules import scheduled_subjects
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.provisioning.plan import Step

# Seconds: the longest time for which the consumer stays paused without an end of the last job, how long it isn't paused
# afterwards (at first, and at most), and how long at least nothing may change until the migration is given up. A worker
# need not wait for jobs: one that asks every few seconds finds the consumer paused whenever the time between is short.
_PAUSED_SECONDS = 5.0
_RESUMED_SECONDS = 0.3
_MOST_RESUMED_SECONDS = 10.0
_STALLED_SECONDS = 60.0
_POLL_PAUSE = 0.05


async def migrate(connection: Connection, step: Step) -> None:
    """Execute the step of a consumer that passes jobs on to others.

    :raises DeadlineError: jobs stay in flight; the consumer is as before
    :raises DriftError: the consumer has dead letters; it is as before
    :raises ApiError: the server refused
    """
    stream = step.name.partition("/")[0]
    try:
        await _Migration(connection, stream, consumer_of(step), step, step.migration or Migration()).run()
    except NotFoundError:
        # Another process that does the same has removed it.
        if step.action != "remove":
            raise


class _Migration:
    def __init__(self, connection: Connection, stream: str, consumer: str, step: Step, migration: Migration) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._step = step
        self._migration = migration
        self._final = step.config
        self._narrowed = False

    async def run(self) -> None:
        info = await self._info()
        self._narrowed = set(filter_subjects(info["config"])) == set(filter_subjects(self._step.config))
        if info["num_ack_pending"]:
            # Jobs that have used up their deliveries aren't in flight any more once a pull request arrives.
            with suppress(TransientError):
                info = await probe_consumer(self._connection, self._stream, self._consumer)
        await self._update(self._limited(info["config"]))
        try:
            await self._pass_on()
        except BaseException:
            if not self._narrowed:
                with suppress(JetStreamProviderError):
                    await self._update(without_record((await self._info())["config"]))
            raise

    async def _pass_on(self) -> None:
        stalled_at, progress, resumed = time.monotonic(), None, _RESUMED_SECONDS
        while True:
            info = await self._info()
            if (state := _progress(info)) != progress:
                stalled_at, progress, resumed = time.monotonic(), state, _RESUMED_SECONDS
            limit = max(_STALLED_SECONDS, 2 * _longest_wait(info["config"]))
            if time.monotonic() - stalled_at > limit:
                raise DeadlineError(self._stalled_text(info["num_ack_pending"], limit))
            if MIGRATION not in (info["config"].get("metadata") or {}):
                # A program that creates its consumer when it starts has replaced the configuration.
                await self._update(self._limited(info["config"]))
            elif info["num_ack_pending"] <= 1:
                async with paused(self._connection, self._stream, self._consumer):
                    if await self._idle() and await self._switch():
                        return
            await asyncio.sleep(resumed)
            resumed = min(2 * resumed, _MOST_RESUMED_SECONDS)

    async def _switch(self) -> bool:
        """Narrow the consumer and end the migration; return ``False`` where it has delivered a job meanwhile."""
        before = await self._info()
        if not before.get("paused") or before["num_ack_pending"]:
            return False
        if not self._narrowed:
            await self._refuse_dead_letters(before)
            self._final = await self._narrowed_config(before["config"])
            await self._update(self._limited(self._final, before["config"]))
            self._narrowed = True
            after = await self._info()
            if after["num_ack_pending"] or after["delivered"]["consumer_seq"] != before["delivered"]["consumer_seq"]:
                return False
        if filter_subjects(self._final) == (handed_over_subject(self._stream, self._consumer),):
            await self._connection.api(f"CONSUMER.DELETE.{self._stream}.{self._consumer}")
        else:
            await self._update(self._final)
        return True

    async def _refuse_dead_letters(self, info: Mapping[str, Any]) -> None:
        # Nothing is in flight: what is stored of its own up to the last delivery will never be delivered again.
        delivered, dead = info["delivered"]["stream_seq"], 0
        for subject in filter_subjects(info["config"]):
            message = await next_message(self._connection, self._stream, 1, subject)
            while message is not None and message.sequence <= delivered:
                dead += covered_by_any(self._migration.filters, message.subject)
                message = await next_message(self._connection, self._stream, message.sequence + 1, subject)
        if dead:
            raise DriftError(f"consumer {self._step.name} is as before: {dead_letters_text(dead)}")

    async def _narrowed_config(self, existing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration with filters for the jobs stored and scheduled now, not when the plan was made."""
        planned, divided, others = self._step.config, self._migration.divided, self._migration.others
        filters = filter_subjects(existing)
        stored = [found for own in filters async for found, _ in subject_counts(self._connection, self._stream, own)]
        scheduled = await scheduled_subjects(self._connection, self._stream)
        stored += [subject for subject in scheduled if covered_by_any(filters, subject)]
        subjects = [subject for subject in stored if not covered_by_any(others, subject)]
        if divided:
            unused = handed_over_subject(self._stream, self._consumer)
            return with_filters(planned, remaining_filters(divided, others, subjects) or (unused,))
        if lost := [subject for subject in subjects if not covered_by_any(filter_subjects(planned), subject)]:
            raise DeadlineError(
                f"jobs were stored on {listed(lost)} after the plan was made, and no consumer would have them: consumer"
                f" {self._step.name} is as before; provision again"
            )
        return planned

    async def _idle(self) -> bool:
        """Wait until nothing is in flight; return ``False`` where that takes too long."""
        deadline = time.monotonic() + _PAUSED_SECONDS
        while (await self._info())["num_ack_pending"]:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_PAUSE)
        return True

    def _limited(self, config: Mapping[str, Any], existing: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a configuration with one job in flight at a time and with the record of the other limit."""
        metadata = (existing or config).get("metadata") or {}
        recorded = metadata.get(MIGRATION, str(config.get("max_ack_pending", 0)))
        own = config.get("metadata") or {}
        return {**config, "max_ack_pending": 1, "metadata": {**own, MIGRATION: recorded}}

    async def _info(self) -> dict[str, Any]:
        return await consumer_info(self._connection, self._stream, self._consumer)

    async def _update(self, config: Mapping[str, Any]) -> None:
        await update_consumer(self._connection, self._stream, config)

    def _stalled_text(self, in_flight: int, seconds: float) -> str:
        state = (
            "it has handed its jobs over and awaits the end of what it delivered meanwhile"
            if self._narrowed
            else "it is as before"
        )
        return (
            f"expected no job of consumer {self._step.name} in flight, found {job_count(in_flight)} without any change"
            f" for {seconds:.0f} s: {state}; make sure that workers pull from it, or wait for jobs that are to be tried"
            " again later, and provision again"
        )


async def update_consumer(
    connection: Connection, stream: str, config: Mapping[str, Any], action: str = "update"
) -> None:
    """Create or update a consumer.

    :param config: its whole configuration
    :raises ApiError: the server refused
    """
    # Older servers leave the name out where a consumer was created with a durable name only.
    subject = f"CONSUMER.CREATE.{stream}.{config.get('name') or config['durable_name']}"
    if filter_subject := config.get("filter_subject"):
        subject += f".{filter_subject}"
    await connection.api(subject, {"stream_name": stream, "config": dict(config), "action": action})


def _progress(info: Mapping[str, Any]) -> tuple[Any, ...]:
    return info["num_ack_pending"], info["delivered"]["consumer_seq"], info["ack_floor"]["consumer_seq"]


def _longest_wait(config: Mapping[str, Any]) -> float:
    return float(max([config.get("ack_wait", 0), *(config.get("backoff") or [])])) / NANOSECONDS
