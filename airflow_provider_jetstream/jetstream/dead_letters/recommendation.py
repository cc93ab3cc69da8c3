"""What to do about the dead letters of one cause, and what speaks for it.

Whether a cause is still there is decided by attempts rather than by the clock: of every (deaths + completions) of the
consumer while the letters died, a share died of this cause. Where so many jobs have been completed since the last such
death that none of them dying has a probability below one percent, the cause is taken for gone. Otherwise it is still
there where the last letter died lately, and unknown where it didn't: then nothing has been tried since.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime
    from typing import Any

    from airflow_provider_jetstream.jetstream.dead_letters.cause_group import CauseGroup
    from airflow_provider_jetstream.jetstream.dead_letters.recent_completions import RecentCompletions

_LATELY = timedelta(minutes=10)
_LONGEST_GAP = timedelta(days=1)
_GAPS = 10
_LEAST_COMPLETIONS = 10
_IMPROBABLE = 0.01
_MOST_DIED_AGAIN = 0.5
_CANARY = 10


class Cause(StrEnum):
    """Whether what killed the letters would kill them again."""

    STILL_FAILING = "still failing"
    """A letter died of it lately, and too little has been completed since."""
    NOT_SEEN_SINCE = "not seen since"
    """So much has been completed since that the cause is probably gone."""
    UNKNOWN = "unknown"
    """Nothing has been tried since."""


class Action(StrEnum):
    """What to do next."""

    NOTHING = "nothing"
    """There are no dead letters."""
    WAIT = "wait"
    """Don't redrive: the letters would die again."""
    TRY_A_FEW = "try_a_few"
    """Redrive a few, then the others if none dies again."""
    REPAIR = "repair"
    """As they are, the jobs can't be done: repair or park them."""
    START_WORKERS = "start_workers"
    """Nobody would run the redriven jobs."""
    ADD_CONSUMER = "add_consumer"
    """No consumer takes the jobs."""


@dataclass(frozen=True, slots=True)
class ConsumerActivity:
    """What a consumer does at the moment.

    :param pending: jobs that it has yet to deliver for the first time
    :param in_flight: deliveries that haven't ended
    :param pulls: open pull requests of workers
    :param paused: whether it is paused
    """

    pending: int
    in_flight: int
    pulls: int
    paused: bool

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ConsumerActivity:
        """Read it from the server's CONSUMER.INFO."""
        return cls(info["num_pending"], info["num_ack_pending"], info["num_waiting"], bool(info.get("paused")))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do about the letters of one cause.

    :param text: what to do, in a sentence
    :param evidence: what speaks for it, a sentence each
    :param completed_since: how many jobs the same consumer has completed since the last of the letters died; ``None``
        where nothing records that
    """

    action: Action
    cause: Cause
    text: str
    evidence: tuple[str, ...]
    completed_since: int | None


def recommend(
    group: CauseGroup, completions: RecentCompletions | None, activity: ConsumerActivity | None, now: datetime
) -> Recommendation:
    """Decide what to do about a group.

    :param completions: what the queue's consumers have completed lately, where that is recorded
    :param activity: of the group's consumer, where it exists
    :param now: by the server's clock
    """
    since = during = None
    if completions and group.consumer:
        since = completions.count(group.consumer, group.last)
        during = _completed_during(group, completions, now)
    cause = _cause(group, since, during, now)
    action, text = _action(group, cause, activity)
    evidence = tuple(_evidence(group, activity, since, during, now))
    return Recommendation(action, cause, text, evidence, since)


def _completed_during(group: CauseGroup, completions: RecentCompletions, now: datetime) -> int:
    """Return how many jobs the consumer completed while the letters died; what isn't stored any more is estimated."""
    consumer = group.consumer or ""
    known = completions.within(consumer, max(group.first, completions.since), group.last)
    if completions.since <= group.first:
        return known
    unknown = min(completions.since, group.last) - group.first
    seconds = (now - completions.since).total_seconds()
    rate = completions.within(consumer, completions.since, now) / seconds if seconds > 0 else 0.0
    return known + round(rate * unknown.total_seconds())


