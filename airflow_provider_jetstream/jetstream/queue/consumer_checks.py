"""Checks of one consumer's declaration, and of the names of consumers and streams."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from airflow_provider_jetstream.jetstream.client.subjects import first_overlap, subject_problem
from airflow_provider_jetstream.jetstream.contract import NO_CONSUMER
from airflow_provider_jetstream.jetstream.queue.partitions import PLACEHOLDER, placeholder_problem
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
_GROUP = re.compile(r"[A-Za-z0-9/_=-]{1,16}")
_SAMPLE = re.compile(r"(\d{1,3})%?")
_MAX_PERCENT = 100
_MIN_WAIT = 1_000_000

# Protocol: NATS ADR-42.
PriorityPolicy: TypeAlias = Literal["overflow", "prioritized", "pinned_client"]


class ConsumerFields(Protocol):
    """The fields of a consumer's declaration that the checks read."""

    name: str
    filter_subjects: tuple[str, ...]
    max_deliver: int | None
    ack_wait: int | None
    backoff: tuple[int, ...]
    max_ack_pending: int | None
    sample_freq: str | None
    partitions: int | None
    partition: int | None
    inactive_threshold: int | None
    mem_storage: bool | None
    priority_groups: tuple[str, ...]
    priority_policy: PriorityPolicy | None


def consumer_problems(consumer: ConsumerFields) -> list[str]:
    """Return a sentence for each thing that makes a consumer unusable, whatever its queue."""
    problems = list(name_problems("consumer", consumer.name))
    problems += [
        f"filter subject {subject!r} of consumer {consumer.name}: {problem}"
        for subject in consumer.filter_subjects
        if (problem := subject_problem(subject))
    ]
    if pair := first_overlap(consumer.filter_subjects):
        problems.append(f"the filter subjects {pair[0]} and {pair[1]} of consumer {consumer.name} overlap: keep one")
    problems += _partition_problems(consumer)
    problems += _priority_problems(consumer)
    if consumer.max_deliver is None:
        problems.append(
            f"consumer {consumer.name} has no max_deliver, so the server would retry a poison job for ever and no job"
            " could become a dead letter: set it (5, say), or -1 where endless retries are wanted"
            " (docs/reference/server-fields.md#no-max-deliver)"
        )
    elif consumer.max_deliver < 1 and consumer.max_deliver != -1:
        problems.append(f"consumer {consumer.name}: expected max_deliver of at least 1, found {consumer.max_deliver}")
    if consumer.backoff and consumer.ack_wait is not None and consumer.ack_wait != consumer.backoff[0]:
        problems.append(
            f"consumer {consumer.name}: the server replaces ack_wait ({format_duration(consumer.ack_wait)}) by the"
            f" first backoff ({format_duration(consumer.backoff[0])}): drop ack_wait"
        )
    if consumer.backoff and consumer.max_deliver and 0 < consumer.max_deliver < len(consumer.backoff):
        problems.append(
            f"consumer {consumer.name}: expected at most max_deliver ({consumer.max_deliver}) backoff steps, found"
            f" {len(consumer.backoff)}"
        )
    waits = [*consumer.backoff, *([] if consumer.ack_wait is None else [consumer.ack_wait])]
    if too_short := [wait for wait in waits if wait < _MIN_WAIT]:
        problems.append(
            f"consumer {consumer.name}: expected ack_wait and backoff of at least 1ms, found"
            f" {format_duration(too_short[0])}"
        )
    if consumer.max_ack_pending is not None and consumer.max_ack_pending < 1 and consumer.max_ack_pending != -1:
        problems.append(
            f"consumer {consumer.name}: expected max_ack_pending of at least 1, or -1 for no limit, found"
            f" {consumer.max_ack_pending}"
        )
    if consumer.inactive_threshold is not None and consumer.inactive_threshold < 0:
        problems.append(
            f"consumer {consumer.name}: expected an inactive_threshold of at least 0, found"
            f" {format_duration(consumer.inactive_threshold)}: leave it out to keep the consumer"
        )
    sample = _SAMPLE.fullmatch(consumer.sample_freq or "0")
    if not sample or int(sample[1]) > _MAX_PERCENT:
        problems.append(
            f'consumer {consumer.name}: expected sample_freq such as "100%", found {consumer.sample_freq!r}'
        )
    return problems


def name_problems(kind: str, name: str) -> Iterator[str]:
    """Yield what is wrong with the name of a stream or consumer."""
    if not _NAME.fullmatch(name):
        yield f"{name!r} can't name a {kind}: expected no white space, dots, wildcards or slashes, at most 255 of them"
    if kind == "consumer" and name == NO_CONSUMER:
        yield f"{name!r} can't name a consumer: subjects have it where no consumer is meant"


def _partition_problems(consumer: ConsumerFields) -> Iterator[str]:
    is_numbered = consumer.partition is not None
    if is_numbered and not (
        consumer.partitions is not None
        and 0 <= (consumer.partition or 0) < consumer.partitions
        and consumer.name.endswith(f"-{consumer.partition}")
    ):
        yield (
            f"consumer {consumer.name}: expected partition {consumer.partition} to be one of its partitions and the end"
            " of its name: declare partitions only, and the partition follows"
        )
    has_placeholders = consumer.partitions is not None and not is_numbered
    if has_placeholders and not consumer.filter_subjects:
        yield (
            f"consumer {consumer.name} has partitions and no filter subject: give it one such as"
            f' "tasks.{PLACEHOLDER}.>"'
        )
    for subject in consumer.filter_subjects:
        if has_placeholders and (problem := placeholder_problem(subject)):
            yield f"filter subject {subject!r} of consumer {consumer.name}, which has partitions: {problem}"
        if not has_placeholders and PLACEHOLDER in subject:
            yield f"filter subject {subject!r} of consumer {consumer.name} needs partitions: declare their number"


def _priority_problems(consumer: ConsumerFields) -> Iterator[str]:
    groups, policy = consumer.priority_groups, consumer.priority_policy
    for group in groups:
        if not _GROUP.fullmatch(group):
            yield (
                f"consumer {consumer.name}: expected a priority group of 1 to 16 letters, digits, -, _, / and =, found"
                f" {group!r}"
            )
    for group in sorted({group for group in groups if groups.count(group) > 1}):
        yield f"consumer {consumer.name}: the priority group {group!r} is named twice: keep one"
    if groups and policy is None:
        yield (
            f"consumer {consumer.name} has priority groups ({', '.join(groups)}) without a policy, which the server"
            " refuses: set priority_policy to overflow or prioritized"
        )
    if policy is not None and not groups:
        yield (
            f"consumer {consumer.name} has the priority policy {policy} without a group, which the server refuses: name"
            ' one in priority_groups, such as ["workers"]'
        )
