"""The connection on an event loop, and nats-py's client over it, for programs that use nats-py's API as well.

A session (:mod:`.session`) connects, authenticates, encrypts and restores the one connection to the server. It is the
transport of nats-py's client: the only private name of nats-py's that this package uses. Where a version of nats-py
lacks that name, or asks its transport for more, nats-py connects to the session by its public names, through a socket
on this machine's loopback.

Nothing is sent after its time limit: not while the connection is lost, nor later from the buffers of one that stalls.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import Transport

from airflow_provider_jetstream.jetstream.client.answer_inbox import AnswerInbox
from airflow_provider_jetstream.jetstream.client.concurrency import keep_cancellation
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.denials import fail
from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.client.headers import STATUS_LINE, encode_headers, first_values
from airflow_provider_jetstream.jetstream.client.session import CLIENT_SID
from airflow_provider_jetstream.jetstream.client.streams import NO_RESPONDERS, STATUS, is_last_of_batch
from airflow_provider_jetstream.jetstream.client.wire import (
    SentFrameReader,
    encode_message,
    encode_subject,
    server_version,
)
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    UnreachableError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from urllib.parse import ParseResult

    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage, RawMessage
    from airflow_provider_jetstream.jetstream.client.session import Session, SessionSubscription
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm, SentFrame
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError, TransientError

log = logging.getLogger(__name__)

_FAILED: Final = "the connection failed during a request on"
_UNSENT: Final = "nothing was sent on"
_LOOPBACK: Final = "127.0.0.1"
_CHUNK: Final = 65_536
_CLOSE_SECONDS: Final = 5.0
_CHECKED_EVERY: Final = 0.05
_INFO: Final = ("server_id", "server_name", "version", "proto", "max_payload", "client_id", "client_ip", "jetstream")
# What nats-py asks its transport for, in the versions that this package supports.
_ASKED: Final = {
    *("connect", "connect_tls", "write", "writelines", "read", "readline", "drain", "wait_closed", "close", "at_eof"),
    "__bool__",
}
_PLAIN: Final = re.compile(rb"[!-~]*")
# The last characters of Unicode, which nobody may use, stand for a byte each.
_FIRST_ESCAPE: Final = 0x10FF00


class NatsPyConnection(Connection):
    """A connection that restores itself for as long as it is open.

    :param session: the open session
    :ivar client: nats-py's client, over the same connection to the server
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.client = NatsPyClient(self)
        session.on_report = self._note_report
        self.timeout = session.settings.timeout
        self.api_prefix = session.settings.jetstream_api
        self.api_level = 0
        self._answers_prefix = session.settings.inbox_prefix
        self._answers = AnswerInbox(self)
        session.on_restored = self._answers.repeat_reads

    def _note_report(self, error: Exception) -> None:
        self.last_error = error

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""
        major, minor, patch = server_version(self.session.info)
        return major, minor, patch

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return int(self.session.info["max_payload"])

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and restored."""
        return self.session.reconnects

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached at this moment."""
        return self.session.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed for good."""
        return self.session.is_closed

    @property
    def close_reason(self) -> JetStreamProviderError | None:
        """Why the connection was closed for good, where the server is the reason."""
        return self.session.close_reason

    @property
    def loss(self) -> JetStreamProviderError:
        """Why the connection isn't there."""
        return self.session.loss

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
        if not self.is_connected:
            await self._require_connected(subject, limit, _FAILED if headers is None else _UNSENT)
            left = max(began + limit - time.monotonic(), 0.001)
        return await self._answers.request(subject, payload, left, headers)

    async def wait_until_connected(self, seconds: float) -> bool:
        """Wait while a lost connection is restored, and return whether it is there."""
        if self.session.is_connected:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.session.wait_until_connected()
        return self.session.is_connected

    async def _require_connected(self, subject: str, limit: float, failed: str = _FAILED) -> None:
        if await self.wait_until_connected(limit):
            return
        if self.is_closed:
            # One who tries again at once can be cancelled.
            await asyncio.sleep(0)
            raise self._unsent(f"{failed} {subject}")
        raise UnreachableError(
            f"the connection is lost for {limit:g} s already, so nothing was sent on {subject}"
            f"{last_report(self.last_error)}"
        )

    def _unsent(self, text: str) -> JetStreamProviderError:
        """Return the error for what isn't sent, since the connection isn't there."""
        return self.loss if self.close_reason else UnreachableError(f"{text}: {self.loss}")

    async def request_status(self, subject: str, payload: bytes) -> str:
        """Send a request that the server answers by a status alone."""
        ((headers, _),) = await self.ask(subject, payload)
        return headers[STATUS].decode(errors="replace").strip()

    async def request_batch(self, subject: str, payload: bytes) -> list[RawMessage]:
        """Send a request that the server answers by many messages and a last one that has a status."""
        return await self.ask(subject, payload, is_last_of_batch)

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        is_last: Callable[[bytes], bool] = lambda _: True,
        *,
        time_limit: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> list[RawMessage]:
        """Send a request and wait for its answers in an inbox of its own.

        :param is_last: tells by the headers of an answer whether none follows
        :param time_limit: seconds; the connection's own where absent
        :raises DeadlineError: the last answer doesn't come in time
        """
        limit = self.timeout if time_limit is None else time_limit
        await self._require_connected(subject, limit)
        inbox = self.new_inbox()
        answers: list[RawMessage] = []
        ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def collect(_subject: bytes, _reply: bytes, headers: bytes | None, body: bytes) -> None:
            if not ended.done():
                answers.append((headers or b"", body))
                if is_last(headers or b""):
                    ended.set_result(None)

        def deny(denial: PermissionDeniedError) -> None:
            if denial.action == "publish" and denial.subject in (subject, inbox):
                fail(ended, denial)
            elif denial.subject == inbox:
                fail(ended, denial, "on which answers would arrive")

        subscription = self.session.subscribe(inbox, collect, deny)
        try:
            self.write(self._frame(subject, payload, headers, inbox))
            async with asyncio.timeout(limit):
                await ended
        except TimeoutError:
            missing = "not all answers" if answers else "no answer"
            raise DeadlineError(f"{missing} on {subject} within {limit:g} s") from None
        finally:
            await subscription.unsubscribe()
        return answers

    async def request_many(
        self, requests: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]] | None = None
    ) -> list[bytes | TransientError]:
        """Send many requests together."""
        return await self._answers.request_many(requests, headers)

    def write(self, frames: bytes, messages: int = 1) -> None:
        """Send encoded messages together with all that is written in the same turn of the loop."""
        if self.session.link is None:
            raise self._unsent("nothing was sent")
        self.session.write(frames, messages)

    async def wait_for_room(self) -> None:
        """Wait while much is written that the operating system hasn't taken yet."""
        await self.session.wait_for_room()

    async def drop_unsent(self) -> None:
        """Make sure that nothing that was written so far reaches the server later."""
        await self.session.drop_unsent()

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, reply: str = ""
    ) -> None:
        """Send a message without waiting for an answer."""
        try:
            frame = self._frame(subject, payload, headers, reply)
        except WireError as error:
            raise UnreachableError(f"nothing was sent on {subject}: {error}") from None
        if not self.is_connected:
            await asyncio.sleep(0)
            raise self._unsent(f"{_UNSENT} {subject}")
        self.write(frame)
        await self.wait_for_room()

    def _frame(self, subject: str, payload: bytes, headers: dict[str, str] | None, reply: str) -> bytes:
        """Encode a message.

        :raises WireError: the server would close the connection
        """
        block = b"" if headers is None else encode_headers(headers)
        if (size := len(block) + len(payload)) > self.max_payload:
            raise WireError(f"it has {size} bytes, more than the server's limit of {self.max_payload}")
        return encode_message(encode_subject(subject), payload, block, encode_subject(reply) if reply else b"")

    async def publish_acknowledged(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, *, time_limit: float | None = None
    ) -> bytes:
        """Publish a message and return the answer of the stream that captures it."""
        limit = self.timeout if time_limit is None else time_limit
        return await self._request(subject, payload, limit, headers or {})

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return f"{self._answers_prefix}.{secrets.token_hex(11)}"

    async def subscribe(
        self,
        subject: str,
        callback: Callable[[Msg], Awaitable[None]],
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
    ) -> ClientSubscription:
        """Subscribe with nats-py's client."""
        number = self.session.follow(on_denied) if on_denied else 0
        try:
            return ClientSubscription(await self.client.subscribe(subject, cb=callback), self.session, number)
        except BaseException as error:
            self.session.unfollow(number)
            if isinstance(error, nats_errors.Error):
                raise UnreachableError(str(error)) from None
            raise

    async def subscribe_raw(
        self,
        subject: str,
        on_message: OnMessage,
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
        form: FrameForm | None = None,
    ) -> SessionSubscription:
        """Subscribe with a function that gets each message as soon as it is parsed."""
        return self.session.subscribe(subject, on_message, on_denied, form)

    @asynccontextmanager
    async def discard_inbox(self) -> AsyncIterator[str]:
        """Open an inbox whose messages are dropped."""
        inbox = self.new_inbox()
        subscription = self.session.subscribe(inbox, lambda *_: None)
        try:
            yield inbox
        finally:
            await subscription.unsubscribe()


