"""A hook with a connection to NATS: one of its own for a blocking operation, the event loop's for an awaited one."""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from airflow.sdk import BaseHook

from airflow_provider_jetstream.hooks.connection_settings import cached_settings, renewed_settings, settings_from
from airflow_provider_jetstream.jetstream.client.connect import connect, shared_connection
from airflow_provider_jetstream.jetstream.errors import EventLoopError, JetStreamProviderError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connect import SharedConnection
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

_Arguments = ParamSpec("_Arguments")
_Hook = TypeVar("_Hook", bound="ConnectedHook")
_Result = TypeVar("_Result")
# What a connection is needed for; the arguments are checked by then.
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
    """Make a method of a hook that does what another one prepares."""

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

    __slots__ = ("_hook", "_use")

    def __init__(self, hook: ConnectedHook) -> None:
        self._hook: ConnectedHook | None = hook
        self._use: SharedConnection | None = None

    async def __aenter__(self) -> Connection:
        if (hook := self._hook) is None:
            raise RuntimeError("a shared connection can be used once: call shared() again")
        # A triggerer has ten thousand waits, and none of them needs its hook any more.
        self._hook = None
        self._use = use = shared_connection(await hook.asettings(), hook._renewed_settings)  # noqa: SLF001
        return await use.__aenter__()

    async def __aexit__(self, *reason: object) -> None:
        if self._use is not None:
            await self._use.__aexit__(*reason)


class ConnectedHook(BaseHook):
    """Runs operations on the servers behind an Airflow connection of type ``nats``."""

    conn_name_attr = "nats_conn_id"
    default_conn_name = "nats_default"
    conn_type = "nats"
    hook_name = "NATS JetStream"

    def __init__(self, nats_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.nats_conn_id = nats_conn_id

    def settings(self) -> ConnectionSettings:
        """Read the Airflow connection.

        :raises ConnectionSettingsError: it can't be used
        """
        connection = self.get_connection(self.nats_conn_id)
        return settings_from(connection, connection.extra_dejson)

    async def asettings(self) -> ConnectionSettings:
        """Do what :meth:`settings` does, awaited, with one lookup in 30 seconds for the whole event loop."""
        return await cached_settings(self.nats_conn_id)

    async def _renewed_settings(self) -> ConnectionSettings:
        return await renewed_settings(self.nats_conn_id)

    def shared(self) -> AbstractAsyncContextManager[Connection]:
        """Use the event loop's one connection with these settings, in an ``async with``.

        :raises JetStreamProviderError: it can't be opened
        """
        return _HookConnection(self)

    def test_connection(self) -> tuple[bool, str]:
        """Connect once, for the button in the UI.

        :return: whether it works, and a sentence that says what was found or what is wrong
        """
        try:
            return True, self.blocking(_describe)
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
        results: list[_Result] = []

        async def run() -> None:
            async with connect(settings, self._renewed_settings) as connection:
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
