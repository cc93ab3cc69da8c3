"""Which jobs a consumer may have had: by its filters, and by the filters that provisioning noted in the metadata.

A consumer's numbers count the jobs that its present filters match. Where another tool has changed these, the consumer
has passed jobs that it never delivered, and nothing in the server's answers says so. A queue that other tools made has
no marks: of its consumers no change is known.

A worker's role is for one consumer, but a worker may name the job of any: in a record or a completion that it stores,
and in its ``+TERM``: the server announces a termination by that consumer although the consumer never had the job
(nats-server 2.10 to 2.15). So what workers bring about counts only from a consumer that may have had the job. An ack
metric needs no such check: the server sends one only of a job that the consumer has in flight.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

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


class FilteredConsumer(Protocol):
    """A consumer, as far as it matters which jobs it takes."""

    @property
    def filters(self) -> Sequence[str]:
        """Its filter subjects."""

    @property
    def created(self) -> datetime:
        """When it was created."""


def may_have_had(
    stream: Mapping[str, Any],
    consumers: Mapping[str, FilteredConsumer],
    consumer: str,
    sequence: int,
    subject: str,
    stored_at: datetime | None = None,
) -> bool:
    """Return whether a consumer may have delivered a job: its filters match the subject, or matched others before.

    A consumer that is gone may have, unless another consumer took the subject already when the job was stored: the
    filters of a work queue never overlap. With a subject that is known in part only, any consumer may have.

    :param stream: the queue's configuration on the server
    :param consumers: the queue's consumers by name
    :param sequence: the job's stream sequence
    :param subject: the job's
    :param stored_at: when the job was stored, by the server's word; ``None`` where that isn't known
    """
    if UNKNOWN_BYTE in subject:
        return True
    if state := consumers.get(consumer):
        return covered_by_any(state.filters, subject) or sequence <= unproved_up_to(stream, consumer, state.filters)
    return not any(
        stored_at is not None
        and other.created <= stored_at
        and _PREFIX + name in (stream.get("metadata") or {})
        and covered_by_any(other.filters, subject)
        and sequence > unproved_up_to(stream, name, other.filters)
        for name, other in consumers.items()
    )


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
