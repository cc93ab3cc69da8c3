"""Connecting to NATS: one time limit over everything, and JetStream's API as plain JSON."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.connection_settings import ConnectionSettings, connection_settings
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    AuthenticationError,
    ConnectionSettingsError,
    DeadlineError,
    JetStreamDisabledError,
    JetStreamProviderError,
    ServerTooOldError,
    TLSError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg

__all__ = ["MINIMUM_SERVER", "Connection", "ConnectionSettings", "connect", "connection_settings"]

MINIMUM_SERVER = (2, 10, 27)

_NOT_ENABLED = {10039, 10076}
# What else the server answers with 503 although waiting doesn't help: no cluster, no such account, not in a cluster.
_LASTING = _NOT_ENABLED | {10010, 10035, 10036}
_SERVICE_UNAVAILABLE = 503

# Seconds; the first patience with a cluster, doubled each time, and the pause after an answer that says to wait.
_PATIENCE = 1.0
_PAUSE = 0.25


class Connection:
    """An open connection with JetStream behind it; belongs to the event loop that opened it.

    :param client: the connected client
    :param timeout: seconds for one API request
    """

    def __init__(self, client: Client, timeout: float) -> None:
        self.client = client
        self.timeout = timeout
        self.api_level = 0
        self.last_error: Exception | None = None

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""
        version = self.client.connected_server_version
        return (version.major, version.minor, version.patch)

    async def api(self, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream's API and keep every field of its answer.

        Protocol: the JSON API described by the NATS documentation, "JetStream wire API reference".

        :param subject: the API subject after ``$JS.API.``
        :param request: the body, as JSON
        :return: the decoded answer
        :raises ApiError: the server refused
        :raises DeadlineError: no answer within the time limit; a cluster gives none while it elects a leader
        :raises UnreachableError: the connection is gone, or the server says that JetStream is unavailable just now
        """
        payload = json.dumps(request).encode() if request is not None else b""
        message = await self.request(f"$JS.API.{subject}", payload)
        return _decoded(message, subject)

    async def request(self, subject: str, payload: bytes = b"") -> Msg:
        """Send a request and wait for its one answer.

        :param subject: the full subject
        :param payload: the body
        :return: the answer
        :raises DeadlineError: no answer within the time limit
        :raises UnreachableError: the connection is gone, or nobody serves the subject just now
        """
        from nats import errors

        try:
            return await self.client.request(subject, payload, timeout=self.timeout)
        except errors.NoRespondersError:
            raise UnreachableError(
                f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"
            ) from None
        except TimeoutError:
            raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s{_last_report(self)}") from None
        except errors.Error as error:
            raise UnreachableError(f"the connection failed while asking {subject}: {error}") from None


def _last_report(connection: Connection) -> str:
    return f" (the connection last reported: {connection.last_error})" if connection.last_error else ""


@asynccontextmanager
async def connect(settings: ConnectionSettings) -> AsyncIterator[Connection]:
    """Connect, make sure that JetStream is there and new enough, and close at the end.

    A cluster that is electing a leader is waited for within the time limit. After that the connection mends itself for
    as long as it is open.

    :param settings: where and as whom
    :return: the open connection
    :raises UnreachableError: no server answered, or JetStream's cluster has no leader
    :raises AuthenticationError: the credentials were refused
    :raises TLSError: no encrypted connection came about
    :raises JetStreamDisabledError: the server or the account has no JetStream
    :raises ServerTooOldError: the server is older than 2.10.27
    """
    failures: list[Exception] = []
    connection: Connection | None = None
    try:
        async with asyncio.timeout(settings.timeout):
            connection = await _open(settings, failures)
    except TimeoutError:
        raise _explain(settings, failures) from None
    try:
        yield connection
    finally:
        await _close(connection.client)


async def _open(settings: ConnectionSettings, failures: list[Exception]) -> Connection:
    import nats.errors

    from airflow_provider_jetstream.jetstream.client import JetStreamClient

    client = JetStreamClient(encrypted=settings.encrypted)
    connection = Connection(client, settings.timeout)

    async def remember(error: Exception) -> None:
        connection.last_error = error
        if not client.is_connected:
            failures.append(error)

    tls = _tls_context(settings) if settings.encrypted else None
    try:
        await client.connect(
            list(settings.servers),
            error_cb=remember,
            name=settings.name,
            tls=tls,
            user=settings.user,
            password=settings.password.get_secret_value() if settings.password else None,
            token=settings.token.get_secret_value() if settings.token else None,
            # A share for each server: a silent one mustn't use up the time of the others.
            connect_timeout=max(1, round(settings.timeout / len(settings.servers))),
            # The client knows one policy for the first connection and for later ones. A first connection tries each
            # server twice and gives up; one that has worked is worth waiting for.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
        )
        await _require_jetstream(connection, failures)
    except (OSError, nats.errors.Error) as error:
        await _close(client)
        failures.append(error)
        raise _explain(settings, failures) from None
    except BaseException:
        await _close(client)
        raise
    client.options["max_reconnect_attempts"] = -1
    client.options["reconnect_time_wait"] = 1
    connection.last_error = None
    return connection


