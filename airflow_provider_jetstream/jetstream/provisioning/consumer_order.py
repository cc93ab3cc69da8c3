"""Orders the steps for a work queue's consumers so that no subject has two consumers at any time.

The server refuses to create a consumer whose filter overlaps with another's (error 10100), and one without a filter
beside others (10099). An update is checked for the first only: a consumer that loses its filters silently gets the jobs
of all others too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import overlaps
from airflow_provider_jetstream.jetstream.provisioning.plan import listed
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.provisioning.plan import Step

MULTIPLE_UNFILTERED = 10099
NOT_UNIQUE = 10100

_UNFILTERED = (">",)
_INTERNAL = ("JS_SRC_", "JS_MIRROR_")


def in_accepted_order(steps: Sequence[Step], existing: Mapping[str, Mapping[str, Any]]) -> list[Step]:
    """Order steps as the server accepts them, and block those that it would refuse in any order.

    :param steps: the steps for consumers of one stream; where there is a choice, their order is kept
    :param existing: the server's configurations of the stream's consumers by name
    """
    current = {name: filter_subjects(config) for name, config in existing.items() if not is_internal(name, config)}
    ordered: list[Step] = []
    waiting = list(steps)
    while waiting:
        step = next((step for step in waiting if not _conflict(step, current)), waiting[0])
        waiting.remove(step)
        if conflict := _conflict(step, current):
            step = replace(step, blocked=(*step.blocked, conflict))
        name = consumer_of(step)
        if step.action == "remove" or step.blocked:
            # What is in the way of a blocked step isn't reported for others once more.
            current.pop(name, None)
        elif step.action != "keep":
            current[name] = filter_subjects(step.config)
        ordered.append(step)
    return ordered


def consumer_of(step: Step) -> str:
    """Return the consumer's name of a consumer's step."""
    return step.name.partition("/")[2]


def is_internal(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a consumer is that of a source or mirror, which takes no job away from others."""
    return bool(config.get("direct")) or name.startswith(_INTERNAL)


def overlap_any(subject: str, filters: Iterable[str]) -> bool:
    """Return whether a filter overlaps with one of several."""
    return any(overlaps(subject, other) for other in filters)


def filter_text(filters: Sequence[str]) -> str:
    """Return a consumer's filters as the beginning of a sentence."""
    return f"its filter {listed(filters)}"


def _conflict(step: Step, current: Mapping[str, Sequence[str]]) -> str:
    """Return why a step isn't possible beside the other consumers as they are; empty where it is."""
    name, target = consumer_of(step), filter_subjects(step.config)
    if step.action in ("keep", "remove") or sorted(current.get(name, ())) == sorted(target):
        return ""
    others = {other: filters for other, filters in current.items() if other != name}
    if target == _UNFILTERED and others:
        return (
            f"it has no filter and would get the jobs of {listed(list(others))} too (error {MULTIPLE_UNFILTERED}): give"
            " it one, or remove the others by hand once they have no jobs"
        )
    for other, filters in others.items():
        if any(overlap_any(subject, filters) for subject in target):
            return (
                f"{filter_text(target)} overlaps with {listed(filters)} of consumer {other} (error {NOT_UNIQUE}): make"
                " them disjoint; consumers that exchange subjects need two provisionings, or other names"
            )
    return ""
