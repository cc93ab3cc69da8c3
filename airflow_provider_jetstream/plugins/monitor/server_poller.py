"""Polls one server every few seconds while the page is open, once for all viewers."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from airflow_provider_jetstream.airflow_compat import AirflowException
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import DeadlineError, JetStreamProviderError, UnreachableError
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues
from airflow_provider_jetstream.plugins.monitor.history import QueueHistory
from airflow_provider_jetstream.plugins.monitor.models.queues import ConnectionState, Problem
from airflow_provider_jetstream.plugins.monitor.queue_view import problem_of, queue_numbers
from airflow_provider_jetstream.plugins.monitor.scanner import Scanner

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview

# After so long without a request, polling ends and the connection is closed.
IDLE_SECONDS = 30.0
FIRST_POLL_SECONDS = 2.0
_POLL_SECONDS = 10.0
_CONNECTION_CHECK_SECONDS = 0.25


class ServerPoller:
    """Polls the server of one Airflow connection.

    :param refresh: seconds from the start of one poll to the next
    """

    def __init__(self, conn_id: str, refresh: float) -> None:
        self.conn_id = conn_id
        self.overviews: dict[str, QueueOverview] = {}
        self.histories: dict[str, QueueHistory] = {}
        self.problem: Problem | None = None
        self.state: Literal["up", "away", "starting"] = "starting"
        self.scanner = Scanner(self.connection)
        self._refresh = refresh
        self._hook = JetStreamHook(conn_id)
        self._server: str | None = None
        self._polled_at: datetime | None = None
        self._polled_time = 0.0
        self._requested_time = 0.0
        self._task: asyncio.Task[None] | None = None
        self._polled = asyncio.Event()

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Open the connection to the server, or use the open one."""
        return self._hook.shared()

    async def refresh(self) -> None:
        """Start polling if it has stopped, and wait up to 2 seconds for a first poll, or for one after a pause."""
        self._requested_time = time.monotonic()
        if self._task is None:
            self._polled.clear()
            self._task = asyncio.create_task(self._run())
        stale = self._polled_time == 0.0 or time.monotonic() - self._polled_time > 2 * self._refresh
        if self.state != "away" and stale:
            try:
                async with asyncio.timeout(FIRST_POLL_SECONDS):
                    await self._polled.wait()
            except TimeoutError:
                return

    def age(self) -> float | None:
        """Return the age of the last poll in seconds."""
        return round(time.monotonic() - self._polled_time, 3) if self._polled_time else None

    def connection_state(self, *, with_queues: bool = True) -> ConnectionState:
        """Return the state of the connection, and the numbers of its queues."""
        return ConnectionState(
            connection=self.conn_id,
            state=self.state,
            problem=self.problem,
            taken_at=self._polled_at,
            age_seconds=self.age(),
            server=self._server,
            queues=[
                queue_numbers(self.conn_id, overview, self.histories[name], self.scanner.scan_of(name).counts)
                for name, overview in self.overviews.items()
            ]
            if with_queues
            else [],
        )

    def _has_viewers(self) -> bool:
        return time.monotonic() - self._requested_time < IDLE_SECONDS

    async def _run(self) -> None:
        try:
            while self._has_viewers():
                try:
                    async with self.connection() as connection:
                        self._server = ".".join(map(str, connection.server_version))
                        await self._poll_repeatedly(connection)
                except (JetStreamProviderError, AirflowException) as error:
                    self._set_away(error)
                    await asyncio.sleep(self._refresh)
        finally:
            self.scanner.drop_connection()
            self._task = None

    async def _poll_repeatedly(self, connection: Connection) -> None:
        while self._has_viewers():
            started = time.monotonic()
            try:
                self._set_up(await _inspect_while_connected(connection, self.overviews))
            except DeadlineError as error:
                # The connection is kept, and so is the scan that uses it.
                self.state, self.problem = "away", problem_of(error)
                self._polled.set()
            else:
                self.scanner.schedule_scans(self.overviews)
            await _sleep_while_connected(connection, self._refresh - (time.monotonic() - started))

    def _set_up(self, overviews: list[QueueOverview]) -> None:
        self.overviews = {overview.name: overview for overview in overviews}
        self.histories = {name: self.histories.get(name) or QueueHistory() for name in self.overviews}
        for name, overview in self.overviews.items():
            if overview.health is not None:
                counts = self.scanner.scan_of(name).counts
                dead_in_queue = overview.left_over.dead if overview.left_over else None
                self.histories[name].add(overview.health, counts.certain if counts else dead_in_queue)
        self.state, self.problem = "up", None
        self._polled_time, self._polled_at = time.monotonic(), datetime.now(UTC)
        self._polled.set()

    def _set_away(self, error: JetStreamProviderError | AirflowException) -> None:
        self.state = "away"
        if isinstance(error, JetStreamProviderError):
            self.problem = problem_of(error)
        else:
            self.problem = Problem(
                code="connection",
                message=f"expected an Airflow connection {self.conn_id!r}, found none that can be used: {error}; create"
                " one of type nats, or name others in [jetstream] monitor_connections",
            )
        self.scanner.drop_connection()
        self._polled.set()


async def _inspect_while_connected(connection: Connection, before: dict[str, QueueOverview]) -> list[QueueOverview]:
    """Inspect the queues; fail as soon as the connection is lost, since a request would wait for its whole timeout."""
    inspection = asyncio.create_task(inspect_all_queues(connection, before))
    try:
        async with asyncio.timeout(_POLL_SECONDS):
            while not inspection.done():
                _require_connected(connection)
                await asyncio.wait({inspection}, timeout=_CONNECTION_CHECK_SECONDS)
            return await inspection
    except TimeoutError:
        raise DeadlineError(
            f"expected an answer of the server within {_POLL_SECONDS:g} s, found none; see whether it is overloaded"
        ) from None
    finally:
        inspection.cancel()
        await asyncio.gather(inspection, return_exceptions=True)


async def _sleep_while_connected(connection: Connection, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        await asyncio.sleep(min(remaining, _CONNECTION_CHECK_SECONDS))
        _require_connected(connection)


def _require_connected(connection: Connection) -> None:
    if not connection.is_connected:
        cause = f": {connection.last_error}" if connection.last_error else ""
        raise UnreachableError(
            f"expected the NATS server to answer, found the connection lost{cause}; see whether it runs"
        )
