"""A way to a server that can be shut, and counts who comes."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_CHUNK = 1 << 16


class TcpProxy:
    """Hands connections on to a server.

    :param port: the server's
    :param after: shuts itself once so many bytes came from the server
    :param until: lets everybody through again once it has refused so many connections
    """

    def __init__(self, port: int, after: int | None = None, until: int | None = None) -> None:
        self._target = port
        self._after = after
        self._until = until
        self._passed = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        self.shut = False
        self.refused = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Wakes whoever waits in accept, which closing alone doesn't.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._hang_up()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.shut:
                self.refused += 1
                if self.refused == self._until:
                    self._after, self.shut = None, False
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client), daemon=True).start()

    def _pass(self, giver: socket.socket, taker: socket.socket) -> None:
        with suppress(OSError):
            while data := giver.recv(_CHUNK):
                taker.sendall(data)
                if giver.getpeername()[1] == self._target:
                    self._passed += len(data)
                if self._after is not None and self._passed > self._after:
                    self.shut = True
                    self._hang_up()
        giver.close()
        taker.close()

    def _hang_up(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
