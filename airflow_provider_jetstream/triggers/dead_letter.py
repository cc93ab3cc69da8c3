"""The trigger that waits for dead letters: once for a sensor, or again and again for a watcher of an asset."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.dead_letters.group import group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.tasks.arguments import check_flags, check_positive_seconds
from airflow_provider_jetstream.tasks.outcome import json_result
from airflow_provider_jetstream.tasks.queue_source import load_queue, require_dead_letter_queue
from airflow_provider_jetstream.tasks.template_values import (
    parse_count,
    parse_selection,
    parse_span,
    selection_as_json,
)
from airflow_provider_jetstream.triggers.polling import PollingTrigger
from airflow_provider_jetstream.triggers.short_collections import SHORT_COLLECTIONS
from airflow_provider_jetstream.triggers.watcher_arguments import dict_of_text, dicts_as_texts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource

# Between two tries while letters can't be watched; doubled each time.
_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 60.0
_INTERVAL = 60.0


class DeadLetterTrigger(PollingTrigger, BaseEventTrigger):
    """Fires when a queue has dead letters: once for the sensor, or for a watcher each time that letters arrive.

    As the trigger of an ``AssetWatcher`` it reports each letter once. What was reported is remembered while the
    triggerer runs, and from Airflow 3.3 on beyond that, in the store of the watched asset. An event is a hint that
    letters are there: the run that it starts should select letters by the queue rather than by the event, since Airflow
    may start one run for several events, or leave an event for the next run.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param min_count: dead letters to wait for; with ``group_by``, of any one group. A watcher counts those that it
        hasn't reported
    :param select: which dead letters, as a :class:`~airflow_provider_jetstream.jetstream.Selection` or its dict
    :param older_than: how long the first of them has to be dead
    :param group_by: the fields that letters of a group share: any of reason, error_class, fingerprint,
        traceback_digest, error_place, subject, consumer, dag_id, run_id, task_id
    :param only_new_groups: for a watcher: fire for a group only while no dead letter of it has been reported, so with
        ``group_by=["fingerprint"]`` when letters die of something new
    :param census: for the sensor: whether to pause consumers until nothing of them is in flight, so that more letters
        are certain
    :param poll_interval: seconds after which the queue is looked at even if no dead letter is announced
    :param nats_conn_id: the Airflow connection
    :param deferred_at: seconds since the epoch at which the sensor deferred itself; absent for a watcher
    """

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        min_count: int = 1,
        select: Selection | Mapping[str, Any] | None = None,
        older_than: timedelta | float | str = 0.0,
        group_by: Sequence[GroupField] = (),
        only_new_groups: bool = False,
        census: bool = False,
        poll_interval: float = _INTERVAL,
        nats_conn_id: str = JetStreamHook.default_conn_name,
        deferred_at: float | None = None,
    ) -> None:
        queue = load_queue(dict_of_text(work_queue))
        declared = queue.model_dump(mode="json", exclude_unset=True)
        super().__init__(
            nats_conn_id=nats_conn_id,
            work_queue=declared,
            poll_interval=poll_interval,
            deferred_at=deferred_at or 0.0,
        )
        check_flags(census=census, only_new_groups=only_new_groups)
        self.min_count = parse_count("min_count", min_count, 1)
        self.select = selection_as_json(parse_selection(dict_of_text(select)))
        self.older_than = parse_span("older_than", older_than).total_seconds()
        self.group_by = list(group_fields(group_by))
        self.only_new_groups = only_new_groups
        self.census = census
        self.is_watcher = deferred_at is None
        if self.is_watcher:
            require_dead_letter_queue(queue)
            check_positive_seconds(poll_interval=poll_interval)
            self._require_watchable()
        elif only_new_groups:
            raise SelectionError("expected only_new_groups for the watcher of an asset only, found it for a sensor")

    def criteria(self) -> dict[str, Any]:
        """Return the arguments that make up the condition."""
        return {
            "min_count": self.min_count,
            "select": self.select,
            "older_than": self.older_than,
            "group_by": self.group_by,
            "only_new_groups": self.only_new_groups,
            "census": self.census,
        }

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that recreate the trigger elsewhere; never a secret."""
        path, arguments = super().serialize()
        return path, dicts_as_texts(arguments | {"deferred_at": None}) if self.is_watcher else arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once for the sensor; for a watcher each time that letters arrive, without an end.

        A watcher that ended or failed would be recreated every two seconds, so it waits while the server is away, and
        while the queue can't be read.
        """
        if not self.is_watcher:
            async for event in super().run():
                yield event
            return
        # DAG files import this module, and only a triggerer waits.
        from airflow_provider_jetstream.jetstream.dead_letters.letter_arrivals import watch_arrivals
        from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import LetterCriteria
        from airflow_provider_jetstream.triggers.reported_letters import ReportedStore

        queue, fields = load_queue(self.work_queue), group_fields(self.group_by)
        age = timedelta(seconds=self.older_than)
        criteria = LetterCriteria(Selection.of(self.select), fields, self.min_count, age)
        store = ReportedStore(self.serialize()[1], getattr(self, "asset_state_store", None))
        pause = _FIRST_PAUSE
        options = {"only_new_groups": self.only_new_groups}
        try:
            while True:
                reported = await store.load()
                try:
                    async with (
                        JetStreamHook(self.nats_conn_id).shared() as connection,
                        watch_arrivals(connection, queue, criteria, self.poll_interval, reported, **options) as watch,
                    ):
                        while True:
                            with SHORT_COLLECTIONS:
                                arrivals = await watch.next()
                            pause = _FIRST_PAUSE
                            payload = json_result(arrivals.as_json())
                            self.log.info("%d dead letters arrived in %s", payload["arrived"], queue.name)
                            yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
                            store.keep(arrivals.reported)
                except Exception as error:  # noqa: BLE001 - Airflow would recreate the watcher at once, and for ever
                    self.log.warning(
                        "The dead letters of %s can't be watched, trying again in %g s: %s", queue.name, pause, error
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            store.close()

    def _require_watchable(self) -> None:
        """Refuse what only a poll could find."""
        selection = Selection.of(self.select)
        if self.census or selection.sequences is not None or selection.selects_undeliverable:
            raise SelectionError(
                "expected letters that the dead letter queue announces, found census, sequences or undeliverable jobs:"
                " use JetStreamDeadLetterSensor for these"
            )
        if self.only_new_groups and not self.group_by:
            raise SelectionError(
                "expected only_new_groups together with group_by, which says what a group is, found none: add it, such"
                ' as group_by=["fingerprint"]'
            )

    async def poll(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Wait for enough dead letters with the queue's other triggers, or scan once where that isn't possible.

        A census pauses consumers, which is this trigger's alone, and jobs that are named or that no consumer takes are
        looked for one by one.

        :return: the summary if there are enough
        """
        age, selection = timedelta(seconds=self.older_than), Selection.of(self.select)
        if self.census or selection.sequences is not None or selection.selects_undeliverable:
            summary = await hook.ascan_dead_letters(self.work_queue, selection, self.group_by, census=self.census)
            return summary.as_json() if summary.reached(self.min_count, age) else None
        # DAG files import this module, and only a triggerer waits.
        from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import LetterCriteria, wait_for_dead_letters

        queue, fields = load_queue(self.work_queue), group_fields(self.group_by)
        criteria = LetterCriteria(selection, fields, self.min_count, age)
        async with hook.shared() as connection:
            with SHORT_COLLECTIONS:
                summary = await wait_for_dead_letters(connection, queue, criteria, self.poll_interval)
        return summary.as_json()