def _tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.tls_ca_file)
    except OSError as error:
        raise ConnectionSettingsError(
            f"tls_ca_file: expected a PEM file with certificates at {settings.tls_ca_file}, found:"
            f" {error.strerror or type(error).__name__}"
        ) from None


async def _require_jetstream(connection: Connection, failures: list[Exception]) -> None:
    if connection.server_version < MINIMUM_SERVER:
        raise ServerTooOldError(
            f"expected nats-server {_dotted(MINIMUM_SERVER)} or later, found {_dotted(connection.server_version)}:"
            " older servers lose or repeat dead letters; upgrade the server"
        )
    account = await _account(connection, failures)
    connection.api_level = int(account.get("api", {}).get("level", 0))


async def _account(connection: Connection, failures: list[Exception]) -> dict[str, Any]:
    """Ask again until there is an answer: a cluster that elects a leader drops what it is asked meanwhile."""
    from nats import errors

    client, patience = connection.client, min(_PATIENCE, connection.timeout / 2)
    failures_before, connection.last_error = len(failures), None
    while True:
        try:
            return _decoded(await client.request("$JS.API.INFO", timeout=patience), "INFO")
        except errors.NoRespondersError:
            raise JetStreamDisabledError(_NO_JETSTREAM) from None
        except ApiError as error:
            if error.err_code in _NOT_ENABLED:
                raise JetStreamDisabledError(_NO_JETSTREAM) from None
            raise
        except UnreachableError as error:
            failures.insert(0, error)
            await asyncio.sleep(_PAUSE)
        except TimeoutError:
            patience *= 2
            # A connection that went away has told its own reasons.
            if client.is_connected and len(failures) == failures_before:
                found = f"no answer{_last_report(connection)}"
                failures.insert(0, UnreachableError(_UNAVAILABLE.format(found=found)))


def _decoded(message: Msg, subject: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(message.data)
    if not (found := answer.get("error")):
        return answer
    error = ApiError(
        found.get("code", 0), found.get("err_code", 0), found.get("description", "no description"), subject
    )
    if error.status == _SERVICE_UNAVAILABLE and error.err_code not in _LASTING:
        raise UnreachableError(_UNAVAILABLE.format(found=error))
    raise error


_UNAVAILABLE = (
    "JetStream is unavailable just now: {found}; try again, since a cluster that elects a leader is back in seconds;"
    " if it stays so, make sure that most of the cluster's servers run and reach each other"
)
_NO_JETSTREAM = (
    "expected JetStream, found a server or account without it: start nats-server with -js (or a jetstream block in its"
    " configuration), or enable JetStream for the account"
)


def _explain(settings: ConnectionSettings, failures: list[Exception]) -> JetStreamProviderError:
    """Name the cause that a person can act on, from most to least telling; never repeat a credential."""
    where = ", ".join(settings.servers)
    ours = next((failure for failure in failures if isinstance(failure, JetStreamProviderError)), None)
    if ours:
        return ours
    texts = [str(failure) for failure in failures]
    if any("authorization" in text.lower() or "authentication" in text.lower() for text in texts):
        sent = "a token" if settings.token else "user and password" if settings.user else "none"
        return AuthenticationError(f"{where} refused the credentials: expected valid ones, found {sent}; check them")
    for failure in failures:
        if isinstance(failure, ssl.SSLError):
            reason = getattr(failure, "verify_message", None) or failure.reason or failure
            return TLSError(f"no TLS with {where}: {reason}; check tls_ca_file and the host name")
    from nats.errors import NoServersError

    causes = [_reason(failure) for failure in failures if not isinstance(failure, NoServersError)]
    reasons = "; ".join(dict.fromkeys(causes)) or f"no answer within {settings.timeout:g} s"
    return UnreachableError(f"no NATS server reached at {where}: {reasons}; check host, port and firewall")


def _reason(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    if isinstance(failure, TimeoutError):
        return "no answer in time"
    return str(failure) or type(failure).__name__


async def _close(client: Client) -> None:
    # The client raises from close() while it is reconnecting with buffered data (TypeError among others), and there
    # is nothing left to do about a connection that goes away anyway.
    with suppress(Exception):
        await client.close()


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
