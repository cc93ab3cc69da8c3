"""One connection to a server on a blocking socket: dialling, TLS, the protocol's handshake, and whole frames.

The socket blocks since a Spark task does one thing at a time, and asyncio would cost more than the parsing. Nothing is
opened when this module is imported, so that Spark may fork its workers.
"""

from __future__ import annotations

import random
import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.connect import MINIMUM_SERVER
from airflow_provider_jetstream.jetstream.client.credentials import check_credentials, connect_command
from airflow_provider_jetstream.jetstream.client.denials import (
    authentication_error,
    connection_error,
    is_refusal,
    parse_denial,
)
from airflow_provider_jetstream.jetstream.client.tls import (
    plaintext_report,
    require_certificate,
    tls_context,
    tls_problem,
)
from airflow_provider_jetstream.jetstream.client.unsent import PING_SECONDS, drop_when_closed, limit_send_time
from airflow_provider_jetstream.jetstream.client.wire import (
    Frame,
    Unfinished,
    new_sid,
    parse_server_info,
    server_version,
)
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    ServerTooOldError,
    TerminalError,
    TLSError,
    UnreachableError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

_PING, _PONG = b"PING\r\n", b"PONG\r\n"
_BUFFER_BYTES = 4 << 20
# Seconds of silence after which a burst counts as over and its bytes are parsed.
_BURST_PAUSE = 0.002


