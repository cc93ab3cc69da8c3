"""nats-py's client over a connection of this package, for programs that use nats-py's API as well.

nats-py is used by its public names, and by ``Client._inbox_prefix``, which its JetStream context reads before it is
connected: setting it does no harm where another version has no such name. Requests and messages go the package's own
way. What is subscribed goes through a socket on this machine's loopback: there nats-py finds a server, behind which is
the session.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

from nats import errors as nats_errors
from nats.aio.client import Client, ServerVersion
from nats.aio.msg import Msg

from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS, STATUS_LINE, encode_headers, first_values
from airflow_provider_jetstream.jetstream.client.session import CLIENT_SID
from airflow_provider_jetstream.jetstream.client.wire import SentFrameReader, encode_message, encode_subject
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    UnreachableError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from urllib.parse import ParseResult

    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.client.session import Session
    from airflow_provider_jetstream.jetstream.client.wire import SentFrame

log = logging.getLogger(__name__)

_LOOPBACK: Final = "127.0.0.1"
_CHUNK: Final = 65_536
_CLOSE_SECONDS: Final = 5.0
_CHECKED_EVERY: Final = 0.05
_INFO: Final = ("server_id", "server_name", "version", "proto", "max_payload", "client_id", "client_ip", "jetstream")
_PLAIN: Final = re.compile(rb"[!-~]*")
# The last characters of Unicode, which nobody may use, stand for a byte each.
_FIRST_ESCAPE: Final = 0x10FF00


class ClientMessage(Msg):
    """A message whose subjects may be any bytes, as :func:`~.wire_text.decode_text` decodes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subject, self.reply = _unescaped(self.subject), _unescaped(self.reply)


