"""A hook with a connection to NATS, whose settings it reads from an Airflow connection of type ``nats``.

A blocking operation gets a connection of its own, an awaited one the event loop's. The triggers of an event loop read
an Airflow connection once for all of them.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeAlias, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from airflow.sdk import BaseHook

from airflow_provider_jetstream.jetstream.errors import (
    AuthenticationError,
    ConnectionSettingsError,
    EventLoopError,
    JetStreamDisabledError,
    JetStreamProviderError,
    PermissionDeniedError,
    ServerTooOldError,
    TLSError,
    UnreachableError,
    WireError,
    same_error,
)
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import airflow.sdk

    from airflow_provider_jetstream.jetstream.client.connect import SharedConnection
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

# Settings for which Airflow has fields of its own, and a setting that nobody chooses.
_OTHERS = {"servers", "user", "password", "name"}
# A URI's scheme is its connection's type: what tls://… asks for must not become plaintext.
_TYPES = {None: "nats", "": "nats", "nats": "nats", "tls": "tls"}
# Triggers that start later see a connection that was changed in Airflow in the meantime.
_CACHE_SECONDS = 30.0


def settings_from(connection: airflow.sdk.Connection, extras: Mapping[str, Any]) -> ConnectionSettings:
    """Read the settings from an Airflow connection.

    :param connection: its host may hold several addresses with commas, each with or without ``tls://`` and port; its
        type is ``nats``, or ``tls`` as of a URI that asks for TLS
    :param extras: its decoded extras, named as the fields of :class:`ConnectionSettings`
    :raises ConnectionSettingsError: an extra isn't known, or the settings contradict each other
    """
    where = f"connection {connection.conn_id!r}"
    values = {name: value for name, value in extras.items() if value not in (None, "")}
    known = [name for name in runtime.ConnectionSettings.model_fields if name not in _OTHERS]
    if unknown := sorted(values.keys() - set(known)):
        raise ConnectionSettingsError(
            f"{where}: expected extras among {', '.join(known)}, found {', '.join(unknown)}; remove or correct them"
        )
    scheme = _TYPES.get(connection.conn_type)
    if scheme is None:
        raise ConnectionSettingsError(
            f"{where}: expected the type nats, or tls for encrypted connections, found {connection.conn_type!r}; set it"
        )
    if connection.schema:
        raise ConnectionSettingsError(f"{where}: expected nothing after host and port, found a schema; remove it")
    # Checked before the host is split at its commas: a comma may be part of a secret.
    if "@" in (connection.host or ""):
        raise ConnectionSettingsError(
            f"{where}: expected addresses without credentials, found an @ in its host: give them as login and password,"
            " or as token"
        )
    hosts = [host.strip() for host in (connection.host or "").split(",") if host.strip()]
    if not hosts:
        raise ConnectionSettingsError(f"{where}: expected a host, found none; set it")
    with named_connection(connection.conn_id):
        return runtime.connection_settings(
            {
                "servers": tuple(_address(host, connection.port, scheme) for host in hosts),
                "user": connection.login or None,
                "password": connection.password or None,
                **values,
            }
        )


_ABOUT_CONNECTION = (
    *(AuthenticationError, ConnectionSettingsError, JetStreamDisabledError, PermissionDeniedError, ServerTooOldError),
    *(TLSError, UnreachableError, WireError),
)


@contextmanager
def named_connection(conn_id: str, servers: Sequence[str] = ()) -> Iterator[None]:
    """Name the Airflow connection in the errors of a block that are about the connection to the servers.

    :param servers: their addresses, which are added where an error doesn't name them
    :raises JetStreamProviderError: another error of the same class, since users of one connection share its errors
    """
    try:
        yield
    except _ABOUT_CONNECTION as error:
        raise _named(error, conn_id, servers) from None


def _named(error: JetStreamProviderError, conn_id: str, servers: Sequence[str]) -> JetStreamProviderError:
    text, name = str(error), f"connection {conn_id!r}"
    if text.startswith(name):
        return error
    where = "" if all(server in text for server in servers) else f" ({', '.join(servers)})"
    named = same_error(error)
    named.args = (f"{name}{where}: {text}",)
    return named.with_traceback(error.__traceback__)


def _address(host: str, port: int | None, scheme: str) -> str:
    if port is None and scheme == "nats":
        return host
    address = host if "://" in host else f"{scheme}://{host}"
    if scheme == "tls" and address.startswith("nats://"):
        raise ConnectionSettingsError(
            "expected addresses with tls://, or without a scheme, in a connection of type tls, found nats://"
        )
    try:
        has_port = port is None or urlsplit(address).port is not None
    except ValueError:
        return address
    return address if has_port else f"{address.rstrip('/')}:{port}"


class _Cache:
    """Reads an Airflow connection once for all triggers of an event loop.

    A triggerer handles such lookups one after another, in some 40 ms each: ten thousand triggers that start together
    would wait for minutes before the last could begin.
    """

    def __init__(self) -> None:
        self.lookups: dict[str, asyncio.Task[ConnectionSettings]] = {}
        self.settings: dict[str, tuple[float, ConnectionSettings]] = {}

    async def get(self, hook: ConnectedHook) -> ConnectionSettings:
        read_at, settings = self.settings.get(hook.nats_conn_id, (0.0, None))
        if settings is not None and time.monotonic() - read_at < _CACHE_SECONDS:
            return settings
        return await self.renewed(hook)

    async def renewed(self, hook: ConnectedHook) -> ConnectionSettings:
        conn_id = hook.nats_conn_id
        self.settings.pop(conn_id, None)
        if conn_id not in self.lookups:
            self.lookups[conn_id] = asyncio.create_task(self._look_up(hook))
        # Shielded: a trigger that is cancelled must not cancel the lookup of the others.
        return await asyncio.shield(self.lookups[conn_id])

    async def _look_up(self, hook: ConnectedHook) -> ConnectionSettings:
        try:
            connection = await hook._read_connection()  # noqa: SLF001
            settings = settings_from(connection, await _extras(connection))
            self.settings[hook.nats_conn_id] = (time.monotonic(), settings)
            return settings
        finally:
            del self.lookups[hook.nats_conn_id]


# Keyed by the loop itself: ids of closed loops are reused. The values must not hold the loop, as a done task would.
_caches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Cache] = WeakKeyDictionary()


def _cache() -> _Cache:
    return _caches.setdefault(asyncio.get_running_loop(), _Cache())


async def _extras(connection: airflow.sdk.Connection) -> Mapping[str, Any]:
    if hasattr(connection, "aextra_dejson"):
        extras: Mapping[str, Any] = await connection.aextra_dejson()
        return extras
    # Before Airflow 3.3.2 masking of secrets blocks, and fails beside another request of the same event loop. asgiref
    # rather than asyncio.to_thread: only so does the request run on the triggerer's own event loop.
    from asgiref.sync import sync_to_async

    return await sync_to_async(lambda: connection.extra_dejson)()


_Arguments = ParamSpec("_Arguments")
_Hook = TypeVar("_Hook", bound="ConnectedHook")
_Result = TypeVar("_Result")
# Takes an open connection; its other arguments are bound and checked.
Operation: TypeAlias = "Callable[[Connection], Awaitable[_Result]]"


def call(
    operation: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> Operation[_Result]:
    """Return an operation with its arguments."""
    return lambda connection: operation(connection, *args, **kwargs)


def blocking(
    prepare: Callable[Concatenate[_Hook, _Arguments], Operation[_Result]],
) -> Callable[Concatenate[_Hook, _Arguments], _Result]:
    """Make a blocking method of a hook from a method that returns the operation."""

    @wraps(prepare)
    def method(self: _Hook, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return self.blocking(prepare(self, *args, **kwargs))

    return method


def awaitable(
    method: Callable[Concatenate[_Hook, _Arguments], _Result],
) -> Callable[Concatenate[_Hook, _Arguments], Coroutine[Any, Any, _Result]]:
    """Make the awaitable twin of a method that is :func:`blocking`."""
    prepare: Callable[Concatenate[_Hook, _Arguments], Operation[_Result]] = method.__wrapped__  # type: ignore[attr-defined]

    @wraps(prepare)
    async def twin(self: _Hook, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return await self.awaited(prepare(self, *args, **kwargs))

    twin.__doc__ = f"Do what :meth:`{prepare.__name__}` does, awaited."
    return twin


class _HookConnection:
    """Reads the settings when the block begins, and uses the connection while it runs."""

    __slots__ = ("_conn_id", "_hook", "_servers", "_use")

    def __init__(self, hook: ConnectedHook) -> None:
        self._hook: ConnectedHook | None = hook
        self._use: SharedConnection | None = None
        self._conn_id = hook.nats_conn_id
        self._servers: Sequence[str] = ()

    async def __aenter__(self) -> Connection:
        if (hook := self._hook) is None:
            raise RuntimeError("a shared connection can be used once: call shared() again")
        # A triggerer has ten thousand waits, and none of them needs its hook any more.
        self._hook = None
        settings = await hook.asettings()
        self._servers = settings.servers
        self._use = use = runtime.shared_connection(settings, hook._renewed_settings)  # noqa: SLF001
        with named_connection(self._conn_id, self._servers):
            return await use.__aenter__()

    async def __aexit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if self._use is not None:
            await self._use.__aexit__(_, error, traceback)
        if isinstance(error, _ABOUT_CONNECTION) and (named := _named(error, self._conn_id, self._servers)) is not error:
            raise named from None


class ConnectedHook(BaseHook):
    """Runs operations on the servers behind an Airflow connection of type ``nats``."""

    conn_name_attr = "nats_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = "nats"
    hook_name = "NATS JetStream"

    def __init__(self, nats_conn_id: str = default_conn_name, *, logger_name: str | None = None) -> None:
        super().__init__(logger_name=logger_name)
        self.nats_conn_id = nats_conn_id

    def settings(self) -> ConnectionSettings:
        """Read the Airflow connection.

        :raises ConnectionSettingsError: it can't be used
        """
        connection = self.get_connection(self.nats_conn_id)
        return settings_from(connection, connection.extra_dejson)

    async def asettings(self) -> ConnectionSettings:
        """Do what :meth:`settings` does, awaited, with one lookup in 30 seconds for the whole event loop."""
        return await _cache().get(self)

    async def _renewed_settings(self) -> ConnectionSettings:
        # What the event loop knows of the connection doesn't work any more.
        return await _cache().renewed(self)

    async def _read_connection(self) -> airflow.sdk.Connection:
        from airflow_provider_jetstream.airflow_compat import AirflowNotFoundException, conf

        try:
            return await BaseHook.aget_connection(self.nats_conn_id)
        except AirflowNotFoundException as error:
            if not conf.getboolean("core", "multi_team", fallback=False):
                raise
            raise AirflowNotFoundException(
                f"{error}, or belongs to a team, and Airflow's triggerers read only connections that belong to none:"
                f" set AIRFLOW_CONN_{self.nats_conn_id.upper()} in the environment of the team's triggerer, or"
                " deferrable=False"
            ) from None

    def shared(self) -> AbstractAsyncContextManager[Connection]:
        """Use the event loop's one connection with these settings, in an ``async with``.

        :raises JetStreamProviderError: it can't be opened
        """
        return _HookConnection(self)

    def get_conn(self) -> NoReturn:
        """Refuse to return a connection, which other hooks of Airflow do.

        A connection to NATS belongs to the event loop that has opened it, and answers, pings and reconnections need
        that loop to run. Outside of one there is no such object that would work, and in one :meth:`shared` returns it.

        :raises NotImplementedError: always, with what to call instead
        """
        raise NotImplementedError(
            "expected a call of one of the hook's own methods, found get_conn: a connection to NATS works only in the"
            " event loop that has opened it. Call publish, wait, find_dead_letters, redrive and the like; for requests"
            " of your own call hook.blocking(function), whose async function gets the open connection, or use"
            " `async with hook.shared() as connection` where an event loop is running"
        )

    def test_connection(self) -> tuple[bool, str]:
        """Connect once, for the button in the UI.

        :return: whether it works, and a sentence that says what was found or what is wrong
        """
        require_no_event_loop()
        try:
            # Airflow tests a connection under another id, which would only confuse.
            return True, self._run(self.settings(), _describe)
        except JetStreamProviderError as error:
            return False, str(error)

    def blocking(
        self,
        operation: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Open a connection, await an operation on it, and close it.

        :param operation: a coroutine function whose first parameter is the open connection
        :param args: its further arguments
        :param kwargs: those by name
        :raises EventLoopError: an event loop is running in this thread; use the awaitable twin
        """
        require_no_event_loop()
        settings = self.settings()
        with named_connection(self.nats_conn_id, settings.servers):
            return self._run(settings, operation, *args, **kwargs)

    def _run(
        self,
        settings: ConnectionSettings,
        operation: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        results: list[_Result] = []

        async def run() -> None:
            async with runtime.connect(settings, self._renewed_settings) as connection:
                results.append(await operation(connection, *args, **kwargs))

        # Not the result of the coroutine: asyncio.run makes a text of that when it restores the handler of SIGINT,
        # which takes 0.5 s for a report of a million jobs.
        asyncio.run(run())
        return results[0]

    async def awaited(
        self,
        operation: Callable[Concatenate[Connection, _Arguments], Awaitable[_Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Await an operation on the event loop's shared connection.

        :param operation: a coroutine function whose first parameter is the open connection
        :param args: its further arguments
        :param kwargs: those by name
        """
        async with self.shared() as connection:
            return await operation(connection, *args, **kwargs)


async def _describe(connection: Connection) -> str:
    version = ".".join(map(str, connection.server_version))
    return f"Connected to nats-server {version} with JetStream (API level {connection.api_level})."


def require_no_event_loop() -> None:
    """Refuse a blocking call in a thread whose event loop it would stop.

    :raises EventLoopError: an event loop is running in this thread
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise EventLoopError(
        "expected no running event loop, found one: a blocking call would stop it; await the method of the same name"
        ' that starts with "a" (aprovision, apublish, …)'
    )
