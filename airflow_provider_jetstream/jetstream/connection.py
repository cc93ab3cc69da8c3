"""Connecting to NATS: settings, one time limit over everything, and JetStream's API as plain JSON."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

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

MINIMUM_SERVER = (2, 10, 27)
DEFAULT_PORT = 4222

_NOT_ENABLED = {10039, 10076}


class ConnectionSettings(BaseModel):
    """Where the servers are and how to prove who is asking.

    :param servers: ``nats://`` or ``tls://`` addresses without credentials; ``host`` and ``host:port`` work too
    :param user: user name, together with ``password``
    :param password: its password
    :param token: a token instead of user and password
    :param tls_ca_file: path of the certificate authority that signed the servers' certificates; the system's
        authorities where it is absent
    :param timeout: seconds for everything between the first packet and a usable JetStream
    :param name: shown in the server's list of connections
    :raises ConnectionSettingsError: if the settings contradict each other
    """

    # A validation error would otherwise repeat the value, and a value may be a password.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    servers: tuple[str, ...] = Field(default=("nats://127.0.0.1:4222",), min_length=1)
    user: str | None = None
    password: SecretStr | None = None
    token: SecretStr | None = None
    tls_ca_file: str | None = None
    timeout: float = Field(default=10.0, gt=0, le=300)
    name: str = "airflow-provider-jetstream"

    @field_validator("servers", mode="after")
    @classmethod
    def _normalise_servers(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_normalise_server(server) for server in servers)

    @model_validator(mode="after")
    def _one_way_to_authenticate(self) -> Self:
        if self.token and (self.user or self.password):
            raise ValueError("expected a token or user and password, found both: keep one")
        if (self.user is None) != (self.password is None):
            raise ValueError("expected user and password together, found only one of them")
        if len({urlsplit(server).scheme for server in self.servers}) > 1:
            raise ValueError("expected either tls:// for all servers or for none, found both")
        return self

    @property
    def encrypted(self) -> bool:
        """Whether plaintext must be refused."""
        return self.servers[0].startswith("tls://") or self.tls_ca_file is not None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ConnectionSettings:
        """Read ``NATS_URL`` (several with commas), ``NATS_USER``, ``NATS_PASSWORD``, ``NATS_TOKEN``, ``NATS_CA``.

        :param environment: such as :data:`os.environ`
        :return: the settings
        :raises ConnectionSettingsError: if they contradict each other
        """
        values = {
            "servers": tuple(filter(None, environment.get("NATS_URL", "").split(","))) or None,
            "user": environment.get("NATS_USER"),
            "password": environment.get("NATS_PASSWORD"),
            "token": environment.get("NATS_TOKEN"),
            "tls_ca_file": environment.get("NATS_CA"),
        }
        return connection_settings({key: value for key, value in values.items() if value is not None})


def connection_settings(values: Mapping[str, Any]) -> ConnectionSettings:
    """Validate settings that came from outside, without ever repeating a value in the error.

    :param values: the fields of :class:`ConnectionSettings`
    :return: the settings
    :raises ConnectionSettingsError: naming the fields and what was expected
    """
    from pydantic import ValidationError

    try:
        return ConnectionSettings.model_validate(dict(values))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False, include_url=False)
        )
        raise ConnectionSettingsError(f"the NATS connection can't be used: {problems}") from None


def _normalise_server(server: str) -> str:
    text = server.strip()
    parts = urlsplit(text if "://" in text else f"nats://{text}")
    if parts.scheme not in ("nats", "tls"):
        raise ValueError(f"expected a nats:// or tls:// address, found the scheme {parts.scheme!r}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected an address without credentials: give user, password or token as settings")
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise ValueError(f"expected a port number at the end of {parts.hostname!r}") from None
    if not parts.hostname:
        raise ValueError(f"expected a host, found {server!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


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
        :raises DeadlineError: no answer within the time limit
        :raises UnreachableError: the connection is gone, or nobody serves the API just now
        """
        payload = json.dumps(request).encode() if request is not None else b""
        message = await self.request(f"$JS.API.{subject}", payload)
        answer: dict[str, Any] = json.loads(message.data)
        if error := answer.get("error"):
            raise ApiError(
                error.get("code", 0), error.get("err_code", 0), error.get("description", "no description"), subject
            )
        return answer

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
            hint = f" (the connection last reported: {self.last_error})" if self.last_error else ""
            raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s{hint}") from None
        except errors.Error as error:
            raise UnreachableError(f"the connection failed while asking {subject}: {error}") from None


@asynccontextmanager
async def connect(settings: ConnectionSettings) -> AsyncIterator[Connection]:
    """Connect, make sure that JetStream is there and new enough, and close at the end.

    After that the connection mends itself for as long as it is open.

    :param settings: where and as whom
    :return: the open connection
    :raises UnreachableError: no server answered
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

    tls = ssl.create_default_context(cafile=settings.tls_ca_file) if settings.encrypted else None
    try:
        await client.connect(
            list(settings.servers),
            error_cb=remember,
            name=settings.name,
            tls=tls,
            user=settings.user,
            password=settings.password.get_secret_value() if settings.password else None,
            token=settings.token.get_secret_value() if settings.token else None,
            connect_timeout=max(1, round(settings.timeout)),
            # The client knows one policy for the first connection and for later ones. A first connection tries each
            # server twice and gives up; one that has worked is worth waiting for.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
        )
        await _require_jetstream(connection)
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


async def _require_jetstream(connection: Connection) -> None:
    if connection.server_version < MINIMUM_SERVER:
        raise ServerTooOldError(
            f"expected nats-server {_dotted(MINIMUM_SERVER)} or later, found {_dotted(connection.server_version)}:"
            " older servers lose or repeat dead letters; upgrade the server"
        )
    try:
        account = await connection.api("INFO")
    except UnreachableError:
        raise JetStreamDisabledError(_NO_JETSTREAM) from None
    except ApiError as error:
        if error.err_code in _NOT_ENABLED:
            raise JetStreamDisabledError(_NO_JETSTREAM) from None
        raise
    connection.api_level = int(account.get("api", {}).get("level", 0))


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
        what = "the token" if settings.token else "user and password" if settings.user else "a connection without any"
        return AuthenticationError(f"{where} refused the credentials: expected valid ones, sent {what}; check them")
    for failure in failures:
        if isinstance(failure, ssl.SSLError):
            return TLSError(f"no TLS with {where}: {failure.reason or failure}; check tls_ca_file and the host name")
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
