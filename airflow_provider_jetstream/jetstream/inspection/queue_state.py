"""The state of a queue and of each of its parts, from its numbers now and what they were before.

A number alone says little: a busy worker has no open pull request, and an acknowledged job leaves no trace in a
consumer but a smaller number in flight. So a :class:`QueueWatch` compares the numbers with those of the last time, and
remembers since when a part is in its state and when one of its jobs ended last.

Protocol: CONSUMER.INFO's ``delivered.consumer_seq`` counts deliveries, repeats included; ``num_ack_pending`` changes by
one with the first delivery of a job and with its end; so where it grows by less than the deliveries do, jobs ended or
deliveries were repeated. ``ack_floor`` moves only when a delivery ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.jetstream.inspection.health import ConsumerHealth, QueueHealth
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview

# For this time after the end of a job, a consumer without open pull requests is between two of them.
_BETWEEN_PULLS = timedelta(seconds=5)
# For this time after the end of a job, a consumer with jobs in flight works.
_WORKING = timedelta(seconds=30)
# After the ack wait and this time without the end of a job, jobs in flight count as stuck.
_STUCK_AFTER = timedelta(seconds=60)
_NAMED_SUBJECTS = 5

Part: TypeAlias = Literal["queue", "consumer", "subject"]


class QueueState(StrEnum):
    """The state of a queue or of a part of it, the most urgent first."""

    NO_CONSUMER = "no_consumer"
    """Jobs are stored, and the stream has no consumer."""
    STUCK = "stuck"
    """Jobs are pending and nobody pulls, or none has ended for longer than the ack wait and a minute."""
    UNSERVED = "unserved"
    """Jobs match no consumer, or their consumer has no worker while others of the queue have."""
    FULL = "full"
    """The stream is at a limit."""
    PAUSED = "paused"
    """A consumer is paused."""
    WAITING = "waiting"
    """Jobs are pending or in flight, and none has ended yet."""
    WORKING = "working"
    """Jobs end."""
    IDLE = "idle"
    """There are no jobs."""
    UNKNOWN = "unknown"
    """The numbers aren't known."""


_URGENCY = {state: position for position, state in enumerate(QueueState)}


@dataclass(frozen=True, slots=True)
class PartState:
    """The state of a queue, a consumer, or the jobs of a subject.

    :param evidence: the numbers that show it, a sentence
    :param since: since when it is known to be so; ``None`` where this is the first time
    :param pending: jobs that wait
    """

    state: QueueState
    part: Part
    name: str
    evidence: str
    since: datetime | None = None
    pending: int = 0

    @property
    def key(self) -> str:
        """The part, as one text."""
        return f"{self.part}:{self.name}"


@dataclass(frozen=True, slots=True)
class Known:
    """What is remembered of a part.

    :param state: its state
    :param since: since when
    :param ended_at: when one of its jobs was last seen to have ended
    :param quiet_since: since when jobs are in flight and none has ended
    """

    state: QueueState
    since: datetime
    ended_at: datetime | None = None
    quiet_since: datetime | None = None


def worst(states: list[PartState]) -> QueueState:
    """Return the most urgent of some states."""
    return min((found.state for found in states), key=_URGENCY.__getitem__, default=QueueState.UNKNOWN)


