"""The sensor that waits for dead letters."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import PokeReturnValue

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.dead_letters.find import group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import parse_duration
from airflow_provider_jetstream.sensors.polling import PollingSensor
from airflow_provider_jetstream.tasks.error_mapping import terminal_errors_fail
from airflow_provider_jetstream.tasks.template_values import (
    require_rendered,
    selection_as_json,
    selection_of,
    templated,
)
from airflow_provider_jetstream.tasks.xcom import plain
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField


class JetStreamDeadLetterSensor(PollingSensor):
    """Succeed when a work queue has dead letters.

    Dead letters that the server told nobody about are found too, and only those beyond doubt are counted: not what is
    said about a job that finished late, or about an earlier stream of the same name. Their bodies are kept on first
    sight.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param select: which dead letters, as a :class:`~airflow_provider_jetstream.jetstream.Selection`, its
        dict, or the text of one; all in circulation where absent
    :param min_count: dead letters to wait for; with ``group_by``, of any one group
    :param older_than: wait until the first of them is dead for this long: a :class:`~datetime.timedelta`, or text such
        as ``"10m"``
    :param group_by: what letters of a group share: any of reason, error_class, fingerprint, traceback_digest,
        error_place, subject, consumer, dag_id, run_id, task_id
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: the count, the sequences as ranges, the groups and their ages, and what isn't counted
    :raises SelectionError: the selection isn't understood, or letters can't be grouped by that
    """

    template_fields: Sequence[str] = ("work_queue", "select", "nats_conn_id")
    ui_color = "#f5e6d9"

    def __init__(
        self,
        *,
        select: Selection | Mapping[str, Any] | str | None = None,
        min_count: int = 1,
        older_than: timedelta | str | None = None,
        group_by: Iterable[GroupField] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if min_count < 1:
            raise ValueError(f"expected min_count of at least 1, found {min_count}")
        self.select = selection_as_json(select) if isinstance(select, Selection) else select
        self.min_count = min_count
        self.older_than = older_than
        self.group_by = group_fields(group_by)
        self._age = timedelta(microseconds=parse_duration(older_than or "0") / 1_000)
        self._selective = select is not None
        if not templated(select):
            selection_of(select)

    def poke(self, context: Context) -> PokeReturnValue:
        """Look once.

        :param context: the task's context
        :return: whether there are enough, and what was found
        :raises AirflowFailException: if looking is impossible
        """
        with terminal_errors_fail():
            summary = JetStreamHook(self.nats_conn_id).scan_dead_letters(
                WorkQueue.load(self.work_queue), self._selection(), self.group_by
            )
        self.log.info("%s", summary)
        for risk in summary.risks:
            self.log.warning("%s", risk)
        return PokeReturnValue(is_done=summary.reached(self.min_count, self._age), xcom_value=plain(summary.as_json()))

    def trigger(self, looking: Mapping[str, Any]) -> DeadLetterTrigger:
        """Give the trigger that goes on looking.

        :param looking: the arguments that all such triggers have
        :return: the trigger
        """
        return DeadLetterTrigger(
            select=selection_as_json(self._selection()),
            min_count=self.min_count,
            older_than=self._age.total_seconds(),
            group_by=list(self.group_by),
            **looking,
        )

    def tell(self, found: Mapping[str, Any]) -> None:
        """Log what a trigger found.

        :param found: what it found
        """
        self.log.info("%d dead letters", found["dead"])

    def _selection(self) -> Selection:
        if self._selective:
            require_rendered("select", self.select)
        return selection_of(self.select)
