"""The filters that provisioning gave to each consumer, in the queue's metadata: they show changes by other means.

A consumer's numbers count the jobs that its present filters match. Where another tool has changed these, the consumer
has passed jobs that it never delivered, and nothing in the server's answers says so. A queue that other tools made has
no marks: of its consumers no change is known.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PREFIX = "filters."
_DIGITS = 12
_EVERY_JOB = 2**63


def filter_marks(
    declared: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, str] | None,
    existing: Mapping[str, Mapping[str, Any]],
    last_sequence: int,
) -> dict[str, str]:
    """Return the marks of a queue that is created, or that has marks.

    :param declared: the declared configurations of its consumers by name
    :param metadata: the stream's metadata; ``None`` where it is created
    :param existing: the server's configurations of its consumers by name
    :param last_sequence: the stream's last sequence
    """
    if metadata is not None and not any(key.startswith(_PREFIX) for key in metadata):
        return {}
    marks: dict[str, str] = {}
    for name, config in declared.items():
        present = existing.get(name)
        since = _since((metadata or {}).get(_PREFIX + name), filter_subjects(present)) if present else 0
        digest = _digest(filter_subjects(config))
        # What another tool has changed counts from now on.
        marks[_PREFIX + name] = f"{digest}@{last_sequence if since == _EVERY_JOB else since}" if since else digest
    return marks


def without_marks(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a queue's metadata as its author wrote it."""
    return {key: value for key, value in metadata.items() if not key.startswith(_PREFIX)}


def unproved_up_to(stream: Mapping[str, Any], consumer: str, filters: Iterable[str]) -> int:
    """Return the sequence up to which a consumer may have passed jobs that its filters match now.

    :param stream: the queue's configuration on the server
    :param filters: the consumer's filters
    """
    return _since((stream.get("metadata") or {}).get(_PREFIX + consumer), filters)


def _since(mark: str | None, filters: Iterable[str]) -> int:
    digest, _, since = (mark or "").partition("@")
    if not digest:
        return 0
    if digest != _digest(filters):
        return _EVERY_JOB
    return int(since) if since.isascii() and since.isdecimal() and len(since) < len(str(_EVERY_JOB)) else 0


def _digest(filters: Iterable[str]) -> str:
    return sha256("\n".join(sorted(filters)).encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]
