"""Text as it is on the wire: subjects and headers may be any bytes, and have to come back as they were.

A byte that isn't UTF-8 is the escape U+DC00 plus that byte (Python's ``surrogateescape``), in both directions.
"""

from __future__ import annotations

import re
from typing import Final

# In a subject that the server has shown only in part: its JSON has U+FFFD for every byte that isn't UTF-8.
UNKNOWN_BYTE: Final = "\udc00"

_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_text(data: bytes) -> str:
    """Decode bytes of the wire."""
    return data.decode("utf-8", "surrogateescape")


def encode_text(text: str) -> bytes:
    """Encode text to the bytes that :func:`decode_text` decoded.

    :raises UnicodeEncodeError: the text has characters that no bytes stand for, as an unknown byte
    """
    return text.encode("utf-8", "surrogateescape")


def is_encodable(text: str) -> bool:
    """Return whether :func:`encode_text` can encode a text."""
    if text.isascii():
        return True
    try:
        encode_text(text)
    except UnicodeEncodeError:
        return False
    return True


def readable_text(text: str) -> str:
    """Replace what isn't UTF-8 by U+FFFD, for people, JSON and files."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