class NatsSocket:
    """An open connection with one subscription, to its inbox.

    :param inbox: the prefix of the subjects for answers; a new one where absent
    :raises UnreachableError: no server answered
    :raises AuthenticationError: the server refused the credentials
    :raises TLSError: no encrypted connection could be made
    :raises ServerTooOldError: the server is older than 2.10.27
    """

    def __init__(self, settings: ConnectionSettings, inbox: str | None = None) -> None:
        self.timeout = settings.timeout
        self.api_prefix = settings.jetstream_api
        self.sid = new_sid()
        self.inbox = inbox or f"{settings.inbox_prefix}.{uuid4().hex}"
        self._settings = settings
        self.server_info: dict[str, Any] = {}
        self.buffer = bytearray(_BUFFER_BYTES)
        self.filled = 0
        self._unfinished = Unfinished()
        self._replies = 0
        self._pongs = 0
        self._socket = self._connect(settings)

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version as numbers."""
        return server_version(self.server_info)

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return int(self.server_info["max_payload"])

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._socket.close()

    def abort(self) -> None:
        """Close the connection and drop all bytes that aren't sent."""
        with suppress(OSError):
            drop_when_closed(self._socket)
        self.close()

    def answers_ping(self, parse: Callable[[], None]) -> bool:
        """Return whether the server answers a ping in time: it has then received all that was sent before.

        :param parse: parses what is in the buffer
        :raises TransientError: the connection is lost
        """
        pongs, deadline = self._pongs, time.monotonic() + PING_SECONDS
        self.send(_PING)
        while self._pongs == pongs and (left := deadline - time.monotonic()) > 0:
            with suppress(DeadlineError):
                self.receive(lambda _buffer, _filled: True, left)
                parse()
        return self._pongs != pongs

    def new_reply_subject(self) -> str:
        """Return a subject of the inbox that no other request has."""
        self._replies += 1
        return f"{self.inbox}.{self._replies}"

    def send(self, data: bytes | memoryview) -> None:
        """Send whole frames.

        :raises UnreachableError: the connection is lost
        """
        try:
            self._socket.settimeout(self.timeout)
            self._socket.sendall(data)
        except OSError as error:
            raise UnreachableError(f"the connection to NATS was lost: {_reason(error)}") from None

    def receive(self, enough: Callable[[bytearray, int], bool], timeout: float | None = None) -> None:
        """Wait for bytes, and read on until there are enough or the burst is over.

        :param enough: whether the buffer, filled up to a position, is to be parsed now
        :param timeout: seconds until the first byte; the connection's own where absent
        :raises DeadlineError: no byte came
        :raises UnreachableError: the connection is lost
        """
        wait, before = self.timeout if timeout is None else timeout, self.filled
        try:
            while True:
                if self.filled == len(self.buffer):
                    self.buffer = self.buffer + bytes(len(self.buffer))
                self._socket.settimeout(max(wait, 0.0001))
                with memoryview(self.buffer) as view:
                    count = self._socket.recv_into(view[self.filled :])
                if not count and self.filled > before:
                    # What came before the end counts: the next call finds the end again.
                    return
                if not count:
                    raise UnreachableError("the server closed the connection")
                self.filled += count
                if enough(self.buffer, self.filled):
                    return
                wait = _BURST_PAUSE
        except TimeoutError:
            if wait != _BURST_PAUSE:
                raise DeadlineError(f"nothing came from the server within {wait:g} s") from None
        except OSError as error:
            if self.filled == before:
                raise UnreachableError(f"the connection to NATS was lost: {_reason(error)}") from None

    def consume(self, end: int) -> None:
        """Drop the parsed bytes before a position of the buffer."""
        rest = self.filled - end
        self.buffer[:rest] = self.buffer[end : self.filled]
        self.filled = rest
        self._unfinished.drop(end)

    def next_frame(self, start: int) -> Frame | None:
        """Parse the frame that begins at a position of the buffer; ``None`` where it hasn't arrived as a whole.

        :raises WireError: the bytes aren't a frame
        """
        return self._unfinished.next_frame(self.buffer, start, self.filled)

    def handle_control(self, frame: Frame) -> None:
        """Handle a frame that isn't a message.

        :raises PermissionDeniedError: the user may not do something
        :raises AuthenticationError: the server refuses the credentials from now on
        :raises UnreachableError: the server ends the connection
        """
        if frame.op == b"PING":
            self.send(_PONG)
        elif frame.op == b"PONG":
            self._pongs += 1
        elif frame.op == b"-ERR":
            raise self._refusal(frame.line)
        elif frame.op == b"INFO":
            self.server_info = parse_server_info(frame.line[5:])

    def request(self, subject: str, payload: bytes = b"") -> tuple[bytes, bytes]:
        """Send a request and return the headers and the body of its answer; other messages are dropped.

        :raises DeadlineError: no answer within the time limit
        :raises UnreachableError: the connection is lost
        """
        reply = self.new_reply_subject()
        self.send(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
        deadline = time.monotonic() + self.timeout
        while True:
            position, answer = 0, None
            while answer is None and (frame := self.next_frame(position)):
                position = frame.end
                if not frame.sid:
                    self.handle_control(frame)
                elif self.buffer[frame.offsets[0] : frame.offsets[1]] == reply.encode():
                    _, _, _, _, header, body, end = frame.offsets
                    answer = bytes(self.buffer[header:body]), bytes(self.buffer[body:end])
            self.consume(position)
            if answer:
                return answer
            if (left := deadline - time.monotonic()) <= 0:
                raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s")
            self.receive(lambda _buffer, _filled: True, left)

    def _connect(self, settings: ConnectionSettings) -> socket.socket:
        check_credentials(settings)
        servers = list(settings.servers)
        # In random order, so that tasks spread over the servers.
        random.SystemRandom().shuffle(servers)
        failures: dict[str, JetStreamProviderError] = {}
        deadline = time.monotonic() + self.timeout
        for index, server in enumerate(servers):
            share = max(0.5, (deadline - time.monotonic()) / (len(servers) - index))
            try:
                return self._dial(server, settings, share)
            except JetStreamProviderError as error:
                failures[server] = error
        # A terminal error of one server matters more than that another server is away.
        if terminal := next((failure for failure in failures.values() if isinstance(failure, TerminalError)), None):
            raise terminal
        causes = "; ".join(f"{server}: {error}" for server, error in failures.items())
        raise UnreachableError(f"no NATS server reached: {causes}; check the addresses and the network")

    def _dial(self, server: str, settings: ConnectionSettings, timeout: float) -> socket.socket:
        address = urlsplit(server)
        host = str(address.hostname)
        deadline = time.monotonic() + timeout
        self.filled, self._unfinished = 0, Unfinished()
        try:
            self._socket = socket.create_connection((host, address.port), timeout)
        except OSError as error:
            raise UnreachableError(_reason(error)) from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_send_time(self._socket, self.timeout)
            if settings.tls_handshake_first:
                self._encrypt(server, host, settings, deadline)
            self._read_info(server, deadline)
            if not settings.tls_handshake_first:
                self._start_tls(server, host, settings, deadline)
            self._authenticate(server, settings, deadline)
        except BaseException:
            self._socket.close()
            raise
        return self._socket

    def _read_info(self, server: str, deadline: float) -> None:
        frame = self._next_frame(deadline)
        if frame.op != b"INFO":
            raise WireError(f"expected INFO from a nats-server at {server}, found {frame.line[:40]!r}")
        self.server_info = parse_server_info(frame.line[5:])
        if self.version < MINIMUM_SERVER:
            raise ServerTooOldError(
                f"expected nats-server {'.'.join(map(str, MINIMUM_SERVER))} or later, found"
                f" {self.server_info['version']} at {server}; upgrade the server"
            )

    def _start_tls(self, server: str, host: str, settings: ConnectionSettings, deadline: float) -> None:
        if not settings.encrypted:
            if self.server_info.get("tls_required"):
                raise TLSError(f"{server} takes encrypted connections only: expected a tls:// address, found nats://")
            return
        # Nothing has been sent yet: a server without TLS never sees a credential.
        if not (self.server_info.get("tls_required") or self.server_info.get("tls_available")):
            raise TLSError(f"expected TLS from {server}, found a server without it: nothing was sent to it")
        require_certificate(settings, self.server_info)
        if self.filled:
            if b"-ERR".startswith(self.buffer[: min(self.filled, 4)]):
                raise self._refusal(self._next_frame(deadline).line, server)
            raise TLSError(f"expected TLS from {server}, found plaintext after its INFO")
        self._encrypt(server, host, settings, deadline)

    def _encrypt(self, server: str, host: str, settings: ConnectionSettings, deadline: float) -> None:
        context = tls_context(settings)
        try:
            # The limit of a handshake as a whole.
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket = context.wrap_socket(self._socket, server_hostname=settings.tls_server_name or host)
        except TimeoutError:
            raise UnreachableError(f"no TLS with {server}: no answer in time") from None
        except OSError as error:
            said = plaintext_report(host, urlsplit(server).port or 0, error) if isinstance(error, ssl.SSLError) else ""
            if said and (refusal := connection_error(server, said)):
                raise refusal from None
            raise TLSError(f"no TLS with {server}: {tls_problem(error)}") from None

    def _authenticate(self, server: str, settings: ConnectionSettings, deadline: float) -> None:
        connect = connect_command(settings, self.server_info) + f"SUB {self.inbox}.* ".encode()
        self.send(connect + self.sid + b"\r\nPING\r\n")
        while True:
            try:
                frame = self._next_frame(deadline)
            except (UnreachableError, DeadlineError) as error:
                # With TLS 1.3 a server that refuses the client's certificate says so after the handshake.
                if settings.encrypted and "alert" in str(error).lower():
                    raise TLSError(f"no TLS with {server}: {error}; check tls_cert_file") from None
                raise
            if frame.op == b"PONG":
                return
            if frame.op == b"-ERR":
                raise self._refusal(frame.line, server)
            self.handle_control(frame)

    def _refusal(self, line: bytes, server: str = "the server") -> JetStreamProviderError:
        text = line.decode(errors="replace").partition(" ")[2].strip().strip("'")
        if denial := parse_denial(text, self._settings.client):
            return denial
        if is_refusal(text):
            return authentication_error(server, self._settings.way, text)
        return connection_error(server, text) or UnreachableError(f"{server} ended the connection: {text}")

    def _next_frame(self, deadline: float) -> Frame:
        while (frame := self.next_frame(0)) is None:
            self.receive(lambda _buffer, _filled: True, max(0.001, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise DeadlineError("the server hasn't sent a whole line of the NATS protocol in time")
        if time.monotonic() > deadline:
            raise DeadlineError("the server has sent other lines than the expected one for too long")
        self.consume(frame.end)
        return frame


def _reason(error: OSError) -> str:
    return str(getattr(error, "verify_message", "") or error.strerror or error or type(error).__name__)
