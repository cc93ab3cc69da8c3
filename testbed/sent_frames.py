"""The messages in what a client writes to a server, as a test sees them."""

import re
from collections.abc import Iterator

_LINE = re.compile(rb"H?PUB ([^ \r\n]+) [^\r\n]*?(\d+)\r\n")


def sent_messages(frames: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the subject of each message, and the message as it is on the wire."""
    position = 0
    while position < len(frames):
        line = _LINE.match(frames, position)
        if line is None:
            raise ValueError(f"expected a message that is published, found {frames[position : position + 80]!r}")
        end = line.end() + int(line[2]) + 2
        yield line[1].decode("utf-8", "surrogateescape"), frames[position:end]
        position = end
