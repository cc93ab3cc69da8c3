"""The data source's options: parsed once, and refused where they are unknown or wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.key_columns import BUCKET_STREAM
from airflow_provider_jetstream.spark.source.option_names import PER_TRIGGER, require_known
from airflow_provider_jetstream.spark.source.option_values import (
    Bound,
    at_least,
    between,
    boolean,
    bound,
    bucket_name,
    byte_size,
    exact_subject,
    filter_subjects,
    id_prefix,
    nanoseconds,
    one_of,
    positive_seconds,
    sequence_ranges,
    stream_name,
    token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.spark.source.option_names import Purpose

_Value = TypeVar("_Value")
_Default = TypeVar("_Default")

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
    """How a stream is read; the fields are the options of ``docs/spark.md``."""

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
    push_filters: bool
    decompress: bool
    accepted_loss: tuple[tuple[int, int], ...] = ()
    of_bucket: bool = False
    latest: bool = False
    per_trigger: TriggerOptions = field(default_factory=TriggerOptions)


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


def read_options(options: Mapping[str, str], purpose: Purpose) -> ReadOptions:
    """Parse the options of a reader; their names may be in any case.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    parser = _OptionParser(options, purpose)
    streaming = purpose == "readStream"
    stream, latest = parser.stream(), parser.latest()
    start, end = parser.bound("starting", "latest" if streaming else "earliest"), parser.bound("ending", "latest")
    _require_order(start, end)
    return ReadOptions(
        stream,
        filters=parser.read("filterSubjects", filter_subjects, default=()),
        start=start,
        end=end,
        min_partitions=parser.read("minPartitions", at_least(1), default=1),
        max_records=parser.read("maxRecordsPerPartition", at_least(1), default=None),
        fail_on_data_loss=parser.read("failOnDataLoss", boolean, default=True),
        include_headers=parser.read("includeHeaders", boolean, default=False),
        method=parser.read("fetchMethod", one_of(_METHODS), default="auto"),
        batch=parser.read("fetchBatch", between(1, _BIGGEST_FETCH), default=None),
        max_bytes=parser.read("fetchMaxBytes", byte_size, default=None),
        push_filters=parser.read("pushFilters", boolean, default=False),
        decompress=parser.read("payloadCompression", one_of(_COMPRESSIONS), default="none") == "zlib",
        accepted_loss=parser.read("acceptedLoss", sequence_ranges, default=()),
        of_bucket=parser.has("bucket"),
        latest=latest,
        per_trigger=parser.per_trigger(),
    )


def write_options(options: Mapping[str, str], purpose: Purpose) -> WriteOptions:
    """Parse the options of a writer; their names may be in any case.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    parser = _OptionParser(options, purpose)
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


class _OptionParser:
    def __init__(self, options: Mapping[str, str], purpose: Purpose) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        require_known(options, purpose)

    def stream(self) -> str:
        if not self._options:
            raise SparkOptionError(
                "expected the option stream, found no options: Spark passes a Python data source none of a table's own,"
                " so give them with the query (FROM jobs WITH (stream 'orders', …), INSERT INTO jobs WITH (…)), or make"
                " a temporary view"
            )
        if self.has("bucket"):
            if self.has("stream"):
                raise SparkOptionError("expected stream or bucket, found both: keep one")
            self._options["stream"] = BUCKET_STREAM + self.read("bucket", bucket_name, default="")
        if "stream" not in self._options:
            raise SparkOptionError("expected the option stream, found none: name the stream to read or to write")
        if "jsdomain" in self._options and "apiprefix" in self._options:
            raise SparkOptionError("expected jsDomain or apiPrefix, found both: keep one")
        # Used by the connection; what is wrong with them is reported with the other options.
        self.read("jsDomain", token, default=None)
        self.read("apiPrefix", token, default=None)
        return self.read("stream", stream_name, default="")

    def has(self, name: str) -> bool:
        return name.lower() in self._options

    def latest(self) -> bool:
        if not self.read("latestPerSubject", boolean, default=False):
            return False
        if found := [name for name in _OF_RANGES if self.has(name)]:
            raise SparkOptionError(
                f"expected no {found[0]} with latestPerSubject, which reads the whole stream in one task: drop one of"
                " them"
            )
        return True

    def per_trigger(self) -> TriggerOptions:
        options = TriggerOptions(
            max_offsets=self.read("maxOffsetsPerTrigger", at_least(1), default=None),
            max_bytes=self.read("maxBytesPerTrigger", byte_size, default=None),
            min_offsets=self.read("minOffsetsPerTrigger", at_least(1), default=None),
            max_delay=self.read("maxTriggerDelay", positive_seconds, default=_MAX_DELAY),
        )
        if self.has("maxTriggerDelay") and not options.min_offsets:
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

    def bound(self, which: str, default: str) -> Bound:
        offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
        if offsets.lower() in self._options and timestamp.lower() in self._options:
            raise SparkOptionError(f"expected {offsets} or {timestamp}, found both: keep one")
        if timestamp.lower() in self._options:
            return Bound(time=self.read(timestamp, nanoseconds, default=0))
        return self.read(offsets, bound, default=Bound(extreme=default))

    def read(self, name: str, convert: Callable[[str], _Value], *, default: _Default) -> _Value | _Default:
        if name.lower() not in self._options:
            return default
        value = self._options[name.lower()]
        try:
            return convert(value)
        except ValueError as error:
            problem = str(error) if "found" in str(error) else f"{error}, found {value!r}"
            raise SparkOptionError(f"{name}: {problem}") from None


def _require_order(start: Bound, end: Bound) -> None:
    pairs = ("Offsets", start.sequence, end.sequence), ("Timestamp", start.time, end.time)
    for kind, first, last in pairs:
        if first is not None and last is not None and first > last:
            raise SparkOptionError(
                f"expected ending{kind} at or after starting{kind}, found {last} before {first}: exchange them"
            )
    if start.extreme == "latest" and end.extreme == "earliest":
        raise SparkOptionError("expected endingOffsets after startingOffsets, found latest to earliest: exchange them")
