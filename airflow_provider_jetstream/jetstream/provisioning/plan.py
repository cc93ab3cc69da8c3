"""The steps of provisioning: one for each stream and consumer of a queue, with what blocks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.finding import Refusal
from airflow_provider_jetstream.jetstream.queue.server_fields import config_fields, field_findings, refusals
from airflow_provider_jetstream.jetstream.queue.stream_config import outside_filters, stored_subjects
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import (
    Difference,
    consumer_differences,
    merged_consumer,
    merged_stream,
    stream_differences,
)
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.queue.field_rules import Kind
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_FIXED_STREAM_FIELDS = config_fields("queue", change="fixed").keys()
_ONE_WAY_STREAM_FIELDS = config_fields("queue", change="once").keys()
_FIXED_CONSUMER_FIELDS = config_fields("consumer", change="fixed").keys()


@dataclass(frozen=True, slots=True)
class Drain:
    """What is awaited before a consumer's filters change: that nothing of it is pending or in flight.

    :param queue: the work queue
    :param jobs: how many of its stored jobs another consumer, or none, would get
    :param receivers: the consumers that get its subjects
    :param filters: the filters whose dead letters are parked then, since another consumer would deliver them
    """

    queue: WorkQueue
    jobs: int
    receivers: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()

    def __str__(self) -> str:
        awaited = f"waits for {job_count(self.jobs)} of it and parks what is dead"
        return f"{awaited}, then gives its subjects to {listed(self.receivers)}" if self.receivers else awaited


@dataclass(frozen=True, slots=True)
class Parking:
    """The dead letters that are parked before the creation of a consumer that would run them again.

    :param queue: the work queue
    :param sequences: the letters' stream sequences, in order
    """

    queue: WorkQueue
    sequences: tuple[int, ...]

    def __str__(self) -> str:
        return f"parks {letter_count(len(self.sequences))} first, which it would run again"


@dataclass(frozen=True, slots=True)
class Step:
    """The provisioning of one stream or consumer.

    :param name: the stream, or ``stream/consumer``
    :param config: the whole configuration to send
    :param differences: what an update changes
    :param blocked: why the server can't make the change, and what to do instead
    :param drain: the jobs of a consumer that are awaited first
    :param parking: the dead letters that are parked first
    :param role: what the stream or consumer is to the queue
    """

    kind: Literal["stream", "consumer"]
    name: str
    action: Literal["create", "update", "keep", "remove"]
    config: dict[str, Any]
    differences: tuple[Difference, ...] = ()
    blocked: tuple[str, ...] = ()
    drain: Drain | None = None
    parking: Parking | None = None
    role: Kind = "consumer"

    @property
    def consumer(self) -> str:
        """The consumer's name; empty for a stream."""
        return self.name.partition("/")[2]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about settings that the server accepts and that will cause trouble later."""
        if self.action == "remove":
            return ()
        found = field_findings(self.role, {"config": self.config}, "plan", name=self.name.rpartition("/")[2])
        return tuple(str(finding) for finding in found if not isinstance(finding, Refusal))

    def __str__(self) -> str:
        before = (*self.differences, *filter(None, (self.drain, self.parking)))
        lines = [*map(str, before), *(f"note: {note}" for note in self.notes)]
        lines += [f"not possible: {reason}" for reason in self.blocked]
        return f"{self.action} {self.kind} {self.name}" + "".join(f"\n    {line}" for line in lines)


@dataclass(frozen=True, slots=True)
class Plan(TaskReport):
    """The steps that make the server match a declaration, in their order.

    :param steps: the streams that capture the events of the queue's jobs come first, so that no end of a job is missed
    :param parked: a sentence on the dead letters that were parked when it was executed, with what brings them back
    """

    steps: tuple[Step, ...]
    parked: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[Step, ...]:
        """The steps that change something."""
        return tuple(step for step in self.steps if step.action != "keep" or step.drain)

    @property
    def blocked(self) -> tuple[Step, ...]:
        """The steps that are impossible; with any, nothing is changed."""
        return tuple(step for step in self.steps if step.blocked)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.steps), *self.parked])


def stream_step(existing: Mapping[str, Any] | None, declared: dict[str, Any], role: Kind) -> Step:
    """Return the step of a stream.

    :param existing: the server's configuration, if it has the stream
    :param declared: the declared fields; ``None`` for one to remove
    :param role: what it is to the queue
    """
    name = declared["name"]
    if existing is None:
        return Step("stream", name, "create", declared, blocked=tuple(_unfed(declared)), role=role)
    if existing.get("allow_msg_schedules") and not declared.get("allow_msg_schedules"):
        # The server keeps roll-ups with it; they are named as a risk.
        declared = {field: value for field, value in declared.items() if field != "allow_rollup_hdrs"}
    differences = stream_differences(existing, declared)
    blocked = tuple(reason for difference in differences if (reason := _stream_blocker(name, difference)) is not None)
    action: Literal["update", "keep"] = "update" if differences else "keep"
    merged = merged_stream(existing, declared)
    blocked += tuple(_unfed(merged))
    blocked += tuple(refusals(field_findings(role, {"config": merged}, "plan")))
    return Step("stream", name, action, merged, differences, blocked, role=role)


def consumer_step(
    stream: str,
    existing: Mapping[str, Any] | None,
    declared: dict[str, Any],
    stored: Sequence[str] = (),
) -> Step:
    """Return the step of a consumer.

    :param existing: the server's configuration, if it has the consumer
    :param declared: the declared fields
    :param stored: the subjects that the stream stores; none where its filters aren't compared with them
    """
    name = f"{stream}/{declared['name']}"
    blocked = list(outside_filters(stream, declared["name"], filter_subjects(declared), stored))
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
    merged = merged_consumer(existing, declared)
    blocked += refusals(field_findings("consumer", {"config": merged}, "plan", name=declared["name"]))
    return Step("consumer", name, action, merged, differences, tuple(blocked))


def job_count(count: int) -> str:
    """Return a number of jobs as text."""
    return "1 job" if count == 1 else f"{count} jobs"


def letter_count(count: int) -> str:
    """Return a number of dead letters as text."""
    return "1 dead letter" if count == 1 else f"{count} dead letters"


def listed(names: Sequence[str], shown: int = 4) -> str:
    """Return names as text: the first few, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _unfed(config: Mapping[str, Any]) -> Iterator[str]:
    if not stored_subjects(config):
        yield (
            "it has no subjects, and no sources or mirror that feed it, so it would never get a job: name its subjects,"
            " or create the stream with its sources first"
        )


def _stream_blocker(name: str, difference: Difference) -> str | None:
    if difference.field in _FIXED_STREAM_FIELDS:
        return (
            f"{difference.field} of a stream is fixed when it is created; declare {difference.existing!r}, or drain"
            f" {name} and remove it by hand, then provision again"
        )
    if difference.field in _ONE_WAY_STREAM_FIELDS and difference.existing:
        return f"{difference.field} can't be reset once it is set; declare true, or leave it out"
    if difference.field == "republish" and difference.existing and difference.declared:
        existing, declared = difference.existing.get("dest"), difference.declared["dest"]
        if existing != declared:
            # A dead letter queue republishes its entries to the audit, a work queue its jobs to the archive.
            of_entries = declared.startswith("entries.")
            keep, use = ("republish: null", "copies") if of_entries else ("archive: false", "an archive")
            return (
                f"{name} republishes to {existing}, and a stream republishes to one subject only; declare {keep}"
                f" to keep that, or remove it by hand for {use} on {declared}, then provision again"
            )
    return None
