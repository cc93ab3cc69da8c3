"""One connection of one task: a socket, TLS where it is asked for, and the first words with the server.

Sockets that block: a task does one thing at a time, and asyncio would cost more than the parsing. Nothing is opened
when this module is imported, so that Spark may fork its workers.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.blocking.parser import Frame, next_frame
from airflow_provider_jetstream.jetstream.client.blocking.subscription_id import new_sid
from airflow_provider_jetstream.jetstream.client.connection import MINIMUM_SERVER
from airflow_provider_jetstream.jetstream.client.credentials import credentials
from airflow_provider_jetstream.jetstream.errors import (
    AuthenticationError,
    ConnectionSettingsError,
    DeadlineError,
    JetStreamProviderError,
    ServerTooOldError,
    TLSError,
    UnreachableError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.settings import SocketSettings

_PONG = b"PONG\r\n"
_ROOM = 4 << 20
# Seconds that the next bytes of a burst may take before what is there is looked at.
_PAUSE = 0.002


class NatsSocket:
    """An open connection, with one subscription for everything that comes back.

    :param settings: where and as whom
    :param inbox: where answers come; one of its own where absent
    :raises UnreachableError: no server answered
    :raises AuthenticationError: the credentials were refused
    :raises TLSError: no encrypted connection came about
    :raises ServerTooOldError: the server is older than 2.10.27
    """

    def __init__(self, settings: SocketSettings, inbox: str | None = None) -> None:
        self.timeout = settings.connection.timeout
        self.sid = new_sid()
        self.inbox = inbox or f"_INBOX.{uuid4().hex}"
        self.banner: dict[str, Any] = {}
        self.buffer = bytearray(_ROOM)
        self.filled = 0
        self._replies = 0
        self._socket = self._first_that_answers(settings)

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version as numbers."""
        return tuple(int(part) for part in str(self.banner["version"]).split("-")[0].split(".")[:3])

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, headers included."""
        return int(self.banner["max_payload"])

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.close()

    def reply(self) -> str:
        """Make a subject of this connection's inbox.

        :return: a subject that no other request has
        """
        self._replies += 1
        return f"{self.inbox}.{self._replies}"

    def send(self, data: bytes | memoryview) -> None:
        """Send frames.

        :param data: whole frames
        :raises UnreachableError: the connection is gone
        """
        try:
            self._socket.settimeout(self.timeout)
            self._socket.sendall(data)
        except OSError as error:
            raise UnreachableError(f"the connection to NATS went away: {_reason(error)}") from None

    def receive(self, enough: Callable[[bytearray, int], bool], timeout: float | None = None) -> None:
        """Wait for bytes, and take more as long as they come in one burst.

        :param enough: told the buffer and how much of it is filled; whether what is there should be looked at
        :param timeout: seconds until the first byte
        :raises DeadlineError: nothing came
        :raises UnreachableError: the connection is gone
        """
        wait = self.timeout if timeout is None else timeout
        try:
            while True:
                if self.filled == len(self.buffer):
                    self.buffer = self.buffer + bytes(len(self.buffer))
                self._socket.settimeout(max(wait, 0.0001))
                with memoryview(self.buffer) as view:
                    count = self._socket.recv_into(view[self.filled :])
                if not count:
                    raise UnreachableError("the server closed the connection")
                self.filled += count
                if enough(self.buffer, self.filled):
                    return
                wait = _PAUSE
        except TimeoutError:
            if wait != _PAUSE:
                raise DeadlineError(f"nothing came from the server within {wait:g} s") from None
        except OSError as error:
            raise UnreachableError(f"the connection to NATS went away: {_reason(error)}") from None

    def consume(self, end: int) -> None:
        """Forget what was looked at.

        :param end: the first byte to keep
        """
        rest = self.filled - end
        self.buffer[:rest] = self.buffer[end : self.filled]
        self.filled = rest

    def answer(self, frame: Frame) -> None:
        """Do what a frame that isn't a message asks for.

        :param frame: the frame
        :raises AuthenticationError: the server refused something
        :raises UnreachableError: it says good-bye
        """
        if frame.op == b"PING":
            self.send(_PONG)
        elif frame.op == b"-ERR":
            raise _refusal(frame.line.decode(errors="replace"))
        elif frame.op == b"INFO":
            self.banner.update(json.loads(frame.line[5:]))

    def request(self, subject: str, payload: bytes = b"") -> tuple[bytes, bytes]:
        """Send a request and wait for its answer; what else comes is dropped.

        :param subject: the subject
        :param payload: the body
        :return: the answer's header and body
        :raises DeadlineError: no answer within the time limit
        :raises UnreachableError: the connection is gone
        """
        reply = self.reply()
        self.send(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
        deadline = time.monotonic() + self.timeout
        while True:
            at, found = 0, None
            while found is None and (frame := next_frame(self.buffer, at, self.filled)):
                at = frame.end
                if not frame.sid:
                    self.answer(frame)
                elif self.buffer[frame.parts[0] : frame.parts[1]] == reply.encode():
                    _, _, _, _, header, body, end = frame.parts
                    found = bytes(self.buffer[header:body]), bytes(self.buffer[body:end])
            self.consume(at)
            if found:
                return found
            if (left := deadline - time.monotonic()) <= 0:
                raise DeadlineError(f"no answer on {subject} within {self.timeout:g} s")
            self.receive(lambda _buffer, _filled: True, left)

    def _first_that_answers(self, settings: SocketSettings) -> socket.socket:
        servers = list(settings.connection.servers)
        # Tasks spread over the servers.
        random.SystemRandom().shuffle(servers)
        failures: dict[str, JetStreamProviderError] = {}
        deadline = time.monotonic() + self.timeout
        for index, server in enumerate(servers):
            share = max(0.5, (deadline - time.monotonic()) / (len(servers) - index))
            try:
                return self._dial(server, settings, share)
            except JetStreamProviderError as error:
                failures[server] = error
        # What waiting can't mend is worth more to know than that another server is away.
        for kind in (AuthenticationError, TLSError, ConnectionSettingsError, ServerTooOldError):
            for failure in failures.values():
                if isinstance(failure, kind):
                    raise failure
        told = "; ".join(f"{server}: {error}" for server, error in failures.items())
        raise UnreachableError(f"no NATS server reached: {told}; check the addresses and the network")

    def _dial(self, server: str, settings: SocketSettings, timeout: float) -> socket.socket:
        parts = urlsplit(server)
        host = str(parts.hostname)
        deadline = time.monotonic() + timeout
        self.filled = 0
        try:
            opened = socket.create_connection((host, parts.port), timeout)
        except OSError as error:
            raise UnreachableError(_reason(error)) from None
        self._socket = opened
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._read_banner(server, deadline)
            self._encrypt(server, host, settings)
            self._introduce(server, settings, deadline)
        except BaseException:
            self._socket.close()
            raise
        return self._socket

    def _read_banner(self, server: str, deadline: float) -> None:
        frame = self._next(deadline)
        if frame.op != b"INFO":
            raise WireError(f"expected the banner of a nats-server at {server}, found {frame.line[:40]!r}")
        self.banner = json.loads(frame.line[5:])
        if self.version < MINIMUM_SERVER:
            raise ServerTooOldError(
                f"expected nats-server {'.'.join(map(str, MINIMUM_SERVER))} or later, found {self.banner['version']} at"
                f" {server}; upgrade the server"
            )

    def _encrypt(self, server: str, host: str, settings: SocketSettings) -> None:
        if not settings.connection.encrypted:
            if self.banner.get("tls_required"):
                raise TLSError(f"{server} takes encrypted connections only: expected a tls:// address, found nats://")
            return
        # Nothing has been sent yet: a server without TLS never sees a credential.
        if not (self.banner.get("tls_required") or self.banner.get("tls_available")):
            raise TLSError(f"expected TLS from {server}, found a server without it: nothing was sent to it")
        if self.filled:
            raise TLSError(f"expected TLS from {server}, found plaintext after its banner")
        try:
            context = ssl.create_default_context(cafile=settings.connection.tls_ca_file)
            if settings.tls_cert_file:
                context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
        except OSError as error:
            raise ConnectionSettingsError(
                f"expected PEM files at tlsCaFile, tlsCertFile and tlsKeyFile, found: {_reason(error)}"
            ) from None
        try:
            self._socket = context.wrap_socket(self._socket, server_hostname=host)
        except OSError as error:
            raise TLSError(f"no TLS with {server}: {_reason(error)}; check tlsCaFile and the host name") from None

    def _introduce(self, server: str, settings: SocketSettings, deadline: float) -> None:
        words = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "protocol": 1,
            "lang": "python",
            "version": "1",
            "name": settings.connection.name,
            "tls_required": settings.connection.encrypted,
            **credentials(settings, self.banner),
        }
        connect = f"CONNECT {json.dumps(words)}\r\nSUB {self.inbox}.* ".encode()
        self.send(connect + self.sid + b"\r\nPING\r\n")
        while True:
            try:
                frame = self._next(deadline)
            except (UnreachableError, DeadlineError) as error:
                # With TLS 1.3 a server that refuses the client's certificate says so after the handshake.
                if settings.connection.encrypted and "alert" in str(error).lower():
                    raise TLSError(f"no TLS with {server}: {error}; check tlsCertFile") from None
                raise
            if frame.op == b"PONG":
                return
            if frame.op == b"-ERR":
                raise _refusal(f"{server} refused the connection: {frame.line.decode(errors='replace')}")
            self.answer(frame)

    def _next(self, deadline: float) -> Frame:
        while (frame := next_frame(self.buffer, 0, self.filled)) is None:
            self.receive(lambda _buffer, _filled: True, max(0.001, deadline - time.monotonic()))
        self.consume(frame.end)
        return frame


def _refusal(line: str) -> JetStreamProviderError:
    if any(word in line.lower() for word in ("authori", "authentication", "permissions")):
        return AuthenticationError(f"{line}; check the credentials and what they are allowed to do")
    return UnreachableError(f"the server ended the connection: {line}")


def _reason(error: OSError) -> str:
    return str(getattr(error, "verify_message", "") or error.strerror or error or type(error).__name__)
