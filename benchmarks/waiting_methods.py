"""The methods of waiting for a job, each as a trigger, so that all run alike and hold the same arguments."""

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import nats
from airflow.providers.common.compat.connection import get_async_connection
from airflow.triggers.base import BaseTrigger, TriggerEvent
from nats.js.errors import NotFoundError

POLL_SECONDS = 1.0
# A thousand concurrent connects take longer than nats-py's default of two seconds.
CONNECT_SECONDS = 60
FOREVER = 86_400.0

_opening: dict[Callable[[str], Awaitable[Any]], asyncio.Task[Any]] = {}


class PeerTrigger(BaseTrigger):
    """A trigger with the arguments of :class:`~airflow_provider_jetstream.triggers.completion.JobCompletionTrigger`."""

    waiting_count: ClassVar[int] = 0

    def __init__(self, **arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments = arguments
        self.sequence: int = arguments["handle"]["sequences"][0][0]
        self.queue: str = arguments["handle"]["cursor"]["queue"]
        self.events: str = arguments["handle"]["cursor"]["events"]

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what recreates the trigger elsewhere."""
        return f"{type(self).__module__}.{type(self).__name__}", self.arguments

    def event(self) -> TriggerEvent:
        """Return the event of a completed job."""
        report = {"completed_sequences": [[self.sequence, self.sequence]]}
        return TriggerEvent({"status": "ended", "report": report})  # type: ignore[no-untyped-call]

    def count_waiter(self) -> None:
        """Count this trigger as waiting from now on."""
        PeerTrigger.waiting_count += 1

    async def url(self) -> str:
        """Return the server's address from the Airflow connection, as a trigger does."""
        connection = await get_async_connection(self.arguments["nats_conn_id"])
        return f"nats://{connection.host}:{connection.port}"


class Idle(PeerTrigger):
    """A trigger that does nothing, for the cost of a trigger itself."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Never fire."""
        self.count_waiter()
        await asyncio.sleep(FOREVER)
        yield self.event()


class ConnectionEach(PeerTrigger):
    """One connection per waiter: it subscribes first, then checks whether the job had ended before."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once the completion is received or found, and close after that."""
        client = await nats.connect(await self.url(), connect_timeout=CONNECT_SECONDS)
        try:
            subject = f"completed.{self.queue}.*.{self.sequence}"
            subscription = await client.subscribe(subject)
            try:
                await client.jetstream(timeout=CONNECT_SECONDS).get_last_msg(self.events, subject)
            except NotFoundError:
                self.count_waiter()
                await subscription.next_msg(timeout=FOREVER)
            yield self.event()
        finally:
            await client.close()


class Polling(PeerTrigger):
    """One request a second, over one connection that all waiters share."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once the completion is found."""
        client = await _shared(_connect, await self.url())
        jetstream = client.jetstream(timeout=CONNECT_SECONDS)
        self.count_waiter()
        # Spread over the second: simultaneous polls would delay each other.
        await asyncio.sleep(POLL_SECONDS * (self.sequence % 1000) / 1000)
        while True:
            try:
                await jetstream.get_last_msg(self.events, f"completed.{self.queue}.*.{self.sequence}")
            except NotFoundError:
                await asyncio.sleep(POLL_SECONDS)
            else:
                break
        yield self.event()


class Taskiq(PeerTrigger):
    """``wait_result`` of taskiq over the result backend of taskiq-nats, both with their defaults."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once the result is stored."""
        backend = await _shared(taskiq_backend, await self.url())
        self.count_waiter()
        await importlib.import_module("taskiq").AsyncTaskiqTask(str(self.sequence), backend).wait_result()
        yield self.event()


async def taskiq_backend(url: str) -> Any:
    """Open the result backend of taskiq-nats, which isn't in the environment of development and of type checks."""
    backend = importlib.import_module("taskiq_nats").NATSObjectStoreResultBackend(url)
    await backend.startup()
    return backend


async def _connect(url: str) -> Any:
    return await nats.connect(url, connect_timeout=CONNECT_SECONDS)


async def _shared(open_client: Callable[[str], Any], url: str) -> Any:
    if open_client not in _opening:
        _opening[open_client] = asyncio.create_task(open_client(url))
    return await _opening[open_client]
