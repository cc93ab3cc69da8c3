"""A connection to the simulated server: the same protocol that the package uses with a real one.

Everything above the frames is the package's own code: requests and their answers are those of its
:class:`~airflow_provider_jetstream.jetstream.client.loop_connection.LoopConnection`.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS
from airflow_provider_jetstream.jetstream.client.loop_connection import LoopConnection
from airflow_provider_jetstream.jetstream.client.wire import SentFrameReader
from airflow_provider_jetstream.jetstream.errors import UnreachableError
from testbed.simulated.server import Listener

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from testbed.simulated.server import SimulatedServer

_LEAST_DELAY, MOST_DELAY = 0.0001, 0.005
# In the subjects of what a redrive stores about letters, and removes of them.
_CHANGES = ("audit.q.letters.", "parked.q.", "STREAM.MSG.DELETE.")


# The actor that opens connections.
OWNER: ContextVar[str] = ContextVar("OWNER", default="")


class SimulatedConnection(LoopConnection):
    """A connection of one actor; messages take a random time each way, and stay in order.

    :param timeout: seconds for one request
    :ivar owner: the actor that has opened it
    :ivar delay: the largest time that a message takes, in seconds
    :ivar changes_left: after how many changes of letters whoever has it is killed
    """

    def __init__(self, server: SimulatedServer, *, timeout: float = 5.0) -> None:
        super().__init__()
        self.server = server
        self.owner = OWNER.get()
        self.timeout = timeout
        self.api_level = server.level
        self.delay = MOST_DELAY
        self.changes_left: int | None = None
        self._draw = server.loop.draws.of("connection", self.owner)
        self._listeners: list[Listener] = []
        self._inboxes = 0
        self._name = f"_INBOX.{server.new_id()}"
        self._sent_until = self._received_until = 0.0
        self._generation = 0
        self._closed = False
        self._connected = asyncio.Event()
        self._connected.set()

    @property
    @override
    def server_version(self) -> tuple[int, int, int]:
        return self.server.version

    @property
    @override
    def max_payload(self) -> int:
        return 1 << 20

    @property
    @override
    def reconnects(self) -> int:
        return self._generation

    @property
    @override
    def is_connected(self) -> bool:
        return self._connected.is_set() and not self._closed

    @property
    @override
    def is_closed(self) -> bool:
        return self._closed

    @override
    async def wait_until_connected(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._connected.wait()
        return self.is_connected

    # Faults.

    def lose(self) -> None:
        """Lose the connection: what is on its way arrives at neither end."""
        self._generation += 1
        self._connected.clear()
        for listener in self._listeners:
            self.server.listeners.remove(listener)

    def restore(self) -> None:
        """Connect anew, with the subscriptions that there were."""
        for listener in self._listeners:
            self.server.listeners.add(listener)
        self._connected.set()
        self.repeat_reads()

    def close(self) -> None:
        """Close it for good."""
        self.lose()
        self._closed = True

    # The way to the server and back.

    @override
    def write(self, frames: bytes, messages: int = 1) -> None:
        if not self.is_connected:
            raise UnreachableError("nothing was sent: the connection is lost")
        self._sent_until = self._call_after(self._sent_until, self._arrive, frames)
        if self.changes_left is not None:
            subjects = [subject for subject, *_ in parsed_frames(frames)]
            self.changes_left -= sum(any(part in one for part in _CHANGES) for one in subjects)
            if self.changes_left <= 0:
                self.changes_left = None
                self.server.loop.call_at(self._sent_until + 1e-8, self.close)

    def _arrive(self, frames: bytes) -> None:
        for subject, reply, headers, data in parsed_frames(frames):
            self.server.receive(subject, reply, headers, data)

    def _call_after(self, earliest: float, call: Callable[..., None], *arguments: Any) -> float:
        """Call a function a little later, after what was sent before; not if the connection is lost meanwhile."""
        loop, generation = self.server.loop, self._generation
        at = max(loop.time() + self._draw.uniform(_LEAST_DELAY, self.delay), earliest + 1e-7)

        def unless_lost() -> None:
            if generation == self._generation:
                call(*arguments)

        loop.call_at(at, unless_lost)
        return at

    def _listen(self, subject: str, receive: Callable[[str, str, bytes, bytes], None]) -> Listener:
        def later(subject: str, reply: str, headers: bytes, data: bytes) -> None:
            def arrive() -> None:
                if listener in self._listeners:
                    receive(subject, reply, headers, data)

            self._received_until = self._call_after(self._received_until, arrive)

        listener = Listener(subject, later)
        self._listeners.append(listener)
        if self.is_connected:
            # The subscription reaches the server in order with what is sent.
            self._sent_until = self._call_after(self._sent_until, self.server.listeners.add, listener)
        return listener

    def _unlisten(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
        if self.is_connected:
            self._sent_until = self._call_after(self._sent_until, self.server.listeners.remove, listener)

    # The protocol.

    @override
    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"{self._name}.{self._inboxes}"

    @override
    async def wait_for_room(self) -> None:
        await asyncio.sleep(0)

    @override
    async def drop_unsent(self) -> None:
        await asyncio.sleep(self.delay)

    @override
    async def subscribe_raw(
        self,
        subject: str,
        on_message: OnMessage,
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
        form: FrameForm | None = None,
    ) -> SimulatedSubscription:
        def receive(subject: str, reply: str, headers: bytes, data: bytes) -> None:
            on_message(
                subject.encode("utf-8", "surrogateescape"),
                reply.encode("utf-8", "surrogateescape"),
                headers or None,
                data,
            )

        return SimulatedSubscription(self, self._listen(subject, receive))


class SimulatedSubscription:
    """A subscription of a simulated connection."""

    def __init__(self, connection: SimulatedConnection, listener: Listener) -> None:
        self._connection, self._listener = connection, listener

    async def unsubscribe(self) -> None:
        self._connection._unlisten(self._listener)  # noqa: SLF001


def parsed_frames(frames: bytes) -> list[tuple[str, str, bytes, bytes]]:
    """Parse PUB and HPUB frames into subject, reply, headers and body."""
    return [(frame.subject, frame.reply, frame.headers, frame.payload) for frame in SentFrameReader().feed(frames)]


__all__ = ["NO_RESPONDERS", "SimulatedConnection", "parsed_frames"]


def connecting_by_settings(connected: Callable[[], AbstractAsyncContextManager[SimulatedConnection]]) -> Any:
    """Have what connects by settings, as a worker does, connect to a simulated server while this is entered."""

    @asynccontextmanager
    async def connect(*_: object) -> AsyncIterator[SimulatedConnection]:
        async with connected() as connection:
            yield connection

    return patch("airflow_provider_jetstream.jetstream.client.connect.connect", connect)
