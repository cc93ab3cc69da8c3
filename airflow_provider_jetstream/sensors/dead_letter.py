"""The sensor that waits for dead letters."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from airflow.sdk import PokeReturnValue

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, NotFoundError, SelectionError
from airflow_provider_jetstream.sensors.polling import PollingSensor
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    is_templated,
    parse_count,
    parse_flag,
    parse_selection,
    parse_span,
    require_rendered,
    selection_as_json,
)
from airflow_provider_jetstream.tasks.context import fail_on_terminal_errors, json_result
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import require_dead_letter_queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.tasks.argument_types import (
        Count,
        DeadLetterSensorOptions,
        Duration,
        Flag,
        PollingArguments,
        PollingTriggerArguments,
        Queue,
        Selected,
    )
    from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger

# A scan of more entries takes longer than a deferral.
_FEW_ENTRIES = 2_000
_DIAGNOSED_GROUPS = 3


class JetStreamDeadLetterSensor(PollingSensor):
    """Succeed when a work queue has dead letters.

    Dead letters for which the server sent no advisory are found too, and only proved ones are counted: not a job that
    finished late, and not an entry about an earlier stream of the same name. The body of a letter is preserved when it
    is first seen.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param select: which dead letters, as a :class:`~airflow_provider_jetstream.jetstream.Selection`, its
        dict, or the text of one; all in circulation where absent
    :param min_count: dead letters to wait for; with ``group_by``, of any one group
    :param older_than: wait until the first of them is dead for this long: a :class:`~datetime.timedelta`, text such as
        ``"10m"``, or seconds
    :param group_by: the fields that letters of a group share: any of reason, error_class, fingerprint,
        traceback_digest, error_place, subject, consumer, dag_id, run_id, task_id
    :param count_under_pause: pause the consumers at each check until nothing is in flight, for their ack wait and half
        a minute at most, so that letters of a queue that is never idle are certain; needs nats-server 2.11
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: the count, the sequences as ranges, the groups and their ages, how many entries aren't counted, and the
        ``diagnosis``: what the letters died of, whether that is still so, and what to do
    :raises SelectionError: the selection isn't understood, or letters can't be grouped by one of the fields
    """

    template_fields: Sequence[str] = (
        "work_queue",
        "select",
        "min_count",
        "older_than",
        "count_under_pause",
        "nats_conn_id",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"work_queue": "json", "select": "json"}
    ui_color = "#f5e6d9"

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls, *, task_id: str, work_queue: Queue = ..., **options: Unpack[DeadLetterSensorOptions]
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    def __init__(
        self,
        *,
        select: Selected | None = None,
        min_count: Count = 1,
        older_than: Duration | None = None,
        group_by: Iterable[GroupField] = (),
        count_under_pause: Flag = False,
        **kwargs: Unpack[PollingArguments],
    ) -> None:
        super().__init__(**kwargs)
        self.select = selection_as_json(select) if isinstance(select, runtime.Selection) else select
        self.min_count = min_count
        self.older_than = older_than
        self.group_by = runtime.group_fields(group_by)
        self.count_under_pause = count_under_pause
        self._has_age = older_than is not None
        self._is_selective = select is not None
        require_dead_letter_queue(self._known_queue)
        if not is_templated(min_count):
            self._count()
        if not is_templated(older_than):
            self._age()
        if not is_templated(select):
            parse_selection(select)
        if not is_templated(count_under_pause):
            parse_flag("count_under_pause", count_under_pause, SelectionError)

    def poke(self, context: Context) -> PokeReturnValue:
        """Scan the dead letters once.

        :raises AirflowFailException: the queue can't be scanned
        """
        with fail_on_terminal_errors():
            count, age = self._count(), self._age()
            summary = hook_for(self.nats_conn_id).scan_dead_letters(
                self.loaded_queue(), self._selection(), self.group_by, count_under_pause=self._counts_under_pause()
            )
        self.log.info("%s", summary)
        for risk in summary.risks:
            self.log.warning("%s", risk)
        is_done, result = summary.reached(count, age), summary.as_json()
        if is_done:
            result["diagnosis"] = self._diagnosis()
        return PokeReturnValue(is_done=is_done, xcom_value=json_result(result))

    def first_poke(self, context: Context) -> PokeReturnValue | None:
        """Look once before deferring, unless there are many entries: the triggers of a queue share what they know."""
        with fail_on_terminal_errors():
            entries = hook_for(self.nats_conn_id).blocking(_count_entries, self.loaded_queue())
        return self.poke(context) if entries <= _FEW_ENTRIES else None

    def polling_trigger(self, polling: PollingTriggerArguments) -> DeadLetterTrigger:
        """Return the trigger that goes on polling."""
        # Only a task that defers needs the trigger.
        from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger as Trigger

        return Trigger(
            select=selection_as_json(self._selection()),
            min_count=self._count(),
            older_than=self._age().total_seconds(),
            group_by=list(self.group_by),
            count_under_pause=self._counts_under_pause(),
            **polling,
        )

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Resume after the trigger, and diagnose what it found.

        :raises AirflowFailException: polling was impossible
        """
        found = super().execute_complete(context, event)
        result: dict[str, Any] = json_result(found | {"diagnosis": self._diagnosis()})
        return result

    def _diagnosis(self) -> dict[str, Any] | None:
        """Say what the letters died of; ``None`` where that isn't possible: the sensor has found what it is for."""
        try:
            diagnosis = hook_for(self.nats_conn_id).diagnose_dead_letters(self.loaded_queue(), self._selection())
        except JetStreamProviderError as error:
            self.log.warning("The dead letters can't be diagnosed: %s", error)
            return None
        self.log.info("%s", diagnosis)
        runtime.send_dead_letter_metrics(diagnosis)
        return diagnosis.as_json(groups=_DIAGNOSED_GROUPS)

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Log the result of a trigger."""
        self.log.info("%d dead letters", result["dead"])

    def _count(self) -> int:
        return parse_count("min_count", self.min_count, 1)

    def _age(self) -> timedelta:
        return parse_span("older_than", self.older_than) if self._has_age else timedelta()

    def _counts_under_pause(self) -> bool:
        return parse_flag("count_under_pause", self.count_under_pause, SelectionError)

    def _selection(self) -> Selection:
        if self._is_selective:
            require_rendered("select", self.select)
        return parse_selection(self.select)


async def _count_entries(connection: Connection, queue: WorkQueue) -> int:
    try:
        return await runtime.count_entries(connection, queue)
    except NotFoundError:
        # The scan says which of the queue's streams is missing.
        return 0
