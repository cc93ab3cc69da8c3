"""Storing messages, and the PubAck by which the server confirms each; once, also where somebody else has used an id.

The server drops a message of an id that it remembers, whatever subject and body the earlier one had, and the PubAck
says ``duplicate`` (NATS ADR-33). Most ids can be computed, and whoever may publish on any subject of a stream can use
them up. So a duplicate counts as stored only where the message that is stored is the sender's own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.diagnostics import api_error
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    NotFoundError,
    PermissionDeniedError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.limits import SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# By far the most frequent answer; any other one is decoded as JSON.
_PLAIN = re.compile(rb'\{"stream":"([^"\\]*)", ?"seq":([1-9]\d{0,18})\}')

# What the server answers where a message was to be stored behind a certain one only: the second one while the cluster
# still replicates another message on the subject.
WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})


@dataclass(frozen=True, slots=True)
class PubAck:
    """The server's confirmation that a message is stored.

    :param stream: the stream
    :param sequence: the message's stream sequence
    :param duplicate: whether it was stored before, under the same id
    :param domain: the JetStream domain of the stream; empty where it has none
    """

    stream: str
    sequence: int
    duplicate: bool = False
    domain: str = ""


async def store(
    connection: Connection,
    subject: str,
    body: bytes,
    headers: dict[str, str] | None = None,
    *,
    time_limit: float | None = None,
) -> PubAck:
    """Publish a message and wait for its PubAck.

    :param time_limit: seconds; the connection's own where absent
    :raises ApiError: the stream refused the message
    :raises UnreachableError: no stream captures the subject just now, or the connection is gone
    :raises DeadlineError: no answer in time; the message may be stored all the same
    """
    answer = await connection.publish_acknowledged(subject, body, headers, time_limit=time_limit)
    return parse_publish_ack(subject, answer)


async def store_each(
    connection: Connection, messages: Sequence[tuple[str, bytes]], headers: Sequence[dict[str, str]]
) -> list[PubAck | ApiError | TransientError]:
    """Publish messages concurrently and return for each its PubAck, or what :func:`store` raises.

    :param messages: subjects and bodies
    :param headers: the headers of each
    """
    acks: list[PubAck | ApiError | TransientError] = []
    for (subject, _), answer in zip(messages, await connection.request_many(messages, headers), strict=True):
        try:
            acks.append(answer if isinstance(answer, TransientError) else parse_publish_ack(subject, answer))
        except (ApiError, TransientError) as error:
            acks.append(error)
    return acks


def parse_publish_ack(subject: str, answer: bytes) -> PubAck:
    """Parse a stream's answer to a message.

    :raises ApiError: the stream refused the message
    :raises UnreachableError: the answer isn't a PubAck: another subscriber of the subject has sent it
    """
    if match := _PLAIN.fullmatch(answer):
        return PubAck(match[1].decode(errors="replace"), int(match[2]))
    ack = _decode(answer)
    stream, sequence, refusal = ack.get("stream"), ack.get("seq"), ack.get("error")
    if isinstance(refusal, dict):
        raise api_error(refusal, subject, stream=str(stream) if stream else None)
    if not isinstance(stream, str) or type(sequence) is not int or not 0 < sequence <= SEQUENCE:
        raise UnreachableError(
            f"expected a stream's acknowledgement on {subject}, found another answer: something else subscribes to it"
        )
    domain = ack.get("domain")
    return PubAck(stream, sequence, bool(ack.get("duplicate")), domain if isinstance(domain, str) else "")


def are_plain_publish_acks(answers: Iterable[bytes]) -> bool:
    """Return whether each answer says that a message is stored and wasn't before; others may say the first as well."""
    return all(map(_PLAIN.fullmatch, answers))


def publish_ack_pattern(stream: str, *, duplicates: bool = False) -> bytes:
    """Return a regular expression for the PubAcks of one stream, to match many of them in a buffer.

    Its group is the sequence. An answer that doesn't match may still be a PubAck.

    :param duplicates: whether to match those which say that the message was stored before, in place of the others
    """
    return rb'\{"stream": ?"%b", ?"seq": ?(\d+)(?:, ?"domain": ?"[^"]*")?%b\}' % (
        re.escape(stream.encode()),
        rb', ?"duplicate": ?true' if duplicates else b"",
    )


def publish_ack_frame(reply_prefix: bytes, subscription: bytes, stream: str, *, duplicates: bool = False) -> bytes:
    """Return a regular expression for the frames of the PubAcks of one stream in an inbox.

    Its groups are the number at the end of the subject, and the one of :func:`publish_ack_pattern`.

    :param reply_prefix: the inbox and a dot; the number follows
    :param subscription: the number of the subscription to the inbox
    """
    return rb"MSG %b(\d+) %b \d+\r\n%b\r\n" % (
        re.escape(reply_prefix),
        re.escape(subscription),
        publish_ack_pattern(stream, duplicates=duplicates),
    )


def _decode(answer: bytes) -> dict[str, Any]:
    try:
        ack = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return ack if isinstance(ack, dict) else {}


async def store_once(
    connection: Connection,
    subject: str,
    body: bytes,
    headers: dict[str, str],
    is_own: Callable[[StoredMessage], bool],
    *,
    time_limit: float | None = None,
) -> PubAck:
    """Store a message, under another id where the server has dropped it for a message that isn't the sender's.

    :param headers: with its id
    :param is_own: returns whether a stored message may stand for this one; its subject is the same
    :param time_limit: seconds for each request; the connection's own where absent
    :raises ApiError: the stream refused the message
    :raises TransientError: it isn't known to be stored
    """

    async def send(headers: dict[str, str]) -> PubAck:
        return await store(connection, subject, body, headers, time_limit=time_limit)

    return await confirmed_once(connection, await send(headers), subject, headers, is_own, send)


async def confirmed_once(
    connection: Connection,
    ack: PubAck,
    subject: str,
    headers: dict[str, str],
    is_own: Callable[[StoredMessage], bool],
    send: Callable[[Headers], Awaitable[PubAck]],
) -> PubAck:
    """Return the PubAck of a message that was sent with an id, under another id where that one was taken.

    :param ack: the PubAck of the first time
    :param send: sends the message with other headers
    """
    if not ack.duplicate or await is_own_duplicate(connection, ack, subject, is_own):
        return ack
    return await send(with_another_id(headers))


async def is_own_duplicate(
    connection: Connection, ack: PubAck, subject: str, is_own: Callable[[StoredMessage], bool]
) -> bool:
    """Return whether the message for which the server has dropped another one is the sender's own.

    It isn't where nothing is stored any more: the server remembers an id longer than its message. What the user may not
    read proves nothing either.
    """
    try:
        stored = await get_message(connection, ack.stream, ack.sequence)
    except (PermissionDeniedError, NotFoundError):
        return False
    return stored is not None and stored.subject == subject and is_own(stored)


def with_another_id(headers: dict[str, str]) -> Headers:
    """Return headers with an id that nobody can have used, which begins with that of these headers."""
    others = (pair for pair in headers.items() if pair[0] != MSG_ID)
    return Headers([*others, (MSG_ID, f"{headers[MSG_ID]}:{uuid4().hex}")])
