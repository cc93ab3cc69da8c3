"""Which requests mustn't arrive late, and the options of a socket by which what it hasn't sent is dropped.

A request that isn't answered in time has failed for its sender, who may do something else from then on. Where it would
change something, it must not arrive after that: see docs/redrive.md, "Requests and their deadlines".
"""

from __future__ import annotations

import re
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

# Seconds after a time limit in which the server may show, by answering a ping, that it has received the request.
PING_SECONDS = 2.0
# Requests of JetStream's API by which nothing changes, whenever they arrive. A pull is among them: it has an expiry, or
# an inbox in which nobody is interested any more.
_READS = re.compile(
    r"\$JS(?:\.[^.]+)?\.API\.(?:INFO|STREAM\.(?:INFO|LIST|NAMES|MSG\.GET)|CONSUMER\.(?:INFO|LIST|NAMES|MSG\.NEXT)"
    r"|DIRECT\.GET)(?:\.|$)"
)
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


def changes_state(subject: str) -> bool:
    """Return whether a request, or a message, changes something on the server.

    Acknowledgements do, and so does every message that a stream stores.

    :param subject: the whole subject of the request
    """
    return _READS.match(subject) is None


def is_read(subject: str) -> bool:
    """Return whether a request reads what is stored: it may be sent twice. A pull takes messages, and isn't one.

    :param subject: the whole subject of the request
    """
    return not changes_state(subject) and ".CONSUMER.MSG.NEXT." not in subject


def limit_send_time(connected: socket.socket | TransportSocket, seconds: float) -> None:
    """Make the operating system give a connection up whose bytes aren't acknowledged in time.

    So it doesn't send them later, whatever has become of this process. Without effect where it can't.

    :param seconds: how long it repeats what it sends
    """
    if _USER_TIMEOUT is not None:
        connected.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(seconds * 1000))


def drop_when_closed(connected: socket.socket | TransportSocket) -> None:
    """Make the operating system drop what it hasn't sent when a connection is closed, in place of sending it later."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
