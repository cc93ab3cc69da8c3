"""nats-py's client with some defects fixed and one feature added.

Credentials are never sent in plaintext where TLS was asked for, a failed TLS handshake ends, subjects and headers may
be any bytes, a request may have many answers, whose headers stay as they are on the wire, and nothing is sent over a
later connection than the one for which it was meant.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from nats import errors as nats_errors
from nats.aio.client import PING_PROTO, Client

from airflow_provider_jetstream.jetstream.client.direct_get import is_last_of_batch
from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.transport import AbortableTransport
from airflow_provider_jetstream.jetstream.client.unsent import PING_SECONDS
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.errors import TLSError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.client import Srv
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import RawMessage

log = logging.getLogger(__name__)


class JetStreamClient(Client):
    """A client that sends its credentials only over TLS where TLS was asked for.

    nats-py connects in plaintext to a server that doesn't announce TLS, even for ``tls://`` addresses. The CONNECT
    line carries the credentials, so its creation is the last moment to stop that, at the first connection and at every
    later one.

    What isn't sent when a connection is lost is dropped: the client would send it over the next one, whenever that is.

    :param encrypted: refuse plaintext
    :param timeout: seconds for which what was sent may be on its way
    """

    def __init__(self, *, encrypted: bool, timeout: float) -> None:
        super().__init__()
        self._encrypted = encrypted
        self._timeout = timeout
        self._reconnected = asyncio.Event()
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
        subscription = await self.subscribe(inbox, cb=discard_message)
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

    async def wait_until_connected(self) -> None:
        """Wait while the client restores a lost connection; return at once from a closed one."""
        while not (self.is_connected or self.is_closed):
            await self._reconnected.wait()

    async def drop_unsent(self) -> None:
        """Make sure that nothing that was sent so far reaches the server later.

        The server reads in order: once it has answered a ping, nothing that was sent before is on its way. A connection
        on which no such answer comes in time is aborted and restored.
        """
        if not self.is_connected:
            return
        transport = self._transport
        generation = transport.generation if isinstance(transport, AbortableTransport) else 0
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # Not by flush(), which sends its ping before what is buffered, and whose late answer ends the client's reading.
        self._pongs.append(pong)
        await self._send_command(PING_PROTO)
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()
        await asyncio.wait([pong], timeout=PING_SECONDS)
        if pong.done() or not self.is_connected or not isinstance(transport, AbortableTransport):
            return
        if transport.generation == generation:
            log.warning("The server hasn't answered for too long: the connection is dropped with what isn't sent")
            await self._process_op_err(nats_errors.StaleConnectionError())

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message.

        :raises ConnectionReconnectingError: the connection is lost; nothing is sent, now or later
        """
        if not (self.is_connected or self.is_closed):
            raise nats_errors.ConnectionReconnectingError
        await super().publish(subject, payload, reply=reply, headers=headers)

    async def _connect_to_server(self, s: Srv) -> None:
        if not self._transport and s.uri.scheme in ("nats", "tls"):
            self._transport = AbortableTransport(self._timeout)
        await super()._connect_to_server(s)

    def abort(self) -> None:
        """Close the connection to the server, and drop what isn't sent."""
        if isinstance(self._transport, AbortableTransport):
            self._transport.abort()

    async def _attempt_reconnect(self) -> None:
        self.abort()
        try:
            await super()._attempt_reconnect()
        finally:
            # Those who wait look again; each attempt has an event of its own.
            reconnected, self._reconnected = self._reconnected, asyncio.Event()
            reconnected.set()

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
        # Subscriptions are sent again by the client itself.
        self._pending, self._pending_data_size = [], 0
        try:
            await super()._process_connect_init()
        except OSError:
            # asyncio never closes the stream under a failed TLS handshake, and the client would wait for that before
            # it tries the next server.
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
                self._transport = None
            raise


async def discard_message(_: Msg) -> None:
    """Do nothing with a message."""
