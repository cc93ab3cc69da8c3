"""From looks at queues to what the page shows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.plugins.monitor.models import ConsumerNumbers, Limit, Problem, QueueNumbers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.jetstream.inspection.health import QueueHealth
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.history import QueueHistory, Rates
    from airflow_provider_jetstream.plugins.monitor.models import LetterCounts

_NANOSECONDS = 10**9


def queue_numbers(
    connection: str, look: QueueOverview, history: QueueHistory, letters: LetterCounts | None
) -> QueueNumbers:
    """Tell a queue's numbers.

    :param connection: the Airflow connection's id
    :param look: the last look at it
    :param history: what was seen of it before
    :param letters: what the last scan of its dead letters found
    :return: the numbers
    """
    health, left = look.health, look.left_over
    known: dict[str, Any] = {
        "connection": connection,
        "queue": look.name,
        "declared": look.dead_letter_queue is not None,
    }
    if health is None:
        return QueueNumbers(
            **known,
            letters=letters,
            stored=look.state["messages"],
            bytes=look.state["bytes"],
            problem=problem_of(look.problem) if look.problem else None,
        )
    oldest = (health.taken_at - health.oldest).total_seconds() if health.oldest else None
    pulls = sum(each.pulls for each in health.consumers.values())
    return QueueNumbers(
        **known,
        pending=health.pending,
        in_flight=health.in_flight,
        redelivered=health.redelivered,
        dead_in_queue=left.dead if left else None,
        undeliverable=sum(left.undeliverable.values()) if left else None,
        schedules=left.schedules if left else None,
        letters=letters,
        stored=health.stored,
        bytes=look.state["bytes"],
        oldest_seconds=None if oldest is None else round(max(0.0, oldest), 3),
        in_per_second=_rounded(history.rates.stored),
        out_per_second=_rounded(history.rates.gone),
        consumers=len(health.consumers),
        open_pulls=pulls,
        limits=_limits(look.config, look.state, oldest),
        state=_state(health, history.rates, pulls),
        pending_history=history.sparkline(),
    )


def consumer_numbers(look: QueueOverview, rates: Rates) -> list[ConsumerNumbers]:
    """Tell the numbers of a queue's consumers.

    :param look: the last look at it
    :param rates: between the last two looks
    :return: the consumers by name
    """
    if look.health is None:
        return []
    return [
        ConsumerNumbers(
            name=each.name,
            filters=list(each.filters),
            pending=each.pending,
            in_flight=each.in_flight,
            redelivered=each.redelivered,
            open_pulls=each.pulls,
            lag=max(0, look.health.last_sequence - each.delivered) if each.pending else 0,
            paused=each.paused,
            deliveries_per_second=_rounded(rates.deliveries.get(each.name)),
        )
        for each in sorted(look.health.consumers.values(), key=lambda each: each.name)
    ]


def problem_of(error: JetStreamProviderError) -> Problem:
    """Tell of an error; it never holds a credential.

    :param error: the error
    :return: its code and its message
    """
    return Problem(code=error.code, message=str(error))


def moment(at: datetime) -> str:
    """Write a time for people.

    :param at: the time
    :return: to the second, in UTC
    """
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _limits(config: Mapping[str, Any], state: Mapping[str, Any], oldest: float | None) -> list[Limit]:
    age = config.get("max_age", 0) / _NANOSECONDS
    known: dict[Literal["max_msgs", "max_bytes", "max_age"], tuple[float, float]] = {
        "max_msgs": (state["messages"], config.get("max_msgs", -1)),
        "max_bytes": (state["bytes"], config.get("max_bytes", -1)),
        "max_age": (oldest or 0.0, age),
    }
    limits = [
        Limit(name=name, used=used, limit=limit, share=round(used / limit, 4))
        for name, (used, limit) in known.items()
        if limit > 0
    ]
    return sorted(limits, key=lambda each: -each.share)


def _state(health: QueueHealth, rates: Rates, pulls: int) -> Literal["idle", "working", "waiting", "stuck", "unknown"]:
    if rates.gone:
        return "working"
    if health.in_flight:
        return "waiting"
    if health.pending:
        return "waiting" if pulls else "stuck"
    return "idle"


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
