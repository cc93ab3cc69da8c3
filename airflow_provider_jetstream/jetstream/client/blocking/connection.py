"""A connection for coroutines that are driven over a wire, with direct gets where those are as exact as the API's."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from airflow_provider_jetstream.jetstream.client.blocking.driver import CoroutineDriver
from airflow_provider_jetstream.jetstream.client.blocking.requests import Request, RequestMany
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.direct_get import BATCHES, STATUS, exact_streams
from airflow_provider_jetstream.jetstream.client.message_reader import NOBODY, WIDEST, ApiReader, DirectReader
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.errors import TransientError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
    from typing import TypeVar

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
    from airflow_provider_jetstream.jetstream.client.headers import Headers
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.message_reader import MessageReader
    from airflow_provider_jetstream.jetstream.client.prefetch import ReadPlan

    _Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Answer:
    data: bytes


class BlockingConnection(Connection):
    """A connection whose coroutines are run by :meth:`run`, and not by an event loop.

    It isn't mended when it breaks: whoever uses it begins again with another one.

    :param wire: an open connection
    """

    def __init__(self, wire: NatsSocket) -> None:
        super().__init__(cast("Client", None), wire.timeout)
        self._driver = CoroutineDriver(wire)
        self.wire = wire
        self._gets: Mapping[str, MessageReader] = {}
        self.request_many = self._ask_each

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""
        major, minor, patch = self.wire.version
        return major, minor, patch

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, headers included."""
        return self.wire.max_payload

    @property
    def reconnects(self) -> int:
        """Always 0."""
        return 0

    @property
    def broken(self) -> TransientError | None:
        """What broke the connection, if anything did."""
        return self._driver.broken

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine that asks over this connection to its end.

        :param coroutine: the coroutine
        :return: its result
        :raises Exception: what it raises
        """
        return self._driver.run(coroutine)

    async def request(self, subject: str, payload: bytes = b"") -> Msg:
        """Send a request and wait for its one answer.

        :param subject: the full subject
        :param payload: the body
        :return: the answer
        :raises DeadlineError: no answer within the time limit
        :raises UnreachableError: the connection is gone, or nobody serves the subject just now
        """
        header, body = await Request(subject, payload)
        if header.startswith(NOBODY):
            raise UnreachableError(
                f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"
            )
        return cast("Msg", _Answer(body))

    async def _ask_each(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[Headers] | None
    ) -> list[bytes | TransientError]:
        answers: list[bytes | TransientError] = []
        for start in range(0, len(requests), WIDEST):
            part = requests[start : start + WIDEST]
            blocks = [_block(each) for each in headers[start : start + WIDEST]] if headers else None
            try:
                answered = await RequestMany(part, blocks)
            except TransientError as error:
                # Some may have been answered; those who asked look what became of it.
                answers += [error] * len(part)
                continue
            for (subject, _), (header, body) in zip(part, answered, strict=True):
                nobody = header.startswith(NOBODY)
                answers.append(UnreachableError(f"nobody answers on {subject}; try again") if nobody else body)
        return answers

    async def status(self, subject: str, payload: bytes) -> str:
        """Send a request that is answered by a status only.

        :param subject: the full subject
        :param payload: the body
        :return: the status, such as ``404``; empty where the answer has none
        :raises DeadlineError: no answer within the time limit
        :raises UnreachableError: the connection is gone, or nobody serves the subject just now
        """
        header, _ = await Request(subject, payload)
        if header.startswith(NOBODY):
            raise UnreachableError(f"nobody can be asked on {subject}")
        return header[STATUS].decode(errors="replace").strip()

    async def publish(self, subject: str, body: bytes, headers: Headers | None = None, reply: str = "") -> None:
        """Send a message and don't wait for anything.

        :param subject: its subject
        :param body: its body
        :param headers: its headers
        :param reply: where answers to it go
        :raises UnreachableError: it isn't sent
        """
        self._driver.send(subject, body, _block(headers), reply.encode())

    async def publish_acknowledged(self, subject: str, body: bytes, headers: Headers | None = None) -> bytes:
        """Publish a message and wait for the answer of the stream that captures it.

        :param subject: its subject
        :param body: its body
        :param headers: its headers
        :return: the answer
        :raises UnreachableError: no stream captures the subject just now, or the connection is gone
        :raises DeadlineError: no answer within the time limit; it may be stored all the same
        """
        header, answer = await Request(subject, body, _block(headers))
        if header.startswith(NOBODY):
            raise UnreachableError(f"no stream captures {subject} just now")
        return answer

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages nobody looks at.

        :return: the inbox
        """
        # No request has this number.
        yield f"{self.wire.inbox}.0"

    async def discover_capabilities(self, streams: Iterable[str]) -> None:
        """Find out what the server knows, and of which streams direct gets are as exact as the API's.

        :param streams: streams that may exist
        """
        self.api_level = int((await self.api("INFO")).get("api", {}).get("level", 0))
        if not (asked := set(streams)):
            return
        configs = [info["config"] for info in await list_streams(self)]
        batches = self.api_level >= BATCHES
        direct = {name: DirectReader(name, batches=batches) for name in exact_streams(configs, asked)}
        self.runs = {name: each.run for name, each in direct.items()} if batches else {}
        self._gets = {name: direct.get(name) or ApiReader(name) for name in asked}
        self.direct = {name: each.get for name, each in self._gets.items()}

    async def last_of(self, stream: str, subjects: Sequence[str]) -> Iterable[StoredMessage]:
        """Get the last messages of subjects.

        :param stream: a stream that was learnt of
        :param subjects: its subjects
        :return: those that there are
        """
        return await self._gets[stream].last_of(subjects) if subjects else []

    @asynccontextmanager
    async def foreseen(self, wanted: Iterable[ReadPlan]) -> AsyncIterator[None]:
        """Get at once what will be asked for in the meantime, as far as a stream allows that.

        :param wanted: what will be asked for
        """
        found: list[MessageReader] = []
        try:
            for each in wanted:
                if gets := self._gets.get(each.stream):
                    found.append(gets)
                    await gets.prefetch(each.sequences, each.subjects)
            yield
        finally:
            for gets in found:
                gets.forget()


def _block(headers: Headers | None) -> bytes:
    if headers is None:
        return b""
    # As the client library sends them.
    lines = "".join([f"{name.strip()}: {value.strip()}\r\n" for name, value in headers.items()])
    return f"NATS/1.0\r\n{lines}\r\n".encode()
