"""What the server's ``-ERR`` says, and which request, or which subscription, it is about.

The server reports a denial to the connection, not to the request: ``-ERR 'Permissions Violation for Publish to "a"'``
or ``… for Subscription to "_INBOX.x.*"``. A subject stands between quotation marks as Go's ``%q`` writes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.errors import (
    AuthenticationError,
    ConnectionSettingsError,
    PermissionDeniedError,
    SubscriptionRefusedError,
    TLSError,
    UnreachableError,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

_DENIAL: Final = re.compile(
    r"permissions violation for (?P<kind>publish|subscription)(?: with reply of)?(?: to)? "
    r"\"(?P<subject>(?:[^\"\\]|\\.){1,8192})\"",
    re.IGNORECASE,
)
_TOO_MANY_TOKENS: Final = ", too many tokens"
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|([\"\\]))")
_PLAIN_REFUSAL: Final = "authorization violation"
_REPORT: Final = re.compile(rb"(?:^|\r\n)-ERR +([^\r\n]{1,1024})\r\n", re.IGNORECASE)

ErrorKind: TypeAlias = Literal["permission", "subscription", "credentials", "address", "encryption", "transient"]

# How the texts of an -ERR begin, all that nats-server 2.10 to 2.15 sends to a client: what they are about. After the
# first two the server keeps the connection open; what is transient passes by itself, or with another connection's end.
ERROR_KINDS: Final[dict[str, ErrorKind]] = {
    "permissions violation": "permission",
    "maximum subscriptions exceeded": "subscription",
    "invalid subject": "subscription",
    "invalid publish subject": "permission",
    "authorization violation": "credentials",
    "user authentication expired": "credentials",
    "user authentication revoked": "credentials",
    "account authentication expired": "credentials",
    "failed account registration": "credentials",
    # The server has waited too long for the client's CONNECT.
    "authentication timeout": "transient",
    "maximum connections exceeded": "transient",
    "maximum account active connections exceeded": "transient",
    "connection throttling is active": "transient",
    "stale connection": "transient",
    # A message or a line that this package doesn't send: the limit was lowered meanwhile, or bytes were lost.
    "maximum payload violation": "transient",
    "maximum control line exceeded": "transient",
    "unknown protocol operation": "transient",
    "secure connection - tls required": "encryption",
    "attempted to connect to route port": "address",
    "attempted to connect to gateway port": "address",
    "attempted to connect to leaf node port": "address",
    "invalid client protocol": "address",
    "no responders requires headers support": "address",
}


def error_kind(text: str) -> ErrorKind | None:
    """Return what an ``-ERR`` is about; ``None`` for a text that no known server sends.

    :param text: what the server said, as it is or within a client's error
    """
    said = _said(text).lower()
    return next((kind for begin, kind in ERROR_KINDS.items() if said.startswith(begin)), None)


def last_report_of(said: bytes) -> str:
    """Return the text of the last ``-ERR`` of a handshake; empty where there is none.

    :param said: all that the server has said
    """
    reports: list[bytes] = _REPORT.findall(said)
    return reports[-1].decode(errors="replace").strip().strip("'") if reports else ""


def parse_denial(text: str, user: str) -> PermissionDeniedError | None:
    """Make an error of the text of an ``-ERR``; ``None`` where it names no subject.

    :param user: who the client is, in words
    """
    if not (match := _DENIAL.search(text)):
        return None
    subject = _ESCAPE.sub(_unescape, match["subject"])
    if text[match.end() :].startswith(_TOO_MANY_TOKENS):
        return SubscriptionRefusedError(subject, user, "it has too many tokens")
    return PermissionDeniedError("publish" if match["kind"].lower() == "publish" else "subscribe", subject, user)


def is_refusal(text: str) -> bool:
    """Return whether the text of an ``-ERR`` refuses the client itself, by its credentials or its account."""
    return error_kind(text) == "credentials" or "authorization" in text.lower()


def authentication_error(servers: str, way: str, text: str) -> AuthenticationError:
    """Return the error for a server that refuses the client.

    :param way: by what the client proves who it is
    :param text: what the server said
    """
    said = _said(text)
    reason = "" if said.lower() == _PLAIN_REFUSAL else f" ({said})"
    return AuthenticationError(
        f"{servers} refused the credentials{reason}: expected valid ones, found {way}; check them"
    )


def connection_error(servers: str, text: str) -> JetStreamProviderError | None:
    """Return the error for a server that ends a connection for what isn't about credentials; ``None`` for other texts.

    :param text: what the server said
    """
    said = _said(text)
    match error_kind(text):
        case "encryption":
            return TLSError(f"{servers} takes encrypted connections only ({said}): use a tls:// address")
        case "address":
            return ConnectionSettingsError(
                f"expected {servers} to be where nats-server takes clients, found another of its ports ({said}): use"
                " the client port, 4222 by default"
            )
        case "subscription":
            return SubscriptionRefusedError("the inbox", "this connection", said)
        case "transient":
            return UnreachableError(f"{servers} ended the connection: {said}; try again")
    return None


def _said(text: str) -> str:
    return text.removeprefix("nats: ").strip().strip("'")


def _unescape(match: re.Match[str]) -> str:
    byte, character, other = match.groups()
    if byte:
        return bytes([int(byte, 16)]).decode("utf-8", "surrogateescape")
    return chr(int(character, 16)) if character else str(other)