class ClientSubscription:
    """A subscription of nats-py's client, with its follower of denials."""

    __slots__ = ("_number", "_session", "_subscription")

    def __init__(self, subscription: Subscription, session: Session, number: int) -> None:
        self._subscription = subscription
        self._session = session
        self._number = number

    async def unsubscribe(self) -> None:
        """End the subscription; without effect where the connection is lost."""
        self._session.unfollow(self._number)
        with suppress(nats_errors.Error):
            await self._subscription.unsubscribe()


class ClientMessage(Msg):
    """A message whose subjects may be any bytes, as :func:`~.wire_text.decode_text` decodes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subject, self.reply = _unescaped(self.subject), _unescaped(self.reply)


class NatsPyClient(Client):
    """nats-py's client over a connection of this package.

    :param connection: what carries its frames
    """

    msg_class = ClientMessage

    def __init__(self, connection: NatsPyConnection) -> None:
        super().__init__()
        self.stats = connection.session.stats
        self._connection = connection
        self._session = connection.session
        self._relay: _Relay | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect to the session."""
        token, address = None, f"nats://{_LOOPBACK}:4222"
        if difference := _difference():
            _report(difference)
            token = secrets.token_hex()
            self._relay = _Relay(self._session, token, self._end)
            address = await self._relay.open()
        else:
            self._transport = SessionTransport(self._session, self._end)
        settings = self._session.settings
        connecting = self.connect(
            address,
            error_cb=_ignore,
            closed_cb=self._close_session,
            inbox_prefix=settings.inbox_prefix,
            connect_timeout=max(1, round(settings.timeout)),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0,
            # The session does.
            ping_interval=1 << 30,
            token=token,
        )
        await keep_cancellation(connecting)

    @property
    def connected_url(self) -> ParseResult | None:
        """The address of the server, which the session knows; absent while there is no connection."""
        server = self._session.server
        if server is None or not self.is_connected:
            return None
        return urlparse(f"nats://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}")

    def _end(self) -> None:
        self._closing = asyncio.get_running_loop().create_task(self.close())

    async def _close_session(self) -> None:
        if self._relay:
            self._relay.close()
        await self._session.close(_CLOSE_SECONDS)

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
        self._connection.write(self._encoded(subject, payload, headers, reply))
        await self._connection.wait_for_room()

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
            ((head, body),) = await self._connection.ask(subject, payload, time_limit=timeout, headers=headers)
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
        if len(block) + len(payload) > self._connection.max_payload:
            raise nats_errors.MaxPayloadError
        try:
            return encode_message(encode_subject(subject), payload, block, encode_subject(reply) if reply else b"")
        except WireError:
            raise nats_errors.BadSubjectError from None

    async def subscribe(self, *args: Any, **kwargs: Any) -> Subscription:
        """Subscribe, before whatever else is sent over the session from then on."""
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


