"""Plans which sequences are read, and by how many tasks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.data_loss import LIMITS, find_loss, report_loss

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.source.data_loss import Planned
    from airflow_provider_jetstream.spark.source.options import Bound, ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo

log = logging.getLogger(__name__)

# Where the options leave the number of tasks open, each has so many sequences at least; with more than the second one
# in a task, a warning says what to do.
_FEWEST_OF_TASK = 100_000
_MANY_OF_TASK = 1_000_000
# The method of a read that isn't one of sequences.
LATEST = "latest"
# The server answers a direct get with many messages since 2.11.
_BATCHED_DIRECT_GET = (2, 11)


@dataclass(frozen=True)
class Range:
    """The messages of one task.

    :param stream: its name
    :param first: the first sequence
    :param last: the last sequence
    :param method: ``consumer``, ``direct`` or ``api``
    :param subjects: filters; empty for every subject
    :param created: when the stream was created, as the server's text
    :param detect_loss: whether messages that are gone may be lost; those of a work queue were done
    :param planned: what is known of the messages that were there; none where nothing is
    """

    stream: str
    first: int
    last: int
    method: str
    subjects: tuple[str, ...]
    created: str
    detect_loss: bool
    planned: Planned | None = None


def fetch_method(options: ReadOptions, info: StreamInfo, version: tuple[int, ...]) -> str:
    """Choose ``consumer``, ``direct`` or ``api``, where the options leave it open.

    :param version: the server's
    :raises SparkOptionError: the stream can't be read by the method of the options
    """
    is_too_old = version < _BATCHED_DIRECT_GET
    direct = info.allow_direct and not is_too_old
    if options.fetch_method == "consumer" and info.retention != LIMITS:
        raise SparkOptionError(
            f"fetchMethod: expected direct or api for {options.stream!r}, found consumer: a consumer on a stream with"
            f" {info.retention} retention takes messages from its workers"
        )
    if options.fetch_method == "direct" and not direct:
        found = ".".join(map(str, version))
        reason = f"it needs nats-server 2.11, found {found}" if is_too_old else "it needs allow_direct on the stream"
        raise SparkOptionError(f"fetchMethod: expected api for {options.stream!r}, found direct: {reason}")
    if options.fetch_method != "auto":
        return options.fetch_method
    if info.retention == LIMITS:
        return "consumer"
    return "direct" if direct else "api"


def require_latest(options: ReadOptions, info: StreamInfo) -> None:
    """Require that the last message of each subject can be read.

    :raises SparkOptionError: only a consumer can do that, and the stream or the options allow none
    """
    if info.retention != LIMITS or options.fetch_method not in ("auto", "consumer"):
        found = f"fetchMethod {options.fetch_method}" if info.retention == LIMITS else f"{info.retention} retention"
        raise SparkOptionError(
            f"latestPerSubject: expected a stream with limits retention and its reading by a consumer, found {found}:"
            " drop it, or choose in Spark with max_by(value, seq)"
        )


def first_sequence(stream: SourceStream, options: ReadOptions, info: StreamInfo) -> int:
    """Find the first sequence to read.

    :raises DataLossError: messages from the bound on are lost, and that is an error
    :raises SparkOptionError: the bound is after the next message
    """
    bound = options.start
    if bound.time is not None:
        return stream.sequence_at(bound.time, info)
    if bound.sequence is None:
        return info.first if bound.extreme == "earliest" else info.last + 1
    _require_stored("startingOffsets", bound.sequence, info)
    if loss := find_loss(stream, info, bound.sequence, options.filter_subjects):
        report_loss(f"{stream.name} begins at {info.first}, startingOffsets is {bound.sequence}", options, loss)
    return max(bound.sequence, info.first)


def last_sequence(stream: SourceStream, bound: Bound, info: StreamInfo) -> int:
    """Find the last sequence to read; the bound itself is excluded, as with Spark's Kafka source.

    :raises SparkOptionError: the bound is after the next message
    """
    if bound.time is not None:
        return stream.sequence_at(bound.time, info) - 1
    if bound.sequence is not None:
        _require_stored("endingOffsets", bound.sequence, info)
        return bound.sequence - 1
    return info.last if bound.extreme == "latest" else info.first - 1


def _require_stored(option: str, sequence: int, info: StreamInfo) -> None:
    if sequence > info.last + 1:
        raise SparkOptionError(
            f"{option}: expected a sequence up to {info.last + 1}, the next one of the stream, found {sequence}: give"
            " latest for all that is stored"
        )


def plan_ranges(
    first: int,
    last: int,
    options: ReadOptions,
    info: StreamInfo,
    method: str,
    subjects: tuple[str, ...],
    planned: Planned | None = None,
) -> list[Range]:
    """Divide sequences into one consecutive range per task; none where there are no sequences."""
    edges = [*range_starts(first, last, options), last + 1]
    detect_loss = info.retention == LIMITS
    most = max((end - start for start, end in pairwise(edges)), default=0)
    if most > _MANY_OF_TASK:
        log.warning(
            "One task reads %d sequences of %s: raise minPartitions, or give maxRecordsPerPartition.",
            *(most, options.stream),
        )
    return [
        Range(options.stream, start, end - 1, method, subjects, info.created, detect_loss, planned)
        for start, end in pairwise(edges)
    ]


def with_share(options: ReadOptions, size: int, total: int) -> ReadOptions:
    """Give a stream its share of tasks among several, and at least one.

    :param size: how many of its sequences are read
    :param total: how many are read of all
    """
    tasks = options.min_partitions or min(options.parallelism, -(-total // _FEWEST_OF_TASK))
    return options.model_copy(update={"min_partitions": max(1, round(tasks * size / max(1, total)))})


def range_starts(first: int, last: int, options: ReadOptions) -> list[int]:
    """Return the first sequence of each task's range."""
    size = max(0, last - first + 1)
    tasks = options.min_partitions or 1
    if options.max_records_per_partition:
        tasks = max(tasks, -(-size // options.max_records_per_partition))
    tasks = min(tasks, size)
    return [first + size * index // tasks for index in range(tasks)]
