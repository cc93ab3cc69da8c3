"""The sensor that waits until a queue is drained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from airflow.sdk import PokeReturnValue

from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
from airflow_provider_jetstream.sensors.polling import PollingSensor
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import check_flags, is_absent, is_templated, parse_list
from airflow_provider_jetstream.tasks.context import fail_on_terminal_errors, json_result
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import require_dead_letter_queue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.tasks.argument_types import (
        DrainedSensorOptions,
        PollingArguments,
        PollingTriggerArguments,
        Queue,
        Text,
    )
    from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger


class JetStreamQueueDrainedSensor(PollingSensor):
    """Succeed when a work queue is drained: nothing pending, nothing in flight.

    Pending jobs count, and jobs that workers have, that were nak'ed with a delay, and that match no consumer's filter.
    Scheduled jobs don't. While the server is away, the sensor keeps polling.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param consumers: names of the consumers to check; all, and jobs that match no filter, where absent
    :param nothing_dead: wait until no dead letter is in circulation either: until each was redriven and completed, or
        parked
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: the counts, and the names of the consumers
    :raises NotFoundError: ``consumers`` names none
    """

    template_fields: Sequence[str] = ("work_queue", "consumers", "nats_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"work_queue": "json", "consumers": "json"}
    ui_color = "#d9ecf5"

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls, *, task_id: str, work_queue: Queue = ..., **options: Unpack[DrainedSensorOptions]
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    def __init__(
        self,
        *,
        consumers: Sequence[str] | Text | None = None,
        nothing_dead: bool = False,
        **kwargs: Unpack[PollingArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_flags(nothing_dead=nothing_dead)
        if nothing_dead:
            require_dead_letter_queue(self._known_queue)
        self.consumers = consumers
        self.nothing_dead = nothing_dead
        self._is_selective = consumers is not None
        if not is_templated(consumers):
            self._consumers()

    def poke(self, context: Context) -> PokeReturnValue:
        """Check the queue once.

        :raises AirflowFailException: the queue can't be checked
        """
        hook = hook_for(self.nats_conn_id)
        try:
            with fail_on_terminal_errors():
                report = hook.check_drained(self.loaded_queue(), self._consumers(), nothing_dead=self.nothing_dead)
        except (TransientError, ApiError) as error:
            self.log.warning("Polling the queue failed, trying again: %s", error)
            return PokeReturnValue(is_done=False)
        self.log.info("%s", report)
        for risk in report.risks:
            self.log.warning("%s", risk)
        return PokeReturnValue(is_done=report.drained, xcom_value=json_result(report.as_json()))

    def polling_trigger(self, polling: PollingTriggerArguments) -> QueueDrainedTrigger:
        """Return the trigger that goes on polling."""
        # Only a task that defers needs the trigger.
        from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger as Trigger

        return Trigger(consumers=self._consumers(), nothing_dead=self.nothing_dead, **polling)

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Log the result of a trigger."""
        self.log.info("%s is drained", result["queue"])

    def _consumers(self) -> tuple[str, ...] | None:
        if not self._is_selective:
            return None
        # A template that renders to nothing must not select all consumers.
        return runtime.chosen_consumers([] if is_absent(self.consumers) else parse_list(self.consumers))
