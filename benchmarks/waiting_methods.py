"""The ways to wait for a job, each as a trigger, so that all run alike and hold the same arguments."""

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import nats
from airflow.providers.common.compat.connection import get_async_connection
from airflow.triggers.base import BaseTrigger, TriggerEvent
from nats.js.errors import NotFoundError

POLL_SECONDS = 1.0
# A thousand that connect at the same time need more than the client's two seconds.
CONNECT_SECONDS = 60
FOREVER = 86_400.0

_opening: dict[Callable[[str], Awaitable[Any]], asyncio.Task[Any]] = {}


class Peer(BaseTrigger):
    """
    A trigger with the arguments of ours.

    :param arguments: those of :class:`~airflow_provider_jetstream.triggers.completion.JobCompletionTrigger`
    """

    joined: ClassVar[int] = 0

    def __init__(self, **arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments = arguments
        self.sequence: int = arguments["sequences"][0][0]
        self.queue: str = arguments["mark"]["queue"]
        self.events: str = arguments["mark"]["events"]

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Give what recreates the trigger elsewhere."""
        return f"{type(self).__module__}.{type(self).__name__}", self.arguments

    def event(self) -> TriggerEvent:
        """Give what says that the job has ended."""
        report = {"completed_sequences": [[self.sequence, self.sequence]]}
        return TriggerEvent({"status": "ended", "report": report})  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Count one that waits from here on."""
        Peer.joined += 1

    async def url(self) -> str:
        """Look the server up as a trigger does."""
        connection = await get_async_connection(self.arguments["nats_conn_id"])
        return f"nats://{connection.host}:{connection.port}"


class Idle(Peer):
    """What a trigger costs that does nothing."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Never fire."""
        self.join()
        await asyncio.sleep(FOREVER)
        yield self.event()


class ConnectionEach(Peer):
    """One connection per waiter: it listens first, then looks whether the job had ended before."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once the completion is heard of or found, and close after that."""
        client = await nats.connect(await self.url(), connect_timeout=CONNECT_SECONDS)
        try:
            subject = f"completed.{self.queue}.*.{self.sequence}"
            subscription = await client.subscribe(subject)
            try:
                await client.jetstream(timeout=CONNECT_SECONDS).get_last_msg(self.events, subject)
            except NotFoundError:
                self.join()
                await subscription.next_msg(timeout=FOREVER)
            yield self.event()
        finally:
            await client.close()


class Polling(Peer):
    """A look each second, over one connection that all share."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once the completion is found."""
        client = await _once(_connected, await self.url())
        jetstream = client.jetstream(timeout=CONNECT_SECONDS)
        self.join()
        # Spread over the second: looks that all came at the same moment would keep each other waiting.
        await asyncio.sleep(POLL_SECONDS * (self.sequence % 1000) / 1000)
        while True:
            try:
                await jetstream.get_last_msg(self.events, f"completed.{self.queue}.*.{self.sequence}")
            except NotFoundError:
                await asyncio.sleep(POLL_SECONDS)
            else:
                break
        yield self.event()


class Taskiq(Peer):
    """``wait_result`` of taskiq over the result backend of taskiq-nats, both with their defaults."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once the result is there."""
        backend = await _once(taskiq_backend, await self.url())
        self.join()
        await importlib.import_module("taskiq").AsyncTaskiqTask(str(self.sequence), backend).wait_result()
        yield self.event()


async def taskiq_backend(url: str) -> Any:
    """
    Open the result backend of taskiq-nats, which isn't in the environment of development and of type checks.

    :param url: the server
    """
    backend = importlib.import_module("taskiq_nats").NATSObjectStoreResultBackend(url)
    await backend.startup()
    return backend


async def _connected(url: str) -> Any:
    return await nats.connect(url, connect_timeout=CONNECT_SECONDS)


async def _once(opened: Callable[[str], Any], url: str) -> Any:
    if opened not in _opening:
        _opening[opened] = asyncio.create_task(opened(url))
    return await _opening[opened]
