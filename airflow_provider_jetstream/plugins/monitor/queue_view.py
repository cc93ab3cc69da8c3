"""The page's models of a queue and its consumers, made from an overview of the queue."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueState
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.plugins.monitor.models.figure import UNKNOWN, Figure, figure
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
    from airflow_provider_jetstream.plugins.monitor.models.figure import Certainty
    from airflow_provider_jetstream.plugins.monitor.models.queues import QueueStateName


_MAX_FINDINGS = 50
# More urgent than deaths.
_NOBODY_WORKS = frozenset({QueueState.NO_CONSUMER, QueueState.STUCK, QueueState.UNSERVED, QueueState.FULL})


@dataclass(frozen=True, slots=True)
class Reading:
    """When the numbers of a server's queues were read.

    :param age: in seconds
    :param current: whether they are current, as far as the server has told
    """

    age: float | None
    current: bool

    def of(self, value: float | None, certainty: Certainty = "exact") -> Figure:
        """Return a number that was read then."""
        return figure(value, self.age, certainty if self.current else "old")


@dataclass(frozen=True, slots=True)
class LetterFigures:
    """What is known of a queue's letters now; see the fields of the same names of ``QueueNumbers``."""

    dead: Figure = UNKNOWN
    uncertain: Figure = UNKNOWN
    parked: Figure = UNKNOWN
    lost: Figure = UNKNOWN
    deaths_per_minute: Figure = UNKNOWN

    def as_of_before(self) -> LetterFigures:
        """Return the figures as old ones, for a server that hasn't been read since."""
        found = (getattr(self, item.name) for item in fields(self))
        return LetterFigures(*(item if item.value is None else replace(item, certainty="old") for item in found))


def queue_numbers(
    connection: str,
    overview: QueueOverview,
    history: QueueHistory,
    letters: LetterFigures,
    pending_history: list[int | None],
    reading: Reading,
    deaths_of_hour: list[int],
) -> QueueNumbers:
    """Return a queue's numbers.

    :param connection: the Airflow connection's id
    :param letters: what is known of its dead letters
    :param pending_history: pending jobs of the last hour
    :param reading: of the overview
    :param deaths_of_hour: see the field of the same name of ``QueueNumbers``
    """
    health, left_over, of = overview.health, overview.left_over, reading.of
    letters = letters if reading.current else letters.as_of_before()
    numbers: dict[str, Any] = {
        "connection": connection,
        "queue": overview.name,
        "declared": overview.dead_letter_queue is not None,
        "stored": of(overview.state["messages"]),
        "bytes": of(overview.state["bytes"]),
        **{item.name: getattr(letters, item.name) for item in fields(letters)},
        "deaths_of_hour": deaths_of_hour,
    }
    if health is None:
        return QueueNumbers(**numbers, problem=problem_of(overview.problem) if overview.problem else None)
    oldest = (health.taken_at - health.oldest).total_seconds() if health.oldest else None
    findings = _findings(history, letters, overview.name)
    return QueueNumbers(
        **numbers,
        pending=of(health.pending),
        in_flight=of(health.in_flight),
        redelivered=of(health.redelivered),
        undeliverable=of(sum(left_over.undeliverable.values()) if left_over else None),
        schedules=of(left_over.schedules if left_over else None),
        oldest_seconds=of(None if oldest is None else round(max(0.0, oldest), 3)),
        in_per_second=of(_rounded(history.rates.stored)),
        out_per_second=of(_rounded(history.rates.gone)),
        consumers=of(len(health.consumers)),
        open_pulls=of(sum(consumer.pulls for consumer in health.consumers.values())),
        limits=_limits(overview.config, overview.state, oldest),
        state=_state(history.watch.state, findings, letters),
        findings=findings,
        pending_history=pending_history,
    )


def _findings(history: QueueHistory, letters: LetterFigures, queue: str) -> list[StateFinding]:
    found = [
        StateFinding(
            state=_name_of(part.state),
            part=part.part,
            name=part.name,
            evidence=part.evidence,
            since=part.since,
            pending=part.pending,
        )
        for part in history.watch.states
        if part.state not in (QueueState.IDLE, QueueState.WORKING)
    ][:_MAX_FINDINGS]
    rate = letters.deaths_per_minute
    if not rate.value or rate.certainty == "old":
        return found
    text = f"{rate.value:g} jobs a minute died in the last five minutes"
    position = sum(finding.state in _NOBODY_WORKS for finding in found)
    return [*found[:position], StateFinding(state="dying", part="queue", name=queue, evidence=text), *found[position:]]


def _name_of(state: QueueState) -> QueueStateName:
    return state.value


def _state(state: QueueState, findings: list[StateFinding], letters: LetterFigures) -> QueueStateName:
    if state in _NOBODY_WORKS:
        return _name_of(state)
    if any(finding.state == "dying" for finding in findings):
        return "dying"
    return "dead" if state == QueueState.IDLE and letters.dead.value else _name_of(state)


def consumer_numbers(overview: QueueOverview, history: QueueHistory, reading: Reading) -> list[ConsumerNumbers]:
    """Return the numbers of a queue's consumers, sorted by name."""
    if overview.health is None:
        return []
    of, last = reading.of, overview.health.last_sequence
    return [
        ConsumerNumbers(
            name=consumer.name,
            filters=list(consumer.filters),
            pending=of(consumer.pending),
            in_flight=of(consumer.in_flight),
            redelivered=of(consumer.redelivered),
            open_pulls=of(consumer.pulls),
            lag=of(max(0, last - consumer.delivered) if consumer.pending else 0),
            paused=consumer.paused,
            deliveries_per_second=of(_rounded(history.rates.deliveries.get(consumer.name))),
            state=_name_of(found.state) if found else "unknown",
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
