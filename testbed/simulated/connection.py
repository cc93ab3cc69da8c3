"""A connection to the simulated server: the same protocol that the package uses with a real one.

Everything above the frames is the package's own code: requests and their answers go through its
:class:`~airflow_provider_jetstream.jetstream.client.answer_inbox.AnswerInbox`.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from nats.aio.msg import Msg
from typing_extensions import override

from airflow_provider_jetstream.jetstream import Connection
from airflow_provider_jetstream.jetstream.client.answer_inbox import AnswerInbox
from airflow_provider_jetstream.jetstream.client.headers import encode_headers, first_values
from airflow_provider_jetstream.jetstream.client.streams import NO_RESPONDERS, STATUS, is_last_of_batch
from airflow_provider_jetstream.jetstream.client.wire import SentFrameReader, encode_message, encode_subject
from airflow_provider_jetstream.jetstream.errors import DeadlineError, UnreachableError
from testbed.simulated.server import Listener

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage, RawMessage
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError, TransientError
    from testbed.simulated.server import SimulatedServer

_LEAST_DELAY, _MOST_DELAY = 0.0001, 0.005
# In the subjects of what a redrive stores about letters, and removes of them.
_CHANGES = ("audit.q.letters.", "parked.q.", "STREAM.MSG.DELETE.")


# The actor that opens connections.
OWNER: ContextVar[str] = ContextVar("OWNER", default="")


class SimulatedConnection(Connection):
    """A connection of one actor; messages take a random time each way, and stay in order.

    :param timeout: seconds for one request
    :ivar owner: the actor that has opened it
    :ivar delay: the largest time that a message takes, in seconds
    :ivar changes_left: after how many changes of letters whoever has it is killed
    """

    def __init__(self, server: SimulatedServer, *, timeout: float = 5.0) -> None:
        self.server = server
        self.owner = OWNER.get()
        self.timeout = timeout
        self.api_level = server.level
        self.delay = _MOST_DELAY
        self.changes_left: int | None = None
        self._draw = server.loop.draws.of("connection", self.owner)
        self._answers = AnswerInbox(self)
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
    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        return await self._request(subject, payload, time_limit)

    @override
    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        return await self._request(subject, payload, time_limit, headers or {})

    async def _request(
        self, subject: str, payload: bytes, time_limit: float | None, headers: dict[str, str] | None = None
    ) -> bytes:
        limit = self.timeout if time_limit is None else time_limit
        if not await self.wait_until_connected(limit):
            raise UnreachableError(f"the connection is lost for {limit:g} s already, so nothing was sent on {subject}")
        return await self._answers.request(subject, payload, limit, headers)

    @override
    async def request_status(self, subject: str, payload: bytes) -> str:
        (headers, _), *_ = await self._collected(subject, payload, lambda _: True)
        return headers[STATUS].decode() if headers.startswith(b"NATS/1.0 ") else ""

    @override
    async def request_batch(self, subject: str, payload: bytes) -> list[RawMessage]:
        return await self._collected(subject, payload, is_last_of_batch)

    async def _collected(self, subject: str, payload: bytes, is_last: Callable[[bytes], bool]) -> list[RawMessage]:
        answers: list[RawMessage] = []
        ended = asyncio.get_running_loop().create_future()

        def collect(_subject: str, _reply: str, headers: bytes, body: bytes) -> None:
            answers.append((headers, body))
            if is_last(headers) and not ended.done():
                ended.set_result(None)

        inbox = self.new_inbox()
        listener = self._listen(inbox, collect)
        try:
            async with asyncio.timeout(self.timeout):
                self.write(encode_message(encode_subject(subject), payload, b"", inbox.encode()))
                await ended
        except TimeoutError:
            raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s") from None
        finally:
            self._unlisten(listener)
        return answers

    @override
    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        return await self._answers.request_many(requests, headers)

    @override
    async def wait_for_room(self) -> None:
        await asyncio.sleep(0)

    @override
    async def drop_unsent(self) -> None:
        await asyncio.sleep(self.delay)

    @override
    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        block = encode_headers(headers) if headers else b""
        self.write(encode_message(encode_subject(subject), payload, block, reply.encode()))

    @override
    async def subscribe(
        self,
        subject: str,
        callback: Callable[[Msg], Awaitable[None]],
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
    ) -> SimulatedSubscription:
        queue: asyncio.Queue[Msg] = asyncio.Queue()

        def receive(subject: str, reply: str, headers: bytes, data: bytes) -> None:
            parsed = dict(_status(headers)) if headers.startswith(b"NATS/1.0 ") else first_values(headers)
            queue.put_nowait(Msg(_client=None, subject=subject, reply=reply, data=data, headers=parsed or None))  # type: ignore[arg-type]

        async def call() -> None:
            while True:
                await callback(await queue.get())

        return SimulatedSubscription(self, self._listen(subject, receive), asyncio.create_task(call()))

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

    @asynccontextmanager
    @override
    async def discard_inbox(self) -> AsyncIterator[str]:
        inbox = self.new_inbox()
        listener = self._listen(inbox, lambda *_: None)
        try:
            yield inbox
        finally:
            self._unlisten(listener)


class SimulatedSubscription:
    """A subscription of a simulated connection."""

    def __init__(
        self, connection: SimulatedConnection, listener: Listener, task: asyncio.Task[None] | None = None
    ) -> None:
        self._connection, self._listener, self._task = connection, listener, task

    async def unsubscribe(self) -> None:
        if self._task:
            self._task.cancel()
        self._connection._unlisten(self._listener)  # noqa: SLF001


def _status(headers: bytes) -> list[tuple[str, str]]:
    line = headers[9:].partition(b"\r\n")[0].decode()
    code, _, description = line.partition(" ")
    return [("Status", code), *([("Description", description)] if description else []), *first_values(headers).items()]


def parsed_frames(frames: bytes) -> list[tuple[str, str, bytes, bytes]]:
    """Parse PUB and HPUB frames into subject, reply, headers and body."""
    return [(frame.subject, frame.reply, frame.headers, frame.payload) for frame in SentFrameReader().feed(frames)]


__all__ = ["NO_RESPONDERS", "SimulatedConnection", "parsed_frames"]
