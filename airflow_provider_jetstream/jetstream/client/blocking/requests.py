"""What coroutines that are driven over a wire wait for: answers of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

# Header and body, as they came.
Answer: TypeAlias = tuple[bytes, bytes]


class Request:
    """A request that waits for its answer.

    :param subject: where it goes
    :param header: its header as it is on the wire
    :param payload: its body
    """

    __slots__ = ("header", "payload", "subject")

    def __init__(self, subject: str, payload: bytes, header: bytes = b"") -> None:
        self.subject = subject
        self.header = header
        self.payload = payload

    def __await__(self) -> Generator[Request, Answer, Answer]:
        return (yield self)


class RequestStream:
    """A request that waits for many answers, of which a status is the last.

    :param subject: where it goes
    :param payload: its body
    """

    __slots__ = ("payload", "subject")

    def __init__(self, subject: str, payload: bytes) -> None:
        self.subject = subject
        self.payload = payload

    def __await__(self) -> Generator[RequestStream, list[Answer], list[Answer]]:
        return (yield self)


class RequestMany:
    """Requests that wait for an answer each; the result has them in the order of the requests.

    :param requests: where they go, and their bodies
    :param headers: for each its header as it is on the wire; none where absent
    """

    __slots__ = ("headers", "requests")

    def __init__(self, requests: Sequence[tuple[str, bytes]], headers: Sequence[bytes] | None = None) -> None:
        self.requests = requests
        self.headers = headers

    def __await__(self) -> Generator[RequestMany, list[Answer], list[Answer]]:
        return (yield self)
