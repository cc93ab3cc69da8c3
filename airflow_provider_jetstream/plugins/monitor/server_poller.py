"""Watching one server: a look every few seconds while anybody asks, whoever and however many they are."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from airflow.providers.common.compat.sdk import AirflowException

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.errors import DeadlineError, JetStreamProviderError, UnreachableError
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues
from airflow_provider_jetstream.plugins.monitor.history import QueueHistory
from airflow_provider_jetstream.plugins.monitor.models import ConnectionState, Problem
from airflow_provider_jetstream.plugins.monitor.queue_view import problem_of, queue_numbers
from airflow_provider_jetstream.plugins.monitor.scanner import Scanner

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview

# Nobody has asked for so long: the watch ends and the connection is closed.
IDLE_SECONDS = 30.0
FIRST_ANSWER_SECONDS = 2.0
_LOOK_SECONDS = 10.0
_ALIVE_CHECK_SECONDS = 0.25


class ServerPoller:
    """One server, watched for all viewers.

    :param conn_id: the Airflow connection's id
    :param refresh: seconds between two looks
    """

    def __init__(self, conn_id: str, refresh: float) -> None:
        self.conn_id = conn_id
        self.looks: dict[str, QueueOverview] = {}
        self.histories: dict[str, QueueHistory] = {}
        self.problem: Problem | None = None
        self.state: Literal["up", "away", "starting"] = "starting"
        self.scanner = Scanner(self.shared)
        self._refresh = refresh
        self._hook = JetStreamHook(conn_id)
        self._server: str | None = None
        self._taken_at: datetime | None = None
        self._taken = 0.0
        self._asked = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()

    def shared(self) -> AbstractAsyncContextManager[Connection]:
        """Use the one connection to the server.

        :return: opens it, or takes the one that is open
        """
        return self._hook.shared()

    async def fresh(self) -> None:
        """See to it that looks are taken, and wait shortly for the first one, or for one after a pause."""
        self._asked = time.monotonic()
        if self._watching is None:
            self._looked.clear()
            self._watching = asyncio.create_task(self._watch())
        stale = self._taken == 0.0 or time.monotonic() - self._taken > 2 * self._refresh
        if self.state != "away" and stale:
            try:
                async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                    await self._looked.wait()
            except TimeoutError:
                return

    def age(self) -> float | None:
        """Tell how old the last look is."""
        return round(time.monotonic() - self._taken, 3) if self._taken else None

    def told(self, *, queues: bool = True) -> ConnectionState:
        """Tell what is known.

        :param queues: whether its queues are told of too
        :return: what the page shows
        """
        return ConnectionState(
            connection=self.conn_id,
            state=self.state,
            problem=self.problem,
            taken_at=self._taken_at,
            age_seconds=self.age(),
            server=self._server,
            queues=[
                queue_numbers(self.conn_id, look, self.histories[name], self.scanner.known(name).counts)
                for name, look in self.looks.items()
            ]
            if queues
            else [],
        )

    async def _watch(self) -> None:
        try:
            while time.monotonic() - self._asked < IDLE_SECONDS:
                try:
                    async with self.shared() as connection:
                        self._server = ".".join(map(str, connection.server_version))
                        await self._look_again_and_again(connection)
                except (JetStreamProviderError, AirflowException) as error:
                    self._away(error)
                    await asyncio.sleep(self._refresh)
        finally:
            self.scanner.drop_connection()
            self._watching = None

    async def _look_again_and_again(self, connection: Connection) -> None:
        while time.monotonic() - self._asked < IDLE_SECONDS:
            began = time.monotonic()
            try:
                self._note(await _while_connected(connection, self.looks))
            except DeadlineError as error:
                # The connection stands, and what uses it goes on.
                self.state, self.problem = "away", problem_of(error)
                self._looked.set()
            else:
                self.scanner.schedule_scans(self.looks)
            await _rest(connection, self._refresh - (time.monotonic() - began))

    def _note(self, looks: list[QueueOverview]) -> None:
        self.looks = {look.name: look for look in looks}
        self.histories = {name: self.histories.get(name) or QueueHistory() for name in self.looks}
        for name, look in self.looks.items():
            if look.health is not None:
                counts = self.scanner.known(name).counts
                dead = counts.certain if counts else look.left_over.dead if look.left_over else None
                self.histories[name].add(look.health, dead)
        self.state, self.problem = "up", None
        self._taken, self._taken_at = time.monotonic(), datetime.now(UTC)
        self._looked.set()

    def _away(self, error: JetStreamProviderError | AirflowException) -> None:
        self.state = "away"
        if isinstance(error, JetStreamProviderError):
            self.problem = problem_of(error)
        else:
            self.problem = Problem(
                code="connection",
                message=f"expected an Airflow connection {self.conn_id!r}, found none that can be used: {error}; make"
                " one of type nats, or name others in [jetstream] monitor_connections",
            )
        self.scanner.drop_connection()
        self._looked.set()


async def _while_connected(connection: Connection, before: dict[str, QueueOverview]) -> list[QueueOverview]:
    """Look, and give up as soon as the connection is lost: a request would wait for its whole time limit."""
    looking = asyncio.create_task(inspect_all_queues(connection, before))
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            while not looking.done():
                _require_connected(connection)
                await asyncio.wait({looking}, timeout=_ALIVE_CHECK_SECONDS)
            return await looking
    except TimeoutError:
        raise DeadlineError(
            f"expected an answer of the server within {_LOOK_SECONDS:g} s, found none; see whether it is overloaded"
        ) from None
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _rest(connection: Connection, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, _ALIVE_CHECK_SECONDS))
        _require_connected(connection)


def _require_connected(connection: Connection) -> None:
    if not connection.is_connected:
        cause = f": {connection.last_error}" if connection.last_error else ""
        raise UnreachableError(
            f"expected the NATS server to answer, found the connection lost{cause}; see whether it runs"
        )
