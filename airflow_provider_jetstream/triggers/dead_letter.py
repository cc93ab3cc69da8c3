"""The trigger that waits for dead letters."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.group import group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.tasks.arguments import check_flags
from airflow_provider_jetstream.tasks.queue_source import load_queue
from airflow_provider_jetstream.tasks.template_values import parse_count, parse_selection, parse_span
from airflow_provider_jetstream.triggers.polling import PollingTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField


class DeadLetterTrigger(PollingTrigger):
    """Fires when a queue has dead letters.

    :param min_count: dead letters to wait for; with ``group_by``, of any one group
    :param select: which dead letters, as a dict
    :param older_than: seconds that the first of them has to be dead
    :param group_by: the fields that letters of a group share
    :param census: whether to pause consumers until nothing of them is in flight, so that more letters are certain
    :param polling: see :class:`PollingTrigger`
    """

    def __init__(
        self,
        *,
        min_count: int,
        select: Mapping[str, Any] | None = None,
        older_than: float = 0.0,
        group_by: Sequence[GroupField] = (),
        census: bool = False,
        **polling: Any,
    ) -> None:
        super().__init__(**polling)
        parse_count("min_count", min_count, 1)
        parse_span("older_than", older_than)
        parse_selection(select)
        group_fields(group_by)
        check_flags(census=census)
        self.min_count = min_count
        self.select = dict(select or {})
        self.older_than = older_than
        self.group_by = list(group_by)
        self.census = census

    def criteria(self) -> dict[str, Any]:
        """Return the arguments that make up the condition."""
        return {
            "min_count": self.min_count,
            "select": self.select,
            "older_than": self.older_than,
            "group_by": self.group_by,
            "census": self.census,
        }

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
        from airflow_provider_jetstream.jetstream.waiting.letter_watch import LetterCriteria, wait_for_dead_letters

        queue, fields = load_queue(self.work_queue), group_fields(self.group_by)
        criteria = LetterCriteria(selection, fields, self.min_count, age)
        summary = await hook.awaited(wait_for_dead_letters, queue, criteria, self.poll_interval)
        return summary.as_json()
