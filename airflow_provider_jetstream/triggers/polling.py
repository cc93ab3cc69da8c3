"""The base class of triggers that poll a queue."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_jetstream.jetstream.errors import ApiError, TerminalError, TransientError
from airflow_provider_jetstream.tasks.arguments import check_mapping, check_positive_seconds, check_text
from airflow_provider_jetstream.tasks.context import json_result
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.triggers.triggerer import EarlyFireGuard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook


class PollingTrigger(BaseTrigger):
    """Polls a queue until a condition holds, and keeps polling while the server is away.

    :param nats_conn_id: the Airflow connection
    :param work_queue: the queue's declaration as a dict
    :param poll_interval: seconds from the start of one poll to the next
    :param deferred_at: seconds since the epoch at which the task deferred itself
    """

    def __init__(
        self, *, nats_conn_id: str, work_queue: Mapping[str, Any], poll_interval: float, deferred_at: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_text(nats_conn_id=nats_conn_id)
        check_mapping(work_queue=work_queue)
        check_positive_seconds(poll_interval=poll_interval)
        self.nats_conn_id = nats_conn_id
        self.work_queue = dict(work_queue)
        self.poll_interval = poll_interval
        self.deferred_at = deferred_at

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that recreate the trigger elsewhere; never a secret."""
        return (
            f"{type(self).__module__}.{type(self).__name__}",
            {
                "nats_conn_id": self.nats_conn_id,
                "work_queue": self.work_queue,
                "poll_interval": self.poll_interval,
                "deferred_at": self.deferred_at,
                **self.criteria(),
            },
        )

    @abstractmethod
    def criteria(self) -> dict[str, Any]:
        """Return the arguments that make up the condition."""

    @abstractmethod
    async def poll(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Poll the queue once.

        :return: the result as JSON if the condition holds, else ``None``
        """

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until the condition holds, then fire one event with ``status`` ``found`` or ``error``."""
        guard = EarlyFireGuard(self.deferred_at)
        try:
            event = {"status": "found", "found": json_result(await self._result())}
        except TerminalError as error:
            event = {"status": "error", "message": f"{error.code} {error}"}
        await guard.wait()
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def _result(self) -> Mapping[str, Any]:
        hook = hook_for(self.nats_conn_id)
        while True:
            started = time.monotonic()
            try:
                if result := await self.poll(hook):
                    return result
            except (TransientError, ApiError) as error:
                self.log.warning("Polling the queue failed, trying again: %s %s", error.code, error)
            await asyncio.sleep(max(0.0, self.poll_interval - (time.monotonic() - started)))
