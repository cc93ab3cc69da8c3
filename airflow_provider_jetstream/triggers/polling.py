"""What triggers share that look at a queue again and again."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import ApiError, TerminalError, TransientError
from airflow_provider_jetstream.tasks.xcom import plain
from airflow_provider_jetstream.triggers.early_fire_guard import EarlyFireGuard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping


class PollingTrigger(BaseTrigger):
    """Looks at a queue until it is as expected; a server that is away is waited for.

    :param nats_conn_id: the Airflow connection
    :param work_queue: the queue's declaration as a dict
    :param poll_interval: seconds between two looks
    :param deferred_at: seconds since the epoch at which the task deferred itself
    """

    def __init__(
        self, *, nats_conn_id: str, work_queue: Mapping[str, Any], poll_interval: float, deferred_at: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nats_conn_id = nats_conn_id
        self.work_queue = dict(work_queue)
        self.poll_interval = poll_interval
        self.deferred_at = deferred_at

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Give what recreates the trigger elsewhere.

        :return: class path and arguments; never a secret
        """
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
        """Give the arguments that say what is looked for."""

    @abstractmethod
    async def look(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Look once.

        :param hook: the hook
        :return: what was found, if the queue is as expected
        """

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until the queue is as expected, then fire once.

        :return: an event with ``status`` ``found`` or ``error``
        """
        guard = EarlyFireGuard(self.deferred_at)
        try:
            event = {"status": "found", "found": plain(await self._find())}
        except TerminalError as error:
            event = {"status": "error", "message": f"{error.code} {error}"}
        await guard.hold()
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def _find(self) -> Mapping[str, Any]:
        hook = JetStreamHook(self.nats_conn_id)
        while True:
            started = time.monotonic()
            try:
                if found := await self.look(hook):
                    return found
            except (TransientError, ApiError) as error:
                self.log.warning("Looking at the queue failed, trying again: %s", error)
            await asyncio.sleep(max(0.0, self.poll_interval - (time.monotonic() - started)))
