"""How a stream is read or written, by the data source's options, which are refused where they are unknown or wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.option_names import PER_TRIGGER
from airflow_provider_jetstream.spark.source.option_parser import OptionParser
from airflow_provider_jetstream.spark.source.option_values import (
    Bound,
    at_least,
    between,
    boolean,
    byte_size,
    exact_subject,
    filter_subjects,
    id_prefix,
    one_of,
    positive_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.spark.source.option_names import Purpose

# What chooses sequences or divides them.
_OF_RANGES = (
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "minPartitions",
    "maxRecordsPerPartition",
)
_METHODS = ("auto", "consumer", "direct", "api")
_COMPRESSIONS = ("none", "zlib")
_NULL_VALUES = ("error", "empty")
_NATS_HEADERS = ("keep", "drop")
# As with Spark's Kafka source.
_MAX_DELAY = 15 * 60.0
_BIGGEST_FETCH = 10_000
_MOST_IN_FLIGHT = 10_000


@dataclass(frozen=True)
class TriggerOptions:
    """How much a batch of a query reads; the fields are the options of ``docs/spark.md``.

    :param max_delay: seconds
    """

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None
    max_delay: float = _MAX_DELAY

    @property
    def given(self) -> tuple[str, ...]:
        """The options that were given, by name."""
        values = (self.max_offsets, self.max_bytes, self.min_offsets)
        return tuple(name for name, value in zip(PER_TRIGGER, values, strict=False) if value)


@dataclass(frozen=True)
class StreamOptions:
    """The stream's name."""

    stream: str


@dataclass(frozen=True)
class ReadOptions(StreamOptions):
    """How a stream is read; the fields are the options of ``docs/spark.md``.

    :param among_several: whether it is one of several, so that options name it with its values
    """

    filters: tuple[str, ...]
    start: Bound
    end: Bound
    min_partitions: int
    max_records: int | None
    fail_on_data_loss: bool
    include_headers: bool
    method: str
    batch: int | None
    max_bytes: int | None
    decompress: bool
    accepted_loss: tuple[tuple[int, int], ...] = ()
    of_bucket: bool = False
    latest: bool = False
    per_trigger: TriggerOptions = field(default_factory=TriggerOptions)
    among_several: bool = False


@dataclass(frozen=True)
class WriteOptions(StreamOptions):
    """How rows are written; the fields are the options of ``docs/spark.md``."""

    subject: str | None
    max_in_flight: int
    ack_timeout: float
    min_duplicate_window: float
    prefix: str | None
    null_is_empty: bool = False
    drop_nats_headers: bool = False


def shared_options(parser: OptionParser) -> ReadOptions:
    """Parse what holds for every stream of a read.

    :return: with neither a name nor bounds
    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    return ReadOptions(
        "",
        filters=parser.read("filterSubjects", filter_subjects, default=()),
        start=Bound(extreme="earliest"),
        end=Bound(extreme="latest"),
        min_partitions=parser.read("minPartitions", at_least(1), default=1),
        max_records=parser.read("maxRecordsPerPartition", at_least(1), default=None),
        fail_on_data_loss=parser.read("failOnDataLoss", boolean, default=True),
        include_headers=parser.read("includeHeaders", boolean, default=False),
        method=parser.read("fetchMethod", one_of(_METHODS), default="auto"),
        batch=parser.read("fetchBatch", between(1, _BIGGEST_FETCH), default=None),
        max_bytes=parser.read("fetchMaxBytes", byte_size, default=None),
        decompress=parser.read("payloadCompression", one_of(_COMPRESSIONS), default="none") == "zlib",
        of_bucket=parser.has("bucket"),
        latest=_latest(parser),
        per_trigger=_per_trigger(parser),
    )


def _latest(parser: OptionParser) -> bool:
    if not parser.read("latestPerSubject", boolean, default=False):
        return False
    if found := [name for name in _OF_RANGES if parser.has(name)]:
        raise SparkOptionError(
            f"expected no {found[0]} with latestPerSubject, which reads the whole stream in one task: drop one of them"
        )
    return True


def _per_trigger(parser: OptionParser) -> TriggerOptions:
    options = TriggerOptions(
        max_offsets=parser.read("maxOffsetsPerTrigger", at_least(1), default=None),
        max_bytes=parser.read("maxBytesPerTrigger", byte_size, default=None),
        min_offsets=parser.read("minOffsetsPerTrigger", at_least(1), default=None),
        max_delay=parser.read("maxTriggerDelay", positive_seconds, default=_MAX_DELAY),
    )
    if parser.has("maxTriggerDelay") and not options.min_offsets:
        raise SparkOptionError(
            "expected minOffsetsPerTrigger with maxTriggerDelay, which limits the wait for it, found none: give it"
            " too, or drop maxTriggerDelay"
        )
    if options.min_offsets and options.max_offsets and options.min_offsets > options.max_offsets:
        raise SparkOptionError(
            f"expected minOffsetsPerTrigger up to maxOffsetsPerTrigger, found {options.min_offsets} and"
            f" {options.max_offsets}: lower the first, or raise the second"
        )
    return options


def write_options(options: Mapping[str, str], purpose: Purpose) -> WriteOptions:
    """Parse the options of a writer; their names may be in any case.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    parser = OptionParser(options, purpose)
    return WriteOptions(
        parser.stream(),
        subject=parser.read("subject", exact_subject, default=None),
        max_in_flight=parser.read("maxInFlight", between(1, _MOST_IN_FLIGHT), default=1000),
        ack_timeout=parser.read("ackTimeout", parse_seconds, default=10.0),
        min_duplicate_window=parser.read("minDuplicateWindow", parse_seconds, default=120.0),
        prefix=parser.read("msgIdPrefix", id_prefix, default=None),
        null_is_empty=parser.read("nullValue", one_of(_NULL_VALUES), default="error") == "empty",
        drop_nats_headers=parser.read("natsHeaders", one_of(_NATS_HEADERS), default="keep") == "drop",
    )
