"""The connection on a blocking socket, with direct gets where they are as exact as the API."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_provider_jetstream.jetstream.client.answer_inbox import MOST_IN_FLIGHT
from airflow_provider_jetstream.jetstream.client.blocking.driver import CoroutineDriver
from airflow_provider_jetstream.jetstream.client.blocking.requests import Request, RequestBatch, RequestMany
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.direct_get import BATCHES, NO_RESPONDERS, STATUS, exact_streams
from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.errors import TransientError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
    from typing import TypeVar

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
    from airflow_provider_jetstream.jetstream.client.connection import RawMessage

    _Result = TypeVar("_Result")


class BlockingConnection(Connection):
    """A connection whose coroutines :meth:`run` drives without an event loop.

    A broken connection isn't restored: its user opens another one and begins again.

    :param socket: an open connection
    """

    def __init__(self, socket: NatsSocket) -> None:
        self.socket = socket
        self.timeout = socket.timeout
        self.api_prefix = socket.api_prefix
        self.api_level = 0
        self._driver = CoroutineDriver(socket)

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""
        major, minor, patch = self.socket.version
        return major, minor, patch

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return self.socket.max_payload

    @property
    def reconnects(self) -> int:
        """Always 0."""
        return 0

    @property
    def broken(self) -> TransientError | None:
        """What broke the connection, if anything did."""
        return self._driver.broken

    @property
    def is_connected(self) -> bool:
        """Whether nothing has broken the connection."""
        return self._driver.broken is None

    @property
    def is_closed(self) -> bool:
        """Whether the connection is broken; it isn't restored."""
        return self._driver.broken is not None

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine that uses this connection, and return its result.

        :raises Exception: what the coroutine raises
        """
        return self._driver.run(coroutine)

    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        """Send a request and return the body of its one answer; the connection's own timeout applies."""
        header, body = await Request(subject, payload)
        if header.startswith(NO_RESPONDERS):
            raise UnreachableError(
                f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"
            )
        return body

    async def request_status(self, subject: str, payload: bytes) -> str:
        """Send a request that the server answers by a status alone."""
        header, _ = await Request(subject, payload)
        if header.startswith(NO_RESPONDERS):
            raise UnreachableError(f"nobody answers on {subject}")
        return header[STATUS].decode(errors="replace").strip()

    async def request_batch(self, subject: str, payload: bytes) -> list[RawMessage]:
        """Send a request that the server answers by many messages and a last one that has a status."""
        return await RequestBatch(subject, payload)

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send many requests together."""
        answers: list[bytes | TransientError] = []
        for start in range(0, len(requests), MOST_IN_FLIGHT):
            some = requests[start : start + MOST_IN_FLIGHT]
            encoded = [encode_headers(pairs) for pairs in headers[start : start + MOST_IN_FLIGHT]] if headers else None
            try:
                raw_answers = await RequestMany(some, encoded)
            except TransientError as error:
                # Some may have been answered; the caller looks up what became of each.
                answers += [error] * len(some)
                continue
            for (subject, _), (header, body) in zip(some, raw_answers, strict=True):
                absent = header.startswith(NO_RESPONDERS)
                answers.append(UnreachableError(f"nobody answers on {subject}; try again") if absent else body)
        return answers

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send a message with the next requests, without waiting for an answer."""
        self._driver.send(subject, payload, b"" if headers is None else encode_headers(headers), reply.encode())

    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        """Publish a message and return the answer of the stream that captures it; the connection's timeout applies."""
        header, answer = await Request(subject, payload, b"" if headers is None else encode_headers(headers))
        if header.startswith(NO_RESPONDERS):
            raise UnreachableError(f"no stream captures {subject} just now")
        return answer

    def write(self, frames: bytes, messages: int = 1) -> None:
        """Send encoded messages with the next requests."""
        self._driver.write(frames)

    async def wait_for_room(self) -> None:
        """Return at once: the socket blocks until the operating system has taken what is written."""

    async def drop_unsent(self) -> None:
        """Give the connection up where the server doesn't show in time that it has received all that was written."""
        self._driver.drop_unsent()

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return self.socket.new_reply_subject()

    async def subscribe(self, subject: str, callback: object, on_denied: object = None) -> NoReturn:
        """Refuse: a callback needs an event loop."""
        raise TypeError(
            f"expected a connection with an event loop for a subscription to {subject}, found a blocking one"
        )

    async def subscribe_raw(
        self, subject: str, on_message: object, on_denied: object = None, form: object = None
    ) -> NoReturn:
        """Refuse, as :meth:`subscribe` does."""
        await self.subscribe(subject, on_message, on_denied)

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages are dropped."""
        # No request has this number.
        yield f"{self.socket.inbox}.0"

    async def discover_capabilities(self, streams: Iterable[str]) -> None:
        """Find out the server's API level and domain, and which streams answer direct gets as exactly as the API.

        :param streams: names of streams, which needn't exist
        """
        account = await self.api("INFO")
        self.api_level = int(account.get("api", {}).get("level", 0))
        self.domain = str(account.get("domain") or "")
        names = set(streams)
        if names and self.api_level >= BATCHES:
            configs = [info["config"] for info in await list_streams(self)]
            self.exact_streams = frozenset(exact_streams(configs, names))
