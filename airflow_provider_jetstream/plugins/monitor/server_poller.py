"""Polls each server that the page shows: every few seconds while somebody looks, else one sample each 20 seconds.

The sampler runs in the API server since that is what shows the numbers: it knows which connections to show, it is there
whenever somebody can look, and nothing else has to be deployed. A triggerer isn't part of every Airflow, and its loop
belongs to waiting tasks. Of several API workers one samples, see
:mod:`~airflow_provider_jetstream.jetstream.inspection.samples`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from airflow.models.connection import Connection as AirflowConnection

from airflow_provider_jetstream.airflow_compat import AirflowException
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.client.stream_api import PAUSE_LEVEL, ServerClock, stream_info
from airflow_provider_jetstream.jetstream.contract import SAMPLE_STREAM
from airflow_provider_jetstream.jetstream.errors import (
    ConnectionSettingsError,
    DeadlineError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    QueueDeclarationError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues, is_work_queue
from airflow_provider_jetstream.jetstream.inspection.samples import (
    SAMPLE_SECONDS,
    TAKE_OVER_SECONDS,
    QueueSample,
    SampleStream,
)
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.queue.declaration import name_problems
from airflow_provider_jetstream.jetstream.queue.discovery import known_queue
from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.authorization import teams_of
from airflow_provider_jetstream.plugins.monitor.background import SingleFlightCache
from airflow_provider_jetstream.plugins.monitor.history import SPARKLINE_POINTS, QueueHistory, SharedHistory
from airflow_provider_jetstream.plugins.monitor.models.queues import ConnectionState, Problem, QueueNumbers, ServerState
from airflow_provider_jetstream.plugins.monitor.queue_view import LetterFigures, Reading, problem_of, queue_numbers
from airflow_provider_jetstream.plugins.monitor.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta

    import airflow.sdk

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
    from airflow_provider_jetstream.plugins.monitor.models.figure import Figure
    from airflow_provider_jetstream.plugins.monitor.models.queues import Point
    from airflow_provider_jetstream.plugins.monitor.scanner import Owners, QueueScan


# Seconds without a request after which polling ends.
IDLE_SECONDS = 30.0
# Seconds for which the connection stays open without a request, so that proved letters can be shown at once.
KEPT_SECONDS = 900.0
FIRST_POLL_SECONDS = 2.0
_POLL_SECONDS = 10.0
_CONNECTION_CHECK_SECONDS = 0.25
_IDLE_CHECK_SECONDS = 5.0
_SAMPLES_SECONDS = 5.0
# So many intervals may pass until numbers are old ones.
_CURRENT_INTERVALS = 3


class _PageHook(JetStreamHook):
    """Reads a connection that belongs to a team too, which Airflow returns only where its team is named."""

    async def _read_connection(self) -> airflow.sdk.Connection:
        if team := (await asyncio.to_thread(teams_of, [self.nats_conn_id])).get(self.nats_conn_id):
            return await asyncio.to_thread(AirflowConnection.get_connection_from_secrets, self.nats_conn_id, team)
        return await self.aget_connection(self.nats_conn_id)


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
        self._hook = _PageHook(conn_id)
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
            # The last numbers may be wrong by now.
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
        """Return when the last numbers were read, and whether they are current."""
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

    def connection_state(self, *, with_queues: bool = True, owners: Owners | None = None) -> ConnectionState:
        """Return the state of the connection, and the numbers of its queues.

        :param owners: the DAGs that the user may see, and their teams
        """
        return ConnectionState(
            connection=self.conn_id,
            state=self.state,
            problem=self.problem,
            taken_at=self._polled_at,
            age_seconds=self.age(),
            server=self._server,
            queues=[self._with_newest(self.numbers(name), owners or {}) for name, overview in self.overviews.items()]
            if with_queues
            else [],
        )

    def numbers(self, queue: str) -> QueueNumbers:
        """Return a queue's numbers."""
        counts, overview, letters = self.scanner.scan_of(queue).counts, self.overviews[queue], self.letters(queue)
        # An old scan tells nothing of the last minutes.
        return queue_numbers(
            *(self.conn_id, overview, self.histories[queue], letters, self.sparkline(queue)),
            self.reading(),
            counts.deaths_of_hour(clock.of_server(self.now(queue)))
            if counts and letters.dead.certainty != "old"
            else [],
        )

    def newest_dags(self) -> set[str]:
        """Return the DAGs whose newest dead letters are known."""
        known = [scan.counts for scan in map(self.scanner.scan_of, self.overviews) if scan.counts]
        return {cause.dag_id for counts in known for cause in counts.newest if cause.dag_id is not None}

    def _with_newest(self, numbers: QueueNumbers, owners: Owners) -> QueueNumbers:
        counts = self.scanner.scan_of(numbers.queue).counts
        return numbers.model_copy(update={"newest": counts.newest_cause(owners)}) if counts else numbers

    def dead(self, queue: str) -> int | None:
        """Return how many letters a queue has now; ``None`` where that isn't known."""
        found = self.scanner.scan_of(queue).figures(self.overviews[queue], 0.0, 0.0, self.now(queue)).dead
        return None if found.value is None or found.certainty == "old" else int(found.value)

    def points(self, queue: str, time: timedelta) -> list[Point]:
        """Return the points of a queue's history that are younger than ``time``, which is an hour at most."""
        now = self.now(queue)
        return self.shared.points(queue, now - time, now)

    def now(self, queue: str) -> datetime:
        """Return the time of a queue's last numbers, by the server's clock."""
        health = self.overviews[queue].health
        return health.taken_at if health else clock.now()

    def sparkline(self, queue: str) -> list[int | None]:
        """Return a queue's pending jobs of the last hour, for a small chart."""
        return self.shared.sparkline(queue, SPARKLINE_POINTS)

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
                # Whether the connection is restored, the next read finds out.
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
                self.histories[name].add(overview.health)
            if sample := QueueSample.of(overview, watch, self.dead(name)):
                self.shared.note(self.now(name), name, sample)
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


