"""Which request, or which subscription, a denial of the server is about.

The server reports a denial to the connection, not to the request: ``-ERR 'Permissions Violation for Publish to "a"'``
or ``… for Subscription to "_INBOX.x.*"``. A subject stands between quotation marks as Go's ``%q`` writes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.errors import AuthenticationError, PermissionDeniedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_DENIAL: Final = re.compile(
    r"permissions violation for (?P<kind>publish|subscription)(?: with reply of)?(?: to)? "
    r"\"(?P<subject>(?:[^\"\\]|\\.){1,8192})\"",
    re.IGNORECASE,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|([\"\\]))")
_REFUSALS: Final = ("authorization", "authentication")
_PLAIN_REFUSAL: Final = "authorization violation"


def parse_denial(text: str, user: str) -> PermissionDeniedError | None:
    """Make an error of the text of an ``-ERR``; ``None`` where it is about something else.

    :param user: who the client is, in words
    """
    if not (match := _DENIAL.search(text)):
        return None
    subject = _ESCAPE.sub(_unescape, match["subject"])
    return PermissionDeniedError("publish" if match["kind"].lower() == "publish" else "subscribe", subject, user)


def is_refusal(text: str) -> bool:
    """Return whether the text of an ``-ERR`` refuses the client itself, by its credentials or its account."""
    return any(word in text.lower() for word in _REFUSALS)


def authentication_error(servers: str, way: str, text: str) -> AuthenticationError:
    """Return the error for a server that refuses the client.

    :param way: by what the client proves who it is
    :param text: what the server said
    """
    said = text.removeprefix("nats: ").strip().strip("'")
    reason = "" if said.lower() == _PLAIN_REFUSAL else f" ({said})"
    return AuthenticationError(
        f"{servers} refused the credentials{reason}: expected valid ones, found {way}; check them"
    )


def _unescape(match: re.Match[str]) -> str:
    byte, character, other = match.groups()
    if byte:
        return bytes([int(byte, 16)]).decode("utf-8", "surrogateescape")
    return chr(int(character, 16)) if character else str(other)


class OpenRequests:
    """The requests without an answer yet, by subject, and those who follow denials."""

    def __init__(self) -> None:
        self._requests: dict[str, set[asyncio.Future[object]]] = {}
        self._followers: dict[int, Callable[[PermissionDeniedError], None]] = {}
        self._last_follower = 0

    def add(self, subject: str, answer: asyncio.Future[object]) -> None:
        """Let the future of an answer fail where the request's subject is denied."""
        answers = self._requests.setdefault(subject, set())
        answers.add(answer)
        answer.add_done_callback(lambda done: self._remove(subject, done))

    def _remove(self, subject: str, answer: asyncio.Future[object]) -> None:
        answers = self._requests.get(subject, set())
        answers.discard(answer)
        if not answers:
            self._requests.pop(subject, None)

    def follow(self, on_denied: Callable[[PermissionDeniedError], None]) -> int:
        """Call a function with every denial; return a number for :meth:`unfollow`."""
        self._last_follower += 1
        self._followers[self._last_follower] = on_denied
        return self._last_follower

    def unfollow(self, number: int) -> None:
        """Call the function no more."""
        self._followers.pop(number, None)

    def deny(self, denial: PermissionDeniedError) -> None:
        """Let the requests on a denied subject fail, and call those who follow denials."""
        if denial.action == "publish":
            for answer in list(self._requests.get(denial.subject, ())):
                fail(answer, denial)
        for follower in list(self._followers.values()):
            follower(denial)


def fail(answer: asyncio.Future[object], denial: PermissionDeniedError, purpose: str = "") -> None:
    """Let a future fail with an error of its own, since each has a traceback of its own."""
    if not answer.done():
        answer.set_exception(PermissionDeniedError(denial.action, denial.subject, denial.user, purpose))
