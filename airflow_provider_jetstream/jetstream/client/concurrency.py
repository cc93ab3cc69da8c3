"""Doing many things at once, and pausing, in an event loop or without one.

Outside of an event loop, whoever drives the coroutine is handed what it waits for: Spark's tasks do so, since an event
loop would cost more than the work.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.headers import Headers


class Gather:
    """Coroutines that a driver is to run side by side.

    :param coroutines: the coroutines
    """

    __slots__ = ("coroutines",)

    def __init__(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
        self.coroutines = coroutines

    def __await__(self) -> Generator[Gather, list[Any], list[Any]]:
        return (yield self)


class Sleep:
    """Time that a driver is to let pass.

    :param seconds: how much
    """

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[Sleep, None, None]:
        yield self


async def gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines side by side.

    :param coroutines: the coroutines
    :return: for each its result, or what it raised
    """
    if _in_loop():
        return list(await asyncio.gather(*coroutines, return_exceptions=True))
    return await Gather(coroutines)


async def sleep(seconds: float) -> None:
    """Let time pass.

    :param seconds: how much
    """
    await (asyncio.sleep(seconds) if _in_loop() else Sleep(seconds))


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def request_many(
    connection: Connection, requests: Sequence[tuple[str, bytes]], headers: Sequence[Headers] | None = None
) -> list[bytes | TransientError]:
    """Send requests, as many side by side as elsewhere.

    :param connection: the server
    :param requests: full subjects and bodies
    :param headers: for each its headers, where they are messages to be stored
    :return: for each its answer, or why there is none
    """
    if connection.request_many:
        return await connection.request_many(requests, headers)

    async def ask(place: int) -> tuple[bytes | TransientError]:
        try:
            if headers:
                return (await connection.publish_acknowledged(*requests[place], headers[place]),)
            return ((await connection.request(*requests[place])).data,)
        except TransientError as error:
            return (error,)

    return [answer for (answer,) in await map_concurrently(ask, range(len(requests)))]


_Item = TypeVar("_Item")


_Result = TypeVar("_Result")


# The server drops its whole queue of API requests at ten thousand.
MAX_CONCURRENT = 256


async def map_concurrently(
    work: Callable[[_Item], Coroutine[Any, Any, _Result]], items: Iterable[_Item]
) -> list[_Result]:
    """Do something for many items, :data:`WIDEST` at a time.

    :param work: a coroutine function
    :param items: what it is called with
    :return: the results in the same order
    :raises Exception: the first that any call raised, once all calls of its time have ended
    """
    results: list[_Result] = []
    waiting = list(items)
    for start in range(0, len(waiting), MAX_CONCURRENT):
        for result in await gather([work(item) for item in waiting[start : start + MAX_CONCURRENT]]):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
    return results
