"""Plans which sequences are read, and by how many tasks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from airflow_provider_jetstream.spark.errors import DataLossError, SparkOptionError

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.source.filter_pushdown import PushedBounds
    from airflow_provider_jetstream.spark.source.options import Bound, ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo

log = logging.getLogger(__name__)

LIMITS = "limits"
# The server answers a direct get with many messages since 2.11.
_BATCHED_DIRECT_GET = (2, 11)


@dataclass(frozen=True)
class Range:
    """The messages of one task.

    :param first: the first sequence
    :param last: the last sequence
    :param method: ``consumer``, ``direct`` or ``api``
    :param subjects: filters; empty for every subject
    :param created: when the stream was created, as the server's text
    :param detect_loss: whether messages are lost where the stream begins after ``first``
    :param fail_on_loss: whether a loss is an error
    """

    first: int
    last: int
    method: str
    subjects: tuple[str, ...]
    created: str
    detect_loss: bool
    fail_on_loss: bool


def fetch_method(options: ReadOptions, info: StreamInfo, version: tuple[int, ...]) -> str:
    """Choose ``consumer``, ``direct`` or ``api``, where the options leave it open.

    :param version: the server's
    :raises SparkOptionError: the stream can't be read by the method of the options
    """
    direct = info.allow_direct and version >= _BATCHED_DIRECT_GET
    if options.method == "consumer" and info.retention != LIMITS:
        raise SparkOptionError(
            f"fetchMethod: expected direct or api for {options.stream!r}, found consumer: a consumer on a stream with"
            f" {info.retention} retention takes messages from its workers"
        )
    if options.method == "direct" and not direct:
        raise SparkOptionError(
            f"fetchMethod: expected api for {options.stream!r}, found direct: the stream needs allow_direct, and the"
            " server 2.11 or later"
        )
    if options.method != "auto":
        return options.method
    if info.retention == LIMITS:
        return "consumer"
    return "direct" if direct else "api"


def first_sequence(stream: SourceStream, bound: Bound, info: StreamInfo, *, fail_on_data_loss: bool) -> int:
    """Find the first sequence to read.

    :raises DataLossError: the bound's message is no longer stored, and ``fail_on_data_loss`` is set
    """
    if bound.time is not None:
        return stream.sequence_at(bound.time, info)
    if bound.sequence is None:
        return info.first if bound.extreme == "earliest" else info.last + 1
    if bound.sequence < info.first and info.retention == LIMITS:
        report_loss(
            f"{stream.name} begins at {info.first}, startingOffsets is {bound.sequence}", fail=fail_on_data_loss
        )
    return max(bound.sequence, info.first)


def last_sequence(stream: SourceStream, bound: Bound, info: StreamInfo) -> int:
    """Find the last sequence to read; the bound itself is excluded, as with Spark's Kafka source."""
    if bound.time is not None:
        return stream.sequence_at(bound.time, info) - 1
    if bound.sequence is not None:
        return min(bound.sequence - 1, info.last)
    return info.last if bound.extreme == "latest" else info.first - 1


def narrow(stream: SourceStream, first: int, last: int, info: StreamInfo, bounds: PushedBounds) -> tuple[int, int]:
    """Narrow a range of sequences by the filters that a query pushes down."""
    first = max(first, bounds.low)
    if bounds.high is not None:
        last = min(last, bounds.high)
    if bounds.since is not None:
        first = max(first, stream.sequence_at(bounds.since, info))
    if bounds.until is not None:
        last = min(last, stream.sequence_at(bounds.until + 1, info) - 1)
    return first, last


def plan_ranges(
    first: int, last: int, options: ReadOptions, info: StreamInfo, method: str, subjects: tuple[str, ...]
) -> list[Range]:
    """Divide sequences into one consecutive range per task; none where there are no sequences."""
    size = last - first + 1
    if size <= 0:
        return []
    tasks = options.min_partitions
    if options.max_records:
        tasks = max(tasks, -(-size // options.max_records))
    tasks = min(tasks, size)
    edges = [first + size * index // tasks for index in range(tasks + 1)]
    # A message that is gone from a work queue was done.
    detect_loss = info.retention == LIMITS
    fail_on_loss = detect_loss and options.fail_on_data_loss
    return [
        Range(start, end - 1, method, subjects, info.created, detect_loss, fail_on_loss)
        for start, end in pairwise(edges)
    ]


def report_loss(finding: str, *, fail: bool) -> None:
    """Raise an error about messages that are gone, or log a warning.

    :raises DataLossError: ``fail`` is set
    """
    if fail:
        raise DataLossError(
            f"expected every message to be there still, found that {finding}: messages were purged, expired or deleted"
            " before they were read; keep them longer, or set failOnDataLoss to false to go on without them"
        )
    log.warning("Messages are missing: %s.", finding)
