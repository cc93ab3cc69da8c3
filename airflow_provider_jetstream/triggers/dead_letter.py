"""The trigger that waits for dead letters: once for a sensor, or again and again for a watcher of an asset."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    DEFAULT_CONN_ID,
    check_flags,
    check_positive_seconds,
    dict_of_text,
    dicts_as_texts,
    parse_count,
    parse_selection,
    parse_span,
    selection_as_json,
)
from airflow_provider_jetstream.tasks.context import json_result
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import load_queue, require_dead_letter_queue
from airflow_provider_jetstream.triggers.polling import PollingTrigger
from airflow_provider_jetstream.triggers.triggerer import SHORT_COLLECTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import ReportedLetters
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource

log = logging.getLogger(__name__)

# Between two tries while letters can't be watched; doubled each time.
_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 60.0
_INTERVAL = 60.0
# Airflow stores an event within some seconds; one that is older is stored, or lost with its process.
STORED_AFTER = 30.0
# What doesn't fit is forgotten, and reported once more after a restart.
_LARGEST_STATE = 60_000
_MOST_WATCHERS = 10_000

_reported: dict[str, ReportedLetters] = {}


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
    :param count_under_pause: for the sensor: pause consumers until nothing is in flight, so that more letters
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
        count_under_pause: bool = False,
        poll_interval: float = _INTERVAL,
        nats_conn_id: str = DEFAULT_CONN_ID,
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
        check_flags(count_under_pause=count_under_pause, only_new_groups=only_new_groups)
        self.min_count = parse_count("min_count", min_count, 1)
        self.select = selection_as_json(parse_selection(dict_of_text(select)))
        self.older_than = parse_span("older_than", older_than).total_seconds()
        self.group_by = list(runtime.group_fields(group_by))
        self.only_new_groups = only_new_groups
        self.count_under_pause = count_under_pause
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
            "count_under_pause": self.count_under_pause,
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
        from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import LetterCriteria, watch_arrivals

        queue, fields = load_queue(self.work_queue), runtime.group_fields(self.group_by)
        age = timedelta(seconds=self.older_than)
        criteria = LetterCriteria(runtime.Selection.of(self.select), fields, self.min_count, age)
        store = _ReportedStore(self.serialize()[1], getattr(self, "asset_state_store", None))
        pause = _FIRST_PAUSE
        options = {"only_new_groups": self.only_new_groups}
        try:
            while True:
                reported = await store.load()
                try:
                    async with (
                        hook_for(self.nats_conn_id).shared() as connection,
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
                    code = getattr(error, "code", type(error).__name__)
                    self.log.warning(
                        "The dead letters of %s can't be watched, trying again in %g s: %s %s",
                        *(queue.name, pause, code, error),
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            store.close()

    def _require_watchable(self) -> None:
        """Refuse what only a poll could find."""
        selection = runtime.Selection.of(self.select)
        if self.count_under_pause or selection.sequences is not None or selection.selects_undeliverable:
            raise SelectionError(
                "expected letters that the dead letter queue announces, found count_under_pause, sequences or"
                " undeliverable jobs: use JetStreamDeadLetterSensor for these"
            )
        if self.only_new_groups and not self.group_by:
            raise SelectionError(
                "expected only_new_groups together with group_by, which says what a group is, found none: add it, such"
                ' as group_by=["fingerprint"]'
            )

    async def poll(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Wait for enough dead letters with the queue's other triggers, or scan once where that isn't possible.

        A count under a pause is this trigger's alone, and jobs that are named or that no consumer takes are
        looked for one by one.

        :return: the summary if there are enough
        """
        age, selection = timedelta(seconds=self.older_than), runtime.Selection.of(self.select)
        if self.count_under_pause or selection.sequences is not None or selection.selects_undeliverable:
            summary = await hook.ascan_dead_letters(
                self.work_queue, selection, self.group_by, count_under_pause=self.count_under_pause
            )
            return summary.as_json() if summary.reached(self.min_count, age) else None
        # DAG files import this module, and only a triggerer waits.
        from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import LetterCriteria, wait_for_dead_letters

        queue, fields = load_queue(self.work_queue), runtime.group_fields(self.group_by)
        criteria = LetterCriteria(selection, fields, self.min_count, age)
        async with hook.shared() as connection:
            with SHORT_COLLECTIONS:
                summary = await wait_for_dead_letters(connection, queue, criteria, self.poll_interval)
        return summary.as_json()


class _ReportedStore:
    """What one watcher has reported, kept while the watcher is recreated.

    Airflow runs a watcher from its beginning after each restart of the triggerer and each change of its DAG. In one
    process the state is in memory; from Airflow 3.3 on, the store of the watched asset keeps it beyond the process. It
    is stored there some time after the event: Airflow doesn't say when it has stored an event, and an event that is
    lost with the triggerer must be reported again.

    :param criteria: the arguments that make up the watcher; another one of the same asset has a state of its own
    :param assets: the store of the watched asset, if Airflow has one
    """

    def __init__(self, criteria: Mapping[str, Any], assets: Any) -> None:
        self._key = hashlib.sha256(json.dumps(criteria, sort_keys=True).encode()).hexdigest()[:24]
        self._assets = assets
        self._saving: asyncio.Task[None] | None = None

    async def load(self) -> ReportedLetters:
        """Return what was reported; nothing where that isn't known."""
        # DAG files import this module, and only a triggerer waits.
        from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import ReportedLetters

        if known := _reported.get(self._key):
            return known
        if self._assets is None:
            return ReportedLetters()
        try:
            return ReportedLetters.of_json(await self._assets.aget(self._name))
        except Exception as error:  # noqa: BLE001 - what Airflow raises for a store of several assets, or one that is away
            log.info("What was reported isn't known, so all letters are reported once more: %s", error)
            return ReportedLetters()

    def keep(self, reported: ReportedLetters) -> None:
        """Keep what is reported from now on."""
        if len(_reported) >= _MOST_WATCHERS:
            _reported.pop(next(iter(_reported)))
        _reported[self._key] = reported
        if self._assets is not None:
            self.close()
            self._saving = asyncio.create_task(self._save(reported))

    def close(self) -> None:
        """Forget what isn't stored yet."""
        if self._saving:
            self._saving.cancel()

    @property
    def _name(self) -> str:
        return f"jetstream_reported_{self._key}"

    async def _save(self, reported: ReportedLetters) -> None:
        await asyncio.sleep(STORED_AFTER)
        state = reported.as_json()
        if len(state["sequences"]) > _LARGEST_STATE or not reported.sequences.is_storable:
            log.warning("The letters reported are too scattered to be stored: a new triggerer reports them once more")
            return
        try:
            await self._assets.aset(self._name, state)
        except Exception as error:  # noqa: BLE001 - whatever Airflow raises: the watcher itself goes on
            log.info("What was reported isn't stored, so a new triggerer reports it once more: %s", error)
