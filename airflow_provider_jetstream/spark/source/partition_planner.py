"""Which sequences are read, and by how many tasks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from airflow_provider_jetstream.spark.errors import DataLossError, SparkOptionError

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.source.filter_pushdown import PushedBounds
    from airflow_provider_jetstream.spark.source.options import Bound, ReadOptions
    from airflow_provider_jetstream.spark.source.stream_api import SourceStream, StreamInfo

log = logging.getLogger(__name__)

LIMITS = "limits"
# The server answers a direct get with many messages since 2.11.
_BATCHES = (2, 11)


@dataclass(frozen=True)
class Range:
    """The messages of one task.

    :param first: the first sequence
    :param last: the last sequence
    :param method: how they are fetched
    :param subjects: filters; empty for every subject
    :param created: of the stream, in the server's words
    :param watched: whether messages are lost where the stream begins after ``first``
    :param must_exist: whether that is an error
    """

    first: int
    last: int
    method: str
    subjects: tuple[str, ...]
    created: str
    detect_loss: bool
    fail_on_loss: bool


def fetch_method(options: ReadOptions, facts: StreamInfo, version: tuple[int, ...]) -> str:
    """Choose how messages are fetched.

    :param options: which may have chosen already
    :param facts: about the stream
    :param version: the server's
    :return: ``consumer``, ``direct`` or ``api``
    :raises SparkOptionError: the stream can't be read as the options say
    """
    direct = facts.allow_direct and version >= _BATCHES
    if options.method == "consumer" and facts.retention != LIMITS:
        raise SparkOptionError(
            f"fetchMethod: expected direct or api for {options.stream!r}, found consumer: a consumer on a stream with"
            f" {facts.retention} retention takes messages from its workers"
        )
    if options.method == "direct" and not direct:
        raise SparkOptionError(
            f"fetchMethod: expected api for {options.stream!r}, found direct: the stream needs allow_direct, and the"
            " server 2.11 or later"
        )
    if options.method != "auto":
        return options.method
    if facts.retention == LIMITS:
        return "consumer"
    return "direct" if direct else "api"


def first_sequence(stream: SourceStream, bound: Bound, facts: StreamInfo, *, fail_on_data_loss: bool) -> int:
    """Find where reading begins.

    :param stream: the stream
    :param bound: what the options say
    :param facts: about the stream
    :param fail_on_data_loss: whether it is an error that the first message is gone
    :return: the first sequence to read
    :raises DataLossError: it is gone
    """
    if bound.time is not None:
        return stream.sequence_at(bound.time, facts)
    if bound.sequence is None:
        return facts.first if bound.extreme == "earliest" else facts.last + 1
    if bound.sequence < facts.first and facts.retention == LIMITS:
        report_loss(
            f"{stream.name} begins at {facts.first}, startingOffsets is {bound.sequence}", fail=fail_on_data_loss
        )
    return max(bound.sequence, facts.first)


def last_sequence(stream: SourceStream, bound: Bound, facts: StreamInfo) -> int:
    """Find where reading ends.

    :param stream: the stream
    :param bound: what the options say; a sequence or a time is the first that isn't read, as with Spark's Kafka source
    :param facts: about the stream
    :return: the last sequence to read
    """
    if bound.time is not None:
        return stream.sequence_at(bound.time, facts) - 1
    if bound.sequence is not None:
        return min(bound.sequence - 1, facts.last)
    return facts.last if bound.extreme == "latest" else facts.first - 1


def within(stream: SourceStream, first: int, last: int, facts: StreamInfo, narrowed: PushedBounds) -> tuple[int, int]:
    """Cut a span to what a query can want.

    :param stream: the stream
    :param first: the first sequence
    :param last: the last sequence
    :param facts: about the stream
    :param narrowed: what it can want
    :return: first and last sequence
    """
    first = max(first, narrowed.low)
    if narrowed.high is not None:
        last = min(last, narrowed.high)
    if narrowed.since is not None:
        first = max(first, stream.sequence_at(narrowed.since, facts))
    if narrowed.until is not None:
        last = min(last, stream.sequence_at(narrowed.until + 1, facts) - 1)
    return first, last


def plan_ranges(
    first: int, last: int, options: ReadOptions, facts: StreamInfo, method: str, subjects: tuple[str, ...]
) -> list[Range]:
    """Divide a span between tasks.

    :param first: its first sequence
    :param last: its last sequence
    :param options: how many tasks
    :param facts: about the stream
    :param method: how messages are fetched
    :param subjects: filters; empty for every subject
    :return: ranges that follow each other; none for an empty span
    """
    size = last - first + 1
    if size <= 0:
        return []
    parts = options.min_partitions
    if options.max_records:
        parts = max(parts, -(-size // options.max_records))
    parts = min(parts, size)
    edges = [first + size * index // parts for index in range(parts + 1)]
    # What is gone from a work queue was done.
    watched = facts.retention == LIMITS
    must_exist = watched and options.fail_on_data_loss
    return [
        Range(start, end - 1, method, subjects, facts.created, watched, must_exist) for start, end in pairwise(edges)
    ]


def report_loss(what: str, *, fail: bool) -> None:
    """Deal with messages that are gone.

    :param what: what was found
    :param fail: whether that is an error
    :raises DataLossError: it is
    """
    if fail:
        raise DataLossError(
            f"expected every message to be there still, found that {what}: messages were purged, expired or deleted"
            " before they were read; keep them longer, or set failOnDataLoss to false to go on without them"
        )
    log.warning("Messages are missing: %s.", what)