class NatsPyClient(Client):
    """nats-py's client over a connection of this package; nats-py connects when something is subscribed first.

    :param session: the connection
    """

    msg_class = ClientMessage

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.stats = session.stats
        # nats-py reads it before it connects, too.
        self._inbox_prefix = bytearray(session.settings.inbox_prefix.encode())
        self._session = session
        self._relay: _Relay | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def _open(self) -> None:
        """Let nats-py connect to the session, once."""
        if self._connecting is None:
            await self._require_connected()
            self._relay = _Relay(self._session, self._end)
            self._connecting = asyncio.create_task(self._connect(self._relay))
        # Shielded: one who is cancelled must not cancel it for the others.
        await asyncio.shield(self._connecting)

    async def _connect(self, relay: _Relay) -> None:
        settings = self._session.settings
        await self.connect(
            await relay.open(),
            error_cb=_ignore,
            closed_cb=self._close_session,
            inbox_prefix=settings.inbox_prefix,
            connect_timeout=max(1, round(settings.timeout)),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0,
            # The session does.
            ping_interval=1 << 30,
            token=relay.token,
        )

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return bool(super().is_connected) if self._relay else self._session.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed for good."""
        return bool(super().is_closed) or (self._relay is None and self._session.is_closed)

    @property
    def connected_url(self) -> ParseResult | None:
        """The address of the server, which the session knows; absent while there is no connection."""
        server = self._session.server
        if server is None or not self.is_connected:
            return None
        return urlparse(f"nats://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}")

    @property
    def connected_server_version(self) -> ServerVersion:
        """The version of the server."""
        return ServerVersion(self._session.info["version"])

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return self._session.max_payload

    @property
    def client_id(self) -> int | None:
        """The server's number of the connection."""
        return self._session.info.get("client_id")

    def _end(self) -> None:
        self._closing = asyncio.get_running_loop().create_task(self.close())

    async def close(self) -> None:
        """Close the connection, which the package and nats-py share."""
        if self._relay is None:
            await self._close_session()
            return
        if self._connecting and not self._connecting.done():
            self._connecting.cancel()
        await super().close()

    async def _close_session(self) -> None:
        if self._relay:
            self._relay.close()
        await self._session.finish(_CLOSE_SECONDS)

    async def force_reconnect(self) -> None:
        """Give the connection to the server up; the session restores it."""
        self._session.reconnect()

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, Any] | None = None
    ) -> None:
        """Send a message.

        :raises ConnectionReconnectingError: the connection is lost; nothing is sent, now or later
        """
        await self._require_connected()
        self._session.write(self._encoded(subject, payload, headers, reply))
        await self._session.wait_for_room()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109
        old_style: bool = False,  # noqa: FBT001, FBT002
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request and return its one answer.

        :param old_style: without effect: each request has an inbox of its own
        :raises PermissionDeniedError: the user may not send the request, or not receive the answer
        """
        await self._require_connected()
        self._encoded(subject, payload, headers)
        try:
            ((head, body),) = await self._session.ask(subject, payload, time_limit=timeout, headers=headers)
        except DeadlineError:
            raise nats_errors.TimeoutError from None
        except UnreachableError:
            raise nats_errors.ConnectionReconnectingError from None
        if head.startswith(NO_RESPONDERS):
            raise nats_errors.NoRespondersError
        return Msg(self, "", "", body, _headers(head))

    async def _require_connected(self) -> None:
        if self._session.link is None or self.is_closed:
            # A loop that tries again at once, such as one around nats-py's fetch, would hold the event loop, which then
            # neither restores the connection nor cancels anything.
            await asyncio.sleep(0)
        if self.is_closed or self._session.is_closed:
            raise nats_errors.ConnectionClosedError
        if self.is_draining_pubs:
            raise nats_errors.ConnectionDrainingError
        if self._session.link is None:
            raise nats_errors.ConnectionReconnectingError

    def _encoded(self, subject: str, payload: bytes, headers: dict[str, Any] | None, reply: str = "") -> bytes:
        block = b"" if headers is None else encode_headers(headers)
        if len(block) + len(payload) > self._session.max_payload:
            raise nats_errors.MaxPayloadError
        try:
            return encode_message(encode_subject(subject), payload, block, encode_subject(reply) if reply else b"")
        except WireError:
            raise nats_errors.BadSubjectError from None

    async def subscribe(self, *args: Any, **kwargs: Any) -> Subscription:
        """Subscribe, before whatever else is sent over the session from then on."""
        await self._open()
        subscription = await super().subscribe(*args, **kwargs)
        await self._hand_over()
        return subscription

    async def _hand_over(self) -> None:
        """Wait until the session has what nats-py has buffered."""
        if self._relay and self.is_connected:
            # The answer to a ping comes behind it, unless the connection is lost. The ping isn't given up: nats-py
            # reads nothing more after an answer for which nobody waits.
            link, answered = self._session.link, asyncio.ensure_future(super().flush())
            answered.add_done_callback(lambda done: done.cancelled() or done.exception())
            while not answered.done() and self._session.link is link:
                await asyncio.wait([answered], timeout=_CHECKED_EVERY)
        while self.pending_data_size and self.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def flush(self, timeout: float = 10) -> None:  # noqa: ASYNC109
        """Wait until the server has received what was sent before."""
        if self.is_closed:
            raise nats_errors.ConnectionClosedError
        if timeout <= 0:
            raise nats_errors.BadTimeoutError
        await self._hand_over()
        pong = self._session.ping()
        await asyncio.wait([pong], timeout=timeout)
        if not pong.done():
            raise nats_errors.FlushTimeoutError
        if pong.cancelled():
            raise nats_errors.ConnectionReconnectingError

    async def rtt(self, timeout: float = 10) -> float:  # noqa: ASYNC109
        """Return the seconds that a ping takes to the server and back."""
        began = time.perf_counter()
        await self.flush(timeout)
        return time.perf_counter() - began


class _Relay:
    """A socket on the loopback behind which a session is: nats-py connects to it as to a server.

    :param on_end: is called where the session has ended for good
    :ivar token: what nats-py shows: anybody on this machine may connect to the loopback
    """

    def __init__(self, session: Session, on_end: Callable[[], None]) -> None:
        self.token = secrets.token_hex()
        self._session = session
        self._on_end = on_end
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """Listen, and return the address."""
        self._server = await asyncio.start_server(self._serve, _LOOPBACK, 0)
        return f"nats://{_LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Listen no more."""
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._session.wait_until_connected(None)
            if self._session.is_closed:
                # nats-py would try again at once, without an end.
                self.close()
                self._on_end()
                return
            await _Guest(self._session, writer, self.token).serve(reader)
        except OSError as error:
            await _ignore(error)
        finally:
            writer.transport.abort()