class SessionFrames:
    """A session as nats-py sees it: nats-py's frames go there, and those of its subscriptions come from there.

    :param session: what carries the frames
    :param on_end: is called where the session has ended for good
    :param token: what has to be in nats-py's CONNECT; nothing where absent
    """

    def __init__(self, session: Session, on_end: Callable[[], None], token: str | None = None) -> None:
        self._session = session
        self._on_end = on_end
        self._token = token
        self._link: object = None
        self._sent = SentFrameReader()
        self._incoming = bytearray()
        self._arrived = asyncio.Event()
        self._is_known = False

    async def connect(self, *_: Any, **__: Any) -> None:
        """Wait until the session has a connection, and use that one."""
        session = self._session
        await session.wait_until_connected()
        if session.is_closed:
            # nats-py would try again at once, without an end. Its close() cancels this.
            self._on_end()
            await asyncio.get_running_loop().create_future()
        self._link, self._is_known, self._sent = session.link, False, SentFrameReader()
        info: dict[str, Any] = {name: session.info[name] for name in _INFO if name in session.info}
        info |= {"headers": True, "auth_required": self._token is not None}
        self._incoming = bytearray(b"INFO %b\r\n" % json.dumps(info).encode())

    async def connect_tls(self, *_: Any, **__: Any) -> None:
        """Do nothing: the session has encrypted the connection."""

    def write(self, payload: bytes) -> None:
        """Send frames of nats-py's; those for a connection that is lost are dropped."""
        try:
            for frame in self._sent.feed(bytes(payload)):
                if not self.at_eof():
                    self._forward(frame)
        except JetStreamProviderError as error:
            log.debug("What nats-py has sent is dropped: %s", error)

    def _forward(self, frame: SentFrame) -> None:
        if frame.verb == b"CONNECT":
            self._introduce(frame.data)
        elif not self._is_known:
            self.close()
        elif frame.verb in (b"PUB", b"HPUB"):
            self._session.write(frame.data, 0)
        elif frame.verb == b"SUB":
            verb, subject, *queue, sid = frame.data.split()
            self._session.write(b" ".join((verb, subject, *queue, CLIENT_SID + sid)) + b"\r\n", 0)
            self._session.confirm(decode_text(subject))
        elif frame.verb == b"UNSUB":
            verb, sid, *limit = frame.data.split()
            self._session.write(b" ".join((verb, CLIENT_SID + sid, *limit)) + b"\r\n", 0)
        elif frame.verb == b"PING":
            self._feed(b"PONG\r\n")

    def _introduce(self, connect: bytes) -> None:
        if self._token is not None:
            # Anybody on this machine may connect to the loopback.
            try:
                shown = json.loads(connect.split(None, 1)[1]).get("auth_token")
            except (ValueError, IndexError, AttributeError, RecursionError):
                shown = None
            if not hmac.compare_digest(str(shown).encode(), self._token.encode()):
                self.close()
                return
        self._is_known = True
        self._session.on_client_message, self._session.on_change = self._receive, self._arrived.set

    def _receive(self, sid: bytes, subject: bytes, reply: bytes, headers: bytes | None, body: bytes) -> None:
        """Take a message for nats-py, which decodes strictly, and reads nothing more after what it can't read."""
        names = b" ".join(filter(None, (_escaped(subject), sid.removeprefix(CLIENT_SID), _escaped(reply))))
        if headers and not (headers.startswith(STATUS_LINE) and headers.isascii()):
            # nats-py takes the last value of a name; all parts have to read the same, or a job would have two ids.
            lines = [f"{name}: {value}\r\n" for name, value in first_values(headers).items()]
            headers = f"NATS/1.0\r\n{''.join(lines)}\r\n".encode() if lines else None
        if headers:
            size = len(headers)
            self._feed(b"HMSG %b %d %d\r\n%b%b\r\n" % (names, size, size + len(body), headers, body))
        else:
            self._feed(b"MSG %b %d\r\n%b\r\n" % (names, len(body), body))

    def _feed(self, data: bytes) -> None:
        self._incoming += data
        self._arrived.set()

    def writelines(self, payload: list[bytes]) -> None:
        """Send frames."""
        self.write(b"".join(payload))

    async def read(self, buffer_size: int = 0) -> bytes:
        """Return what has arrived; empty at the end of the connection."""
        while not self._incoming and not self.at_eof():
            self._arrived.clear()
            await self._arrived.wait()
        data, self._incoming = bytes(self._incoming), bytearray()
        return data

    async def readline(self) -> bytes:
        """Return the next line of the handshake; empty at the end of the connection."""
        line, end, rest = (await self.read()).partition(b"\n")
        self._incoming[:0] = rest
        return line + end

    async def drain(self) -> None:
        """Wait while much isn't sent."""
        await self._session.wait_for_room()

    async def wait_closed(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """End nats-py's use of the connection."""
        self._link = None
        self._arrived.set()

    def at_eof(self) -> bool:
        """Return whether the connection is lost that nats-py was introduced to."""
        return self._link is None or self._session.link is not self._link

    def __bool__(self) -> bool:
        """Be true before the first connection as well: nats-py would replace it by a transport of its own."""
        return True


class SessionTransport(SessionFrames, Transport):
    """A session as nats-py's transport."""


class _Relay:
    """A socket on the loopback behind which a session is; nats-py connects to it by its public names.

    :param token: what nats-py shows, so that nobody else on this machine uses the session
    """

    def __init__(self, session: Session, token: str, on_end: Callable[[], None]) -> None:
        self._session = session
        self._token = token
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
        frames = SessionFrames(self._session, self._on_end, self._token)

        async def forward() -> None:
            while data := await reader.read(_CHUNK):
                frames.write(data)

        async def hand_over() -> None:
            while data := await frames.read():
                writer.write(data)
                await writer.drain()

        tasks: list[asyncio.Task[None]] = []
        try:
            await frames.connect()
            tasks = [asyncio.create_task(forward()), asyncio.create_task(hand_over())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.transport.abort()


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


def _difference() -> str:
    """Return how nats-py differs from what this module expects; empty if it doesn't."""
    if asked := set(Transport.__abstractmethods__) - _ASKED:
        return f"its transport has {', '.join(sorted(asked))}"
    return "" if hasattr(Client(), "_transport") else "Client._transport"


@lru_cache
def _report(difference: str) -> None:
    """Log once a process what differs."""
    log.warning(
        "This nats-py isn't as expected (%s), so its client is connected through a socket of this machine, which is"
        " slower: install a version that this package supports",
        difference,
    )
