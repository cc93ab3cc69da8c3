"""The sensor that waits for dead letters."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.common.compat.sdk import AirflowFailException, BaseSensorOperator, PokeReturnValue, conf

from airflow_provider_jetstream.hooks.failing import terminal_errors_fail
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.queue import QueueSource


class JetStreamDeadLetterSensor(BaseSensorOperator):
    """Succeed when a work queue has dead letters.

    Only entries that were proved are counted: those about a job that finished late, or about an earlier stream of the
    same name, are not.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.queue.WorkQueue`, its dict, or its YAML's path
    :param min_count: dead letters to wait for
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: the count, and the sequences as ranges
    """

    template_fields: Sequence[str] = ("work_queue", "nats_conn_id")
    ui_color = "#f5e6d9"

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        min_count: int = 1,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = JetStreamHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if min_count < 1:
            raise ValueError(f"expected min_count of at least 1, found {min_count}")
        self.work_queue = work_queue
        self.min_count = min_count
        self.deferrable = deferrable
        self.nats_conn_id = nats_conn_id

    def poke(self, context: Context) -> PokeReturnValue:
        """Look once.

        :param context: the task's context
        :return: whether there are enough, and what was found
        :raises AirflowFailException: if looking is impossible
        """
        with terminal_errors_fail():
            findings = JetStreamHook(self.nats_conn_id).find_dead_letters(WorkQueue.load(self.work_queue))
        found = summarise(findings)
        self.log.info("%d dead letters, %d entries dismissed", found["dead"], found["dismissed"])
        return PokeReturnValue(is_done=found["dead"] >= self.min_count, xcom_value=found)

    def execute(self, context: Context) -> Any:
        """Wait for dead letters.

        :param context: the task's context
        :return: what was found
        """
        if not self.deferrable:
            return super().execute(context)
        first = self.poke(context)
        if not first.is_done:
            self._defer()
        return first.xcom_value

    def _defer(self) -> NoReturn:
        with terminal_errors_fail():
            queue = WorkQueue.load(self.work_queue)
        self.defer(
            trigger=DeadLetterTrigger(
                nats_conn_id=self.nats_conn_id,
                work_queue=queue.model_dump(mode="json", exclude_unset=True),
                min_count=self.min_count,
                poll_interval=self.poke_interval,
                deferred_at=time.time(),
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Go on after the trigger.

        :param context: the task's context
        :param event: what the trigger found
        :return: what was found
        :raises AirflowFailException: looking was impossible
        """
        if event is None or event["status"] == "error":
            raise AirflowFailException(event["message"] if event else "the trigger ended without an event")
        self.log.info("%d dead letters", event["found"]["dead"])
        found: dict[str, Any] = event["found"]
        return found