class _Guest:
    """One connection of nats-py to a relay, for as long as the session has the same connection to the server.

    :param token: what has to be in the CONNECT
    """

    def __init__(self, session: Session, writer: asyncio.StreamWriter, token: str) -> None:
        self._session = session
        self._writer = writer
        self._token = token
        self._link = session.link
        self._is_known = False

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Forward what is sent until the end of the connection; what is sent for a lost one is dropped."""
        info: dict[str, Any] = {name: self._session.info[name] for name in _INFO if name in self._session.info}
        info |= {"headers": True, "auth_required": True}
        self._writer.write(b"INFO %b\r\n" % json.dumps(info).encode())
        sent = SentFrameReader()
        while data := await reader.read(_CHUNK):
            try:
                for frame in sent.feed(data):
                    if self._is_current():
                        self._forward(frame)
            except JetStreamProviderError as error:
                log.debug("What nats-py has sent is dropped: %s", error)
            await self._session.wait_for_room()

    def _is_current(self) -> bool:
        """Return whether the connection goes on, and end it where the session's connection has ended."""
        if self._session.link is not self._link:
            self._writer.transport.abort()
        return not self._writer.is_closing()

    def _forward(self, frame: SentFrame) -> None:
        if frame.verb == b"CONNECT":
            self._introduce(frame.data)
        elif not self._is_known:
            self._writer.transport.abort()
        elif frame.verb in (b"PUB", b"HPUB"):
            self._session.send(frame.data)
        elif frame.verb == b"SUB":
            verb, subject, *queue, sid = frame.data.split()
            self._session.send(b" ".join((verb, subject, *queue, CLIENT_SID + sid)) + b"\r\n")
            self._session.confirm(decode_text(subject))
        elif frame.verb == b"UNSUB":
            verb, sid, *limit = frame.data.split()
            self._session.send(b" ".join((verb, CLIENT_SID + sid, *limit)) + b"\r\n")
        elif frame.verb == b"PING":
            self._writer.write(b"PONG\r\n")

    def _introduce(self, connect: bytes) -> None:
        try:
            shown = json.loads(connect.split(None, 1)[1]).get("auth_token")
        except (ValueError, IndexError, AttributeError, RecursionError):
            shown = None
        if not hmac.compare_digest(str(shown).encode(), self._token.encode()):
            self._writer.transport.abort()
            return
        self._is_known = True
        self._session.on_client_message, self._session.on_change = self._receive, self._is_current

    def _receive(self, sid: bytes, subject: bytes, reply: bytes, headers: bytes | None, body: bytes) -> None:
        """Take a message for nats-py, which decodes strictly, and reads nothing more after what it can't read."""
        names = b" ".join(filter(None, (_escaped(subject), sid.removeprefix(CLIENT_SID), _escaped(reply))))
        if headers and not (headers.startswith(STATUS_LINE) and headers.isascii()):
            # nats-py takes the last value of a name; all parts have to read the same, or a job would have two ids.
            lines = [f"{name}: {value}\r\n" for name, value in first_values(headers).items()]
            headers = f"NATS/1.0\r\n{''.join(lines)}\r\n".encode() if lines else None
        if headers:
            size = len(headers)
            self._writer.write(b"HMSG %b %d %d\r\n%b%b\r\n" % (names, size, size + len(body), headers, body))
        else:
            self._writer.write(b"MSG %b %d\r\n%b\r\n" % (names, len(body), body))


async def _ignore(error: Exception) -> None:
    log.debug("nats-py reports: %s", error)


def _escaped(name: bytes) -> bytes:
    """Encode a subject so that nats-py can read it, which decodes strictly, and takes any white space for its end."""
    if _PLAIN.fullmatch(name):
        return name
    escaped = (
        char if char.isprintable() else "".join(chr(_FIRST_ESCAPE + byte) for byte in encode_text(char))
        for char in decode_text(name)
    )
    return "".join(escaped).encode()


def _unescaped(name: str) -> str:
    if name.isascii():
        return name
    escaped = (bytes([ord(char) - _FIRST_ESCAPE]) if ord(char) >= _FIRST_ESCAPE else char.encode() for char in name)
    return decode_text(b"".join(escaped))


def _headers(raw: bytes) -> dict[str, str] | None:
    """Parse headers as nats-py does, but for the first value of each name."""
    if not raw.startswith(STATUS_LINE):
        return first_values(raw) or None
    code, _, description = raw[len(STATUS_LINE) :].partition(b"\r\n")[0].decode(errors="replace").partition(" ")
    return {"Status": code} | ({"Description": description} if description else {}) | first_values(raw)
