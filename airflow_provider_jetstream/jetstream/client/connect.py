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
from airflow_provider_jetstream.jetstream.client.tls import tls_context
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamDisabledError,
    JetStreamProviderError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream.client.jetstream_client import JetStreamClient
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
        await _close(connection.client)


async def _open(
    settings: ConnectionSettings, renew: RenewSettings | None, failures: list[Exception]
) -> NatsPyConnection:
    # Imported here, since nats-py takes long to import and Airflow parses DAG files often.
    from nats import errors as nats_errors

    from airflow_provider_jetstream.jetstream.client.jetstream_client import JetStreamClient
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

    client = JetStreamClient(settings, renew)
    connection = NatsPyConnection(client, settings)

    async def record_error(reported: Exception) -> None:
        # What this package raises within the client is the cause of an error of the client's.
        error = reported.__cause__ if isinstance(reported.__cause__, JetStreamProviderError) else reported
        if client.outage.is_explained and isinstance(error, OSError):
            # How the connection ends says less than what the server said before.
            return
        connection.last_error = error
        if not client.is_connected:
            failures.append(error)
            client.outage.record(error)

    check_credentials(settings)
    if settings.encrypted:
        # So that a file that can't be used is reported before anything else is tried.
        tls_context(settings)
    client.use_tls_options()
    try:
        await client.connect(
            list(settings.servers),
            error_cb=record_error,
            inbox_prefix=settings.inbox_prefix,
            tls_handshake_first=settings.tls_handshake_first,
            tls_hostname=settings.tls_server_name,
            # A share for each server: one that doesn't answer mustn't use up the time of the others.
            connect_timeout=max(1, round(settings.timeout / len(settings.servers))),
            # The client has one policy for the first connection and for later ones. The first one tries each server
            # twice and gives up; a connection that has worked is worth waiting for.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
        )
        await _require_jetstream(connection, failures)
    except (OSError, nats_errors.Error) as error:
        await _abandon(client)
        failures.append(error)
        raise explain(settings, failures) from None
    except BaseException:
        await _abandon(client)
        raise
    client.options["max_reconnect_attempts"] = -1
    client.options["reconnect_time_wait"] = 1
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
    from nats import errors as nats_errors

    client, limit = connection.client, min(_FIRST_LIMIT, connection.timeout / 2)
    subject = f"{connection.api_prefix}.INFO"
    failures_before, connection.last_error = len(failures), None
    while True:
        try:
            return decode_answer((await client.request(subject, timeout=limit)).data, "INFO")
        except nats_errors.NoRespondersError:
            raise JetStreamDisabledError(NO_JETSTREAM) from None
        except nats_errors.ConnectionReconnectingError:
            await client.wait_until_connected()
        except ApiError as error:
            if error.err_code in NOT_ENABLED:
                raise JetStreamDisabledError(NO_JETSTREAM) from None
            raise
        except UnreachableError as error:
            failures.insert(0, error)
            await asyncio.sleep(_PAUSE)
        except TimeoutError:
            limit *= 2
            # A connection that was lost meanwhile has recorded its own causes.
            if client.is_connected and len(failures) == failures_before:
                failures.insert(0, unavailable(f"no answer{last_report(connection.last_error)}"))


async def _abandon(client: JetStreamClient) -> None:
    """Close a connection that never worked: nothing is worth sending."""
    client.abort()
    await _close(client)


async def _close(client: JetStreamClient) -> None:
    # The client raises from close() while it is reconnecting with buffered data (TypeError among others), and nothing
    # is left to do about a connection that is being closed.
    with suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await client.close()
    # Where the server takes nothing more, what is left would be sent whenever it does.
    client.abort()
