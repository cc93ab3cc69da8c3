"""What makes the declaration of a consumer an error by itself, and what can name a consumer or a stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import first_overlap, subject_problem
from airflow_provider_jetstream.jetstream.queue.partitions import partition_problems
from airflow_provider_jetstream.jetstream.queue.priority_groups import priority_problems
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue.declaration import Consumer

_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
_SAMPLE = re.compile(r"(\d{1,3})%?")
_ALL = 100
_SHORTEST_WAIT = 1_000_000


def consumer_problems(consumer: Consumer) -> list[str]:
    """Find what makes a consumer unusable by itself.

    :param consumer: the declaration
    :return: a sentence each
    """
    problems = list(name_problems("consumer", consumer.name))
    problems += [
        f"filter subject {subject!r} of consumer {consumer.name}: {problem}"
        for subject in consumer.filter_subjects
        if (problem := subject_problem(subject))
    ]
    if pair := first_overlap(consumer.filter_subjects):
        problems.append(f"the filter subjects {pair[0]} and {pair[1]} of consumer {consumer.name} overlap: keep one")
    problems += partition_problems(consumer)
    problems += priority_problems(consumer)
    if consumer.max_deliver is None:
        problems.append(
            f"consumer {consumer.name} has no max_deliver, so the server would retry a poison job for ever and no job"
            " could become a dead letter: set it (5, say), or -1 where endless retries are wanted"
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
    if too_short := [wait for wait in waits if wait < _SHORTEST_WAIT]:
        problems.append(
            f"consumer {consumer.name}: expected ack_wait and backoff of at least 1ms, found"
            f" {format_duration(too_short[0])}"
        )
    if consumer.max_ack_pending is not None and consumer.max_ack_pending < 1 and consumer.max_ack_pending != -1:
        problems.append(
            f"consumer {consumer.name}: expected max_ack_pending of at least 1, or -1 for no limit, found"
            f" {consumer.max_ack_pending}"
        )
    sample = _SAMPLE.fullmatch(consumer.sample_freq or "0")
    if not sample or int(sample[1]) > _ALL:
        problems.append(
            f'consumer {consumer.name}: expected sample_freq such as "100%", found {consumer.sample_freq!r}'
        )
    return problems


def name_problems(kind: str, name: str) -> Iterator[str]:
    """Find what is wrong with a name.

    :param kind: what it names
    :param name: the name
    :return: a sentence each
    """
    if not _NAME.fullmatch(name):
        yield f"{name!r} can't name a {kind}: expected no white space, dots, wildcards or slashes, at most 255 of them"
