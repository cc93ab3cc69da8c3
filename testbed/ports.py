"""Free TCP ports on the loopback address."""

import contextlib
import fcntl
import functools
import os
import random
import socket
import tempfile
from pathlib import Path

from airflow_provider_jetstream.dev.listening_ports import LOOPBACK

__all__ = ["LOOPBACK", "free_port", "free_ports"]

# Below the range that Linux takes the local ports of outgoing connections from: a port out of that range can
# be gone again before its server, which may take seconds to come up, binds it.
_CANDIDATES = range(10_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on at the moment, and that no other process gets while this one lives.

    A server that is stopped for a while thus finds its port free again, whatever other tests start meanwhile. A
    program that doesn't choose its ports here can still take one: the caller must be ready to retry with other ports.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.SystemRandom().sample(_CANDIDATES, len(_CANDIDATES)):
            if len(ports) == count:
                return ports
            holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # Servers set it too: with it a connection in TIME_WAIT doesn't block the port, a listener does.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                holder.bind((LOOPBACK, port))
                _claim(port)
                ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"found {len(ports)} free ports on {LOOPBACK}, expected {count}")


def free_port() -> int:
    """Return one port that nothing listens on at the moment, and that no other process gets while this one lives."""
    return free_ports(1)[0]


def _claim(port: int) -> None:
    """Lock the port's byte in the file of all processes of this user; raise OSError where another one has it."""
    if port in _claimed:
        raise OSError(f"this process has given port {port} to somebody")
    fcntl.lockf(_claims_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    _claimed.add(port)


_claimed: set[int] = set()


@functools.cache
def _claims_file() -> int:
    # Open as long as the process lives: a process loses its locks of a file when it closes any descriptor of it.
    return os.open(Path(tempfile.gettempdir()) / f"testbed-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)
