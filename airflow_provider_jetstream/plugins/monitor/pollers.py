"""The pollers of all servers that the page shows, and what requests need of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    QueueDeclarationError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.inspection.overview import is_work_queue
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.queue.declaration import name_problems
from airflow_provider_jetstream.jetstream.queue.discovery import known_queue
from airflow_provider_jetstream.plugins.monitor.background import SingleFlightCache
from airflow_provider_jetstream.plugins.monitor.errors import LettersUnreadError
from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
    from airflow_provider_jetstream.plugins.monitor.queue_scan import QueueScan

_MAX_DECLARATIONS = 256
_DECLARATION_SECONDS = 30.0
# Small queues are scanned by then; of a large one, the page shows the progress of the scan.
_FIRST_SCAN_SECONDS = 0.4
# A request that reads every letter anyway waits longer.
_SCAN_SECONDS = 20.0
_POLLS_OF_A_NEW_QUEUE = 2


class Pollers:
    """The pollers by connection, made when one is first used; to be used in one event loop."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._pollers: dict[str, ServerPoller] = {}
        self._declarations: SingleFlightCache[WorkQueue] = SingleFlightCache(_MAX_DECLARATIONS, _DECLARATION_SECONDS)

    def clear(self) -> None:
        """Forget all pollers."""
        self._pollers.clear()

    def of(self, connection: str) -> ServerPoller:
        """Return the poller of a connection.

        :raises NotFoundError: the connection isn't shown
        """
        if connection not in self._settings.connections:
            raise NotFoundError(
                f"expected a connection among {', '.join(self._settings.connections)}, found {connection!r}: name it in"
                " [jetstream] monitor_connections to have it shown"
            )
        if connection not in self._pollers:
            self._pollers[connection] = ServerPoller(connection, self._settings.refresh)
        return self._pollers[connection]

    async def refreshed(self, connections: Sequence[str]) -> list[ServerPoller]:
        """Return the pollers of some connections, each with numbers of now if its server answers soon."""
        pollers = [self.of(connection) for connection in connections]
        await asyncio.gather(*(poller.refresh() for poller in pollers))
        return pollers

    async def of_queue(self, connection: str, queue: str) -> ServerPoller:
        """Return the poller of a connection that has numbers of a queue.

        :raises NotFoundError: there is no such queue
        :raises UnreachableError: the server hasn't answered yet
        """
        (poller,) = await self.refreshed([connection])
        unknown = NotFoundError(
            f"expected a work queue {shown_value(queue)} on the server of {connection}, found none: it was deleted, or"
            " has another name"
        )
        if any(name_problems("work queue", queue)):
            # No stream has such a name, and a server may not answer a request about it.
            raise unknown
        if queue not in poller.overviews and poller.state == "up":
            try:
                async with poller.connection() as opened:
                    config = (await stream_info(opened, queue))["config"]
                if not is_work_queue(config):
                    raise unknown
            except NotFoundError:
                raise unknown from None
            except PermissionDeniedError:
                # The list of all streams may be allowed.
                pass
        # Created just now, perhaps while a poll was running.
        for _ in range(_POLLS_OF_A_NEW_QUEUE):
            if queue not in poller.overviews:
                await poller.poll_again()
        if queue in poller.overviews:
            return poller
        poller.require_usable()
        if poller.state == "starting":
            raise UnreachableError(f"the first poll of {connection} is still running; try again")
        raise unknown

    async def requested_scan(self, connection: str, queue: str) -> QueueScan:
        """Return the scan of a queue's dead letters, which may still run.

        :raises QueueDeclarationError: the queue has no dead letter queue
        """
        poller = await self.of_queue(connection, queue)
        scan = poller.scanner.request_scan(poller.overviews[queue])
        await poller.scanner.wait_for_result(scan, _FIRST_SCAN_SECONDS)
        if isinstance(scan.error, QueueDeclarationError):
            raise scan.error.with_traceback(None)
        return scan

    async def finished_scan(self, connection: str, queue: str) -> QueueScan:
        """Return the scan of a queue's dead letters once it knows what the last poll saw, if that takes no 20 seconds.

        :raises QueueDeclarationError: the queue has no dead letter queue
        """
        scan = await self.requested_scan(connection, queue)
        if scan.task is not None:
            await asyncio.wait({scan.task}, timeout=_SCAN_SECONDS)
        return scan

    def require_scan(self, connection: str, scan: QueueScan) -> Scan:
        """Return what proves single letters again.

        :raises LettersUnreadError: the letters are still being read
        :raises JetStreamProviderError: they can't be read
        """
        if scan.scan is not None:
            return scan.scan
        self.of(connection).require_usable()
        if scan.error is not None and scan.task is None:
            raise scan.error.with_traceback(None)
        raise LettersUnreadError(
            f"the dead letters are being read, {scan.letters_seen} so far; the server answers: try again in a few"
            " seconds"
        )

    async def declaration(self, connection: str, queue: str) -> WorkQueue:
        """Return a queue's declaration, as of half a minute ago at most.

        :raises JetStreamProviderError: it can't be read
        """
        poller = self.of(connection)

        async def discover() -> WorkQueue:
            async with poller.connection() as opened:
                return await known_queue(opened, queue)

        return await self._declarations.get((connection, queue), discover)

    async def known_declaration(self, connection: str, queue: str) -> WorkQueue | None:
        """Return a queue's declaration; ``None`` where it can't be read, since its numbers are shown all the same."""
        try:
            return await self.declaration(connection, queue)
        except JetStreamProviderError:
            return None
