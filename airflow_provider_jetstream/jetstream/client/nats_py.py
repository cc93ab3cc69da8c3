"""The connection on an event loop: nats-py's client with some defects fixed and one feature added.

Credentials are never sent in plaintext where TLS was asked for, a failed TLS handshake ends, subjects and headers may
be any bytes, and a request may have many answers, whose headers stay as they are on the wire.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.js.errors import Error as NatsJetStreamError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.client.direct_get import is_last_of_batch
from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.errors import DeadlineError, TLSError, TransientError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.client.connection import RawMessage

log = logging.getLogger(__name__)


class NatsPyConnection(Connection):
    """A connection through nats-py's client, which restores itself for as long as it is open.

    :param client: the connected client
    :param timeout: seconds for one request
    """

    def __init__(self, client: JetStreamClient, timeout: float) -> None:
        self.client = client
        self.timeout = timeout
        self.api_level = 0

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

    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        """Send a request and return the body of its one answer."""
        limit = self.timeout if time_limit is None else time_limit
        try:
            return (await self.client.request(subject, payload, timeout=limit)).data
        except nats_errors.NoRespondersError:
            raise UnreachableError(
                f"nobody answers on {subject}: the stream, the consumer or JetStream itself is away; try again"
            ) from None
        except TimeoutError:
            reported = last_report(self.last_error)
            raise DeadlineError(f"no answer on {subject} within {limit:g} s{reported}") from None
        except nats_errors.Error as error:
            raise UnreachableError(f"the connection failed during a request on {subject}: {error}") from None

    async def request_status(self, subject: str, payload: bytes) -> str:
        """Send a request that the server answers by a status alone."""
        try:
            # In the old style, with an inbox of its own: the answers to the client's shared inbox lose their status.
            answer = await self.client.request(subject, payload, timeout=self.timeout, old_style=True)
        except TimeoutError:
            raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s") from None
        except nats_errors.Error as error:
            raise UnreachableError(f"the request on {subject} failed: {error}") from None
        return (answer.headers or {}).get("Status", "")

    async def request_batch(self, subject: str, payload: bytes) -> list[RawMessage]:
        """Send a request that the server answers by many messages and a last one that has a status."""
        try:
            async with asyncio.timeout(self.timeout):
                return await self.client.request_batch(subject, payload)
        except TimeoutError:
            raise DeadlineError(f"not all answers on {subject} within {self.timeout:g} s") from None
        except nats_errors.Error as error:
            raise UnreachableError(f"the connection failed during a request on {subject}: {error}") from None

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send many requests concurrently."""

        async def request(index: int) -> tuple[bytes | TransientError]:
            try:
                if headers:
                    return (await self.publish_acknowledged(*requests[index], headers[index]),)
                return (await self.request(*requests[index]),)
            except TransientError as error:
                return (error,)

        return [answer for (answer,) in await map_concurrently(request, range(len(requests)))]

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send a message without waiting for an answer."""
        try:
            await self.client.publish(subject, payload, reply=reply, headers=headers)
        except nats_errors.Error as error:
            raise UnreachableError(f"nothing was sent on {subject}: {error}") from None

    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        """Publish a message and return the answer of the stream that captures it."""
        limit = self.timeout if time_limit is None else time_limit
        try:
            return (await self.client.request(subject, payload, timeout=limit, headers=headers)).data
        except nats_errors.NoRespondersError:
            raise UnreachableError(f"no stream captures {subject} just now") from None
        except (TimeoutError, NatsJetStreamError) as error:
            raise DeadlineError(f"no acknowledgement on {subject} within {limit:g} s: {error}") from None
        except nats_errors.Error as error:
            raise UnreachableError(f"nothing was sent on {subject}: {error}") from None

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return self.client.new_inbox()

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> NatsPySubscription:
        """Subscribe to a subject."""
        try:
            return NatsPySubscription(await self.client.subscribe(subject, cb=callback))
        except nats_errors.Error as error:
            raise UnreachableError(str(error)) from None

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages are dropped."""
        inbox = self.client.new_inbox()
        subscription = await self.subscribe(inbox, _discard)
        try:
            yield inbox
        finally:
            await subscription.unsubscribe()


class NatsPySubscription:
    """A subscription of nats-py's client."""

    __slots__ = ("_subscription",)

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        """End the subscription; without effect where the connection is lost."""
        try:
            await self._subscription.unsubscribe()
        except nats_errors.Error as error:
            log.debug("The subscription to %s ended with its connection: %s", self._subscription.subject, error)


class JetStreamClient(Client):
    """A client that sends its credentials only over TLS where TLS was asked for.

    nats-py connects in plaintext to a server that doesn't announce TLS, even for ``tls://`` addresses. The CONNECT
    line carries the credentials, so its creation is the last moment to stop that, at the first connection and at every
    later one.

    :param encrypted: refuse plaintext
    """

    def __init__(self, *, encrypted: bool) -> None:
        super().__init__()
        self._encrypted = encrypted
        # By subscription number: functions that take the raw headers and body of each message.
        self._raw_callbacks: dict[int, Callable[[bytes, bytes], None]] = {}

    async def request_batch(self, subject: str, payload: bytes) -> list[RawMessage]:
        """Send a request and wait for all its answers, of which the last one has a status."""
        answers: list[RawMessage] = []
        ended = asyncio.get_running_loop().create_future()

        def collect(headers: bytes, body: bytes) -> None:
            answers.append((headers, body))
            if not ended.done() and is_last_of_batch(headers):
                ended.set_result(None)

        inbox = self.new_inbox()
        subscription = await self.subscribe(inbox, cb=_discard)
        number = next(number for number, candidate in self._subs.items() if candidate is subscription)
        self._raw_callbacks[number] = collect
        try:
            await self.publish(subject, payload, reply=inbox)
            await ended
            return answers
        finally:
            del self._raw_callbacks[number]
            if self.is_connected:
                await subscription.unsubscribe()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        # The client makes a dictionary of the headers, which loses repeated names.
        if callback := self._raw_callbacks.get(sid):
            callback(bytes(headers or b""), bytes(data))
        else:
            await super()._process_msg(sid, subject, reply, data, headers)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (UnicodeDecodeError, IndexError) as error:
            # A publisher may send anything as headers, and the client would receive nothing more.
            log.warning("The headers of a message can't be parsed, and are ignored: %s", error)
            return None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # The client decodes strictly: it would receive nothing more after a subject that isn't UTF-8.
        return self.msg_class(
            subject=decode_text(subject),
            reply=decode_text(reply),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, str] | None
    ) -> None:
        # The client sends only UTF-8, and not every name of a header that may be stored.
        target = b"%b %b" % (encode_text(subject), encode_text(reply))
        if headers is None:
            command = b"PUB %b %d\r\n%b\r\n" % (target, len(payload), payload)
        else:
            block = encode_headers(headers)
            size = len(block) + len(payload)
            command = b"HPUB %b %d %d\r\n%b%b\r\n" % (target, len(block), size, block, payload)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(command)
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    def _connect_command(self) -> bytes:
        if self._encrypted and not self._server_info.get("tls_required"):
            raise TLSError(
                "expected a server that requires TLS, found one that talks plaintext; nothing was sent to it: enable"
                " tls on the server, or use a nats:// address without tls_ca_file"
            )
        return super()._connect_command()

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except OSError:
            # asyncio never closes the stream under a failed TLS handshake, and the client would wait for that before
            # it tries the next server.
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
                self._transport = None
            raise


async def _discard(_: Msg) -> None:
    return
