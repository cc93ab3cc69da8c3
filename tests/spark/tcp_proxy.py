"""A TCP proxy to a server that can refuse connections and counts the refused ones."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_CHUNK = 1 << 16


class TcpProxy:
    """Forwards connections to a server.

    :param port: the server's
    :param after: refuses connections, and closes the open ones, after so many bytes from the server
    :param until: forwards again after so many refused connections
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
        # Ends a waiting accept, which closing alone doesn't.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_connections()

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
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                target.sendall(data)
                if source.getpeername()[1] == self._target:
                    self._passed += len(data)
                if self._after is not None and self._passed > self._after:
                    self.shut = True
                    self._close_connections()
        source.close()
        target.close()

    def _close_connections(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
