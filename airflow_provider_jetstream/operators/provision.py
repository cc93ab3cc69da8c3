"""The operator that provisions a work queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks.error_mapping import terminal_errors_fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource


class JetStreamProvisionOperator(BaseOperator):
    """Bring a work queue's streams and consumers into being; do nothing where they are as declared.

    Streams made by hand are adopted. A change that the server can't make is refused before anything is changed.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param nats_conn_id: the Airflow connection
    :return: one line per stream and consumer, saying what was done
    """

    operator_extra_links = (QueueLink(),)
    template_fields: Sequence[str] = ("work_queue", "nats_conn_id")
    ui_color = "#d9ecf5"

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        nats_conn_id: str = JetStreamHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.work_queue = work_queue
        self.nats_conn_id = nats_conn_id

    def execute(self, context: Context) -> list[str]:
        """Provision.

        :param context: the task's context
        :return: one line per stream and consumer
        :raises AirflowFailException: if the declaration can't be used, or the server can't make the change
        """
        with terminal_errors_fail():
            queue = WorkQueue.load(self.work_queue)
            for warning in queue.warnings():
                self.log.warning("Work queue %s: %s", queue.name, warning)
            done = JetStreamHook(self.nats_conn_id).provision(queue)
        for step in done.steps:
            self.log.info("%s", step)
        return [f"{step.action} {step.kind} {step.name}" for step in done.steps]