class QueueWatch:
    """The states of one queue's parts from one reading to the next.

    :ivar states: of the last reading, the most urgent first
    """

    def __init__(self) -> None:
        self.states: list[PartState] = []
        self._known: dict[str, Known] = {}
        self._last: QueueHealth | None = None

    @property
    def state(self) -> QueueState:
        """The queue's state."""
        return worst(self.states)

    def known(self) -> Mapping[str, Known]:
        """Return what is remembered of each part, by ``PartState.key``."""
        return self._known

    def remember(self, known: Mapping[str, Known]) -> None:
        """Take over what another watch remembers, where it knows of an earlier time."""
        for key, found in known.items():
            mine = self._known.get(key)
            if mine is None or (mine.state == found.state and found.since < mine.since):
                self._known[key] = found

    def of_consumer(self, name: str) -> PartState | None:
        """Return the state of a consumer."""
        return next((found for found in self.states if found.part == "consumer" and found.name == name), None)

    def compare(self, overview: QueueOverview) -> list[PartState]:
        """Compare a queue's numbers with the last ones.

        :return: the states of all parts, the most urgent first
        """
        health = overview.health
        if health is None:
            self.states = [PartState(QueueState.UNKNOWN, "queue", overview.name, "its numbers aren't known")]
            return self.states
        last = self._last if self._last and self._last.created == health.created else None
        ends = {name: self._ends(health, last, name) for name in health.consumers}
        found = [*_of_queue(overview, health), *(_of_consumer(health, name, ends) for name in health.consumers)]
        known: dict[str, Known] = {}
        for position, part in enumerate(found):
            before = self._known.get(part.key)
            since = before.since if before and before.state == part.state else None
            is_consumer = part.part == "consumer"
            known[part.key] = Known(part.state, since or health.taken_at, *(ends[part.name] if is_consumer else ()))
            found[position] = replace(part, since=since)
        self._known, self._last = known, health
        self.states = sorted(found, key=lambda part: (_URGENCY[part.state], -part.pending, part.key))
        return self.states

    def _ends(self, health: QueueHealth, last: QueueHealth | None, name: str) -> _Ends:
        """Return the time of a consumer's last end, and the time since which no job in flight has ended."""
        now, known = health.consumers[name], self._known.get(f"consumer:{name}")
        before = last.consumers.get(name) if last else None
        ended_at = known.ended_at if known else None
        quiet_since = known.quiet_since if known else None
        if before is not None and before.created == now.created:
            alone = last if len(health.consumers) == 1 else None
            gone = (health.last_sequence - alone.last_sequence) - (health.stored - alone.stored) if alone else 0
            if _has_ended(before, now, gone):
                ended_at = quiet_since = health.taken_at
        return _Ends(ended_at, (quiet_since or health.taken_at) if now.in_flight else None)


class _Ends(NamedTuple):
    ended_at: datetime | None
    quiet_since: datetime | None


def _has_ended(before: ConsumerHealth, now: ConsumerHealth, gone: int) -> bool:
    """Return whether a job has ended in between.

    :param gone: how many messages left the stream, where no other consumer takes any
    """
    if gone > 0 or now.ack_floor > before.ack_floor:
        return True
    # Repeated deliveries count as well, so it is an end only where none of the jobs in flight was repeated.
    ended = (now.deliveries - before.deliveries) - (now.in_flight - before.in_flight)
    return ended > 0 and not now.redelivered and not before.redelivered


def _of_queue(overview: QueueOverview, health: QueueHealth) -> Iterator[PartState]:
    name, left_over = overview.name, overview.left_over
    if not health.consumers:
        if health.stored:
            dead = left_over.dead if left_over else 0
            among = f", {dead} of them dead" if dead else ""
            text = f"{health.stored} jobs are stored{among}, and the stream has no consumer"
            yield PartState(QueueState.NO_CONSUMER, "queue", name, text, pending=health.stored - dead)
        else:
            yield PartState(QueueState.IDLE, "queue", name, "no jobs; the stream has no consumer either")
    elif left_over is not None:
        subjects = list(left_over.undeliverable.items())
        for subject, count in subjects[:_NAMED_SUBJECTS]:
            text = f"{count} jobs on {subject}, which no consumer's filter matches"
            yield PartState(QueueState.UNSERVED, "subject", subject, text, pending=count)
        if rest := subjects[_NAMED_SUBJECTS:]:
            count = sum(count for _, count in rest)
            text = f"{count} jobs on {len(rest)} more subjects that no consumer's filter matches"
            yield PartState(QueueState.UNSERVED, "queue", name, text, pending=count)
    else:
        yield PartState(QueueState.UNKNOWN, "queue", name, overview.uncounted)
    yield from _full(overview)


def _full(overview: QueueOverview) -> Iterator[PartState]:
    config, state = overview.config, overview.state
    average = state["bytes"] / state["messages"] if state["messages"] else 0
    uses = (
        ("max_msgs", state["messages"], 1, config.get("max_msgs", -1)),
        ("max_bytes", state["bytes"], average, config.get("max_bytes", -1)),
    )
    for limit, used, more, most in uses:
        if most > 0 and used + more > most:
            effect = "refuses more jobs" if config.get("discard") == "new" else "drops the oldest job for each new one"
            text = f"{used} of {limit} {most} are used: the stream {effect}"
            yield PartState(QueueState.FULL, "queue", overview.name, text)


