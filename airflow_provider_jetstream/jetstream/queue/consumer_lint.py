"""Warnings about the consumers of a queue: how jobs are retried, how soon a crash is noticed, who gets the jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from airflow_provider_jetstream.jetstream.queue.consumer_checks import ConsumerFields

LONG_ACK_WAIT = 5 * 60 * NANOSECONDS
# What the server sets where nothing is declared.
DEFAULT_MAX_ACK_PENDING = 1_000
_UNLIMITED = -1


def consumer_warnings(consumers: Iterable[ConsumerFields], *, execute_at_header: bool) -> Iterator[QueueWarning]:
    """Yield the warnings of consumers; of numbered partitions, which are all alike, only the first has any.

    :param execute_at_header: whether workers hold jobs back until the time in their header
    """
    for consumer in consumers:
        if consumer.partition in (None, 0):
            yield from _crash_warnings(consumer)
            yield from _retry_warnings(consumer)
            yield from _sharing_warnings(consumer)
            yield from lifetime_warnings(
                consumer.name, consumer.inactive_threshold, in_memory=bool(consumer.mem_storage)
            )
            if execute_at_header:
                yield _execute_at_warning(consumer)


def lifetime_warnings(consumer: str, inactive_threshold: int | None, *, in_memory: bool) -> Iterator[QueueWarning]:
    """Yield why a consumer may be gone one day.

    :param inactive_threshold: as declared, or as the server has it
    :param in_memory: whether its state is in memory
    """
    harm = "its jobs wait for a new one, which would run its dead letters again"
    if inactive_threshold and inactive_threshold > 0:
        yield QueueWarning(
            "inactive-threshold",
            f"consumer {consumer} has an inactive_threshold of {format_duration(inactive_threshold)}: the server"
            f" removes it once nobody has pulled for so long, and {harm}; declare 0",
        )
    if in_memory:
        yield QueueWarning(
            "memory-consumer",
            f"consumer {consumer} is in memory (mem_storage): a restart of its server removes it, and {harm}; create it"
            " without that",
        )


def _crash_warnings(consumer: ConsumerFields) -> Iterator[QueueWarning]:
    # The first backoff replaces the ack wait.
    field, wait = ("first backoff", consumer.backoff[0]) if consumer.backoff else ("ack_wait", consumer.ack_wait)
    if wait is not None and wait > LONG_ACK_WAIT:
        yield QueueWarning(
            "long-ack-wait",
            f"consumer {consumer.name}: {'a' if consumer.backoff else 'an'} {field} of {format_duration(wait)} delays"
            " the redelivery of a crashed worker's jobs by that time; use a shorter one and let workers report"
            " progress",
        )


def _retry_warnings(consumer: ConsumerFields) -> Iterator[QueueWarning]:
    if consumer.max_deliver == _UNLIMITED:
        yield QueueWarning(
            "no-max-deliver",
            f"consumer {consumer.name} retries for ever (max_deliver -1): a poison job is run again and again",
        )
    if not consumer.backoff and consumer.max_deliver != 1:
        used_up = "runs again at once" if consumer.max_deliver == _UNLIMITED else "uses up its deliveries at once"
        yield QueueWarning(
            "no-backoff",
            f"consumer {consumer.name} has no backoff: a job that a worker naks without a delay {used_up}; declare"
            ' waits such as ["1s", "5s", "30s"]',
        )


def _sharing_warnings(consumer: ConsumerFields) -> Iterator[QueueWarning]:
    if consumer.priority_policy == "pinned_client":
        yield QueueWarning(
            "stateful-workers",
            f"consumer {consumer.name} gives all its jobs to one worker (pinned_client), as only workers with state of"
            " their own need: keep the state outside, and let any worker do any job",
        )
    if consumer.max_ack_pending == _UNLIMITED:
        yield QueueWarning(
            "unlimited-ack-pending",
            f"consumer {consumer.name} has no limit of jobs in flight (max_ack_pending -1): one worker that pulls too"
            " many keeps them from all others for the ack wait",
        )
    if consumer.max_ack_pending == 1 and consumer.partition is None:
        yield QueueWarning(
            "one-job-at-a-time",
            f"consumer {consumer.name} has one job in flight at a time (max_ack_pending 1), whatever the number of its"
            " workers: declare partitions, of which each has its own order",
        )


def _execute_at_warning(consumer: ConsumerFields) -> QueueWarning:
    limit = consumer.max_ack_pending
    allowed = "no limit" if limit == _UNLIMITED else f"{limit or DEFAULT_MAX_ACK_PENDING:,}"
    return QueueWarning(
        "execute-at-ack-pending",
        f"execute_at_header: a job that waits for its time counts as in flight, so consumer {consumer.name} delivers"
        f" nothing else while as many wait as max_ack_pending allows ({allowed})",
    )
