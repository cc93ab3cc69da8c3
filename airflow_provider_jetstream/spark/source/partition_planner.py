"""Plans which sequences are read, by how many tasks, and decides which of them are lost.

The server keeps no trace of a message that left the head of a stream. So a finding rests on three things: which
messages the filters matched when the read was planned, which of the stream's limits can have removed anything at all,
and whether newer messages of the same subjects have superseded the ones that are gone. ``docs/spark.md`` defines a loss
in these terms and says what can't be proved.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.spark.errors import DataLossError, SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.spark.source.options import Bound, ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo


log = logging.getLogger(__name__)

LIMITS: Final = "limits"
_ROLLUP = "Nats-Rollup"
# Someone who deletes the message at the head leaves the same trace as a purge of that one message.
_DELETED_SINGLY = 1
_PLACES = 8


@dataclass(frozen=True)
class FirstMatches:
    """The first two messages at or after a sequence that the filters matched when a read was planned.

    :param start: the sequence
    :param messages: sequence and subject of each; fewer where there were no more
    """

    start: int
    messages: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Planned:
    """Facts about a range from the time at which it was planned.

    :param matches: in order; empty where the stream's sequences alone tell what was there
    :param deleted: how many of the stream's sequences were missing
    :param oldest: nothing that was to be read was stored before, in nanoseconds since 1970
    """

    matches: tuple[FirstMatches, ...] = ()
    deleted: int = 0
    oldest: int = 0

    def between(self, first: int, end: int) -> list[tuple[int, str]]:
        """Return the known messages from one sequence to before another."""
        known = {message for found in self.matches for message in found.messages if first <= message[0] < end}
        return sorted(known)

    def had_none(self, first: int, end: int) -> bool:
        """Return whether the filters are known to have matched nothing from one sequence to before another."""
        for found in self.matches:
            start = found.start
            for sequence, _ in found.messages:
                if start <= first and end <= sequence:
                    return True
                start = sequence + 1
            if start <= first and len(found.messages) < 2:  # noqa: PLR2004  # it found all there were
                return True
        return False


def record_matches(stream: SourceStream, info: StreamInfo, starts: Sequence[int], subjects: Sequence[str]) -> Planned:
    """Record messages that the filters match now, by which a loss is told from a deletion later.

    :param starts: the sequences at which ranges begin
    """
    if info.retention != LIMITS or (matches_all(subjects, info) and not info.limits.compacts and not info.deleted):
        return Planned(deleted=info.deleted, oldest=info.oldest)
    # Farther places as well: a task that has read the first ones needs them to tell what is lost.
    size = info.last + 1 - starts[0] if starts else 0
    places = {*starts[:_PLACES], *(starts[0] + size * index // _PLACES for index in range(min(size, _PLACES)))}
    starts = sorted(places)[:: max(1, len(subjects) // _PLACES)]
    return Planned(tuple(_first_matches(stream, start, subjects) for start in starts), info.deleted, info.oldest)


def _first_matches(stream: SourceStream, start: int, subjects: Sequence[str]) -> FirstMatches:
    messages: list[tuple[int, str]] = []
    position = start
    while len(messages) < 2 and (message := stream.next_of(position, subjects)):  # noqa: PLR2004
        messages.append((message.sequence, message.subject))
        position = message.sequence + 1
    return FirstMatches(start, tuple(messages))


def matches_all(subjects: Sequence[str], info: StreamInfo) -> bool:
    """Return whether the filters match every subject that the stream takes."""
    if not subjects or ">" in subjects:
        return True
    own = info.limits.subjects
    return bool(own) and all(any(covers(wide, subject) for wide in subjects) for subject in own)


@dataclass(frozen=True)
class Loss:
    """A range of sequences that are gone, and that held messages for the reader, or may have.

    :param first: the first sequence
    :param last: the last sequence
    :param cause: what is known of why
    """

    first: int
    last: int
    cause: str


def find_loss(
    stream: SourceStream,
    info: StreamInfo,
    position: int,
    subjects: Sequence[str],
    planned: Planned | None = None,
    *,
    last: int | None = None,
    oldest: int = 0,
) -> Loss | None:
    """Find out whether messages between a position and the head of the stream are lost to the reader.

    :param info: the stream as it is now
    :param position: the next sequence to read
    :param planned: what was there; none where nothing is known, as about messages stored after a checkpoint
    :param last: the last sequence to read, where there is one
    :param oldest: nothing that was to be read was stored before, in nanoseconds since 1970
    """
    if info.retention != LIMITS or info.first <= position:
        return None
    if planned and planned.had_none(position, info.first):
        return None
    end, everything = info.first, matches_all(subjects, info)
    lost_to = min(end - 1, last or end)
    oldest = max(oldest, planned.oldest if planned else 0)
    if limit := info.limits.possible_cause(position, info.last, oldest, stream.socket.max_payload):
        return Loss(position, lost_to, f"the stream's {limit} can have removed them")
    removed = planned.between(position, end) if planned else []
    if info.limits.compacts:
        removed = [message for message in removed if not _is_superseded(stream, info, message)]
        certain = len(removed)
    elif everything:
        certain = max(len(removed), end - position - (planned.deleted if planned else 0))
    else:
        certain = len(removed)
    if certain > _DELETED_SINGLY:
        acts = "purged, deleted one by one, or had a TTL" if info.limits.ttls else "purged, or deleted one by one"
        return Loss(position, lost_to, f"no limit of the stream can have removed them, so they were {acts}")
    if not (removed or everything or info.limits.compacts):
        log.warning(
            "%s begins at %d now: someone purged or deleted messages from %d on. Whether %s matched any isn't known.",
            stream.name,
            end,
            position,
            ", ".join(subjects),
        )
    return None


def _is_superseded(stream: SourceStream, info: StreamInfo, message: tuple[int, str]) -> bool:
    """Return whether the stream holds as many newer messages of a message's subject as it keeps, or a rollup."""
    sequence, subject = message
    newest = stream.last_of(subject)
    if newest is not None and newest.sequence > sequence:
        kept = info.limits.per_subject
        if newest.header(_ROLLUP) or kept == 1 or (kept > 1 and stream.count_of(subject) >= kept):
            return True
    head = stream.next_message(info.first)
    return head is not None and (head.header(_ROLLUP) or "").lower() == "all"


