"""What a stored message must have in common with the new job of a letter to be that job.

The message id of a new job is made of the letter, so that a redrive that was cut off uses it again; any publisher can
compute it and use it first. What counts is the subject, the headers but for the server's, and the body.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.headers import is_servers

if TYPE_CHECKING:
    from collections.abc import Iterable

_BYTES: Final = 12


def content_of_copy(subject: str, headers: Iterable[tuple[str, str]], body: bytes) -> str:
    """Return the digest of a new job, or of a stored message that may be one: 16 letters."""
    # Readers leave white space around a value out.
    own = sorted([name, value.strip()] for name, value in headers if not is_servers(name))
    # Of a subject that isn't UTF-8, a reader may see only a part.
    head = json.dumps([subject if subject.isascii() else "", own])
    return urlsafe_b64encode(sha256(head.encode() + b"\n" + body).digest()[:_BYTES]).decode()
