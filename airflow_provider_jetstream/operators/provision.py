"""The operator that provisions a work queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource


class JetStreamProvisionOperator(BaseOperator):
    """Create or update a work queue's streams and consumers; do nothing where they are as declared.

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
        """Provision the queue.

        :raises AirflowFailException: the declaration can't be used, or the server can't make the change
        """
        with fail_on_terminal_errors():
            queue = WorkQueue.load(self.work_queue)
            for warning in queue.warnings():
                self.log.warning("Work queue %s: %s", queue.name, warning)
            plan = JetStreamHook(self.nats_conn_id).provision(queue)
        for step in plan.steps:
            self.log.info("%s", step)
        return [f"{step.action} {step.kind} {step.name}" for step in plan.steps]
