"""Connecting to NATS within one time limit, which includes waiting for a JetStream leader; and the pool of connections.

All users of a process share one connection per settings and event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.jetstream.client.credentials import check_credentials
from airflow_provider_jetstream.jetstream.client.diagnostics import (
    NO_JETSTREAM,
    NOT_ENABLED,
    decode_answer,
    explain,
    last_report,
    too_old,
    unavailable,
)
from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS
from airflow_provider_jetstream.jetstream.client.tls import tls_context
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadlineError,
    JetStreamDisabledError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.client.outage import RenewSettings
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

MINIMUM_SERVER = (2, 10, 27)

# Seconds: the first time limit for a cluster's answer, doubled after each timeout, and the pause after an answer that
# says "unavailable".
_FIRST_LIMIT = 1.0
_PAUSE = 0.25
_CLOSE_SECONDS = 5.0


@asynccontextmanager
async def connect(settings: ConnectionSettings, renew: RenewSettings | None = None) -> AsyncIterator[NatsPyConnection]:
    """Connect, make sure that JetStream is enabled and recent enough, and close the connection at the end.

    A cluster that is electing a leader is waited for within the time limit. Once open, the connection restores itself
    after every loss. Only a server that refuses the credentials for five minutes ends it.

    :param renew: reads the settings again, where a lost connection can't be restored by the ones known
    :raises UnreachableError: no server answered, or JetStream's cluster has no leader
    :raises AuthenticationError: the server refused the credentials
    :raises PermissionDeniedError: the user may not use JetStream
    :raises TLSError: no encrypted connection could be made
    :raises JetStreamDisabledError: the server or the account has no JetStream
    :raises ServerTooOldError: the server is older than 2.10.27
    """
    failures: list[Exception] = []
    try:
        async with asyncio.timeout(settings.timeout):
            connection = await _open(settings, renew, failures)
    except TimeoutError:
        raise explain(settings, failures) from None
    try:
        yield connection
    finally:
        await connection.close(_CLOSE_SECONDS)


async def _open(
    settings: ConnectionSettings, renew: RenewSettings | None, failures: list[Exception]
) -> NatsPyConnection:
    # Imported here, since these take long to import and Airflow parses DAG files often.
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

    check_credentials(settings)
    if settings.encrypted:
        # So that a file that can't be used is reported before anything else is tried.
        tls_context(settings)
    connection = NatsPyConnection(settings, renew)
    try:
        await connection.open(failures)
        await _require_jetstream(connection, failures)
    except BaseException:
        # It never worked: nothing is worth sending.
        connection.abort()
        raise
    connection.last_error = None
    failures.clear()
    return connection


async def _require_jetstream(connection: NatsPyConnection, failures: list[Exception]) -> None:
    if connection.server_version < MINIMUM_SERVER:
        raise too_old(connection.server_version, MINIMUM_SERVER)
    account = await _account_info(connection, failures)
    connection.api_level = int(account.get("api", {}).get("level", 0))
    connection.domain = str(account.get("domain") or "")


async def _account_info(connection: NatsPyConnection, failures: list[Exception]) -> dict[str, Any]:
    """Request the account's state until an answer comes: a cluster that elects a leader drops requests."""
    limit = min(_FIRST_LIMIT, connection.timeout / 2)
    failures_before, connection.last_error = len(failures), None
    while True:
        try:
            ((headers, answer),) = await connection.ask(f"{connection.api_prefix}.INFO", time_limit=limit)
            if headers.startswith(NO_RESPONDERS):
                raise JetStreamDisabledError(NO_JETSTREAM)
            return decode_answer(answer, "INFO")
        except ApiError as error:
            if error.err_code in NOT_ENABLED:
                raise JetStreamDisabledError(NO_JETSTREAM) from None
            raise
        except DeadlineError:
            limit *= 2
            # A connection that was lost meanwhile has recorded its own causes.
            if connection.is_connected and len(failures) == failures_before:
                failures.insert(0, unavailable(f"no answer{last_report(connection.last_error)}"))
        except UnreachableError as error:
            failures.insert(0, error)
            await asyncio.sleep(_PAUSE)


@dataclass
class _Shared:
    settings: ConnectionSettings
    users: int = 0
    opening: asyncio.Task[NatsPyConnection] | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def open_attempt(self, settings: ConnectionSettings, renew: RenewSettings | None) -> asyncio.Task[NatsPyConnection]:
        """Return the one attempt to open that all waiting users share, its failure too; later users start another."""
        if self.opening is None or (self.opening.done() and not _is_usable(self.opening)):
            self.opening = asyncio.create_task(self._open(settings, renew))
        return self.opening

    async def close(self) -> None:
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
            await asyncio.gather(self.opening, return_exceptions=True)
        await self.stack.aclose()

    async def _open(self, settings: ConnectionSettings, renew: RenewSettings | None) -> NatsPyConnection:
        await self.stack.aclose()
        return await self.stack.enter_async_context(connect(settings, renew))


def _is_usable(opening: asyncio.Task[NatsPyConnection]) -> bool:
    return not opening.cancelled() and opening.exception() is None and not opening.result().is_closed


# Keyed by the loop itself: ids of closed loops are reused, and requests from another loop only time out.
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ConnectionSettings, _Shared]] = WeakKeyDictionary()


class SharedConnection:
    """Uses a connection of the pool while the block runs; see :func:`shared_connection`."""

    # Not a generator, nor an attribute more than needed: a triggerer has one for each of ten thousand waits.
    __slots__ = ("_shared", "_source")

    def __init__(self, settings: ConnectionSettings, renew: RenewSettings | None) -> None:
        self._source: tuple[ConnectionSettings, RenewSettings | None] | None = (settings, renew)
        self._shared: _Shared | None = None

    async def __aenter__(self) -> NatsPyConnection:
        if self._source is None:
            raise RuntimeError("a shared connection can be used once: call shared_connection again")
        (settings, renew), self._source = self._source, None
        pool = _loops.setdefault(asyncio.get_running_loop(), {})
        shared = pool.get(settings)
        if shared is None:
            shared = pool[settings] = _Shared(settings)
        shared.users += 1
        try:
            # Shielded: a user that is cancelled while it waits must not cancel the attempt of the others.
            connection = await asyncio.shield(shared.open_attempt(settings, renew))
            await _require_connected(connection, settings.timeout)
        except BaseException:
            await _leave(shared)
            raise
        self._shared = shared
        return connection

    async def __aexit__(self, *_: object) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            await _leave(shared)


def shared_connection(settings: ConnectionSettings, renew: RenewSettings | None = None) -> SharedConnection:
    """Use the event loop's connection with these settings, in an ``async with``; the last user closes it.

    Where that connection is lost, its restoration is waited for within the time limit of the settings.

    :param renew: reads the settings again, where a lost connection can't be restored by the ones known
    :raises JetStreamProviderError: as :func:`~airflow_provider_jetstream.jetstream.client.connect.connect` does
    """
    return SharedConnection(settings, renew)


async def _require_connected(connection: NatsPyConnection, seconds: float) -> None:
    if not await connection.wait_until_connected(seconds):
        raise connection.loss


async def _leave(shared: _Shared) -> None:
    shared.users -= 1
    if shared.users == 0:
        pool = _loops.get(asyncio.get_running_loop(), {})
        if pool.get(shared.settings) is shared:
            del pool[shared.settings]
        await shared.close()
