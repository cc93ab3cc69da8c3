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
    from collections.abc import Callable, Iterable, Sequence

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
    :param on_acknowledged: gets the indexes of messages, and the sequence of each
    """

    def __init__(
        self,
        reply_prefix: bytes,
        stream: str,
        domain: str,
        on_acknowledged: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self._reply_prefix = re.escape(reply_prefix)
        place = rb'\{"stream": ?"%b", ?' % re.escape(stream.encode())
        if domain:
            place += rb'"domain": ?"%b", ?' % re.escape(domain.encode())
        self._body = rb'(%b"seq": ?)([1-9]\d{0,18})\}' % place
        self._on_acknowledged = on_acknowledged
        self._number = 0
        # The form of one server's answers: as above without the choices, so that only the numbers are captured.
        self._form = b""

    def bind(self, number: int) -> None:
        """Set the number of the subscription to the inbox."""
        self._number = number
        self._first = re.compile(
            rb"MSG (%b)(\d{1,18}) %d (\d{1,9})\r\n%b\r\n" % (self._reply_prefix, number, self._body)
        )
        self._form = b""

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Hand the PubAcks that begin at a position over; return where they end, how many they are, and their size."""
        first = self._first.match(data, start)
        if first is None:
            return start, 0, 0
        if first[4] != self._form:
            self._set_form(first[1], first[4])
        if (match := self._frames.match(data, start)) is None or match.end() == start:
            return start, 0, 0
        fields = self._frame.findall(data, start, match.end())
        indexes, sizes, sequences = zip(*fields, strict=True)
        lengths = list(map(int, sizes))
        around = len(self._form) + len(b"}")
        if lengths != [around + length for length in map(len, sequences)]:
            # Made to look like one; the parser finds out where it ends.
            return start, 0, 0
        self._on_acknowledged(list(map(int, indexes)), list(map(int, sequences)))
        return match.end(), len(fields), sum(lengths)

    def _set_form(self, reply_prefix: bytes, form: bytes) -> None:
        self._form = form
        frame = rb"MSG %b(\d{1,18}) %d (\d{1,9})\r\n%b([1-9]\d{0,18})\}\r\n" % (
            *(re.escape(reply_prefix), self._number, re.escape(form)),
        )
        self._frame = re.compile(frame)
        # Atomic: what was matched is never matched again. A possessive repeat goes wrong before Python 3.11.5.
        self._frames = re.compile(rb"(?>(?:%b)*)" % frame)


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
