"""What has to be done about each stream and consumer of a queue, and why some of it can't be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.jetstream.client.subjects import overlaps
from airflow_provider_jetstream.jetstream.contract import Reserved, archive_filter, reserved_subjects
from airflow_provider_jetstream.jetstream.provisioning.diff import (
    Difference,
    consumer_differences,
    merged_consumer,
    merged_stream,
    stream_differences,
)
from airflow_provider_jetstream.jetstream.queue.checks import NO_SCHEDULES_WITH_DISCARD_NEW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_FIXED_STREAM_FIELDS = frozenset({"retention", "storage"})
_ONE_WAY_STREAM_FIELDS = frozenset({"deny_delete", "deny_purge"})
_FIXED_CONSUMER_FIELDS = frozenset({"ack_policy", "deliver_policy", "replay_policy"})


@dataclass(frozen=True, slots=True)
class Step:
    """What has to be done about one stream or consumer.

    :param kind: ``stream`` or ``consumer``
    :param name: the stream, or ``stream/consumer``
    :param action: ``create``, ``update`` or ``keep``
    :param config: the whole configuration to send
    :param differences: what an update changes
    :param blocked: why the server can't make the change, and what to do instead
    """

    kind: Literal["stream", "consumer"]
    name: str
    action: Literal["create", "update", "keep"]
    config: dict[str, Any]
    differences: tuple[Difference, ...] = ()
    blocked: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = "".join(f"\n    {difference}" for difference in self.differences)
        reasons = "".join(f"\n    not possible: {reason}" for reason in self.blocked)
        return f"{self.action} {self.kind} {self.name}{changes}{reasons}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that make the server match a declaration, in the order in which they must be taken.

    :param steps: the streams that hear of the queue's jobs first, so that no end of a job is missed
    """

    steps: tuple[Step, ...]

    @property
    def changes(self) -> tuple[Step, ...]:
        """The steps that change something."""
        return tuple(step for step in self.steps if step.action != "keep")

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps)


def stream_step(existing: Mapping[str, Any] | None, declared: dict[str, Any]) -> Step:
    """Tell what has to be done about a stream.

    :param existing: the server's configuration, if it has the stream
    :param declared: the fields that are declared; ``None`` for one that is to be removed
    :return: the step
    """
    name = declared["name"]
    if existing is None:
        return Step("stream", name, "create", declared)
    differences = stream_differences(existing, declared)
    blocked = tuple(reason for difference in differences if (reason := _stream_block(name, difference)) is not None)
    action: Literal["update", "keep"] = "update" if differences else "keep"
    merged = merged_stream(existing, declared)
    return Step("stream", name, action, merged, differences, (*blocked, *_schedule_blocks(existing, merged)))


def consumer_step(
    stream: str,
    existing: Mapping[str, Any] | None,
    declared: dict[str, Any],
    reserved: Iterable[Reserved] = (),
    resizing: str | None = None,
) -> Step:
    """Tell what has to be done about a consumer.

    :param stream: its stream
    :param existing: the server's configuration, if it has the consumer
    :param declared: the fields that are declared
    :param reserved: the subjects of the stream that no consumer may take
    :param resizing: why there can't be this number of partitions now
    :return: the step
    """
    name = f"{stream}/{declared['name']}"
    blocked = [*_reserved_blocks(declared, reserved), *([resizing] if resizing else [])]
    if existing is None:
        return Step("consumer", name, "create", declared, blocked=tuple(blocked))
    differences = consumer_differences(existing, declared)
    blocked += [
        f"{difference.field} of a consumer is fixed when it is created; remove the consumer by hand if no job is in"
        " flight, then provision again"
        for difference in differences
        if difference.field in _FIXED_CONSUMER_FIELDS
    ]
    action: Literal["update", "keep"] = "update" if differences else "keep"
    return Step("consumer", name, action, merged_consumer(existing, declared), differences, tuple(blocked))


