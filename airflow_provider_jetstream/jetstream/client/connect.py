"""Connecting to NATS within one time limit, which includes waiting for a JetStream leader."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

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
from airflow_provider_jetstream.jetstream.client.direct_get import NO_RESPONDERS
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
        # nats-py raises from close() while it is reconnecting, and nothing is left to do about that.
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await connection.client.close()
        await connection.session.close(_CLOSE_SECONDS)


async def _open(
    settings: ConnectionSettings, renew: RenewSettings | None, failures: list[Exception]
) -> NatsPyConnection:
    # Imported here, since these take long to import and Airflow parses DAG files often.
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.client.session import Session

    check_credentials(settings)
    if settings.encrypted:
        # So that a file that can't be used is reported before anything else is tried.
        tls_context(settings)
    session = Session(settings, renew)
    connection = NatsPyConnection(session)
    try:
        await session.open(failures)
        await _require_jetstream(connection, failures)
        await connection.client.open()
    except BaseException:
        # It never worked: nothing is worth sending.
        session.abort()
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
