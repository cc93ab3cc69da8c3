"""TCP ports of this machine: which are free, and which process listens on one that isn't."""

import socket
from contextlib import suppress

import psutil

from airflow_provider_jetstream.jetstream.errors import ArgumentError

LOOPBACK = "127.0.0.1"


def loopback() -> str:
    """Return the name by which the processes of one machine find each other's servers."""
    return LOOPBACK


def free_port(port: int, program: str, option: str) -> int:
    """Return a port, or any free one for 0; refuse one on which another process listens.

    :param program: what shall listen on the port
    :param option: the option of the command line that chooses another port
    :raises ArgumentError: it is taken; names the process where this user may see it
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As servers set it: with it a connection in TIME_WAIT doesn't block the port, a listener does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except PermissionError:
            found = "a port that needs a privilege"
        except OSError:
            found = f"{_listener_name(port)} listening there"
        else:
            return int(listener.getsockname()[1])
    raise ArgumentError(
        f"expected port {port} to be free for {program}, found {found}: stop that process, or choose another port with"
        f" {option}"
    )


def _listener_name(port: int) -> str:
    """Return name and id of the process that listens on a port."""
    # Who listens can be hidden: processes of other users, and on some platforms all of them.
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
            if is_listener and connection.pid is not None:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "a process of another user"
