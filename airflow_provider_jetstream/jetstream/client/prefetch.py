"""Shorter ways to what JetStream's API gives, as exact as that, for connections that know some."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream.client.headers import Headers
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.errors import TransientError


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Some messages of one stream.

    :param stream: the stream
    :param sequences: of messages, in order
    :param subjects: whose last messages are meant
    """

    stream: str
    sequences: Sequence[int] = ()
    subjects: Sequence[str] = ()


class ReadCapabilities:
    """None of them; a connection that knows some says so here."""

    # Streams with a shorter way to one message, and the way; it takes what the API takes.
    direct: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[StoredMessage | None]]] = MappingProxyType({})
    # Streams of which many messages in a row can be had for one request: from a sequence on, of a subject.
    runs: Mapping[str, Callable[[int, str], Awaitable[list[StoredMessage]]]] = MappingProxyType({})
    # Sends many requests side by side: full subjects and bodies, and headers of what is to be stored.
    request_many: (
        Callable[[Sequence[tuple[str, bytes]], Sequence[Headers] | None], Awaitable[list[bytes | TransientError]]]
        | None
    ) = None

    def prefetch(self, wanted: Iterable[ReadPlan]) -> AbstractAsyncContextManager[object]:
        """Say what will be asked for in the meantime, which may be got at once.

        :param wanted: what will be asked for
        """
        return nullcontext(wanted)
