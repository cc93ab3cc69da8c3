"""Streams of the simulated server: what they store, refuse, remember and remove.

Each behaviour is that of nats-server as measured; what differs by version asks :attr:`Server.level`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from airflow_provider_jetstream.jetstream.client.subjects import covers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

NANOSECONDS: Final = 10**9
_DEDUP_WINDOW: Final = 120 * NANOSECONDS
# The levels of JetStream's API from which on a server does so.
_CONDITIONS_FIRST: Final = 1
_SCHEDULES: Final = 2
_LEADERS_SINCE: Final = 2
_PURGES_TOGETHER: Final = 5
_HEADER: Final = re.compile(rb"(?:^|\r\n)([^:\r\n]+):[ \t]*([^\r\n]*)")


class Host(Protocol):
    """The server, as far as streams and consumers need it."""

    level: int
    on_late_termination: Callable[[Message], None]

    def now(self) -> int:
        """Return the nanoseconds since 1970."""

    def new_id(self) -> str:
        """Return the id of an event."""

    def later(self, delay: int, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function after some nanoseconds."""

    def has_interest(self, subject: str) -> bool:
        """Return whether somebody subscribes to a subject."""

    def deliver(self, target: str, headers: bytes, data: bytes, *, reply: str = "", subject: str = "") -> bool:
        """Send a message to the subscriptions of a subject, and to nobody else."""

    def publish(self, subject: str, headers: bytes, data: bytes, reply: str = "") -> bool:
        """Hand a message to subscriptions and streams."""


class Reader(Protocol):
    """A consumer, as far as its stream needs it."""

    @property
    def filters(self) -> list[str]:
        """Its filter subjects."""

    def matches(self, subject: str) -> bool:
        """Return whether it takes messages of a subject."""

    def serve(self) -> None:
        """Deliver what can be delivered."""

    def forget(self, sequence: int) -> None:
        """Give up a message that was removed from the stream."""

    def purge(self, first: int, last: int, *, wider: bool) -> None:
        """Pass by what was purged."""

    @property
    def is_in_memory(self) -> bool:
        """Whether a restart removes it."""

    def restart(self) -> None:
        """Lose what waits."""

    def copied(self) -> dict[str, Any]:
        """Return a copy of its state."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state."""


class Refusal(Exception):  # noqa: N818
    """An error of JetStream's API.

    :param code: the HTTP-like code
    :param err_code: JetStream's own
    """

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.fields = {"code": code, "err_code": err_code, "description": description}


@dataclass(slots=True)
class Message:
    """A stored message.

    :param headers: as on the wire, with their first line; empty where it has none
    :param time: nanoseconds since 1970
    """

    sequence: int
    subject: str
    headers: bytes
    data: bytes
    time: int


@lru_cache(4096)
def header(block: bytes, name: str) -> str | None:
    """Return the first value of a header."""
    wanted = name.encode()
    for found, value in _HEADER.findall(block.partition(b"\r\n")[2]):
        if found == wanted:
            return str(value.decode("utf-8", "surrogateescape")).strip()
    return None


@lru_cache(4096)
def ttl_of(headers: bytes) -> int | None:
    """Return after how many nanoseconds a message is to be removed: 0 where nothing says it, -1 for never.

    :return: ``None`` where it isn't one that the server understands
    """
    text = header(headers, "Nats-TTL") if headers else None
    if not text:
        return 0
    if text.lower() == "never":
        return -1
    if text.isdigit() and int(text):
        return int(text) * NANOSECONDS
    if not re.fullmatch(r"(\d+(\.\d+)?(h|m|s|ms))+", text):
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)(h|ms|m|s)", text)
    seconds = sum(float(number) * {"h": 3600, "m": 60, "s": 1, "ms": 0.001}[unit] for number, unit in parts)
    return int(seconds) * NANOSECONDS if seconds >= 1 else None


@lru_cache
def _second(whole: int) -> str:
    return datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def timestamp(nanoseconds: int) -> str:
    """Return the server's text of a time."""
    whole, rest = divmod(nanoseconds, NANOSECONDS)
    text = _second(whole)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{text}{fraction}Z"


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a stream's configuration as the server completes it."""
    defaults: dict[str, Any] = {
        "retention": "limits",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "discard": "old",
        "storage": "file",
        "num_replicas": 1,
        "compression": "none",
        "allow_direct": False,
        "mirror_direct": False,
        "sealed": False,
        "deny_delete": False,
        "deny_purge": False,
        "allow_rollup_hdrs": False,
        "consumer_limits": {},
    }
    full = defaults | {name: value for name, value in config.items() if value is not None}
    for name in ("max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size", "max_consumers"):
        full[name] = full[name] or -1
    if not full.get("duplicate_window"):
        full["duplicate_window"] = min(_DEDUP_WINDOW, full["max_age"] or _DEDUP_WINDOW)
    return full


