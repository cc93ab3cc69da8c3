"""Free TCP ports on the loopback address."""

import contextlib
import random
import socket

LOOPBACK = "127.0.0.1"
# Below the range that Linux takes the local ports of outgoing connections from: a port out of that range can
# be gone again before its server, which may take seconds to come up, binds it.
_CANDIDATES = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on at the moment.

    Another process can still take one before it is used: the caller must be ready to retry with other ports.
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
                ports.append(port)
    raise OSError(f"found {len(ports)} free ports on {LOOPBACK}, expected {count}")


def free_port() -> int:
    """Return one port that nothing listens on at the moment."""
    return free_ports(1)[0]
