"""The requests that a coroutine yields to the driver of a blocking connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import RawMessage


class Request:
    """One request with one answer.

    :param header: its headers as they are on the wire
    """

    __slots__ = ("header", "payload", "subject")

    def __init__(self, subject: str, payload: bytes, header: bytes = b"") -> None:
        self.subject = subject
        self.header = header
        self.payload = payload

    def __await__(self) -> Generator[Request, RawMessage, RawMessage]:
        return (yield self)


class RequestBatch:
    """One request with many answers, of which the last one has a status."""

    __slots__ = ("payload", "subject")

    def __init__(self, subject: str, payload: bytes) -> None:
        self.subject = subject
        self.payload = payload

    def __await__(self) -> Generator[RequestBatch, list[RawMessage], list[RawMessage]]:
        return (yield self)


class RequestMany:
    """Many requests with one answer each; the answers are in the order of the requests.

    :param requests: subjects and bodies
    :param headers: for each request its headers as they are on the wire; none where absent
    """

    __slots__ = ("headers", "requests")

    def __init__(self, requests: Sequence[tuple[str, bytes]], headers: Sequence[bytes] | None = None) -> None:
        self.requests = requests
        self.headers = headers

    def __await__(self) -> Generator[RequestMany, list[RawMessage], list[RawMessage]]:
        return (yield self)
