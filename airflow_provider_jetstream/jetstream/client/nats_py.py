"""The connection on an event loop.

Nothing is sent after its time limit: not while the connection is lost, nor later from the buffers of one that stalls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from nats import errors as nats_errors

from airflow_provider_jetstream.jetstream.client.answer_inbox import AnswerInbox
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.diagnostics import explain, last_report
from airflow_provider_jetstream.jetstream.client.jetstream_client import discard_message
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    TransientError,
    UnreachableError,
    same_error,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage, RawMessage
    from airflow_provider_jetstream.jetstream.client.denials import OpenRequests
    from airflow_provider_jetstream.jetstream.client.jetstream_client import JetStreamClient
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm
    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, PermissionDeniedError

log = logging.getLogger(__name__)


class NatsPyConnection(Connection):
    """A connection through nats-py's client, which restores itself for as long as it is open.

    :param client: the connected client
    :param settings: the time limit of one request, and the names of JetStream's API
    """

    def __init__(self, client: JetStreamClient, settings: ConnectionSettings) -> None:
        self.client = client
        self.timeout = settings.timeout
        self.api_prefix = settings.jetstream_api
        self.api_level = 0
        self._answers = AnswerInbox(self)

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""
        version = self.client.connected_server_version
        return (version.major, version.minor, version.patch)

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return self.client.max_payload

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and restored."""
        return int(self.client.stats["reconnects"])

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached at this moment."""
        return self.client.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed for good."""
        return self.client.is_closed

    @property
    def close_reason(self) -> JetStreamProviderError | None:
        """Why the connection was closed for good, where the server is the reason."""
        return self.client.close_reason

    @property
    def loss(self) -> JetStreamProviderError:
        """Why the connection isn't there."""
        return self.close_reason or explain(self.client.settings, self.client.outage.failures)

    def _failed(self, error: Exception, text: str = "") -> JetStreamProviderError:
        """Return the error for what the client couldn't do."""
        if self.client.is_closed and (reason := self.close_reason):
            return same_error(reason)
        return UnreachableError(f"{text}: {error}" if text else str(error))

    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        """Send a request and return the body of its one answer."""
        return await self._request(subject, payload, self.timeout if time_limit is None else time_limit)

    async def _request(
        self, subject: str, payload: bytes, limit: float, headers: dict[str, str] | None = None
    ) -> bytes:
        """Send a request as soon as the connection is there, and return its answer.

        A request that changes something and isn't answered in time isn't sent later: see :mod:`.unsent`.
        """
        left, began = limit, time.monotonic()
        if self.client.is_closed:
            # One who tries again at once can be cancelled.
            await asyncio.sleep(0)
            failed = "the connection failed during a request on" if headers is None else "nothing was sent on"
            raise self._failed(nats_errors.ConnectionClosedError(), f"{failed} {subject}")
        if not self.client.is_connected:
            await self._require_connected(subject, limit)
            left = max(began + limit - time.monotonic(), 0.001)
        return await self._answers.request(subject, payload, left, headers)

    async def wait_until_connected(self, seconds: float) -> bool:
        """Wait while a lost connection is restored, and return whether it is there."""
        if self.client.is_connected:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.client.wait_until_connected()
        return self.client.is_connected

    async def _require_connected(self, subject: str, limit: float) -> None:
        if not (await self.wait_until_connected(limit) or self.client.is_closed):
            raise UnreachableError(
                f"the connection is lost for {limit:g} s already, so nothing was sent on {subject}"
                f"{last_report(self.last_error)}"
            )

    async def request_status(self, subject: str, payload: bytes) -> str:
        """Send a request that the server answers by a status alone."""
        await self._require_connected(subject, self.timeout)
        try:
            # In the old style, with an inbox of its own: the answers to the client's shared inbox lose their status.
            answer = await self.client.request(subject, payload, timeout=self.timeout, old_style=True)
        except TimeoutError:
            raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s") from None
        except nats_errors.Error as error:
            raise self._failed(error, f"the request on {subject} failed") from None
        return (answer.headers or {}).get("Status", "")

    async def request_batch(self, subject: str, payload: bytes) -> list[RawMessage]:
        """Send a request that the server answers by many messages and a last one that has a status."""
        await self._require_connected(subject, self.timeout)
        try:
            async with asyncio.timeout(self.timeout):
                return await self.client.request_batch(subject, payload)
        except TimeoutError:
            raise DeadlineError(f"not all answers on {subject} within {self.timeout:g} s") from None
        except nats_errors.Error as error:
            raise self._failed(error, f"the connection failed during a request on {subject}") from None

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send many requests together."""
        return await self._answers.request_many(requests, headers)

    def write(self, frames: bytes, messages: int = 1) -> None:
        """Send encoded messages together with all that is written in the same turn of the loop."""
        try:
            self.client.write(frames, messages)
        except nats_errors.Error as error:
            raise self._failed(error, "nothing was sent") from None

    async def wait_for_room(self) -> None:
        """Wait while much is written that the operating system hasn't taken yet."""
        await self.client.wait_for_room()

    async def drop_unsent(self) -> None:
        """Make sure that nothing that was written so far reaches the server later."""
        await self.client.drop_unsent()

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send a message without waiting for an answer."""
        try:
            await self.client.publish(subject, payload, reply=reply, headers=headers)
            await self.client.wait_for_room()
        except nats_errors.Error as error:
            raise self._failed(error, f"nothing was sent on {subject}") from None

    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        """Publish a message and return the answer of the stream that captures it."""
        limit = self.timeout if time_limit is None else time_limit
        return await self._request(subject, payload, limit, headers or {})

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return self.client.new_inbox()

    async def subscribe(
        self,
        subject: str,
        callback: Callable[[Msg], Awaitable[None]],
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
    ) -> NatsPySubscription:
        """Subscribe to a subject."""
        return await self._subscribed(self.client.subscribe(subject, cb=callback), on_denied)

    async def subscribe_raw(
        self,
        subject: str,
        on_message: OnMessage,
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
        form: FrameForm | None = None,
    ) -> NatsPySubscription:
        """Subscribe with a function that the parser calls at once with each message."""
        return await self._subscribed(self.client.subscribe_raw(subject, on_message, form), on_denied)

    async def _subscribed(
        self, subscribing: Awaitable[Subscription], on_denied: Callable[[PermissionDeniedError], None] | None
    ) -> NatsPySubscription:
        denials = self.client.open_requests
        number = denials.follow(on_denied) if on_denied else 0
        try:
            return NatsPySubscription(await subscribing, denials, number)
        except BaseException as error:
            denials.unfollow(number)
            if isinstance(error, nats_errors.Error):
                raise self._failed(error) from None
            raise

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages are dropped."""
        inbox = self.client.new_inbox()
        subscription = await self.subscribe(inbox, discard_message)
        try:
            yield inbox
        finally:
            await subscription.unsubscribe()


class NatsPySubscription:
    """A subscription of nats-py's client.

    :param denials: where denials are followed, under a number
    """

    __slots__ = ("_denials", "_number", "_subscription")

    def __init__(self, subscription: Subscription, denials: OpenRequests, number: int) -> None:
        self._subscription = subscription
        self._denials = denials
        self._number = number

    async def unsubscribe(self) -> None:
        """End the subscription; without effect where the connection is lost."""
        self._denials.unfollow(self._number)
        try:
            await self._subscription.unsubscribe()
        except nats_errors.Error as error:
            log.debug("The subscription to %s ended with its connection: %s", self._subscription.subject, error)
