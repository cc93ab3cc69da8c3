"""The configurations that a declaration asks of the server: of the queue's stream, its companions and its consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.contract import archive_filter
from airflow_provider_jetstream.jetstream.queue.declaration import ARCHIVE_LIMITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.queue.stream_declaration import Stream
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


def declared_companion_config(
    queue: WorkQueue, companion: Stream, existing: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the declared fields of a companion of a queue.

    A new archive takes over the limits of its queue; an existing one keeps those that aren't declared for it. What
    another tool has made allows direct gets or doesn't: without them, reading is slower.

    :param existing: the server's configuration, if it has the stream
    """
    config = companion.config()
    if existing is not None and "allow_direct" not in companion.model_fields_set:
        config.pop("allow_direct", None)
    if companion is queue.schedules and queue.duplicate_window is not None:
        return {"duplicate_window": queue.duplicate_window} | config
    if companion is not queue.archive:
        return config
    if existing is None:
        return config | queue.new_archive_limits()
    kept = set(ARCHIVE_LIMITS) - companion.model_fields_set
    return {field: value for field, value in config.items() if field not in kept}


def declared_queue_config(queue: WorkQueue, existing: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the declared fields of a work queue's own stream; ``None`` for one to remove.

    A new queue allows direct gets unless that is declared otherwise; an existing one stays as it is.

    :param existing: the server's configuration, if it has the stream from an earlier declaration
    """
    declared = queue.config()
    if existing is None:
        declared.setdefault("allow_direct", True)
    elif existing.get("subject_delete_marker_ttl"):
        # With it the server allows roll-ups.
        declared["subject_delete_marker_ttl"] = None
    republish = (existing or {}).get("republish") or {}
    if queue.archive_disabled and republish.get("dest") == archive_filter(queue.name):
        declared["republish"] = None
    return declared


def declared_consumers(queue: WorkQueue) -> dict[str, dict[str, Any]]:
    """Return the declared configurations of a work queue's consumers by name."""
    return {consumer.name: consumer.config() for consumer in queue.consumers}
