"""The one protocol by which the core uses a NATS server, whatever carries the bytes.

:class:`~airflow_provider_jetstream.jetstream.client.nats_py.NatsPyConnection` implements it on an event loop, and
:class:`~airflow_provider_jetstream.jetstream.client.blocking.connection.BlockingConnection` on a blocking socket.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from airflow_provider_jetstream.jetstream.client.diagnostics import decode_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.wire import FrameForm
    from airflow_provider_jetstream.jetstream.errors import (
        JetStreamProviderError,
        PermissionDeniedError,
        TransientError,
    )

# Headers and body of a reply, as they are on the wire.
RawMessage: TypeAlias = tuple[bytes, bytes]
# Takes subject, reply, headers and body of a message as they are on the wire; without headers ``None``.
OnMessage: TypeAlias = "Callable[[bytes, bytes, bytes | None, bytes], None]"


def is_only_answer(_: bytes) -> bool:
    """Say of each answer that none follows."""
    return True


class Subscription(Protocol):
    """A subscription of a connection."""

    async def unsubscribe(self) -> None:
        """End the subscription; without effect where the connection is lost."""


class Connection(Protocol):
    """An open connection to a server with JetStream; belongs to the event loop that opened it.

    A class that implements this protocol derives from it, and inherits what both implementations share.
    """

    timeout: float
    """Seconds for one request."""
    api_prefix: str = "$JS.API"
    """What the subjects of JetStream's API begin with."""
    api_level: int
    """The level of JetStream's API that the server supports; 0 before 2.11."""
    domain: str = ""
    """The JetStream domain of the server; empty where it has none."""
    last_error: Exception | None = None
    """What the connection last reported about itself."""
    exact_streams: frozenset[str] = frozenset()
    """Streams whose direct gets are as exact as their leader's answers, as far as that was asked."""

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and restored."""

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached at this moment, as far as the connection knows."""

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed for good; a lost one is restored by itself."""

    @property
    def close_reason(self) -> JetStreamProviderError | None:
        """Why the connection was closed for good, where the server is the reason."""
        return None

    async def wait_until_connected(self, seconds: float) -> bool:
        """Wait while a lost connection is restored, and return whether it is there.

        :param seconds: for how long
        """
        return self.is_connected

    async def api(
        self, subject: str, request: Mapping[str, Any] | None = None, *, time_limit: float | None = None
    ) -> dict[str, Any]:
        """Send a request to JetStream's API and return every field of the answer.

        Protocol: the JSON API described by the NATS documentation, "JetStream wire API reference".

        :param subject: the API subject after the prefix
        :param request: the body, as JSON
        :param time_limit: seconds; the connection's own where absent
        :raises ApiError: the server refused
        :raises TransientError: no answer, as while a cluster elects a leader, or JetStream is unavailable just now
        """
        payload = json.dumps(request).encode() if request is not None else b""
        return decode_answer(await self.api_request(subject, payload, time_limit=time_limit), subject)

    async def api_request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        """Send an encoded request to JetStream's API and return the answer as it is."""
        return await self.request(f"{self.api_prefix}.{subject}", payload, time_limit=time_limit)

    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        """Send a request and return the body of its one answer.

        While the connection is lost, the request waits for it; one that only reads is sent again if the connection is
        lost before its answer. Once the time limit has passed, a request that changes something isn't sent any more,
        nor is what is left of it in the buffers of this machine (:mod:`.unsent`).

        :param time_limit: seconds; the connection's own where absent
        :raises TransientError: no answer, no connection, or no responder on the subject just now
        :raises PermissionDeniedError: the user may not send the request, or not receive the answer
        """

    async def ask(
        self, subject: str, payload: bytes = b"", is_last: Callable[[bytes], bool] = is_only_answer
    ) -> list[RawMessage]:
        """Send a request and return all of its answers, each with its headers, such as those that are a status.

        A batch of direct gets (ADR-31, "JetStream Direct Get") has many answers, of which the last one has a status.

        :param is_last: tells by the headers of an answer whether none follows
        :raises TransientError: the last answer didn't come, or the connection is lost
        :raises PermissionDeniedError: the user may not send the request, or not receive the answers
        """

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send many requests together, with at most a thousand unanswered ones.

        :param requests: subjects and bodies
        :param headers: one for each request, where the requests are messages to be stored
        :return: for each request the body of its answer, or why there is none
        :raises PermissionDeniedError: the user may not send one of them, or not receive the answers
        """

    def write(self, frames: bytes, messages: int = 1) -> None:
        """Send encoded messages (:mod:`.wire`) together with all that is written in the same turn of the loop.

        Whoever waits for an answer to what changes something calls :meth:`drop_unsent` once its time limit has passed.

        :param messages: how many they are
        :raises UnreachableError: the connection is lost; nothing is sent, now or later
        """

    async def wait_for_room(self) -> None:
        """Wait while much is written that the operating system hasn't taken yet."""

    async def drop_unsent(self) -> None:
        """Make sure that nothing that was written so far reaches the server later, by a new connection if need be."""

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send a message without waiting for an answer.

        :param reply: the subject for answers
        :raises UnreachableError: the connection is lost; the message isn't sent, now or later
        """

    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        """Publish a message and return the answer of the stream that captures it.

        :param time_limit: seconds; the connection's own where absent
        :raises TransientError: no answer; the message may be stored all the same
        """

    def new_inbox(self) -> str:
        """Return a new subject for answers."""

    async def subscribe_raw(
        self,
        subject: str,
        on_message: OnMessage,
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
        form: FrameForm | None = None,
    ) -> Subscription:
        """Subscribe with a function that the parser calls at once with each message; needs an event loop.

        It must not block: the next messages of the connection wait for it. What it raises is logged, and the message
        is dropped.

        :param on_denied: is called, until the end of the subscription, with every denial of something that was
            published or subscribed to on this connection; it looks whether the denied subject is its own
        :param form: takes most messages before the function gets them
        :raises UnreachableError: the connection is closed
        """

    def discard_inbox(self) -> AbstractAsyncContextManager[str]:
        """Open an inbox whose messages are dropped."""