def undeclared_consumer_steps(
    stream: str, existing: Mapping[str, Any], reserved: Iterable[Reserved], resizing: str | None = None
) -> tuple[Step, ...]:
    """Tell what about a consumer keeps its queue from being as declared though no declaration knows it.

    :param stream: the work queue
    :param existing: the server's configuration of a consumer that isn't declared
    :param reserved: the subjects of the stream that no consumer may take
    :param resizing: what is wrong with it as one of more partitions than are declared
    :return: nothing for a consumer that is in nobody's way, since it is left alone
    """
    blocked = (*_reserved_blocks(existing, reserved), *([resizing] if resizing else []))
    return (Step("consumer", f"{stream}/{existing['name']}", "keep", dict(existing), (), blocked),) if blocked else ()


def declared_queue_config(queue: WorkQueue, existing: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give what is declared of a work queue's own stream, in view of what it has from earlier declarations.

    :param queue: the declaration
    :param existing: the server's configuration, if it has the stream
    :return: the fields that are declared; ``None`` for one that is to be removed
    """
    declared = queue.config()
    declared["subjects"] = [*queue.subjects, *(each.subjects for each in reserved_subjects_in_use(queue, existing))]
    republish = (existing or {}).get("republish") or {}
    if queue.archive_disabled and republish.get("dest") == archive_filter(queue.name):
        declared["republish"] = None
    return declared


def reserved_subjects_in_use(queue: WorkQueue, existing: Mapping[str, Any] | None) -> tuple[Reserved, ...]:
    """Tell which subjects of a queue aren't for jobs.

    A queue that no longer declares them keeps them: a marker that is stored still keeps its letter from being redriven
    twice, and a schedule that is stored still makes jobs.

    :param queue: the declaration
    :param existing: the server's configuration, if it has the stream
    :return: those that are declared, or were once
    """
    captured = (existing or {}).get("subjects") or ()
    return tuple(
        each
        for each in reserved_subjects(queue.name)
        if getattr(queue, each.flag)
        or (each.subjects in captured and not any(overlaps(subject, each.subjects) for subject in queue.subjects))
    )


def _reserved_blocks(consumer: Mapping[str, Any], reserved: Iterable[Reserved]) -> Iterator[str]:
    filters = [consumer.get("filter_subject"), *(consumer.get("filter_subjects") or ())]
    for subject in [subject for subject in filters if subject] or [">"]:
        for own in reserved:
            if overlaps(subject, own.subjects):
                yield f"it takes {subject}, {own.what} ({own.subjects}) among it: give it a narrower filter"


def _schedule_blocks(existing: Mapping[str, Any], merged: Mapping[str, Any]) -> Iterator[str]:
    if not merged.get("allow_msg_schedules") or existing.get("allow_msg_schedules"):
        return
    if merged.get("discard") == "new":
        yield f'it has discard "new", and the server allows no schedules with that: {NO_SCHEDULES_WITH_DISCARD_NEW}'
    if merged.get("deny_purge"):
        yield "it has deny_purge, which can't be taken back, and the server purges fired schedules; use another stream"


def _stream_block(name: str, difference: Difference) -> str | None:
    if difference.field in _FIXED_STREAM_FIELDS:
        return (
            f"{difference.field} of a stream is fixed when it is created; declare {difference.found!r}, or drain"
            f" {name} and remove it by hand, then provision again"
        )
    if difference.field in _ONE_WAY_STREAM_FIELDS and difference.found:
        return f"{difference.field} can't be taken back once it is set; declare true, or leave it out"
    if difference.field == "republish" and difference.found and difference.declared:
        where, ours = difference.found.get("dest"), difference.declared["dest"]
        if where != ours:
            return (
                f"{name} republishes to {where}, and a stream republishes to one place only; declare archive: false to"
                f" keep that, or take it away by hand to have an archive on {ours}, then provision again"
            )
    return None
