"""The trigger that waits until a queue is drained."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.hooks.results import plain
from airflow_provider_jetstream.jetstream.draining import check_drained
from airflow_provider_jetstream.jetstream.errors import ApiError, TerminalError, TransientError
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.triggers.holding import EarlyFireGuard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.draining import DrainReport


class QueueDrainedTrigger(BaseTrigger):
    """Fires when a queue is drained.

    :param nats_conn_id: the Airflow connection
    :param work_queue: the queue's declaration as a dict
    :param poll_interval: seconds between two looks
    :param deferred_at: seconds since the epoch at which the task deferred itself
    :param consumers: names of the consumers to look at; all where absent
    :param nothing_dead: whether to wait until no dead letter is in circulation either
    """

    def __init__(
        self,
        *,
        nats_conn_id: str,
        work_queue: Mapping[str, Any],
        poll_interval: float,
        deferred_at: float,
        consumers: Sequence[str] | None = None,
        nothing_dead: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nats_conn_id = nats_conn_id
        self.work_queue = dict(work_queue)
        self.poll_interval = poll_interval
        self.deferred_at = deferred_at
        self.consumers = None if consumers is None else list(consumers)
        self.nothing_dead = nothing_dead
        self._told = ""

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
                "consumers": self.consumers,
                "nothing_dead": self.nothing_dead,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until the queue is drained, then fire once.

        :return: an event with ``status`` ``drained`` or ``error``
        """
        guard = EarlyFireGuard(self.deferred_at)
        try:
            event = {"status": "drained", "found": plain((await self._look()).as_json())}
        except TerminalError as error:
            event = {"status": "error", "message": f"{error.code} {error}"}
        await guard.hold()
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def _look(self) -> DrainReport:
        hook, queue = JetStreamHook(self.nats_conn_id), WorkQueue.load(self.work_queue)
        while True:
            started = time.monotonic()
            try:
                async with hook.shared() as connection:
                    report = await check_drained(connection, queue, self.consumers, nothing_dead=self.nothing_dead)
                self._tell(report)
                if report.drained:
                    return report
            except (TransientError, ApiError) as error:
                self.log.warning("Looking at the queue failed, trying again: %s", error)
            await asyncio.sleep(max(0.0, self.poll_interval - (time.monotonic() - started)))

    def _tell(self, report: DrainReport) -> None:
        if (told := str(report)) != self._told:
            self._told = told
            self.log.info("%s", told)