_Reader = TypeVar("_Reader", bound=Reader)


@dataclass
class Stream(Generic[_Reader]):
    """A stream, its messages and its consumers.

    :ivar led: whether a server leads it; otherwise it takes and answers nothing
    :ivar leader: the name of the server that leads it, and since when; empty where there is one server only
    :ivar ahead: by how many nanoseconds its leader's clock is ahead
    :ivar died: the sequences and bodies of jobs that have used up their deliveries or were terminated, once at least,
        and when they last did
    :ivar history: by sequence the bodies that it has stored, also those that are gone; not what a loss of power took
    :ivar lost: by sequence the bodies that a loss of power took
    """

    server: Host
    config: dict[str, Any]
    created: int
    messages: dict[int, Message] = field(default_factory=dict)
    first: int = 1
    last: int = 0
    last_time: int = 0
    consumers: dict[str, _Reader] = field(default_factory=dict)
    ids: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_id: str = ""
    purged: bool = False
    expiry: asyncio.TimerHandle | None = None
    led: bool = True
    leader: tuple[str, int] = ("", 0)
    ahead: int = 0
    died: dict[tuple[int, bytes], int] = field(default_factory=dict)
    history: dict[int, bytes] = field(default_factory=dict)
    lost: dict[int, bytes] = field(default_factory=dict)

    def now(self) -> int:
        """Return the nanoseconds since 1970 by its leader's clock."""
        return self.server.now() + self.ahead

    def cluster(self) -> dict[str, Any]:
        """Return what its answers, and those about its consumers, say of the cluster."""
        name, since = self.leader
        if not name:
            return {}
        shown = {"name": "c", "leader": name, "replicas": []}
        return {"cluster": shown | {"leader_since": timestamp(since)} if self.server.level >= _LEADERS_SINCE else shown}

    @classmethod
    def create(cls, server: Host, config: dict[str, Any]) -> Stream[_Reader]:
        """Make an empty stream."""
        full = _completed(config)
        if full["duplicate_window"] > (full["max_age"] or full["duplicate_window"]):
            raise Refusal(500, 10052, "duplicates window can not be larger then max age")
        if full["retention"] not in ("limits", "interest", "workqueue"):
            raise Refusal(400, 10025, "invalid JSON")
        if full.get("discard_new_per_subject"):
            if full["discard"] != "new":
                raise Refusal(500, 10052, "discard new per subject requires discard new policy to be set")
            if full["max_msgs_per_subject"] < 1:
                raise Refusal(500, 10052, "discard new per subject requires max msgs per subject > 0")
        stream = cls(server, full, server.now())
        if first := config.get("first_seq"):
            stream.first, stream.last = first, first - 1
        return stream

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.config["name"])

    @property
    def is_work_queue(self) -> bool:
        """Whether a message is removed once it is acknowledged."""
        return bool(self.config["retention"] == "workqueue")

    def captures(self, subject: str) -> bool:
        """Return whether it stores what is published on a subject."""
        return any(covers(filter_, subject) for filter_ in self.config.get("subjects") or ())

    # What is stored.

    def publish(self, subject: str, headers: bytes, data: bytes) -> dict[str, Any]:
        """Store a message, and return the PubAck.

        :raises Refusal: it isn't stored
        """
        self._expire()
        message_id = header(headers, "Nats-Msg-Id") if headers else None
        self._check_expectations(subject, headers)
        if self.server.level >= _CONDITIONS_FIRST:
            self._check_last(subject, headers)
        if message_id and (known := self._known(message_id)):
            return {"stream": self.name, "seq": known, "duplicate": True}
        if self.server.level < _CONDITIONS_FIRST:
            self._check_last(subject, headers)
        self._check_last_id(headers)
        self._check_limits(subject, headers, data)
        return {"stream": self.name, "seq": self._append(subject, headers, data)}

    def note_death(self, sequence: int) -> None:
        """Note that a job has died."""
        self.died[sequence, self.history.get(sequence) or self.lost.get(sequence, b"")] = self.now()

    def _known(self, message_id: str) -> int:
        """Return the sequence of the message that has an id, or 0."""
        self._forget_ids()
        return self.ids.get(message_id, (0, 0))[0]

    def _append(self, subject: str, headers: bytes, data: bytes) -> int:
        self.last += 1
        now = max(self.now(), self.last_time + 1)
        self.last_time = now
        message = Message(self.last, subject, headers, data, now)
        before = self.last_of(subject)
        self.messages[self.last] = message
        self.history[self.last] = data
        if len(self.messages) == 1:
            self.first = self.last
        self.last_id = header(headers, "Nats-Msg-Id") or "" if headers else ""
        if self.last_id:
            self.ids[self.last_id] = (self.last, self.now())
        if self.config["max_age"] or (headers and self.server.level >= _CONDITIONS_FIRST and ttl_of(headers)):
            self._set_expiry()
        self._enforce_limits(subject)
        self._republish(message, before.sequence if before else 0)
        for consumer in list(self.consumers.values()):
            # The others don't hear of it.
            if consumer.matches(subject):
                consumer.serve()
        return message.sequence

    def _check_expectations(self, subject: str, headers: bytes) -> None:
        if not headers:
            return
        if (expected := header(headers, "Nats-Expected-Stream")) and expected != self.name:
            raise Refusal(400, 10060, "expected stream does not match")
        if ttl_of(headers) and self.server.level >= _CONDITIONS_FIRST and not self.config.get("allow_msg_ttl"):
            raise Refusal(400, 10166, "per-message TTL is disabled")

    def _check_last(self, subject: str, headers: bytes) -> None:
        if not headers:
            return
        if (text := header(headers, "Nats-Expected-Last-Subject-Sequence")) is not None:
            filter_ = header(headers, "Nats-Expected-Last-Subject-Sequence-Subject") or subject
            last = self.last_of(filter_)
            found = last.sequence if last else 0
            if int(text) != found:
                raise Refusal(400, 10071, f"wrong last sequence: {found}")
        if (text := header(headers, "Nats-Expected-Last-Sequence")) is not None and int(text) != self.last:
            raise Refusal(400, 10071, f"wrong last sequence: {self.last}")
        if (
            header(headers, "Nats-Schedule")
            and not self.config.get("allow_msg_schedules")
            and self.server.level >= _SCHEDULES
        ):
            raise Refusal(400, 10188, "message schedules is disabled")

    def _check_last_id(self, headers: bytes) -> None:
        if not headers:
            return
        if (expected := header(headers, "Nats-Expected-Last-Msg-Id")) and expected != self.last_id:
            raise Refusal(400, 10070, f"wrong last msg ID: {self.last_id}")
        if header(headers, "Nats-Rollup") and not self.config.get("allow_rollup_hdrs"):
            raise Refusal(500, 10111, "rollup not permitted")

    def _check_limits(self, subject: str, headers: bytes, data: bytes) -> None:
        """Refuse a message that is too large, or one too many."""
        size = len(headers) + len(data)
        if 0 <= self.config["max_msg_size"] < size:
            raise Refusal(400, 10054, "message size exceeds maximum allowed")
        if ttl_of(headers) is None and self.server.level >= _CONDITIONS_FIRST:
            raise Refusal(400, 10165, "invalid per-message TTL")
        if self.config["discard"] != "new":
            return
        own = len(self.matching(subject))
        if self.config.get("discard_new_per_subject") and 0 < self.config["max_msgs_per_subject"] <= own:
            raise Refusal(503, 10077, "maximum messages per subject exceeded")
        if 0 <= self.config["max_msgs"] <= len(self.messages):
            raise Refusal(503, 10077, "maximum messages exceeded")
        size = _stored_size(self.config["storage"], subject, headers, data)
        if 0 <= self.config["max_bytes"] < self.size() + size:
            raise Refusal(503, 10077, "maximum bytes exceeded")

    def _enforce_limits(self, subject: str) -> None:
        per_subject = self.config["max_msgs_per_subject"]
        if per_subject > 0:
            own = [message.sequence for message in self.matching(subject)]
            for sequence in own[: max(0, len(own) - per_subject)]:
                self.remove(sequence)
        while 0 <= self.config["max_msgs"] < len(self.messages) or 0 <= self.config["max_bytes"] < self.size():
            self.remove(next(iter(self.messages)))

    def _republish(self, message: Message, before: int) -> None:
        rule = self.config.get("republish")
        if not rule or not covers(rule.get("src") or ">", message.subject):
            return
        extra = (
            f"Nats-Stream: {self.name}\r\nNats-Subject: {message.subject}\r\nNats-Sequence: {message.sequence}\r\n"
            f"Nats-Time-Stamp: {timestamp(message.time)}\r\nNats-Last-Sequence: {before}\r\n"
        ).encode("utf-8", "surrogateescape")
        block = (message.headers[:-2] if message.headers else b"NATS/1.0\r\n") + extra + b"\r\n"
        target = transformed(rule.get("src") or ">", rule["dest"], message.subject)
        if rule.get("headers_only"):
            block = block[:-2] + b"Nats-Msg-Size: %d\r\n\r\n" % len(message.data)
        self.server.publish(target, block, b"" if rule.get("headers_only") else message.data)

    def size(self) -> int:
        """Return how many bytes are stored."""
        storage = self.config["storage"]
        return sum(
            _stored_size(storage, message.subject, message.headers, message.data) for message in self.messages.values()
        )

    def matching(self, filter_: str) -> list[Message]:
        """Return the messages of subjects that match a filter, in order."""
        if filter_ in ("", ">"):
            return list(self.messages.values())
        return [message for message in self.messages.values() if covers(filter_, message.subject)]

    def last_of(self, filter_: str) -> Message | None:
        """Return the last message whose subject matches a filter."""
        for message in reversed(self.messages.values()):
            if covers(filter_, message.subject):
                return message
        return None

    # What is removed.

    def remove(self, sequence: int) -> bool:
        """Remove a message; what a worker has of it is reported as deleted."""
        if self.messages.pop(sequence, None) is None:
            return False
        if sequence == self.first:
            self.first = next(iter(self.messages), self.last + 1)
        for consumer in list(self.consumers.values()):
            consumer.forget(sequence)
        return True

    def purge(self, request: dict[str, Any]) -> int:
        """Remove messages as STREAM.PURGE says, and return their number."""
        if self.config.get("deny_purge"):
            raise Refusal(500, 10110, "stream purge not permitted")
        below = int(request.get("seq") or 0)
        chosen = [message.sequence for message in self.matching(request.get("filter") or ">")]
        if below:
            chosen = [sequence for sequence in chosen if sequence < below]
        elif keep := request.get("keep"):
            chosen = chosen[:-keep]
        filter_ = request.get("filter") or ""
        self.purged = self.purged or not filter_
        for sequence in chosen:
            del self.messages[sequence]
        if not filter_ and below > self.last:
            self.last = below - 1
        if filter_ and (len(chosen) == 1 or self.server.level < _PURGES_TOGETHER):
            # What a worker has of a single message is reported; of several nothing is since 2.15.
            for sequence in chosen:
                for consumer in list(self.consumers.values()):
                    consumer.forget(sequence)
        self._let_consumers_pass(filter_)
        return len(chosen)

    def _let_consumers_pass(self, purged: str) -> None:
        """Let consumers pass by what was purged.

        :param purged: the filter; empty where everything was
        """
        self.first = next(iter(self.messages), self.last + 1)
        left = next((message.sequence for message in self.matching(purged)), 0) if purged else self.first
        for consumer in list(self.consumers.values()):
            if not purged or any(covers(purged, own) for own in consumer.filters):
                consumer.purge(left, self.last, wider=False)
            elif any(covers(own, purged) for own in consumer.filters):
                consumer.purge(self.first, self.last, wider=True)

    def _expires(self, message: Message) -> int:
        """Return when a message is removed for its age; 0 for never."""
        ttl = ttl_of(message.headers) if message.headers and self.config.get("allow_msg_ttl") else 0
        if ttl:
            return message.time + ttl if ttl > 0 else 0
        return message.time + self.config["max_age"] if self.config["max_age"] else 0

    def _expire(self) -> None:
        if not self.config["max_age"] and not self.config.get("allow_msg_ttl"):
            return
        now = self.now()
        for message in list(self.messages.values()):
            if 0 < self._expires(message) <= now:
                self.remove(message.sequence)

    def _set_expiry(self) -> None:
        """Remove what is old when its time is over."""
        due = min((at for message in self.messages.values() if (at := self._expires(message))), default=0)
        if self.expiry:
            self.expiry.cancel()
        self.expiry = self.server.later(max(1, due - self.now()), self._on_expiry) if due else None

    def _on_expiry(self) -> None:
        self.expiry = None
        self._expire()
        self._set_expiry()

    def _forget_ids(self) -> None:
        limit = self.now() - self.config["duplicate_window"]
        for message_id, (_, at) in list(self.ids.items()):
            if at > limit:
                break
            del self.ids[message_id]

    # What a restart changes.

    def restart(self) -> None:
        """Forget what isn't stored: the ids of messages that are gone."""
        self.ids = {
            message_id: (sequence, at) for message_id, (sequence, at) in self.ids.items() if sequence in self.messages
        }
        for name, consumer in list(self.consumers.items()):
            consumer.restart()
            if consumer.is_in_memory:
                del self.consumers[name]

    def copied(self) -> dict[str, Any]:
        """Return a copy of what it stores, its consumers included."""
        consumers = {name: consumer.copied() for name, consumer in self.consumers.items()}
        return {
            "messages": dict(self.messages),
            "first": self.first,
            "last": self.last,
            "last_time": self.last_time,
            "consumers": consumers,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what was stored earlier: a loss of power takes the tail of its file."""
        self.messages, self.first, self.last = dict(state["messages"]), state["first"], state["last"]
        self.last_time = state["last_time"]
        self.lost |= {sequence: body for sequence, body in self.history.items() if sequence > self.last}
        self.history = {sequence: body for sequence, body in self.history.items() if sequence <= self.last}
        self.ids = {key: known for key, known in self.ids.items() if known[0] <= self.last}
        for name, consumer in self.consumers.items():
            if name in state["consumers"]:
                consumer.restore(state["consumers"][name])

    # What is shown.

    def info(self, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return STREAM.INFO without its type."""
        self._expire()
        request = request or {}
        messages = self.messages
        first = messages.get(self.first)
        state: dict[str, Any] = {
            "messages": len(messages),
            "bytes": self.size(),
            "first_seq": self.first if (messages or self.last or self.purged) else 0,
            "first_ts": timestamp(first.time) if first else "0001-01-01T00:00:00Z",
            "last_seq": self.last,
            "last_ts": timestamp(self.last_time) if self.last_time else "0001-01-01T00:00:00Z",
            "consumer_count": len(self.consumers),
        }
        if subjects := len({message.subject for message in messages.values()}):
            state["num_subjects"] = subjects
        deleted = [number for number in range(self.first, self.last + 1) if number not in messages] if messages else []
        if deleted:
            state["num_deleted"] = len(deleted)
            if request.get("deleted_details"):
                state["deleted"] = deleted
        answer: dict[str, Any] = {
            "config": self.config,
            "created": timestamp(self.created),
            "state": state,
            "ts": timestamp(self.now()),
            **self.cluster(),
        }
        if filter_ := request.get("subjects_filter"):
            counts: dict[str, int] = {}
            for message in self.matching(filter_):
                counts[message.subject] = counts.get(message.subject, 0) + 1
            offset = request.get("offset") or 0
            page = dict(sorted(counts.items())[offset : offset + 100_000])
            if page:
                state["subjects"] = page
            answer |= {"total": len(counts), "offset": offset, "limit": 100_000}
        return answer

    def get(self, request: dict[str, Any]) -> Message:
        """Return the message that a MSG.GET names.

        :raises Refusal: none is stored
        """
        self._expire()
        found: Message | None = None
        if subject := request.get("last_by_subj"):
            found = self.last_of(subject)
        elif filter_ := request.get("next_by_subj"):
            start = request.get("seq") or 1
            found = next((message for message in self.matching(filter_) if message.sequence >= start), None)
        else:
            found = self.messages.get(request.get("seq") or 0)
        if found is None:
            raise Refusal(404, 10037, "no message found")
        return found


def _stored_size(storage: str, subject: str, headers: bytes, data: bytes) -> int:
    # What a file store writes around a message: 22 bytes, 8 of a checksum, and 4 where it has headers.
    around = 16 if storage == "memory" else 34 if headers else 30
    return around + len(subject.encode("utf-8", "surrogateescape")) + len(headers) + len(data)


def transformed(source: str, target: str, subject: str) -> str:
    """Return the subject that a rule makes of another."""
    if source.endswith(">") and target.endswith(">"):
        return target[:-1] + subject[len(source) - 1 :]
    given = [part for mark, part in zip(source.split("."), subject.split("."), strict=False) if mark == "*"]
    return re.sub(r"\{\{\s*wildcard\((\d+)\)\s*\}\}", lambda found: given[int(found[1]) - 1], target)


def compact(answer: dict[str, Any]) -> bytes:
    """Encode an answer as the server does."""
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
