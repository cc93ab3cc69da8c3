"""Warnings about a queue's declaration: settings that work and will cause trouble later.

They speak of the best practices and anti-patterns of work queues; ``docs/queue.md`` has each rule under its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.queue.companion_lint import (
    archive_warnings,
    dead_letter_warnings,
    event_warnings,
    is_limited,
)
from airflow_provider_jetstream.jetstream.queue.consumer_lint import consumer_warnings
from airflow_provider_jetstream.jetstream.queue.end_evidence import end_evidence_warnings
from airflow_provider_jetstream.jetstream.queue.message_size import size_warnings
from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue.checks import QueueFields

_LONG_WINDOW = 10 * 60 * NANOSECONDS
_SHORT_WINDOW = 60 * NANOSECONDS


def queue_warnings(queue: QueueFields) -> list[QueueWarning]:
    """Return a sentence for each setting that works and will cause trouble later."""
    return [
        *_limit_warnings(queue),
        *size_warnings(queue),
        *dead_letter_warnings(queue),
        *event_warnings(queue),
        *end_evidence_warnings(queue),
        *archive_warnings(queue),
        *_feature_warnings(queue),
        *consumer_warnings(queue.consumers, execute_at_header=queue.execute_at_header),
    ]


def _limit_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    if queue.discard != "new" and is_limited(queue.max_msgs, queue.max_bytes, queue.max_msgs_per_subject):
        yield QueueWarning(
            "discard-old",
            'discard "old" with a limit drops the oldest waiting jobs silently when the queue is full: use'
            ' discard "new", which refuses new jobs instead',
        )
    if queue.max_age is not None and queue.max_age > 0:
        yield QueueWarning(
            "max-age",
            f"max_age {format_duration(queue.max_age)} removes waiting jobs and dead letters of that age without an"
            " advisory",
        )
    window = queue.duplicate_window
    if window is not None and window > _LONG_WINDOW:
        yield QueueWarning(
            "duplicate-window",
            f"duplicate_window {format_duration(window)}: a job that is published again with its message id within"
            " that time isn't stored, even if the first one is done; give what shall run again another id",
        )
    if window is not None and window < _SHORT_WINDOW:
        yield QueueWarning(
            "duplicate-window",
            f"duplicate_window {format_duration(window)}: a publisher that repeats an unanswered request after that"
            " time stores the job twice; use the server's 2m",
        )


def _feature_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    if queue.atomic_redrive:
        yield QueueWarning(
            "atomic-redrive",
            "atomic_redrive leaves a marker in the queue for a day for each redriven letter: markers count towards"
            " max_msgs and max_bytes",
        )
    if queue.schedules and queue.dead_letters:
        yield QueueWarning(
            "schedules",
            "schedules: the server purges the subject of one that has fired, and in clusters servers have been seen to"
            " lose dead letters over purges of other subjects; "
            + ("their bodies are in the archive" if queue.archive else "declare an archive, which keeps their bodies"),
        )
