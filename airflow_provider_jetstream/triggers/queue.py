"""The trigger that waits until a queue is drained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.inspection.drained import check_drained
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.triggers.polling import PollingTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook


class QueueDrainedTrigger(PollingTrigger):
    """Fires when a queue is drained.

    :param consumers: names of the consumers to look at; all where absent
    :param nothing_dead: whether to wait until no dead letter is in circulation either
    :param looking: see :class:`LookingTrigger`
    """

    def __init__(self, *, consumers: Sequence[str] | None = None, nothing_dead: bool = False, **looking: Any) -> None:
        super().__init__(**looking)
        self.consumers = None if consumers is None else list(consumers)
        self.nothing_dead = nothing_dead
        self._told = ""

    def criteria(self) -> dict[str, Any]:
        """Give the arguments that say what is looked for."""
        return {"consumers": self.consumers, "nothing_dead": self.nothing_dead}

    async def look(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Look once.

        :param hook: the hook
        :return: the counts, if the queue is drained
        """
        async with hook.shared() as connection:
            report = await check_drained(
                connection, WorkQueue.load(self.work_queue), self.consumers, nothing_dead=self.nothing_dead
            )
        if (told := str(report)) != self._told:
            self._told = told
            self.log.info("%s", told)
        return report.as_json() if report.drained else None
