"""The trigger of a task that waits for messages on a consumer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Unpack

from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import check_text, check_times
from airflow_provider_jetstream.triggers.polling import PollingTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.tasks.argument_types import PollingTriggerArguments


class WaitingMessagesTrigger(PollingTrigger):
    """Fires when a consumer could deliver a message, or at a deadline.

    :param consumer: the consumer's name
    :param deadline: seconds since the epoch after which it fires in any case
    :param polling: see :class:`PollingTrigger`
    """

    def __init__(self, *, consumer: str, deadline: float, **polling: Unpack[PollingTriggerArguments]) -> None:
        super().__init__(**polling)
        check_text(consumer=consumer)
        check_times(deadline=deadline)
        self.consumer = consumer
        self.deadline = deadline

    def criteria(self) -> dict[str, Any]:
        """Return the arguments that make up the condition."""
        return {"consumer": self.consumer, "deadline": self.deadline}

    async def poll(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Wait for a message; the server tells when one can be delivered."""
        left = max(0.0, self.deadline - time.time())
        async with hook.shared() as connection:
            found = await runtime.wait_for_messages(connection, self.work_queue["name"], self.consumer, left)
        return {"waiting": found.waiting if found else 0, "deadline": self.deadline}
