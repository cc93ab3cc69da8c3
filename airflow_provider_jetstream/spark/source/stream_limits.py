"""The limits by which a stream removes messages itself, and whether one of them can have removed certain messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a message takes in the store beside its headers and its body: its subject, above all.
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
