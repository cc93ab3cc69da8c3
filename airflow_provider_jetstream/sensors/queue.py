"""The sensor that waits until a queue is drained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import PokeReturnValue

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
from airflow_provider_jetstream.jetstream.inspection.drained import check_drained, chosen_consumers
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.sensors.polling import PollingSensor
from airflow_provider_jetstream.tasks.error_mapping import terminal_errors_fail
from airflow_provider_jetstream.tasks.template_values import absent, templated
from airflow_provider_jetstream.tasks.xcom import plain
from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.providers.common.compat.sdk import Context


class JetStreamQueueDrainedSensor(PollingSensor):
    """Succeed when a work queue is drained: nothing pending, nothing in flight.

    Jobs count that wait, that workers have, that were handed back and wait for their delay, and that no consumer takes.
    Jobs for later don't. A server that is away is waited for.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
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
        consumers: Sequence[str] | str | None = None,
        nothing_dead: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.consumers = consumers
        self.nothing_dead = nothing_dead
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

    def trigger(self, looking: Mapping[str, Any]) -> QueueDrainedTrigger:
        """Give the trigger that goes on looking.

        :param looking: the arguments that all such triggers have
        :return: the trigger
        """
        return QueueDrainedTrigger(consumers=self._chosen(), nothing_dead=self.nothing_dead, **looking)

    def tell(self, found: Mapping[str, Any]) -> None:
        """Log what a trigger found.

        :param found: what it found
        """
        self.log.info("%s is drained", found["queue"])

    def _chosen(self) -> tuple[str, ...] | None:
        if not self._selective:
            return None
        # What renders to nothing must not mean all.
        return chosen_consumers([] if absent(self.consumers) else self.consumers)
