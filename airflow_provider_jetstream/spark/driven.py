"""A connection for coroutines that are driven over a wire, with direct gets where those are as exact as the API's."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from airflow_provider_jetstream.jetstream.connection import Connection
from airflow_provider_jetstream.jetstream.discovery import list_streams
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError
from airflow_provider_jetstream.jetstream.stored import StoredMessage, parse_headers
from airflow_provider_jetstream.spark.connection_options import wire_settings
from airflow_provider_jetstream.spark.driving import Ask, Driver
from airflow_provider_jetstream.spark.errors import WireError
from airflow_provider_jetstream.spark.wire import Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
    from typing import TypeVar

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.headers import Headers

    _Result = TypeVar("_Result")

_NOBODY = b"NATS/1.0 503"
_NO_MESSAGE = b"NATS/1.0 404"
_STATUS = slice(9, 12)
# What the server adds to the headers of a direct get: stream, subject, sequence and time, in this order.
_ADDED = 4


@dataclass(frozen=True, slots=True)
class _Answer:
    data: bytes


class DrivenConnection(Connection):
    """A connection whose coroutines are run by :meth:`run`, and not by an event loop.

    It isn't mended when it breaks: whoever uses it begins again with another one.

    :param wire: an open connection
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__(cast("Client", None), wire.timeout)
        self._driver = Driver(wire)
        self.wire = wire

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
        header, body = await Ask(subject, payload)
        if header.startswith(_NOBODY):
            raise UnreachableError(
                f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"
            )
        return cast("Msg", _Answer(body))

    async def status(self, subject: str, payload: bytes) -> str:
        """Send a request that is answered by a status only.

        :param subject: the full subject
        :param payload: the body
        :return: the status, such as ``404``; empty where the answer has none
        :raises DeadlineError: no answer within the time limit
        :raises UnreachableError: the connection is gone, or nobody serves the subject just now
        """
        header, _ = await Ask(subject, payload)
        if header.startswith(_NOBODY):
            raise UnreachableError(f"nobody can be asked on {subject}")
        return header[_STATUS].decode(errors="replace").strip()

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
        header, answer = await Ask(subject, body, _block(headers))
        if header.startswith(_NOBODY):
            raise UnreachableError(f"no stream captures {subject} just now")
        return answer

    @asynccontextmanager
    async def ignored(self) -> AsyncIterator[str]:
        """Open an inbox whose messages nobody looks at.

        :return: the inbox
        """
        # No request has this number.
        yield f"{self.wire.inbox}.0"

    async def learn(self, streams: Iterable[str]) -> None:
        """Find out what the server knows, and of which streams direct gets are as exact as the API's.

        With replicas any of them may answer, and be behind; so may a mirror that answers for its origin.

        :param streams: streams that may exist
        """
        self.api_level = int((await self.api("INFO")).get("api", {}).get("level", 0))
        if not (asked := set(streams)):
            return
        configs = [info["config"] for info in await list_streams(self)]
        mirrored = {each["mirror"]["name"] for each in configs if each.get("mirror") and each.get("mirror_direct")}
        self.direct = {
            each["name"]: partial(self._read, each["name"])
            for each in configs
            if each["name"] in asked - mirrored
            and each.get("allow_direct")
            and each["num_replicas"] == 1
            and not each.get("mirror")
        }

    async def _read(self, stream: str, request: Mapping[str, Any]) -> StoredMessage | None:
        subject = f"$JS.API.DIRECT.GET.{stream}"
        # By far the most frequent one is written by hand, at a third of the price.
        plain = request.keys() == {"seq"}
        header, body = await Ask(subject, b'{"seq":%d}' % request["seq"] if plain else json.dumps(request).encode())
        if header.startswith(b"NATS/1.0\r\n"):
            return _message(header, body)
        if header.startswith(_NO_MESSAGE):
            return None
        if header.startswith(_NOBODY):
            raise UnreachableError(f"nobody answers on {subject}: {stream} is away, or takes no direct gets any more")
        raise ApiError(int(header[_STATUS]), 0, header.decode(errors="replace").strip(), subject)


@contextmanager
def driven(given: Mapping[str, str]) -> Iterator[DrivenConnection]:
    """Connect, and hang up at the end.

    :param given: where and as whom, as the data source's options say it
    :return: the open connection
    :raises UnreachableError: no server answered
    :raises AuthenticationError: the credentials were refused
    :raises TLSError: no encrypted connection came about
    :raises ServerTooOldError: the server is older than 2.10.27
    """
    wire = Wire(wire_settings(given))
    try:
        yield DrivenConnection(wire)
    finally:
        wire.close()


def _message(header: bytes, body: bytes) -> StoredMessage:
    pairs = parse_headers(header)
    added = dict(pairs[-_ADDED:])
    try:
        return StoredMessage(
            subject=added["Nats-Subject"],
            sequence=int(added["Nats-Sequence"]),
            time=added["Nats-Time-Stamp"],
            headers=pairs[:-_ADDED],
            data=body,
        )
    except (KeyError, ValueError):
        raise WireError(f"expected an answer to a direct get, found the headers {header[:200]!r}") from None


def _block(headers: Headers | None) -> bytes:
    if headers is None:
        return b""
    # As the client library sends them.
    lines = "".join([f"{name.strip()}: {value.strip()}\r\n" for name, value in headers.items()])
    return f"NATS/1.0\r\n{lines}\r\n".encode()