log = logging.getLogger(__name__)

_INSPECTION_SECONDS = 15.0
_SAMPLES_OF_A_CONNECTION = 45


class Sampler:
    """Samples the queues of one server.

    :param poller: of the same server
    :param seconds: from one sample to the next
    """

    def __init__(self, poller: ServerPoller, seconds: float = SAMPLE_SECONDS) -> None:
        self._poller = poller
        self._seconds = seconds
        self._take_over = TAKE_OVER_SECONDS * seconds / SAMPLE_SECONDS
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{random.randrange(2**32):08x}"  # noqa: S311

    async def run(self) -> None:
        """Sample until this is cancelled."""
        while True:
            try:
                async with self._poller.kept_connection() as connection:
                    # Then Airflow's connection is read again: it may name another server by now.
                    for _ in range(_SAMPLES_OF_A_CONNECTION):
                        pause = await self._sample(connection)
                        self._poller.shared.problem = None
                        await asyncio.sleep(pause)
            except (JetStreamProviderError, AirflowException, TimeoutError) as error:
                # The page names it beside its charts; a server that is away is named anyway.
                self._poller.shared.problem = str(error) or "the server took too long to answer"
                log.debug("The queues of %s aren't sampled: %s", self._poller.conn_id, error)
                await asyncio.sleep(self._seconds)

    async def _sample(self, connection: Connection) -> float:
        """Sample, unless another one does; return after how many seconds to go on."""
        stream = SampleStream(connection)
        last = await stream.last()
        if last is None:
            await stream.make()
        elif last.holder != self._holder:
            age = ((await ServerClock.read(connection, SAMPLE_STREAM)).now() - last.at).total_seconds()
            if age < self._take_over:
                return max(0.1, self._take_over - age + random.random() * self._seconds / 4)  # noqa: S311
        poller = self._poller
        await poller.shared.update(connection)
        async with asyncio.timeout(_INSPECTION_SECONDS):
            await poller.observe(connection)
        # Large queues are still being scanned then; the number of their dead letters isn't known.
        await poller.scanner.settled(self._seconds / 2)
        queues: dict[str, QueueSample] = {}
        for name, overview in poller.overviews.items():
            if sample := QueueSample.of(overview, poller.histories[name].watch, poller.dead(name)):
                queues[name] = sample
        try:
            if not await stream.append(self._holder, queues, last.sequence if last else 0):
                return self._seconds / 4
        except NotFoundError:
            await stream.make()
        return self._seconds


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
        """Return the scan by which single letters are proved again.

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


class LettersUnreadError(TransientError):
    """The letters of a queue are still being read; the server answers."""

    code = "JS601"
