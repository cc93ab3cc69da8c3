"""Whether the queue of a wait is still the stream in which its jobs were stored, and not another one of that name.

A stream that is deleted and created anew starts its sequences again. The end of another job would then look like that
of an awaited one, since events of the server name a job by its sequence only.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, QueueGoneError, TransientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0


class QueueIdentity:
    """Compares the queue's stream with that of a cursor."""

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._queue = cursor.queue
        self._created = cursor.created
        self._running: asyncio.Task[str | None] | None = None
        self._next: asyncio.Task[str | None] | None = None

    async def confirm(self, last_end_at: datetime | None) -> None:
        """Return if the ends that were read up to now are those of jobs in the cursor's stream.

        Concurrent callers share a request.

        :param last_end_at: when the last of the ends was stored; ``None`` where there is none
        :raises QueueGoneError: they may be those of jobs in another stream of that name
        :raises UnreachableError: the connection was closed
        """
        if last_end_at is None:
            return
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._running))
        # Shielded: a waiter that is cancelled must not cancel the request of the others.
        created = await asyncio.shield(self._next)
        if created in (None, self._created):
            return
        if last_end_at >= datetime.fromisoformat(str(created)):
            raise self._another(str(created))

    def is_same(self, info: Mapping[str, Any]) -> bool:
        """Return whether a STREAM.INFO is that of the cursor's stream."""
        return bool(info["created"] == self._created)

    def another(self, info: Mapping[str, Any]) -> QueueGoneError:
        """Return the error of a STREAM.INFO of another stream."""
        return self._another(info["created"])

    def _another(self, created: str) -> QueueGoneError:
        return QueueGoneError(
            f"expected stream {self._queue} to be the one that stored the awaited jobs, created at {self._created};"
            f" found that it was deleted and created anew at {created}: how jobs ended that were still awaited then"
            " can't be known; find out which of them are done before you publish any of them again"
        )

    async def _read_after(self, running: asyncio.Task[str | None] | None) -> str | None:
        if running is not None:
            await asyncio.wait([running])
        # Who comes from here on may have read later ends.
        self._running, self._next = self._next, None
        while True:
            try:
                return str((await stream_info(self._connection, self._queue))["created"])
            except NotFoundError:
                # There is no other stream either, whose jobs could have ended.
                return None
            except (TransientError, ApiError) as error:
                if self._connection.is_closed:
                    raise
                log.warning("Reading stream %s failed, trying again: %s", self._queue, error)
                await asyncio.sleep(_RETRY_PAUSE)