def _cause(group: CauseGroup, since: int | None, during: int | None, now: datetime) -> Cause:
    if since is not None and during is not None and since >= _LEAST_COMPLETIONS:
        share = group.count / (group.count + during)
        if (1 - share) ** since <= _IMPROBABLE:
            return Cause.NOT_SEEN_SINCE
    gap = (group.last - group.first) / max(1, group.count - 1)
    if now - group.last <= max(_LATELY, min(_GAPS * gap, _LONGEST_GAP)):
        return Cause.STILL_FAILING
    return Cause.UNKNOWN


def _action(group: CauseGroup, cause: Cause, activity: ConsumerActivity | None) -> tuple[Action, str]:
    return _obstacle(group, activity) or _advice(group, cause, activity)


def _obstacle(group: CauseGroup, activity: ConsumerActivity | None) -> tuple[Action, str] | None:
    """Return what keeps the jobs from being delivered, whatever they died of."""
    consumer = group.consumer
    if group.reason == Reason.UNDELIVERABLE:
        return Action.ADD_CONSUMER, "declare a consumer for their subjects: then they are delivered without a redrive"
    if consumer and activity is None:
        advice = "provision the queue again, parking its dead letters first (--park-dead), then"
        return Action.ADD_CONSUMER, f"consumer {consumer} is gone: {advice} {_canary(group)}"
    if activity and activity.paused:
        return Action.START_WORKERS, f"consumer {consumer} is paused: resume it, then {_canary(group)}"
    return None


def _advice(group: CauseGroup, cause: Cause, activity: ConsumerActivity | None) -> tuple[Action, str]:
    is_idle = activity is not None and not activity.pulls and not activity.in_flight
    is_given_up = group.reason == Reason.TERMINATED and cause == Cause.UNKNOWN
    if cause == Cause.STILL_FAILING:
        return Action.WAIT, f"don't redrive yet: mend the cause, then {_canary(group)}"
    if group.redriven >= group.count * _MOST_DIED_AGAIN:
        return Action.REPAIR, "a redrive didn't help before: repair them, or park them"
    if group.reason == Reason.EXPIRED:
        return Action.REPAIR, "their time is over, and would be after a redrive: repair them, or park them"
    if is_idle:
        text = f"no worker pulls from consumer {group.consumer}: start one, then {_canary(group)}"
        return Action.START_WORKERS, text
    if is_given_up:
        text = f"a worker gave them up for good: mend the handler or repair them, then {_canary(group)}"
        return Action.REPAIR, text
    tried = _canary(group) + (", then the others if none dies again" if group.count > 1 else "")
    return Action.TRY_A_FEW, tried if cause == Cause.NOT_SEEN_SINCE else f"nothing has been tried since: {tried}"


def _canary(group: CauseGroup) -> str:
    if group.count == 1:
        return "redrive it"
    return f"redrive {_CANARY if group.count > _CANARY else 1} of them first"


def _evidence(
    group: CauseGroup, activity: ConsumerActivity | None, since: int | None, during: int | None, now: datetime
) -> Iterator[str]:
    yield f"the last one died {_span(now - group.last)} ago, the first {_span(now - group.first)} ago"
    if group.redriven:
        yield f"{group.redriven} of {group.count} were redriven before and died again"
    if since is None and group.consumer:
        yield f"what consumer {group.consumer} completes isn't recorded: the queue has no events"
    elif since is not None:
        # Nothing lies between the first and the last death of one letter.
        meanwhile = f", and about {during} while they died" if group.first < group.last else ""
        yield f"consumer {group.consumer} completed {since} jobs since the last one died{meanwhile}"
        if during and during > group.count:
            yield "most of its jobs are completed, so the cause concerns these jobs rather than all"
    if activity:
        state = "is paused, " if activity.paused else ""
        yield (
            f"consumer {group.consumer} {state}has {activity.pulls} open pull requests of workers,"
            f" {activity.in_flight} jobs in flight and {activity.pending} pending"
        )


def _span(span: timedelta) -> str:
    seconds = max(0, round(span.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
