"""The sensor that waits until a queue is drained."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.common.compat.sdk import AirflowFailException, BaseSensorOperator, PokeReturnValue, conf

from airflow_provider_jetstream.hooks.failing import terminal_errors_fail
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.hooks.rendering import absent, templated
from airflow_provider_jetstream.hooks.results import plain
from airflow_provider_jetstream.jetstream.draining import check_drained, chosen_consumers
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.queue import QueueSource


class JetStreamQueueDrainedSensor(BaseSensorOperator):
    """Succeed when a work queue is drained: nothing pending, nothing in flight.

    Jobs count that wait, that workers have, that were handed back and wait for their delay, and that no consumer takes.
    Jobs for later don't. A server that is away is waited for.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.queue.WorkQueue`, its dict, or its YAML's path
    :param consumers: names of the consumers to look at; all, and jobs that no consumer takes, where absent
    :param nothing_dead: wait until no dead letter is in circulation either: until each was redriven and done, or parked
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: the counts, and the names of the consumers
    :raises NotFoundError: ``consumers`` names none
    """

    template_fields: Sequence[str] = ("work_queue", "consumers", "nats_conn_id")
    ui_color = "#d9ecf5"

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        consumers: Sequence[str] | str | None = None,
        nothing_dead: bool = False,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = JetStreamHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.work_queue = work_queue
        self.consumers = consumers
        self.nothing_dead = nothing_dead
        self.deferrable = deferrable
        self.nats_conn_id = nats_conn_id
        self._selective = consumers is not None
        if not templated(consumers):
            self._chosen()

    def poke(self, context: Context) -> PokeReturnValue:
        """Look once.

        :param context: the task's context
        :return: whether the queue is drained, and what was found
        :raises AirflowFailException: if looking is impossible
        """
        hook = JetStreamHook(self.nats_conn_id)
        try:
            with terminal_errors_fail():
                report = hook.blocking(
                    check_drained, WorkQueue.load(self.work_queue), self._chosen(), nothing_dead=self.nothing_dead
                )
        except (TransientError, ApiError) as error:
            self.log.warning("Looking at the queue failed, trying again: %s", error)
            return PokeReturnValue(is_done=False)
        self.log.info("%s", report)
        for risk in report.risks:
            self.log.warning("%s", risk)
        return PokeReturnValue(is_done=report.drained, xcom_value=plain(report.as_json()))

    def execute(self, context: Context) -> Any:
        """Wait until the queue is drained.

        :param context: the task's context
        :return: what was found
        """
        if not self.deferrable:
            return super().execute(context)
        first = self.poke(context)
        if not first.is_done:
            self._defer()
        return first.xcom_value

    def _chosen(self) -> tuple[str, ...] | None:
        if not self._selective:
            return None
        # What renders to nothing must not mean all.
        return chosen_consumers([] if absent(self.consumers) else self.consumers)

    def _defer(self) -> NoReturn:
        with terminal_errors_fail():
            queue, consumers = WorkQueue.load(self.work_queue), self._chosen()
        self.defer(
            trigger=QueueDrainedTrigger(
                nats_conn_id=self.nats_conn_id,
                work_queue=queue.model_dump(mode="json", exclude_unset=True),
                poll_interval=self.poke_interval,
                deferred_at=time.time(),
                consumers=consumers,
                nothing_dead=self.nothing_dead,
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
        self.log.info("%s is drained", event["found"]["queue"])
        found: dict[str, Any] = event["found"]
        return found
