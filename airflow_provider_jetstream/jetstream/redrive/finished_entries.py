"""The entries of the dead letter queue whose letters are done, until they are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport

_AT_ONCE = 2_000


class FinishedEntries:
    """Removes finished entries, many of them at once.

    An entry that a redrive leaves because it is cut off does no harm: the audit says what was done to its letter.

    :param queue: the work queue
    :param config: the dead letter queue's configuration
    :param report: how many entries stay is added to it
    :param gathers: whether entries stay until they are many, or :meth:`remove` is called
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        config: Mapping[str, Any],
        report: RedriveReport,
        *,
        gathers: bool,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._config = config
        self._report = report
        self._at_once = _AT_ONCE if gathers else 1
        self._entries: list[int] = []

    async def add(self, entries: Sequence[int]) -> None:
        """Note that entries are finished."""
        self._entries += entries
        if len(self._entries) >= self._at_once:
            await self.remove()

    async def remove(self) -> None:
        """Remove those that are still stored."""
        entries, self._entries = self._entries, []
        self._report.entries_left += await remove_entries(self._connection, self._queue, entries, self._config)