def report_loss(finding: str, options: ReadOptions, loss: Loss | None = None) -> None:
    """Raise an error about messages that are gone, or log a warning.

    :param loss: which; none where that isn't known
    :raises DataLossError: neither ``failOnDataLoss`` nor ``acceptedLoss`` allows it
    """
    if loss:
        finding = f"{finding}: {_lost(loss, options.filter_subjects)} are lost, {loss.cause}"
    accepted = loss is not None and _is_covered(loss, options.losses)
    if not options.fail_on_data_loss or accepted:
        log.warning("Messages are missing: %s.", finding)
        return
    accept = f" accept exactly this with acceptedLoss={_acceptance(loss, options)}," if loss else ""
    raise DataLossError(
        f"expected every message to be there still, found that {finding}; keep messages longer,{accept} or set"
        " failOnDataLoss to false to go on without any that are missing"
    )


def _lost(loss: Loss, filters: Iterable[str]) -> str:
    names = ", ".join(filters)
    return f"the messages {loss.first} to {loss.last}" + (f" as far as {names} matched them" if names else "")


def _acceptance(loss: Loss, options: ReadOptions) -> str:
    ranges = f"{loss.first}-{loss.last}"
    return json.dumps({options.stream: ranges}, ensure_ascii=False) if options.several else ranges


def _is_covered(loss: Loss, accepted: Sequence[tuple[int, int]]) -> bool:
    position = loss.first
    for first, last in sorted(accepted):
        if first <= position <= last:
            position = last + 1
    return position > loss.last


# Where the options leave the number of tasks open, a task has at least the first number of sequences; above the second
# one, a warning says what to do.
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
    :param detect_loss: whether messages that are gone may be lost; gone messages of a work queue were done
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
