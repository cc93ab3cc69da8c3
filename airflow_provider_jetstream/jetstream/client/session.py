"""The connection to a server on an event loop: it connects, restores itself after each loss, and carries frames.

Credentials are never sent in plaintext where TLS was asked for; settings that have changed are used by the next
attempt; only refused credentials, and a refused subscription, end a session for good. Nothing is sent over a later
connection than the one for which it was meant. A denial reaches all who follow denials.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import secrets
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from airflow_provider_jetstream.jetstream.client.credentials import connect_command
from airflow_provider_jetstream.jetstream.client.denials import error_kind, parse_denial
from airflow_provider_jetstream.jetstream.client.diagnostics import explain
from airflow_provider_jetstream.jetstream.client.loop_connection import LoopConnection
from airflow_provider_jetstream.jetstream.client.outage import Outage
from airflow_provider_jetstream.jetstream.client.server_link import MOST_UNSENT, ServerLink, said
from airflow_provider_jetstream.jetstream.client.tls import plaintext_report, require_certificate, tls_context
from airflow_provider_jetstream.jetstream.client.unsent import PING_SECONDS, limit_send_time
from airflow_provider_jetstream.jetstream.client.wire import encode_subject, parse_server_info, server_version
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    SubscriptionRefusedError,
    TLSError,
    UnreachableError,
    WireError,
    same_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage
    from airflow_provider_jetstream.jetstream.client.outage import RenewSettings
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger(__name__)

CLIENT_SID: Final = b"c"
_PING, _PONG = b"PING\r\n", b"PONG\r\n"
_UNHANDLED: Final = (ValueError, LookupError, TypeError, AttributeError)
_FIRST_TRIES: Final = 2
# Seconds between two rounds of attempts.
_LEAST_PAUSE: Final = 0.75
_MOST_PAUSE: Final = 1.0
_RENEW_SECONDS: Final = 10.0
_PING_EVERY: Final = 120.0
_MOST_UNANSWERED: Final = 2


class _Server(NamedTuple):
    """An address of a server.

    :param tls_name: the name in its certificate
    """

    host: str
    port: int
    tls_name: str


class SessionSubscription:
    """A subscription of a session; sent again over each later connection."""

    __slots__ = ("_session", "form", "number", "on_denied", "on_message", "subject")

    def __init__(
        self,
        session: Session,
        number: bytes,
        subject: str,
        on_message: OnMessage,
        on_denied: Callable[[PermissionDeniedError], None] | None,
        form: FrameForm | None,
    ) -> None:
        self._session = session
        self.number = number
        self.subject = subject
        self.on_message = on_message
        self.on_denied = on_denied
        self.form = form

    @property
    def command(self) -> bytes:
        """The line that subscribes."""
        return b"SUB %b %b\r\n" % (encode_subject(self.subject), self.number)

    async def unsubscribe(self) -> None:
        """End the subscription; without effect where the connection is lost."""
        self._session.unsubscribe(self)


class Session(LoopConnection):
    """A connection that restores itself until it is closed.

    :param settings: servers, credentials and TLS; what was sent may be on its way for their time limit
    :param renew: reads the settings again, where a lost connection can't be restored by the ones known
    :ivar on_client_message: gets messages to subscriptions of nats-py's client, whose numbers begin with
        :data:`CLIENT_SID`
    :ivar on_change: is called when the connection is there, lost or closed
    """

    is_closed = False
    reconnects = 0
    close_reason: JetStreamProviderError | None = None

    def __init__(self, settings: ConnectionSettings, renew: RenewSettings | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.timeout = settings.timeout
        self.api_prefix = settings.jetstream_api
        self.api_level = 0
        self.outage = Outage()
        self.info: dict[str, Any] = {}
        self.server: _Server | None = None
        self.link: ServerLink | None = None
        # Those of nats-py's client, which counts its own messages in them.
        self.stats = dict.fromkeys(("in_msgs", "out_msgs", "in_bytes", "out_bytes", "reconnects", "errors_received"), 0)
        self.on_client_message: Callable[[bytes, bytes, bytes, bytes | None, bytes], None] = lambda *_: None
        self.on_change: Callable[[], object] = lambda: None
        self._inbox_prefix = settings.inbox_prefix
        self._renew = renew
        self._servers: list[_Server] = _addresses(settings)
        self._last_words: Exception | None = None
        self._opened_at = 0.0
        self._number = 0
        self._subscriptions: dict[bytes, SessionSubscription] = {}
        # The subjects of subscriptions that the server hasn't taken yet, in their order.
        self._unconfirmed: list[tuple[str, asyncio.Future[None]]] = []
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._out: list[bytes] = []
        self._out_size = 0
        self._changed = asyncio.Event()
        self._restoring: asyncio.Task[None] | None = None
        self._alive: asyncio.TimerHandle | None = None
        self._unanswered = 0

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached, as far as the session knows."""
        return self.link is not None

    @property
    def loss(self) -> JetStreamProviderError:
        """Why the connection isn't there."""
        if self.close_reason:
            return same_error(self.close_reason)
        if self.is_closed:
            return UnreachableError("nats: connection closed")
        return explain(self.settings, self.outage.failures)

    async def open(self, failures: list[Exception]) -> None:
        """Connect to the first server that takes the connection; each is tried twice.

        :param failures: gets why attempts failed
        :raises JetStreamProviderError: no server takes the connection
        """
        for _ in range(_FIRST_TRIES):
            random.shuffle(self._servers)
            for server in tuple(self._servers):
                try:
                    await self._dial(server)
                except (OSError, JetStreamProviderError) as error:
                    failures.append(error)
                    self.outage.record(error)
                else:
                    return
        raise explain(self.settings, failures)

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The server's version as numbers."""
        major, minor, patch = server_version(self.info)
        return major, minor, patch

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return int(self.info["max_payload"])

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return f"{self._inbox_prefix}.{secrets.token_hex(11)}"

    async def wait_until_connected(self, seconds: float | None) -> bool:
        """Wait while a lost connection is restored, and return whether it is there; at once where it is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self.is_connected or self.is_closed):
                    await self._changed.wait()
        return self.is_connected

    async def finish(self, seconds: float) -> None:
        """Close the connection once all is sent.

        :param seconds: how long it may take; what isn't sent then is dropped
        """
        link = self.link
        if link:
            self.flush()
        self._end()
        if link:
            link.close()
            await asyncio.wait([link.ended], timeout=seconds)
            link.abort()

    def abort(self) -> None:
        """Close the connection, and drop what isn't sent."""
        link = self.link
        self._end()
        if link:
            link.abort()

    def _end(self) -> None:
        self.is_closed = True
        self._lose()
        if self._restoring and self._restoring is not asyncio.current_task():
            self._restoring.cancel()
        self._change()

    def _lose(self) -> None:
        self.link = None
        # It would be sent over another connection than the one for which it was meant.
        self._out, self._out_size = [], 0
        for pong in self._pongs:
            pong.cancel()
        self._pongs.clear()
        self._unconfirmed = []
        if self._alive:
            self._alive.cancel()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self.on_change()

    # Connecting

    async def _dial(self, server: _Server) -> None:
        """Connect to a server.

        :raises ConnectionError: the server refuses the connection
        :raises JetStreamProviderError: the connection wouldn't be what the settings ask for
        :raises OSError: there is no connection
        """
        link = ServerLink(self._on_message, self._on_control, self._on_lost, self.stats)
        try:
            # A share for each server: one that doesn't answer mustn't use up the time of the others.
            async with asyncio.timeout(max(1, round(self.settings.timeout / len(self._servers)))):
                info = await self._introduce(link, server)
        except BaseException as error:
            link.abort()
            if isinstance(error, OSError) and (text := await _reported(link, server, error)):
                raise ConnectionError(text) from None
            raise
        self.info, self.server, self.link, self._opened_at = info, server, link, time.monotonic()
        self._discover(info, server)
        link.is_open = True
        for subscription in self._subscriptions.values():
            self._start(subscription, link)
        self._unanswered = 0
        self._alive = asyncio.get_running_loop().call_later(_PING_EVERY, self._check_alive)
        for op, line in link.lines:
            self._on_control(op, line)
        self._change()

    async def _introduce(self, link: ServerLink, server: _Server) -> dict[str, Any]:
        settings, loop = self.settings, asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: link, server.host, server.port)
        limit_send_time(transport.get_extra_info("socket"), settings.timeout)
        if settings.tls_handshake_first:
            await link.start_tls(tls_context(settings), server.tls_name)
        op, line = await link.next_line()
        if op != b"INFO":
            raise WireError(f"expected INFO from a nats-server at {server.host}, found {line[:40]!r}")
        info = parse_server_info(line[len(b"INFO ") :])
        require_certificate(settings, info)
        wants_tls = settings.encrypted or info.get("tls_required")
        if wants_tls and not settings.tls_handshake_first:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise TLSError(
                    "expected a server that requires TLS, found one that talks plaintext; nothing was sent to it:"
                    " enable tls on the server, or use a nats:// address without tls_ca_file"
                )
            if link.lines:
                await link.next_line()
                raise TLSError(f"expected TLS from {server.host}, found plaintext after its INFO")
            await link.start_tls(tls_context(settings), server.tls_name)
        link.write(connect_command(settings, info) + _PING)
        while (await link.next_line())[0] != b"PONG":
            pass
        return info

    def _discover(self, info: dict[str, Any], server: _Server) -> None:
        """Add the other servers of the cluster to those that are tried after a loss."""
        known = {(each.host, each.port) for each in self._servers}
        for address in info.get("connect_urls") or []:
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            if (host, int(port)) not in known:
                # Whose certificate has no address in it.
                name = self.settings.tls_server_name or (server.tls_name if _is_ip(host) else host)
                self._servers.append(_Server(host, int(port), name))

    async def _restore(self) -> None:
        while not self.is_closed:
            random.shuffle(self._servers)
            for server in sorted(self._servers, key=lambda each: each == self.server):
                try:
                    if server == self.server and time.monotonic() < self._opened_at + _MOST_PAUSE:
                        # One that ends each connection at once isn't asked without a pause.
                        await self._pause()
                    if await self._has_other_settings() or self.is_closed:
                        break
                    await self._dial(server)
                except (OSError, JetStreamProviderError) as error:
                    self.last_error = error
                    self.outage.record(error)
                else:
                    self.reconnects += 1
                    self.stats["reconnects"] = self.reconnects
                    self.repeat_reads()
                    return
            await self._pause()

    @staticmethod
    async def _pause() -> None:
        await asyncio.sleep(random.uniform(_LEAST_PAUSE, _MOST_PAUSE))  # noqa: S311

    async def _has_other_settings(self) -> bool:
        """Read the settings again where that is due, and use them from now on where they have changed.

        Gives the connection up where its credentials have been refused for long.

        :return: whether the addresses that were about to be used aren't valid any more
        """
        self.outage.report(", ".join(self.settings.servers))
        if self._renew and self.outage.renewal_is_due:
            self.outage.note_renewal()
            try:
                async with asyncio.timeout(_RENEW_SECONDS):
                    settings = await self._renew()
            except Exception as error:  # noqa: BLE001
                # Whatever became of Airflow meanwhile: the settings that are known may work again.
                known = str(error) if isinstance(error, JetStreamProviderError) else type(error).__name__
                log.warning("The settings of the connection can't be read again: %s", known)
            else:
                if settings != self.settings:
                    log.info(
                        "The settings of the connection have changed: it goes on at %s", ", ".join(settings.servers)
                    )
                    self.settings, self._servers = settings, _addresses(settings)
                    return True
        if self.outage.is_refused_for_good:
            self.close_reason = explain(self.settings, self.outage.failures)
            self._end()
        return False

    def _on_lost(self, link: ServerLink, error: Exception) -> None:
        if link is not self.link:
            return
        self._lose()
        words, self._last_words = self._last_words, None
        if words is None:
            # How the connection ends says less than what the server said before.
            self.last_error = error
        self.outage.begin(words)
        self._restoring = asyncio.get_running_loop().create_task(self._restore())
        self._change()

    def reconnect(self) -> None:
        """Give the connection up, and restore it."""
        if self.link:
            self._drop(self.link, ConnectionError("the connection was given up"))

    def _drop(self, link: ServerLink, error: Exception) -> None:
        """Give a connection up at once, with what isn't sent."""
        link.fail(error)
        self._on_lost(link, error)

    def _check_alive(self) -> None:
        if self.link is None:
            return
        if self._unanswered >= _MOST_UNANSWERED:
            self._drop(self.link, ConnectionError("stale connection"))
            return
        self._unanswered += 1
        self.ping().add_done_callback(self._is_alive)
        self._alive = asyncio.get_running_loop().call_later(_PING_EVERY, self._check_alive)

    def _is_alive(self, _: asyncio.Future[None]) -> None:
        self._unanswered = 0

    # Receiving

    def _on_message(self, sid: bytes, subject: bytes, reply: bytes, headers: bytes | None, body: bytes) -> None:
        try:
            if subscription := self._subscriptions.get(sid):
                subscription.on_message(subject, reply, headers, body)
            elif sid.startswith(CLIENT_SID):
                self.stats["in_msgs"] -= 1
                self.stats["in_bytes"] -= len(body)
                self.on_client_message(sid, subject, reply, headers, body)
        except _UNHANDLED as error:
            # The client would receive nothing more, and nobody would learn of it.
            log.warning("A message can't be handled, and is dropped: %s", type(error).__name__)

    def _on_control(self, op: bytes, line: bytes) -> None:
        match op:
            case b"PING":
                self.send(_PONG)
            case b"PONG" if self._pongs:
                pong = self._pongs.popleft()
                if not pong.done():
                    pong.set_result(None)
            case b"-ERR":
                self._on_error(said(line))
            case b"INFO":
                info = parse_server_info(line[len(b"INFO ") :])
                self.info |= info
                if self.server:
                    self._discover(info, self.server)

    def _on_error(self, text: str) -> None:
        user = self.settings.client
        if denial := parse_denial(text, user):
            self._deny(denial)
            return
        kind = error_kind(text)
        if kind == "subscription" and (subject := self._take_unconfirmed()) is not None:
            self._deny(SubscriptionRefusedError(subject, user, text))
            return
        error = ConnectionError(text)
        self.last_error = error
        if kind == "subscription":
            # One of those that are sent again after a loss, nobody knows which: it would stay silent.
            self.close_reason = SubscriptionRefusedError("what it had subscribed to", user, text)
            self.abort()
        elif kind != "permission" and self.link:
            self._last_words = error
            self._drop(self.link, error)

    def _take_unconfirmed(self) -> str | None:
        """Return the subject of the oldest subscription that isn't confirmed, which the server refuses."""
        for entry in self._unconfirmed:
            if not entry[1].done():
                self._unconfirmed.remove(entry)
                return entry[0]
        return None

    def _deny(self, denial: PermissionDeniedError) -> None:
        self.last_error = denial
        for subscription in list(self._subscriptions.values()):
            if subscription.on_denied:
                subscription.on_denied(denial)

    # Sending

    async def subscribe_raw(
        self,
        subject: str,
        on_message: OnMessage,
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
        form: FrameForm | None = None,
    ) -> SessionSubscription:
        """Subscribe with a function that gets each message as soon as it is parsed.

        :param on_denied: gets every denial on this connection until the end of the subscription
        :param form: takes most messages before the function gets them
        :raises UnreachableError: the session is closed
        """
        if self.is_closed:
            raise self.loss
        encode_subject(subject)
        self._number += 1
        number = b"%d" % self._number
        subscription = SessionSubscription(self, number, subject, on_message, on_denied, form)
        if form:
            form.bind(self._number)
        self._subscriptions[number] = subscription
        if self.link:
            self._start(subscription, self.link)
            self.confirm(subject)
        return subscription

    def confirm(self, subject: str) -> None:
        """Note that a subscription was sent just now, so that its refusal, which names none, is known for its own.

        The server reads in order: the refusal comes before the answer to a ping.
        """
        self._unconfirmed = [entry for entry in self._unconfirmed if not entry[1].done()]
        self._unconfirmed.append((subject, self.ping()))

    def _start(self, subscription: SessionSubscription, link: ServerLink) -> None:
        if subscription.form:
            link.reader.forms[subscription.number] = subscription.form
        self.send(subscription.command)

    def unsubscribe(self, subscription: SessionSubscription) -> None:
        """End a subscription."""
        number = subscription.number
        if self._subscriptions.pop(number, None) and self.link:
            self.link.reader.forms.pop(number, None)
            self.send(b"UNSUB %b\r\n" % number)

    def write(self, frames: bytes, messages: int = 1) -> None:
        """Send encoded messages together with all that is written in the same turn of the loop."""
        self.send(frames)
        self.stats["out_msgs"] += messages
        self.stats["out_bytes"] += len(frames)

    def send(self, frames: bytes) -> None:
        """Send frames of any kind together with all else that is written before the event loop's next turn.

        :raises UnreachableError: the connection is lost; nothing is sent, now or later
        """
        if self.link is None:
            raise self.unsent("nothing was sent")
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out.append(frames)
        self._out_size += len(frames)

    def flush(self) -> None:
        """Hand over to the operating system what is written."""
        out, self._out, self._out_size = self._out, [], 0
        if out and self.link:
            # In one piece: over TLS each piece is a record of its own.
            self.link.write(out[0] if len(out) == 1 else b"".join(out))

    async def wait_for_room(self) -> None:
        """Wait while more is written than is to be held, though not longer than for one request."""
        link = self.link
        if link is None or self._out_size + link.unsent <= MOST_UNSENT:
            return
        self.flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.timeout):
                await link.wait_for_room()

    def ping(self) -> asyncio.Future[None]:
        """Send a ping; the future is done once the server has answered, and cancelled with the connection."""
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.link is None:
            pong.cancel()
            return pong
        self._pongs.append(pong)
        self.send(_PING)
        return pong

    async def drop_unsent(self) -> None:
        """Make sure that nothing that was sent so far reaches the server later.

        The server reads in order: once it has answered a ping, nothing that was sent before is on its way. A connection
        on which no such answer comes in time is aborted and restored.
        """
        if (link := self.link) is None:
            return
        pong = self.ping()
        await asyncio.wait([pong], timeout=PING_SECONDS)
        if not pong.done() and link is self.link:
            log.warning("The server hasn't answered for too long: the connection is dropped with what isn't sent")
            self._drop(link, ConnectionError("stale connection"))


def _addresses(settings: ConnectionSettings) -> list[_Server]:
    servers = []
    for address in map(urlsplit, settings.servers):
        host = str(address.hostname)
        servers.append(_Server(host, address.port or 4222, settings.tls_server_name or host))
    return servers


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _reported(link: ServerLink, server: _Server, error: OSError) -> str:
    """Return what the server said before a handshake failed; empty where it said nothing."""
    reports = [line for op, line in link.lines if op == b"-ERR"]
    if reports:
        return said(reports[-1])
    if isinstance(error, ssl.SSLError):
        return await asyncio.to_thread(plaintext_report, server.host, server.port, error)
    return ""
