"""The stream that a data source reads or writes: its state, its limits, and the core's stream API."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
from airflow_provider_jetstream.jetstream.client.diagnostics import NOT_ENABLED, decode_answer
from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS
from airflow_provider_jetstream.jetstream.client.message import NO_MESSAGE
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, stream_names
from airflow_provider_jetstream.jetstream.client.streams import msg_get, next_message
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamDisabledError,
    NotFoundError,
    TransientError,
    UnreachableError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# The bytes of a stored message besides headers and body, mainly of its subject.
_STORED_WITH = 1024


@dataclass(frozen=True)
class StreamLimits:
    """A stream's limits, and how full it is; 0 where there is no limit.

    :param subjects: what the stream takes
    :param max_age: nanoseconds
    :param per_subject: how many messages of each subject it keeps, the newest
    :param rollups: whether a message can replace the earlier ones of its subject
    :param ttls: whether messages can have a TTL of their own
    :param since: when the stream was created, unless it holds older messages of another one; nanoseconds since 1970
    :param now: the server's clock; 0 where an older server doesn't say
    :param messages: how many it has
    :param size: bytes that it has
    """

    subjects: tuple[str, ...] = ()
    max_age: int = 0
    max_messages: int = 0
    max_size: int = 0
    max_message_size: int = 0
    per_subject: int = 0
    rollups: bool = False
    ttls: bool = False
    since: int = 0
    now: int = 0
    messages: int = 0
    size: int = 0

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> StreamLimits:
        """Read them from the answer to STREAM.INFO."""
        config, state = info["config"], info["state"]
        discards_old = config.get("discard", "old") == "old"
        copies = config.get("mirror") or config.get("sources")
        return cls(
            subjects=tuple(config.get("subjects") or ()) if not copies else (),
            max_age=_limit(config, "max_age"),
            max_messages=_limit(config, "max_msgs") if discards_old else 0,
            max_size=_limit(config, "max_bytes") if discards_old else 0,
            max_message_size=_limit(config, "max_msg_size"),
            per_subject=0 if config.get("discard_new_per_subject") else _limit(config, "max_msgs_per_subject"),
            rollups=bool(config.get("allow_rollup_hdrs")),
            ttls=bool(config.get("allow_msg_ttl")),
            since=0 if copies else _nanoseconds(info["created"]),
            now=_nanoseconds(info["ts"]) if "ts" in info else 0,
            messages=int(state["messages"]),
            size=int(state["bytes"]),
        )

    @property
    def compacts(self) -> bool:
        """Whether newer messages of a subject replace older ones."""
        return self.per_subject > 0 or self.rollups

    @property
    def average_size(self) -> int:
        """Bytes of a message in the store, at least one."""
        return max(1, self.size // max(1, self.messages))

    def possible_cause(self, position: int, last: int, oldest: int, max_payload: int) -> str | None:
        """Return which limit can have removed messages between a position and the head; ``None`` if none can.

        Whatever a limit removes is the oldest message of the stream. So when it removes one from the position on, the
        stream has no more than what was stored from there on.

        :param last: the stream's last sequence
        :param oldest: nothing from the position on was stored before, in nanoseconds since 1970
        """
        if self.max_age and (not self.now or self.now - max(oldest, self.since) >= self.max_age):
            return "max_age"
        stored = last - position + 1
        # A stream that compacts gets fuller only by new subjects: it is still full if it once was.
        if self.max_messages and (self.messages if self.compacts else stored - 1) >= self.max_messages:
            return "max_msgs"
        largest = (self.max_message_size or max_payload) + _STORED_WITH
        most = self.size + (largest if self.compacts else (stored - self.messages) * largest)
        if self.max_size and most > self.max_size:
            return "max_bytes"
        return None


def _limit(config: Mapping[str, Any], name: str) -> int:
    return max(0, int(config.get(name) or 0))


def _nanoseconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1_000_000) * 1000


_NO_STREAM = 10059
_UNAVAILABLE = 503
_FRACTION_DIGITS = 9


@dataclass(frozen=True)
class StreamInfo:
    """A stream's configuration and state as of one moment.

    :param created: the server's text; distinguishes a stream from a later one of the same name
    :param retention: ``limits``, ``interest`` or ``workqueue``
    :param allow_direct: whether the stream answers direct gets
    :param duplicate_window: seconds for which the stream remembers message ids
    :param first: the sequence of the first message, or of the next one where the stream is empty
    :param last: the sequence of the last message that was ever stored
    :param deleted: how many sequences between these are missing
    :param oldest: when the first message was stored, in nanoseconds since 1970; no stored message is older
    :param newest: when the last message was stored
    :param limits: what the stream removes by itself
    :param republishes: whether the server copies stored messages to other subjects, such as an archive's
    """

    created: str
    retention: str
    allow_direct: bool
    duplicate_window: float
    first: int
    last: int
    deleted: int = 0
    oldest: int = 0
    newest: int = 0
    limits: StreamLimits = field(default_factory=StreamLimits)
    republishes: bool = False


class _SourceConnection(BlockingConnection):
    """Words errors in terms of the options.

    It waits for one answer at a time and compares the whole reply subject: a consumer's messages may arrive on the
    same socket meanwhile.
    """

    def __init__(self, socket: NatsSocket, stream: str) -> None:
        super().__init__(socket)
        self._stream = stream

    async def api(
        self, subject: str, request: Mapping[str, Any] | None = None, *, time_limit: float | None = None
    ) -> dict[str, Any]:
        payload = json.dumps(request).encode() if request is not None else b""
        return self.decode(subject, *self.socket.request(f"{self.api_prefix}.{subject}", payload))

    async def request(self, subject: str, payload: bytes = b"", *, time_limit: float | None = None) -> bytes:
        header, body = self.socket.request(subject, payload)
        if header.startswith(NO_RESPONDERS):
            raise self._no_answer(subject)
        return body

    def decode(self, subject: str, header: bytes, body: bytes) -> dict[str, Any]:
        if header.startswith(NO_RESPONDERS):
            raise self._no_answer(f"{self.api_prefix}.{subject}")
        try:
            return decode_answer(body, subject)
        except ApiError as error:
            if error.err_code == _NO_STREAM:
                raise NotFoundError(
                    f"expected the stream {self._stream!r}, found none: check the option stream"
                ) from None
            if error.err_code in NOT_ENABLED:
                raise JetStreamDisabledError(f"expected JetStream, found: {error.description}") from None
            if error.status == _UNAVAILABLE:
                raise UnreachableError(f"JetStream can't answer just now: {error.description}") from None
            raise

    def _no_answer(self, subject: str) -> UnreachableError:
        return UnreachableError(f"no answer on {subject}: JetStream is off, its leader is away, or jsDomain is wrong")


class SourceStream:
    """A stream behind an open connection."""

    def __init__(self, socket: NatsSocket, name: str) -> None:
        self.socket = socket
        self.name = name
        self.api_prefix = socket.api_prefix
        self._connection = _SourceConnection(socket, name)

    def api(self, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to JetStream's API.

        :raises ApiError: the server refused
        :raises NotFoundError: the stream doesn't exist
        :raises JetStreamDisabledError: the server or the account has no JetStream
        :raises UnreachableError: there is no answer at the moment
        """
        return self._connection.run(self._connection.api(subject, request))

    def get_all(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """Read messages from the stream's leader, all at a time; ``None`` where there is none.

        The bytes of headers and bodies are as they were stored.

        :param requests: as ``MSG.GET`` takes them
        """
        subject, connection = f"STREAM.MSG.GET.{self.name}", self._connection
        encoded = [(f"{self.api_prefix}.{subject}", json.dumps(request).encode()) for request in requests]
        found: list[dict[str, Any] | None] = []
        for answer in connection.run(connection.request_many(encoded)):
            if isinstance(answer, TransientError):
                raise answer
            try:
                found.append(connection.decode(subject, b"", answer)["message"])
            except ApiError as error:
                if error.err_code != NO_MESSAGE:
                    raise
                found.append(None)
        return found

    def info(self) -> StreamInfo:
        """Read the stream's configuration and state."""
        info = self._connection.run(stream_info(self._connection, self.name))
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
            deleted=int(state.get("num_deleted", 0)),
            oldest=_state_time(state["first_ts"]),
            newest=_state_time(state["last_ts"]),
            limits=StreamLimits.of(info),
            republishes=bool(config.get("republish")),
        )

    def next_message(self, sequence: int, subject: str = ">") -> StoredMessage | None:
        """Read the first message at or after a sequence."""
        return self._connection.run(next_message(self._connection, self.name, max(sequence, 1), subject))

    def next_of(self, sequence: int, subjects: Sequence[str]) -> StoredMessage | None:
        """Read the first message at or after a sequence that any of the filters matches; all do without filters."""
        messages = [self.next_message(sequence, subject) for subject in subjects or (">",)]
        return min((message for message in messages if message), key=lambda message: message.sequence, default=None)

    def next_sequence(self, sequence: int, subjects: Sequence[str]) -> int | None:
        """Find the first message at or after a sequence that any of the filters matches."""
        message = self.next_of(sequence, subjects)
        return message.sequence if message else None

    def last_of(self, subject: str) -> StoredMessage | None:
        """Read the last message of a subject."""
        return self._connection.run(msg_get(self._connection, self.name, {"last_by_subj": subject}))

    def count_of(self, subject: str) -> int:
        """Count the messages of a subject."""
        state = self.api(f"STREAM.INFO.{self.name}", {"subjects_filter": subject})["state"]
        return int((state.get("subjects") or {}).get(subject, 0))

    def sequence_at(self, time: int, info: StreamInfo) -> int:
        """Find the first message that was stored at or after a time, by bisection.

        :param time: nanoseconds since 1970
        :param info: its first and last sequence bound the search
        :return: the message's sequence, or the one after the last
        """
        low, high = info.first, info.last + 1
        while low < high:
            middle = (low + high) // 2
            message = self.next_message(middle)
            if message is None or parse_time(message.time) >= time:
                high = middle
            else:
                low = min(message.sequence + 1, high)
        return low


def names_of_streams(socket: NatsSocket) -> list[str]:
    """Read the names of all streams of the account.

    :raises ApiError: the server refused
    """
    connection = _SourceConnection(socket, "")
    return connection.run(stream_names(connection))


def _state_time(text: str) -> int:
    """Convert a time of a stream's state, which is in the year 1 where there was no message yet."""
    return max(0, parse_time(text))


def parse_time(text: str) -> int:
    """Convert a time of the server (RFC 3339, up to nine digits of a second) to nanoseconds since 1970.

    :raises WireError: the text isn't such a time
    """
    try:
        whole, _, fraction = text.removesuffix("Z").partition(".")
        seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
        return seconds * 1_000_000_000 + int((fraction or "0").ljust(_FRACTION_DIGITS, "0"))
    except ValueError:
        raise WireError(f"expected a time of the server, found {text!r}") from None
