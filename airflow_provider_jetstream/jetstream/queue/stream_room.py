"""How much a stream stores before it drops its oldest messages for new ones, which no publisher learns of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.headers import wire_size

if TYPE_CHECKING:
    from collections.abc import Mapping

# What the server's file store adds to a message with headers; its memory store adds less.
_STORED_OVERHEAD = 34


def eviction_limits(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the limits beyond which a stream drops its oldest messages, whatever their subject."""
    if config.get("discard") == "new":
        return ()
    return tuple(limit for limit in ("max_msgs", "max_bytes") if config.get(limit, -1) > 0)


def per_subject_limit(config: Mapping[str, Any]) -> int:
    """Return the number of messages of a subject beyond which a stream drops its oldest; 0 where there is none."""
    limit = int(config.get("max_msgs_per_subject", -1))
    # With discard new alone the server refuses messages beyond the other limits only.
    refuses = config.get("discard") == "new" and config.get("discard_new_per_subject")
    return limit if limit > 0 and not refuses else 0


def stored_size(subject: str, headers: Mapping[str, str], body: bytes) -> int:
    """Return the bytes of a stored message, as they count towards a stream's ``max_bytes``.

    :raises UnicodeEncodeError: a header can't be sent
    """
    return _STORED_OVERHEAD + len(subject.encode("utf-8", "surrogateescape")) + wire_size(headers) + len(body)


@dataclass(slots=True)
class StreamRoom:
    """What a stream can store without dropping anything, whatever its subject.

    :param config: its configuration on the server
    :param messages: how many messages it stores
    :param size: how many bytes they take
    """

    config: Mapping[str, Any]
    messages: int
    size: int

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> StreamRoom:
        """Read it from the server's STREAM.INFO."""
        return cls(info["config"], info["state"]["messages"], info["state"]["bytes"])

    def problem(self, messages: int, size: int) -> str:
        """Return a clause that says why further messages would drop others; empty if they wouldn't.

        :param size: their bytes
        """
        for limit, used, needed in (("max_msgs", self.messages, messages), ("max_bytes", self.size, size)):
            if limit in eviction_limits(self.config) and used + needed > self.config[limit]:
                return f"{limit} {self.config[limit]}, {used} used, {needed} needed"
        return ""

    def take(self, messages: int, size: int) -> None:
        """Count further messages as stored, or removed ones where the numbers are negative."""
        self.messages += messages
        self.size += size
