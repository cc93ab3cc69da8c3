"""The base class of sensors that poll a queue, in the task itself or in a trigger."""

from __future__ import annotations

import time
from abc import abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator

from airflow_provider_jetstream.airflow_compat import AirflowFailException, conf
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks.arguments import check_flags, check_text, check_work_queue
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors
from airflow_provider_jetstream.triggers.early_fire_guard import SHORTEST_MARGIN, exit_notice_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource
    from airflow_provider_jetstream.triggers.polling import PollingTrigger


class PollingSensor(BaseSensorOperator):
    """Polls a queue until a condition holds.

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
        check_work_queue(work_queue)
        check_text(nats_conn_id=nats_conn_id)
        check_flags(deferrable=deferrable)
        self.work_queue = work_queue
        self.deferrable = deferrable
        self.nats_conn_id = nats_conn_id

    @abstractmethod
    def polling_trigger(self, polling: Mapping[str, Any]) -> PollingTrigger:
        """Return the trigger that goes on polling.

        :param polling: the arguments of :class:`~airflow_provider_jetstream.triggers.polling.PollingTrigger`
        """

    @abstractmethod
    def log_result(self, result: Mapping[str, Any]) -> None:
        """Log the result of a trigger."""

    def execute(self, context: Context) -> Any:
        """Wait until the condition holds.

        :return: the result of the last poll
        """
        if not self.deferrable:
            return super().execute(context)
        first: Any = self.poke(context)
        if not first.is_done:
            self._defer()
        return first.xcom_value

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Resume after the trigger.

        :raises AirflowFailException: polling was impossible
        """
        if event is None or event["status"] == "error":
            raise AirflowFailException(event["message"] if event else "the trigger ended without an event")
        result: dict[str, Any] = event["found"]
        self.log_result(result)
        return result

    def _defer(self) -> NoReturn:
        with fail_on_terminal_errors():
            trigger = self.polling_trigger(
                {
                    "nats_conn_id": self.nats_conn_id,
                    "work_queue": WorkQueue.load(self.work_queue).model_dump(mode="json", exclude_unset=True),
                    "poll_interval": self.poke_interval,
                    "deferred_at": time.time(),
                }
            )
        # Airflow's own time limit resumes a task too, and fails it if that comes too early.
        seconds = max(self.timeout, exit_notice_seconds() + SHORTEST_MARGIN)
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=seconds))
