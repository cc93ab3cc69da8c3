"""What a stream is and holds, asked over a task's own connection."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamDisabledError,
    NotFoundError,
    UnreachableError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket

_NO_MESSAGE = 10037
_NO_STREAM = 10059
_DISABLED = {10039, 10076}
_UNAVAILABLE = 503
_FRACTION_DIGITS = 9


@dataclass(frozen=True)
class StreamInfo:
    """What a stream was when it was asked.

    :param created: when, in the server's words; tells a stream from a later one of the same name
    :param retention: ``limits``, ``interest`` or ``workqueue``
    :param allow_direct: whether it answers direct gets
    :param duplicate_window: seconds in which an id is known
    :param first: the sequence of its first message, or where the next one will be
    :param last: the sequence of the last message that it ever had
    """

    created: str
    retention: str
    allow_direct: bool
    duplicate_window: float
    first: int
    last: int


@dataclass(frozen=True)
class FetchedMessage:
    """A stored message.

    :param sequence: in the stream
    :param subject: its subject
    :param time: when it was stored, in nanoseconds since 1970
    :param header: its headers as they are on the wire
    :param body: its body
    """

    sequence: int
    subject: str
    time: int
    header: bytes
    body: bytes


class SourceStream:
    """A stream behind a connection.

    :param wire: the connection
    :param name: the stream
    :param prefix: what its API's subjects begin with
    """

    def __init__(self, wire: NatsSocket, name: str, prefix: str = "$JS.API") -> None:
        self.socket = wire
        self.name = name
        self.api_prefix = prefix

    def api(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream's API.

        :param subject: after the prefix
        :param request: the body
        :return: the answer
        :raises ApiError: the server refused
        :raises NotFoundError: there is no such stream
        :raises JetStreamDisabledError: there is no JetStream
        :raises UnreachableError: nobody answers just now
        """
        body = json.dumps(request).encode() if request is not None else b""
        return self.decoded(subject, *self.socket.request(f"{self.api_prefix}.{subject}", body))

    def decoded(self, subject: str, header: bytes, body: bytes) -> dict[str, Any]:
        """Read an answer of the API.

        :param subject: what was asked
        :param header: the answer's header
        :param body: its body
        :return: the answer
        :raises ApiError: and the others of :meth:`api`
        """
        if header.startswith(b"NATS/1.0 503"):
            raise UnreachableError(
                f"nobody answers on {self.api_prefix}.{subject}: JetStream is off, its leader is away, or jsDomain is wrong"
            )
        answer: dict[str, Any] = json.loads(body)
        if not (found := answer.get("error")):
            return answer
        error = ApiError(found.get("code", 0), found.get("err_code", 0), found.get("description", ""), subject)
        if error.err_code == _NO_STREAM:
            raise NotFoundError(f"expected the stream {self.name!r}, found none: check the option stream")
        if error.err_code in _DISABLED:
            raise JetStreamDisabledError(f"expected JetStream, found: {error.description}")
        if error.status == _UNAVAILABLE:
            raise UnreachableError(f"JetStream can't answer just now: {error.description}")
        raise error

    def info(self) -> StreamInfo:
        """Ask what the stream is and holds.

        :return: what it said
        """
        info = self.api(f"STREAM.INFO.{self.name}")
        config, state = info["config"], info["state"]
        last = int(state["last_seq"])
        return StreamInfo(
            created=str(info["created"]),
            retention=str(config["retention"]),
            allow_direct=bool(config.get("allow_direct")),
            duplicate_window=int(config.get("duplicate_window", 0)) / 1e9,
            # An empty stream's first message is the one after its last.
            first=int(state["first_seq"]) if state["messages"] else last + 1,
            last=last,
        )

    def get_request(self, sequence: int, subject: str) -> bytes:
        """Write the request for the first message at a sequence or after it.

        :param sequence: where to begin
        :param subject: a filter
        :return: the request's body
        """
        return json.dumps({"seq": sequence, "next_by_subj": subject}).encode()

    def stored(self, answer: dict[str, Any]) -> FetchedMessage:
        """Read the message in an answer.

        :param answer: to a request as :meth:`get_request` writes them
        :return: the message
        """
        message = answer["message"]
        return FetchedMessage(
            int(message["seq"]),
            str(message["subject"]),
            nanoseconds(str(message["time"])),
            base64.b64decode(message.get("hdrs", "")),
            base64.b64decode(message.get("data", "")),
        )

    def next_message(self, sequence: int, subject: str = ">") -> FetchedMessage | None:
        """Get the first message at a sequence or after it.

        :param sequence: where to begin
        :param subject: a filter
        :return: the message, or ``None`` if there is none
        """
        topic = f"STREAM.MSG.GET.{self.name}"
        try:
            return self.stored(
                self.decoded(
                    topic,
                    *self.socket.request(f"{self.api_prefix}.{topic}", self.get_request(max(sequence, 1), subject)),
                )
            )
        except ApiError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            raise

    def next_sequence(self, sequence: int, subjects: Sequence[str]) -> int | None:
        """Find the first message at a sequence or after it that any filter takes.

        :param sequence: where to begin
        :param subjects: filters
        :return: its sequence
        """
        found = [stored.sequence for subject in subjects if (stored := self.next_message(sequence, subject))]
        return min(found, default=None)

    def sequence_at(self, time: int, facts: StreamInfo) -> int:
        """Find the first message that was stored at a time or after it.

        :param time: nanoseconds since 1970
        :param facts: between whose first and last sequence it is looked for
        :return: its sequence, or the one after the last
        """
        low, high = facts.first, facts.last + 1
        while low < high:
            middle = (low + high) // 2
            found = self.next_message(middle)
            if found is None or found.time >= time:
                high = middle
            else:
                low = min(found.sequence + 1, high)
        return low


def nanoseconds(text: str) -> int:
    """Read a time of the server.

    :param text: as RFC 3339 with up to nine digits of a second
    :return: nanoseconds since 1970
    :raises WireError: it isn't one
    """
    try:
        whole, _, fraction = text.removesuffix("Z").partition(".")
        seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
        return seconds * 1_000_000_000 + int((fraction or "0").ljust(_FRACTION_DIGITS, "0"))
    except ValueError:
        raise WireError(f"expected a time of the server, found {text!r}") from None
