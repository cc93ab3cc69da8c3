"""Connecting to NATS: one time limit over everything, and JetStream's API as plain JSON."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.diagnostics import (
    NO_JETSTREAM,
    NOT_ENABLED,
    decode_answer,
    explain,
    last_report,
    tls_context,
    too_old,
    unavailable,
)
from airflow_provider_jetstream.jetstream.client.prefetch import ReadCapabilities
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadlineError,
    JetStreamDisabledError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.headers import Headers
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings


MINIMUM_SERVER = (2, 10, 27)

# Seconds; the first patience with a cluster, doubled each time, and the pause after an answer that says to wait.
_PATIENCE = 1.0
_PAUSE = 0.25


class Connection(ReadCapabilities):
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

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, headers included."""
        return self.client.max_payload

    @property
    def reconnects(self) -> int:
        """How often it was lost and came back."""
        return int(self.client.stats["reconnects"])

    async def api(self, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream's API and keep every field of its answer.

        Protocol: the JSON API described by the NATS documentation, "JetStream wire API reference".

        :param subject: the API subject after ``$JS.API.``
        :param request: the body, as JSON
        :return: the decoded answer
        :raises ApiError: the server refused
        :raises TransientError: there is none, as while a cluster elects a leader, or JetStream is unavailable just now
        """
        payload = json.dumps(request).encode() if request is not None else b""
        message = await self.request(f"$JS.API.{subject}", payload)
        return decode_answer(message.data, subject)

    async def request(self, subject: str, payload: bytes = b"") -> Msg:
        """Send a request and wait for its one answer.

        :param subject: the full subject
        :param payload: the body
        :return: the answer
        :raises TransientError: there is none, the connection is gone, or nobody serves the subject just now
        """
        from nats import errors

        try:
            return await self.client.request(subject, payload, timeout=self.timeout)
        except errors.NoRespondersError:
            raise UnreachableError(
                f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"
            ) from None
        except TimeoutError:
            told = last_report(self.last_error)
            raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s{told}") from None
        except errors.Error as error:
            raise UnreachableError(f"the connection failed while asking {subject}: {error}") from None

    async def status(self, subject: str, payload: bytes) -> str:
        """Send a request that is answered by a status only.

        :param subject: the full subject
        :param payload: the body
        :return: the status, such as ``404``; empty where the answer has none
        :raises TransientError: there is no answer
        """
        from nats import errors

        try:
            # In the old style, with an inbox of its own: the client's shared one has no place for a status.
            answer = await self.client.request(subject, payload, timeout=self.timeout, old_style=True)
        except TimeoutError:
            raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s") from None
        except errors.Error as error:
            raise UnreachableError(f"nobody can be asked on {subject}: {error}") from None
        return (answer.headers or {}).get("Status", "")

    async def publish(self, subject: str, body: bytes, headers: Headers | None = None, reply: str = "") -> None:
        """Send a message, and wait for nothing.

        :param subject: its subject
        :param body: its body
        :param headers: its headers
        :param reply: where answers to it go
        :raises UnreachableError: it isn't sent
        """
        from nats import errors

        try:
            await self.client.publish(subject, body, reply=reply, headers=headers)
        except errors.Error as error:
            raise UnreachableError(f"nothing was sent on {subject}: {error}") from None

    async def publish_acknowledged(self, subject: str, body: bytes, headers: Headers | None = None) -> bytes:
        """Publish a message and wait for the answer of the stream that captures it.

        :param subject: its subject
        :param body: its body
        :param headers: its headers
        :return: the answer
        :raises TransientError: there is none; the message may be stored all the same
        """
        from nats import errors
        from nats.js import errors as js_errors

        try:
            answer = await self.client.request(subject, body, timeout=self.timeout, headers=headers)
        except errors.NoRespondersError:
            raise UnreachableError(f"no stream captures {subject} just now") from None
        except (TimeoutError, js_errors.Error) as error:
            raise DeadlineError(f"no acknowledgement on {subject} within {self.timeout:g} s: {error}") from None
        except errors.Error as error:
            raise UnreachableError(f"nothing was sent on {subject}: {error}") from None
        return answer.data

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages nobody looks at.

        :return: the inbox
        """

        async def ignore(_: Msg) -> None:
            return

        inbox = self.client.new_inbox()
        arrivals = await self.client.subscribe(inbox, cb=ignore)
        try:
            yield inbox
        finally:
            await arrivals.unsubscribe()


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
        raise explain(settings, failures) from None
    try:
        yield connection
    finally:
        await _close(connection.client)


async def _open(settings: ConnectionSettings, failures: list[Exception]) -> Connection:
    import nats.errors

    from airflow_provider_jetstream.jetstream.client.nats_py import JetStreamClient

    client = JetStreamClient(encrypted=settings.encrypted)
    connection = Connection(client, settings.timeout)

    async def remember(error: Exception) -> None:
        connection.last_error = error
        if not client.is_connected:
            failures.append(error)

    tls = tls_context(settings) if settings.encrypted else None
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
        raise explain(settings, failures) from None
    except BaseException:
        await _close(client)
        raise
    client.options["max_reconnect_attempts"] = -1
    client.options["reconnect_time_wait"] = 1
    connection.last_error = None
    return connection


async def _require_jetstream(connection: Connection, failures: list[Exception]) -> None:
    if connection.server_version < MINIMUM_SERVER:
        raise too_old(connection.server_version, MINIMUM_SERVER)
    account = await _account(connection, failures)
    connection.api_level = int(account.get("api", {}).get("level", 0))


async def _account(connection: Connection, failures: list[Exception]) -> dict[str, Any]:
    """Ask again until there is an answer: a cluster that elects a leader drops what it is asked meanwhile."""
    from nats import errors

    client, patience = connection.client, min(_PATIENCE, connection.timeout / 2)
    failures_before, connection.last_error = len(failures), None
    while True:
        try:
            return decode_answer((await client.request("$JS.API.INFO", timeout=patience)).data, "INFO")
        except errors.NoRespondersError:
            raise JetStreamDisabledError(NO_JETSTREAM) from None
        except ApiError as error:
            if error.err_code in NOT_ENABLED:
                raise JetStreamDisabledError(NO_JETSTREAM) from None
            raise
        except UnreachableError as error:
            failures.insert(0, error)
            await asyncio.sleep(_PAUSE)
        except TimeoutError:
            patience *= 2
            # A connection that went away has told its own reasons.
            if client.is_connected and len(failures) == failures_before:
                failures.insert(0, unavailable(f"no answer{last_report(connection.last_error)}"))


async def _close(client: Client) -> None:
    # The client raises from close() while it is reconnecting with buffered data (TypeError among others), and there
    # is nothing left to do about a connection that goes away anyway.
    with suppress(Exception):
        await client.close()
