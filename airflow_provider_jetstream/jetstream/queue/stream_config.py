"""What a stream's configuration says: which subjects it may store, and how much before it drops its oldest messages.

Filters match what is stored, which may differ from what is published. No publisher learns of what is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.headers import wire_size
from airflow_provider_jetstream.jetstream.client.subjects import covers, overlaps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


_ALL: Final = ">"
# A function of a subject transform, ADR-36; its arguments may hold dots.
_FUNCTION: Final = re.compile(r"\{\{\s*([A-Za-z]+)[^{}]*\}\}")
# These may give any number of tokens.
_MANY_TOKENS: Final = frozenset({"split", "slicefromleft", "slicefromright"})
_POSITION: Final = re.compile(r"\$\d+")
# The bytes that the server's file store adds to a message with headers; its memory store adds fewer.
_STORED_OVERHEAD = 34


def stored_subjects(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return filters that match every subject which a stream may store.

    :param config: its configuration on the server
    """
    arriving = [*(config.get("subjects") or ()), *_taken_over(config)]
    transform = config.get("subject_transform") or {}
    stored = [subject for one in arriving for subject in _transformed(one, transform)] if transform else arriving
    return tuple(dict.fromkeys(stored))


def outside_filters(queue: str, consumer: str, filters: Iterable[str], stored: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each filter of a consumer that matches nothing that its queue stores.

    :param stored: what the queue stores; with nothing, no filter is compared
    """
    for subject in filters:
        if stored and not any(overlaps(one, subject) for one in stored):
            yield (
                f"filter {subject} of consumer {consumer} is outside the subjects that {queue} stores"
                f" ({', '.join(stored)}), so it would never get a job: correct one of them"
            )


def _taken_over(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the subjects that come from other streams, which capture what isn't known here."""
    for source in [*(config.get("sources") or ()), *([config["mirror"]] if config.get("mirror") else ())]:
        transforms = source.get("subject_transforms") or ()
        if not transforms:
            yield source.get("filter_subject") or _ALL
        for transform in transforms:
            yield _destination(transform.get("dest") or transform.get("src") or _ALL)


def _transformed(subject: str, transform: Mapping[str, str]) -> Iterator[str]:
    source = transform.get("src") or _ALL
    if overlaps(source, subject):
        yield _destination(transform.get("dest") or subject)
    if not covers(source, subject):
        # Others keep their subject.
        yield subject


def _destination(dest: str) -> str:
    """Return a filter for what a transform gives."""
    tokens: list[str] = []
    for token in _FUNCTION.sub(lambda function: f"\0{function[1].lower()}\0", dest).split("."):
        if any(name in _MANY_TOKENS for name in token.split("\0")):
            return ".".join([*tokens, _ALL])
        tokens.append("*" if "\0" in token or _POSITION.search(token) else token)
    return ".".join(tokens)


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
    """The room of a stream: how much it can store without dropping anything, whatever the subject.

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
