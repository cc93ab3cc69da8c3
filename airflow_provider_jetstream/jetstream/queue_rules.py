"""What makes a queue's declaration an error or worth a warning.

An error is what the server would refuse, or accept and then lose jobs over; everything else that hurts is a warning.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.names import MAX_DELIVERIES, TERMINATED, completion_filter
from airflow_provider_jetstream.jetstream.subjects import (
    covered_by_any,
    covers,
    first_overlap,
    overlaps,
    subject_problem,
)
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue import Consumer, Stream, WorkQueue

_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
_SAMPLE = re.compile(r"(\d{1,3})%?")
_ALL = 100
# The server's own subjects, and those among them that a stream may capture all the same.
_RESERVED = (
    ("$JS.>", "$JS.EVENT.>", "JetStream's own API"),
    ("$SYS.>", "$SYS.ACCOUNT.>", "the server's system API"),
)
_LONG_ACK_WAIT = 15 * 60 * NANOSECONDS
_SHORTEST_WINDOW = 100_000_000
_SHORTEST_WAIT = 1_000_000


def consumer_problems(consumer: Consumer) -> list[str]:
    """Find what makes a consumer unusable by itself.

    :param consumer: the declaration
    :return: a sentence each
    """
    problems = list(_name_problems("consumer", consumer.name))
    problems += [
        f"filter subject {subject!r} of consumer {consumer.name}: {problem}"
        for subject in consumer.filter_subjects
        if (problem := subject_problem(subject))
    ]
    if pair := first_overlap(consumer.filter_subjects):
        problems.append(f"the filter subjects {pair[0]} and {pair[1]} of consumer {consumer.name} overlap: keep one")
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


def queue_problems(queue: WorkQueue) -> list[str]:
    """Find what makes a queue unusable.

    :param queue: the declaration, its consumers already checked by themselves
    :return: a sentence each
    """
    problems = list(_stream_problems(queue))
    problems += _filter_problems(queue)
    streams: list[Stream] = [stream for stream in (queue, queue.dead_letters, queue.events) if stream is not None]
    for part in streams[1:]:
        problems += _stream_problems(part)
    for one, other in combinations(streams, 2):
        problems += _shared_stream_problems(one, other)
    if queue.dead_letters and not covered_by_any(queue.dead_letters.subjects, f"{MAX_DELIVERIES}.{queue.name}.*"):
        problems.append(
            f"the dead letter queue {queue.dead_letters.name} doesn't capture {MAX_DELIVERIES}.{queue.name}.*, so dead"
            " letters would go unseen: add that subject"
        )
    if queue.events and not covered_by_any(queue.events.subjects, completion_filter(queue.name)):
        problems.append(
            f"the events stream {queue.events.name} doesn't capture {completion_filter(queue.name)}, so nobody would"
            " learn that a job ended: add that subject"
        )
    if queue.dead_letters:
        problems += [
            f"consumer {consumer.name} retries for ever (max_deliver -1), so the dead letter queue"
            f" {queue.dead_letters.name} would never see a letter of it: set max_deliver, or drop dead_letters"
            for consumer in queue.consumers
            if consumer.max_deliver == -1
        ]
    return problems


def queue_warnings(queue: WorkQueue) -> list[str]:
    """Find what works but will hurt later.

    :param queue: a usable declaration
    :return: a sentence each
    """
    warnings: list[str] = []
    if queue.discard != "new" and _limited(queue.max_msgs, queue.max_bytes, queue.max_msgs_per_subject):
        warnings.append(
            'discard "old" with a limit drops the oldest waiting jobs without a word when the queue is full: use'
            ' discard "new", which refuses new jobs instead'
        )
    if queue.max_age is not None and queue.max_age > 0:
        warnings.append(
            f"max_age {format_duration(queue.max_age)} removes waiting jobs and dead letters of that age without an"
            " advisory"
        )
    if queue.dead_letters is None:
        warnings.append("no dead_letters: jobs that use up their deliveries stay in the queue, and nothing tells")
    else:
        letters = queue.dead_letters
        if not covered_by_any(letters.subjects, f"{TERMINATED}.{queue.name}.*"):
            warnings.append(f"{letters.name} doesn't capture {TERMINATED}.{queue.name}.*: terminated jobs go unseen")
        if letters.discard == "new" and any(
            limit is not None and limit > 0 for limit in (letters.max_msgs, letters.max_bytes)
        ):
            warnings.append(f"{letters.name} refuses advisories once it is full (discard new): dead letters go unseen")
    warnings += [
        f"consumer {consumer.name}: an ack_wait of {format_duration(consumer.ack_wait)} means that a worker's death is"
        " noticed only after that time; use a shorter one and let workers report progress"
        for consumer in queue.consumers
        if consumer.ack_wait is not None and consumer.ack_wait > _LONG_ACK_WAIT
    ]
    warnings += [
        f"consumer {consumer.name} retries for ever (max_deliver -1): a poison job is run again and again"
        for consumer in queue.consumers
        if consumer.max_deliver == -1
    ]
    return warnings


def _limited(*limits: int | None) -> bool:
    return any(limit is not None and limit > 0 for limit in limits)


def _filter_problems(queue: WorkQueue) -> Iterator[str]:
    names = [consumer.name for consumer in queue.consumers]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two consumers are named {name}"
    unfiltered = [consumer.name for consumer in queue.consumers if not consumer.filter_subjects]
    if unfiltered and len(queue.consumers) > 1:
        yield (
            f"consumer {unfiltered[0]} has no filter subject and would take every job: the server refuses other"
            " consumers beside it; give each its own filter"
        )
    pairs = [(consumer, subject) for consumer in queue.consumers for subject in consumer.filter_subjects]
    for consumer, subject in pairs:
        if not any(overlaps(captured, subject) for captured in queue.subjects):
            yield (
                f"filter {subject} of consumer {consumer.name} is outside the stream's subjects"
                f" ({', '.join(queue.subjects)}), so it would never get a job"
            )
    for index, (ours, left) in enumerate(pairs):
        for theirs, right in pairs[index + 1 :]:
            if ours is not theirs and overlaps(left, right):
                yield (
                    f"the filters {left} (consumer {ours.name}) and {right} (consumer {theirs.name}) overlap: in a work"
                    " queue every job has one consumer; make them disjoint"
                )


def _stream_problems(stream: Stream) -> Iterator[str]:
    yield from _name_problems("stream", stream.name)
    if not stream.subjects:
        yield f"stream {stream.name} has no subjects: name at least one"
    for subject in stream.subjects:
        if problem := subject_problem(subject):
            yield f"subject {subject!r} of stream {stream.name}: {problem}"
        for own, allowed, what in _RESERVED:
            if overlaps(subject, own) and not covers(allowed, subject):
                yield f"subject {subject} of stream {stream.name} would capture {what}: narrow it"
    if pair := first_overlap(stream.subjects):
        yield f"the subjects {pair[0]} and {pair[1]} of stream {stream.name} overlap: keep one"
    window, age = stream.duplicate_window, stream.max_age
    if age is not None and 0 < age < _SHORTEST_WINDOW:
        yield f"max_age of stream {stream.name}: expected at least 100ms, or -1, found {format_duration(age)}"
    if window is not None and window < _SHORTEST_WINDOW:
        yield (
            f"duplicate_window of stream {stream.name}: expected at least 100ms, found {format_duration(window)}; leave"
            " it out for the server's 2 minutes"
        )
    if window and age and window > age > 0:
        yield (
            f"duplicate_window ({format_duration(window)}) of stream {stream.name} is longer than its max_age"
            f" ({format_duration(age)}): the server refuses that; shorten the window"
        )


def _shared_stream_problems(one: Stream, other: Stream) -> Iterator[str]:
    if one.name == other.name:
        yield f"the {one.kind} and the {other.kind} are both named {one.name}: each needs its own stream"
    for ours in one.subjects:
        for theirs in other.subjects:
            if overlaps(ours, theirs):
                yield (
                    f"subject {theirs} of stream {other.name} overlaps {ours} of {one.name}: the server allows one"
                    " stream per subject"
                )


def _name_problems(kind: str, name: str) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield f"{name!r} can't name a {kind}: expected no white space, dots, wildcards or slashes, at most 255 of them"
