"""Polls one server every few seconds while the page is open, once for all viewers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from airflow_provider_jetstream.airflow_compat import AirflowException
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.client.stream_api import PAUSE_LEVEL
from airflow_provider_jetstream.jetstream.errors import (
    ConnectionSettingsError,
    DeadlineError,
    JetStreamProviderError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues
from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.history import SPARKLINE_POINTS, QueueHistory, sparkline
from airflow_provider_jetstream.plugins.monitor.models.queues import ConnectionState, Problem, ServerState
from airflow_provider_jetstream.plugins.monitor.queue_view import LetterFigures, Reading, problem_of, queue_numbers
from airflow_provider_jetstream.plugins.monitor.scanner import Scanner
from airflow_provider_jetstream.plugins.monitor.shared_history import SharedHistory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.models.figure import Figure
    from airflow_provider_jetstream.plugins.monitor.models.history import Point

# After so long without a request, polling ends.
IDLE_SECONDS = 30.0
# For so long the connection is open without a request, so that the letters that were proved can be shown at once.
KEPT_SECONDS = 900.0
FIRST_POLL_SECONDS = 2.0
_POLL_SECONDS = 10.0
_CONNECTION_CHECK_SECONDS = 0.25
_IDLE_CHECK_SECONDS = 5.0
_SAMPLES_SECONDS = 5.0
# So many intervals may pass until numbers are old ones.
_CURRENT_INTERVALS = 3


class ServerPoller:
    """Polls the server of one Airflow connection.

    :param refresh: seconds from the start of one poll to the next
    """

    def __init__(self, conn_id: str, refresh: float) -> None:
        self.conn_id = conn_id
        self.overviews: dict[str, QueueOverview] = {}
        self.histories: dict[str, QueueHistory] = {}
        self.problem: Problem | None = None
        self.error: JetStreamProviderError | AirflowException | None = None
        self.state: ServerState = "starting"
        self.scanner = Scanner(self.connection)
        self.shared = SharedHistory()
        self.has_pauses = False
        self._refresh = refresh
        self._hook = JetStreamHook(conn_id)
        self._server: str | None = None
        self._polled_at: datetime | None = None
        self._polled_time = 0.0
        self._requested_time = 0.0
        self._viewed_since = 0.0
        self._users = 0
        self._task: asyncio.Task[None] | None = None
        self._polled = asyncio.Event()
        self._requested = asyncio.Event()
        self._samples_time = -_SAMPLES_SECONDS

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Open the connection to the server, or use the open one."""
        return self._hook.shared()

    async def refresh(self) -> None:
        """Start polling if it has stopped, and wait up to 2 seconds for a first poll, or for one after a pause."""
        was_idle = not self._has_viewers()
        self._requested_time = clock.monotonic()
        if was_idle:
            self._viewed_since = self._requested_time
        self._requested.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if was_idle:
            # What was so when somebody last looked needn't be so now.
            self._polled.clear()
            if self.state != "up":
                self.state, self.problem, self.error = "starting", None, None
        stale = self._polled_time == 0.0 or clock.monotonic() - self._polled_time > 2 * self._refresh
        if self.state not in ("away", "refused") and stale:
            try:
                async with asyncio.timeout(FIRST_POLL_SECONDS):
                    await self._polled.wait()
            except TimeoutError:
                return

    async def poll_again(self) -> None:
        """Wait for the next poll of a server that answers, a little longer than two of them are apart."""
        if self.state == "up":
            self._polled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._refresh + FIRST_POLL_SECONDS):
                    await self._polled.wait()

    def require_usable(self) -> None:
        """Return unless the server is away or refuses.

        :raises JetStreamProviderError: as the last poll did
        """
        if isinstance(self.error, JetStreamProviderError):
            raise self.error.with_traceback(None)
        if self.problem is not None:
            raise ConnectionSettingsError(self.problem.message)

    def age(self) -> float | None:
        """Return the age of the last numbers in seconds."""
        return round(clock.monotonic() - self._polled_time, 3) if self._polled_time else None

    def reading(self) -> Reading:
        """Return when the last numbers were read, and whether they are those of now."""
        age = self.age()
        recent = age is not None and age <= max(_CURRENT_INTERVALS * self._refresh, FIRST_POLL_SECONDS)
        return Reading(age, recent and self.state == "up")

    def letters(self, queue: str) -> LetterFigures:
        """Return what is known of a queue's dead letters."""
        scan, overview = self.scanner.scan_of(queue), self.overviews[queue]
        return scan.figures(overview, self._viewed_since, self.age(), clock.of_server(self.now(queue)))

    def of_letters(self, queue: str, value: float) -> Figure:
        """Return a number of letters that was counted in the table of a queue's scan."""
        return self.scanner.scan_of(queue).figure(value, self.overviews[queue], self._viewed_since)

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
                queue_numbers(
                    self.conn_id,
                    overview,
                    self.histories[name],
                    self.letters(name),
                    self.sparkline(name),
                    self.reading(),
                )
                for name, overview in self.overviews.items()
            ]
            if with_queues
            else [],
        )

    def dead(self, queue: str) -> int | None:
        """Return how many letters a queue has now; ``None`` where that isn't known."""
        found = self.scanner.scan_of(queue).figures(self.overviews[queue], 0.0, 0.0, self.now(queue)).dead
        return None if found.value is None or found.certainty == "old" else int(found.value)

    def points(self, queue: str, time: timedelta) -> list[Point]:
        """Return a queue's points of the last time, up to an hour: of the shared samples where there are some."""
        if not self.shared.has(queue):
            return self.histories[queue].points()
        now = self.now(queue)
        return self.shared.points(queue, now - time, now)

    def now(self, queue: str) -> datetime:
        """Return the time of a queue's last numbers, by the server's clock."""
        health = self.overviews[queue].health
        return health.taken_at if health else clock.now()

    def sparkline(self, queue: str) -> list[int | None]:
        """Return a queue's pending jobs of the last hour, for a small chart."""
        if self.shared.has(queue):
            return self.shared.sparkline(queue, SPARKLINE_POINTS)
        return sparkline(self.histories[queue].points())

    @asynccontextmanager
    async def kept_connection(self) -> AsyncGenerator[Connection, None]:
        """Open the connection for as long as letters may be scanned with it."""
        async with self._hook.shared() as connection:
            self._users += 1
            self._server = ".".join(map(str, connection.server_version))
            self.has_pauses = connection.api_level >= PAUSE_LEVEL
            try:
                yield connection
            finally:
                self._users -= 1
                if not self._users:
                    self.scanner.drop_connection()

    async def observe(self, connection: Connection) -> None:
        """Read the numbers of all queues, and scan the dead letters that have changed."""
        self._set_up(await _inspect_while_connected(connection, self.overviews))
        self.scanner.schedule_scans(self.overviews)

    def _has_viewers(self) -> bool:
        return clock.monotonic() - self._requested_time < IDLE_SECONDS

    def _is_kept(self) -> bool:
        return clock.monotonic() - self._requested_time < KEPT_SECONDS

    async def _wait_for_viewers(self, connection: Connection) -> None:
        self._requested.clear()
        while self._is_kept() and not self._requested.is_set():
            if not connection.is_connected:
                # Restored meanwhile or not: whoever looks next finds out.
                self.state = "starting"
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_CHECK_SECONDS):
                    await self._requested.wait()

    async def _run(self) -> None:
        try:
            while self._has_viewers() or (self.state == "up" and self._is_kept()):
                try:
                    async with self.kept_connection() as connection:
                        await self._poll_repeatedly(connection)
                except (JetStreamProviderError, AirflowException) as error:
                    self._set_away(error)
                    await asyncio.sleep(self._refresh)
        finally:
            self._task = None

    async def _poll_repeatedly(self, connection: Connection) -> None:
        while self._is_kept():
            if not self._has_viewers():
                await self._wait_for_viewers(connection)
                continue
            started = clock.monotonic()
            try:
                await self._read_samples(connection)
                await self.observe(connection)
            except DeadlineError as error:
                # The connection is kept, and so is the scan that uses it.
                self.state, self.problem, self.error = "away", problem_of(error), error
                self._polled.set()
            await _sleep_while_connected(connection, self._refresh - (clock.monotonic() - started))

    async def _read_samples(self, connection: Connection) -> None:
        if clock.monotonic() - self._samples_time < _SAMPLES_SECONDS:
            return
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await self.shared.update(connection)
            self._samples_time = clock.monotonic()
        except (JetStreamProviderError, TimeoutError) as error:
            # The numbers of now are shown without a history.
            self.shared.problem = str(error) or "the server took too long to answer"

    def _set_up(self, overviews: list[QueueOverview]) -> None:
        self.overviews = {overview.name: overview for overview in overviews}
        self.histories = {name: self.histories.get(name) or QueueHistory() for name in self.overviews}
        for name, overview in self.overviews.items():
            watch = self.histories[name].watch
            watch.remember(self.shared.known(name))
            watch.compare(overview)
            if overview.health is not None:
                self.histories[name].add(overview.health, self.dead(name))
        self.state, self.problem, self.error = "up", None, None
        self._polled_time, self._polled_at = clock.monotonic(), clock.now()
        self._polled.set()

    def _set_away(self, error: JetStreamProviderError | AirflowException) -> None:
        self.error = error
        # A terminal error stays until a person changes something.
        self.state = "away" if isinstance(error, TransientError) else "refused"
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
    end = clock.monotonic() + seconds
    while (remaining := end - clock.monotonic()) > 0:
        await asyncio.sleep(min(remaining, _CONNECTION_CHECK_SECONDS))
        _require_connected(connection)


def _require_connected(connection: Connection) -> None:
    if not connection.is_connected:
        cause = f": {connection.last_error}" if connection.last_error else ""
        raise UnreachableError(
            f"expected the NATS server to answer, found the connection lost{cause}; see whether it runs"
        )
