"""The operator of the DAG that redrives: it learns from its run which queue, which letters, and what with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.reprocessing.actions import REDRIVE, request_for_action
from airflow_provider_jetstream.tasks.error_mapping import terminal_errors_fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.providers.common.compat.sdk import Context


class JetStreamRedriveByNameOperator(JetStreamRedriveOperator):
    """Bring dead letters of a queue back that is declared nowhere but on its server.

    :param queue_name: the queue's name
    :param action: ``redrive``, ``park``, or ``in_place`` for all letters of the queue
    :param count_only: tell what would be done, and change nothing; a template may give it as text
    """

    template_fields: Sequence[str] = ("queue_name", "select", "rate", "why", "nats_conn_id", "action", "count_only")

    def __init__(
        self, *, queue_name: str, action: str = REDRIVE, count_only: bool | str = False, **kwargs: Any
    ) -> None:
        # Its declaration takes its place as soon as it is known.
        super().__init__(work_queue=queue_name, **kwargs)
        self.queue_name = queue_name
        self.action = action
        self.count_only = count_only

    def execute(self, context: Context) -> dict[str, Any]:
        """Find the queue's declaration on the server, and redrive.

        :param context: the task's context
        :return: the result of the task
        :raises AirflowFailException: there is no such queue, or what is asked for isn't possible
        :raises RedriveError: some letters stayed where they were
        """
        with terminal_errors_fail():
            asked = request_for_action(self.action, Selection())
            self.protocol, self.max_redrives = asked.protocol.value, asked.max_redrives
            self.only_preview = str(self.count_only).strip().lower() == "true"
            self.work_queue = JetStreamHook(self.nats_conn_id).blocking(discover_queue, self.queue_name)
        return super().execute(context)
