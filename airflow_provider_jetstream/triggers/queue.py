"""The trigger that waits until a queue is drained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import check_flags
from airflow_provider_jetstream.triggers.polling import PollingTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.tasks.argument_types import PollingTriggerArguments


class QueueDrainedTrigger(PollingTrigger):
    """Fires when a queue is drained.

    :param consumers: names of the consumers to check; all where absent
    :param nothing_dead: whether to wait until no dead letter is in circulation either
    :param polling: see :class:`PollingTrigger`
    """

    def __init__(
        self,
        *,
        consumers: Sequence[str] | None = None,
        nothing_dead: bool = False,
        **polling: Unpack[PollingTriggerArguments],
    ) -> None:
        super().__init__(**polling)
        check_flags(nothing_dead=nothing_dead)
        chosen = runtime.chosen_consumers(consumers)
        self.consumers = None if chosen is None else list(chosen)
        self.nothing_dead = nothing_dead
        self._logged = ""

    def criteria(self) -> dict[str, Any]:
        """Return the arguments that make up the condition."""
        return {"consumers": self.consumers, "nothing_dead": self.nothing_dead}

    async def poll(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Check the queue once; return the counts if it is drained."""
        report = await hook.acheck_drained(self.work_queue, self.consumers, nothing_dead=self.nothing_dead)
        if (line := str(report)) != self._logged:
            self._logged = line
            self.log.info("%s", line)
        return report.as_json() if report.drained else None
