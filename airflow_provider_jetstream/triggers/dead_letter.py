"""The trigger that waits for dead letters."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.hooks.results import plain
from airflow_provider_jetstream.jetstream.errors import ApiError, TerminalError, TransientError
from airflow_provider_jetstream.triggers.holding import EarlyFireGuard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.summary import Summary


class DeadLetterTrigger(BaseTrigger):
    """Fires when a queue has dead letters.

    :param nats_conn_id: the Airflow connection
    :param work_queue: the queue's declaration as a dict
    :param min_count: dead letters to wait for; with ``group_by``, of any one group
    :param poll_interval: seconds between two looks
    :param deferred_at: seconds since the epoch at which the task deferred itself
    :param select: which dead letters, as a dict
    :param older_than: seconds that the first of them has to be dead
    :param group_by: what letters of a group share
    """

    def __init__(
        self,
        *,
        nats_conn_id: str,
        work_queue: Mapping[str, Any],
        min_count: int,
        poll_interval: float,
        deferred_at: float,
        select: Mapping[str, Any] | None = None,
        older_than: float = 0.0,
        group_by: Sequence[GroupField] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nats_conn_id = nats_conn_id
        self.work_queue = dict(work_queue)
        self.min_count = min_count
        self.poll_interval = poll_interval
        self.deferred_at = deferred_at
        self.select = dict(select or {})
        self.older_than = older_than
        self.group_by = list(group_by)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Give what recreates the trigger elsewhere.

        :return: class path and arguments; never a secret
        """
        return (
            f"{type(self).__module__}.{type(self).__name__}",
            {
                "nats_conn_id": self.nats_conn_id,
                "work_queue": self.work_queue,
                "min_count": self.min_count,
                "poll_interval": self.poll_interval,
                "deferred_at": self.deferred_at,
                "select": self.select,
                "older_than": self.older_than,
                "group_by": self.group_by,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there are enough, then fire once.

        :return: an event with ``status`` ``found`` or ``error``
        """
        guard = EarlyFireGuard(self.deferred_at)
        try:
            event = {"status": "found", "found": plain((await self._look()).as_json())}
        except TerminalError as error:
            event = {"status": "error", "message": f"{error.code} {error}"}
        await guard.hold()
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def _look(self) -> Summary:
        hook = JetStreamHook(self.nats_conn_id)
        while True:
            started = time.monotonic()
            try:
                summary = await hook.ascan_dead_letters(self.work_queue, self.select, self.group_by)
                if summary.reached(self.min_count, timedelta(seconds=self.older_than)):
                    return summary
            except (TransientError, ApiError) as error:
                self.log.warning("Looking for dead letters failed, trying again: %s", error)
            await asyncio.sleep(max(0.0, self.poll_interval - (time.monotonic() - started)))
