"""What sensors share that look at a queue: here, or again and again in a trigger."""

from __future__ import annotations

import time
from abc import abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.common.compat.sdk import AirflowFailException, BaseSensorOperator, conf

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks.error_mapping import terminal_errors_fail
from airflow_provider_jetstream.triggers.early_fire_guard import SHORTEST_MARGIN, noticing_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource
    from airflow_provider_jetstream.triggers.polling import PollingTrigger


class PollingSensor(BaseSensorOperator):
    """Looks at a queue until it is as expected.

    :param work_queue: the queue
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    """

    operator_extra_links = (QueueLink(),)

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = JetStreamHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.work_queue = work_queue
        self.deferrable = deferrable
        self.nats_conn_id = nats_conn_id

    @abstractmethod
    def trigger(self, looking: Mapping[str, Any]) -> PollingTrigger:
        """Give the trigger that goes on looking.

        :param looking: the arguments that all such triggers have
        :return: the trigger
        """

    @abstractmethod
    def tell(self, found: Mapping[str, Any]) -> None:
        """Log what a trigger found.

        :param found: what it found
        """

    def execute(self, context: Context) -> Any:
        """Wait until the queue is as expected.

        :param context: the task's context
        :return: what was found
        """
        if not self.deferrable:
            return super().execute(context)
        first: Any = self.poke(context)
        if not first.is_done:
            self._defer()
        return first.xcom_value

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Go on after the trigger.

        :param context: the task's context
        :param event: what the trigger found
        :return: what was found
        :raises AirflowFailException: looking was impossible
        """
        if event is None or event["status"] == "error":
            raise AirflowFailException(event["message"] if event else "the trigger ended without an event")
        found: dict[str, Any] = event["found"]
        self.tell(found)
        return found

    def _defer(self) -> NoReturn:
        with terminal_errors_fail():
            trigger = self.trigger(
                {
                    "nats_conn_id": self.nats_conn_id,
                    "work_queue": WorkQueue.load(self.work_queue).model_dump(mode="json", exclude_unset=True),
                    "poll_interval": self.poke_interval,
                    "deferred_at": time.time(),
                }
            )
        # Airflow's own time limit resumes a task too, and fails it if that comes too early.
        seconds = max(self.timeout, noticing_seconds() + SHORTEST_MARGIN)
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=seconds))
