"""Warnings about a queue's declaration: settings that work and will cause trouble later.

They speak of the best practices and anti-patterns of work queues; ``docs/queue.md`` has each rule under its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.queue.companion_lint import (
    archive_warnings,
    dead_letter_warnings,
    event_warnings,
)
from airflow_provider_jetstream.jetstream.queue.end_evidence import end_evidence_warnings
from airflow_provider_jetstream.jetstream.queue.message_size import size_warnings
from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings
from airflow_provider_jetstream.jetstream.queue.stored_subjects import outside_filters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue.checks import QueueFields

_UNLIMITED = -1
# What the server sets where nothing is declared.
_DEFAULT_MAX_ACK_PENDING = 1_000


def queue_warnings(queue: QueueFields) -> list[QueueWarning]:
    """Return a sentence for each setting that works and will cause trouble later."""
    return [
        *_declared_fields(queue),
        *_filter_warnings(queue),
        *size_warnings(queue),
        *dead_letter_warnings(queue),
        *event_warnings(queue),
        *end_evidence_warnings(queue),
        *archive_warnings(queue),
        *_execute_at_warnings(queue),
    ]


def _declared_fields(queue: QueueFields) -> Iterator[QueueWarning]:
    """Yield what the server's fields that are declared mean; of numbered partitions only for the first."""
    yield from QueueWarning.of(field_findings("queue", {"config": queue.config()}, "lint"))
    for consumer in queue.consumers:
        if consumer.partition in (None, 0):
            yield from QueueWarning.of(field_findings("consumer", {"config": consumer.config()}, "lint"))


def _filter_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    for consumer in queue.consumers:
        for problem in outside_filters(queue.name, consumer.name, consumer.filter_subjects, queue.subjects):
            yield QueueWarning(
                "filter-outside-subjects", f"{problem}, unless the stream has a subject_transform or sources"
            )


def _execute_at_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    for consumer in queue.consumers if queue.execute_at_header else ():
        if consumer.partition in (None, 0):
            limit = consumer.max_ack_pending
            allowed = "no limit" if limit == _UNLIMITED else f"{limit or _DEFAULT_MAX_ACK_PENDING:,}"
            yield QueueWarning(
                "execute-at-ack-pending",
                f"execute_at_header: a job that waits for its time counts as in flight, so consumer {consumer.name}"
                f" delivers nothing else while as many wait as max_ack_pending allows ({allowed})",
            )
