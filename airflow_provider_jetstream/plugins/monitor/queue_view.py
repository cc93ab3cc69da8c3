"""The page's models of a queue and its consumers, made from an overview of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueState
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.plugins.monitor.models.queues import (
    ConsumerNumbers,
    Limit,
    Problem,
    QueueNumbers,
    StateFinding,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.history import QueueHistory
    from airflow_provider_jetstream.plugins.monitor.models.queues import LetterCounts


_MAX_FINDINGS = 50


def queue_numbers(
    connection: str,
    overview: QueueOverview,
    history: QueueHistory,
    letters: LetterCounts | None,
    pending_history: list[int | None],
) -> QueueNumbers:
    """Return a queue's numbers.

    :param connection: the Airflow connection's id
    :param letters: the counts of the last scan of its dead letters
    :param pending_history: pending jobs of the last hour
    """
    health, left_over = overview.health, overview.left_over
    identity: dict[str, Any] = {
        "connection": connection,
        "queue": overview.name,
        "declared": overview.dead_letter_queue is not None,
    }
    if health is None:
        return QueueNumbers(
            **identity,
            letters=letters,
            stored=overview.state["messages"],
            bytes=overview.state["bytes"],
            problem=problem_of(overview.problem) if overview.problem else None,
        )
    oldest = (health.taken_at - health.oldest).total_seconds() if health.oldest else None
    pulls = sum(consumer.pulls for consumer in health.consumers.values())
    return QueueNumbers(
        **identity,
        pending=health.pending,
        in_flight=health.in_flight,
        redelivered=health.redelivered,
        dead_in_queue=left_over.dead if left_over else None,
        undeliverable=sum(left_over.undeliverable.values()) if left_over else None,
        schedules=left_over.schedules if left_over else None,
        letters=letters,
        stored=health.stored,
        bytes=overview.state["bytes"],
        oldest_seconds=None if oldest is None else round(max(0.0, oldest), 3),
        in_per_second=_rounded(history.rates.stored),
        out_per_second=_rounded(history.rates.gone),
        consumers=len(health.consumers),
        open_pulls=pulls,
        limits=_limits(overview.config, overview.state, oldest),
        state=history.watch.state,
        findings=_findings(history),
        pending_history=pending_history,
    )


def _findings(history: QueueHistory) -> list[StateFinding]:
    return [
        StateFinding(
            state=found.state,
            part=found.part,
            name=found.name,
            evidence=found.evidence,
            since=found.since,
            pending=found.pending,
        )
        for found in history.watch.states
        if found.state not in (QueueState.IDLE, QueueState.WORKING)
    ][:_MAX_FINDINGS]


def consumer_numbers(overview: QueueOverview, history: QueueHistory) -> list[ConsumerNumbers]:
    """Return the numbers of a queue's consumers, sorted by name."""
    if overview.health is None:
        return []
    return [
        ConsumerNumbers(
            name=consumer.name,
            filters=list(consumer.filters),
            pending=consumer.pending,
            in_flight=consumer.in_flight,
            redelivered=consumer.redelivered,
            open_pulls=consumer.pulls,
            lag=max(0, overview.health.last_sequence - consumer.delivered) if consumer.pending else 0,
            paused=consumer.paused,
            deliveries_per_second=_rounded(history.rates.deliveries.get(consumer.name)),
            state=found.state if found else QueueState.UNKNOWN,
            evidence=found.evidence if found else "",
            since=found.since if found else None,
            partition=consumer.partition,
            partitions=consumer.partitions,
            paused_until=consumer.paused_until if consumer.paused else None,
            max_in_flight=consumer.max_in_flight,
            ack_wait_seconds=consumer.ack_wait,
        )
        for consumer in sorted(overview.health.consumers.values(), key=lambda consumer: consumer.name)
        for found in (history.watch.of_consumer(consumer.name),)
    ]


def problem_of(error: JetStreamProviderError) -> Problem:
    """Return an error's code and message; no error of this package holds a credential."""
    return Problem(code=error.code, message=str(error))


def _limits(config: Mapping[str, Any], state: Mapping[str, Any], oldest: float | None) -> list[Limit]:
    uses: dict[Literal["max_msgs", "max_bytes", "max_age"], tuple[float, float]] = {
        "max_msgs": (state["messages"], config.get("max_msgs", -1)),
        "max_bytes": (state["bytes"], config.get("max_bytes", -1)),
        "max_age": (oldest or 0.0, config.get("max_age", 0) / NANOSECONDS),
    }
    limits = [
        Limit(name=name, used=used, limit=limit, share=round(used / limit, 4))
        for name, (used, limit) in uses.items()
        if limit > 0
    ]
    return sorted(limits, key=lambda limit: -limit.share)


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
