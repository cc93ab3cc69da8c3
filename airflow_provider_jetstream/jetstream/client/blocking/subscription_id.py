"""Ids of subscriptions that a bulk parser can find among payloads."""

from __future__ import annotations

import secrets
import string

# DEL is rare in text, so few candidates are examined. Seven of them hold exactly one aligned word of four bytes,
# wherever the id begins.
MARKS = b"\x7f" * 7
_ALPHABET = string.ascii_letters + string.digits
_RANDOM = 7
SID_LENGTH = len(MARKS) + _RANDOM


def new_sid() -> bytes:
    """Make an id for a subscription that no payload holds by chance, and no publisher can guess.

    :return: fourteen bytes
    """
    return MARKS + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM)).encode()