def _of_consumer(health: QueueHealth, name: str, ends: Mapping[str, _Ends]) -> PartState:
    consumer = health.consumers[name]
    counts = f"{consumer.pending} pending, {consumer.in_flight} in flight"
    if consumer.paused:
        until = f" until {consumer.paused_until:%Y-%m-%dT%H:%M:%SZ}" if consumer.paused_until else ""
        state, text = QueueState.PAUSED, f"paused{until}: {counts}"
    elif consumer.in_flight:
        state, text = _with_flight(consumer, ends[name], health.taken_at)
    elif consumer.pending:
        served = [other for other in health.consumers if other != name and _is_served(health, other, ends[other])]
        state, text = _without_flight(consumer, ends[name], health.taken_at, served)
    elif _is_recent(ends[name].ended_at, health.taken_at, _BETWEEN_PULLS):
        state, text = QueueState.WORKING, "; jobs end as they come"
    else:
        state, text = QueueState.IDLE, f"no jobs; {_pulls(consumer)}"
    if state in (QueueState.STUCK, QueueState.UNSERVED, QueueState.WAITING, QueueState.WORKING):
        text = f"{counts}{text}"
    return PartState(state, "consumer", name, f"{_place(consumer)}{text}", pending=consumer.pending)


def _without_flight(consumer: ConsumerHealth, ends: _Ends, now: datetime, served: list[str]) -> tuple[QueueState, str]:
    """Return the state of a consumer that has jobs and none in flight.

    :param served: other consumers of the queue that have workers
    """
    if consumer.pulls or _is_recent(ends.ended_at, now, _BETWEEN_PULLS):
        works = _is_recent(ends.ended_at, now, _WORKING)
        return QueueState.WORKING if works else QueueState.WAITING, f"; {_pulls(consumer)}"
    if served:
        others = f"{served[0]} is" if len(served) == 1 else f"{len(served)} other consumers are"
        return QueueState.UNSERVED, f", and nobody pulls, while {others} served"
    return QueueState.STUCK, ", and nobody pulls"


def _with_flight(consumer: ConsumerHealth, ends: _Ends, now: datetime) -> tuple[QueueState, str]:
    """Return the state of a consumer that has jobs in flight."""
    if _is_recent(ends.ended_at, now, _WORKING):
        return QueueState.WORKING, "; jobs end"
    quiet, ack_wait = now - (ends.quiet_since or now), timedelta(seconds=consumer.ack_wait)
    at_limit = consumer.max_in_flight is not None and consumer.in_flight >= consumer.max_in_flight
    full = f" (max_ack_pending {consumer.max_in_flight})" if at_limit else ""
    if quiet > ack_wait + _STUCK_AFTER and (consumer.pending or consumer.redelivered):
        return QueueState.STUCK, (
            f"{full}, {consumer.redelivered} of these delivered again; none has ended for {_duration(quiet)}, with an"
            f" ack wait of {_duration(ack_wait)}; {_pulls(consumer)}"
        )
    return QueueState.WAITING, f"{full}; none has ended yet; {_pulls(consumer)}"


def _is_recent(moment: datetime | None, now: datetime, most: timedelta) -> bool:
    return moment is not None and now - moment <= most


def _is_served(health: QueueHealth, name: str, ends: _Ends) -> bool:
    consumer = health.consumers[name]
    return consumer.pulls > 0 or consumer.in_flight > 0 or _is_recent(ends.ended_at, health.taken_at, _WORKING)


def _place(consumer: ConsumerHealth) -> str:
    if consumer.partition is None:
        return ""
    return f"partition {consumer.partition} of {consumer.partitions}: "


def _pulls(consumer: ConsumerHealth) -> str:
    return f"{consumer.pulls} open pull requests" if consumer.pulls else "nobody pulls now"


def _duration(time: timedelta) -> str:
    seconds = int(time.total_seconds())
    if seconds < 120:  # noqa: PLR2004
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"  # noqa: PLR2004
