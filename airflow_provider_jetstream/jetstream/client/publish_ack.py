"""Storing messages, and the PubAck by which the server confirms each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.diagnostics import api_error
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError
from airflow_provider_jetstream.jetstream.limits import SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection


# By far the most frequent answer; any other one is decoded as JSON.
_PLAIN = re.compile(rb'\{"stream":"([^"\\]*)", ?"seq":([1-9]\d{0,18})\}')


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


class PublishAckRun:
    """The plain PubAcks of one stream in an inbox, which are matched and parsed many at a time.

    Plain ones say that the message is stored and wasn't before. Any other answer isn't matched.

    :param reply_prefix: the inbox and a dot; the index of the published message follows
    :param domain: the stream's JetStream domain; empty where it has none
    :param on_acknowledged: gets the index and the sequence of each message
    """

    def __init__(
        self,
        reply_prefix: bytes,
        stream: str,
        domain: str,
        on_acknowledged: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        self._reply_prefix = re.escape(reply_prefix)
        place = rb'\{"stream": ?"%b", ?' % re.escape(stream.encode())
        if domain:
            place += rb'"domain": ?"%b", ?' % re.escape(domain.encode())
        self._body = rb'(%b"seq": ?)([1-9]\d{0,18})\}' % place
        self._on_acknowledged = on_acknowledged

    def bind(self, number: int) -> None:
        """Set the number of the subscription to the inbox."""
        frame = rb"MSG %b(\d{1,18}) %d (\d{1,9})\r\n%b\r\n" % (self._reply_prefix, number, self._body)
        self._frame = re.compile(frame)
        # Possessive: what was matched is never matched again.
        self._frames = re.compile(rb"(?:%b)*+" % frame)

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Hand the PubAcks that begin at a position over; return where they end, how many they are, and their size."""
        match = self._frames.match(data, start)
        if match is None or match.end() == start:
            return start, 0, 0
        acknowledged: list[tuple[int, int]] = []
        total = 0
        for index, size, head, sequence in self._frame.findall(data, start, match.end()):
            total += (length := int(size))
            if length != len(head) + len(sequence) + 1:
                # Made to look like one; the parser finds out where it ends.
                return start, 0, 0
            acknowledged.append((int(index), int(sequence)))
        self._on_acknowledged(acknowledged)
        return match.end(), len(acknowledged), total


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


def publish_ack_pattern(stream: str) -> bytes:
    """Return a regular expression for the PubAcks of one stream, to match many of them in a buffer.

    Its one group is empty unless the message is a duplicate. An answer that doesn't match may still be a PubAck.
    """
    return rb'\{"stream": ?"%b", ?"seq": ?\d+(?:, ?"domain": ?"[^"]*")?(, ?"duplicate": ?true)?\}' % re.escape(
        stream.encode()
    )


def _decode(answer: bytes) -> dict[str, Any]:
    try:
        ack = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return ack if isinstance(ack, dict) else {}
