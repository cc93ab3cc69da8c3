"""The data source's options: parsed once, and refused where they are unknown or wrong."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from airflow_provider_jetstream.jetstream.client.subjects import covers, first_overlap, subject_problem
from airflow_provider_jetstream.jetstream.units import parse_seconds, parse_size
from airflow_provider_jetstream.spark.connection_options import NAMED_CONNECTION, VARIABLES
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Value = TypeVar("_Value")
_Default = TypeVar("_Default")

Purpose: TypeAlias = Literal["load", "read", "readStream", "write", "writeStream"]

_ALWAYS = (*VARIABLES, *NAMED_CONNECTION, "stream")
_READING = (
    "filterSubjects",
    "startingOffsets",
    "startingTimestamp",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "fetchMethod",
    "fetchBatch",
    "fetchMaxBytes",
    "payloadCompression",
)
_WRITING = ("subject", "maxInFlight", "ackTimeout", "minDuplicateWindow", "msgIdPrefix")
_ONCE = ("endingOffsets", "endingTimestamp", "pushFilters")
_GROWING = ("maxOffsetsPerTrigger",)
_NAMES: dict[Purpose, tuple[str, ...]] = {
    # Spark requests the schema before the data source learns which of the next two it is.
    "load": (*_ALWAYS, *_READING, *_ONCE, *_GROWING),
    "read": (*_ALWAYS, *_READING, *_ONCE),
    "readStream": (*_ALWAYS, *_READING, *_GROWING),
    "write": (*_ALWAYS, *_WRITING),
    # Spark passes its own options to the sink.
    "writeStream": (*_ALWAYS, *_WRITING, "checkpointLocation", "queryName"),
}
_METHODS = ("auto", "consumer", "direct", "api")
_COMPRESSIONS = ("none", "zlib")
_EXTREMES = ("earliest", "latest")
_BIGGEST_FETCH = 10_000
_MOST_IN_FLIGHT = 10_000
_MILLISECOND = 1_000_000


@dataclass(frozen=True)
class StreamOptions:
    """The stream's name."""

    stream: str


@dataclass(frozen=True)
class Bound:
    """Where a read begins or ends: one of these.

    :param extreme: ``earliest`` or ``latest``
    :param sequence: a sequence
    :param time: nanoseconds since 1970
    """

    extreme: str | None = None
    sequence: int | None = None
    time: int | None = None


@dataclass(frozen=True)
class ReadOptions(StreamOptions):
    """How a stream is read; the fields are the options of ``docs/spark.md``."""

    filters: tuple[str, ...]
    start: Bound
    end: Bound
    min_partitions: int
    max_records: int | None
    max_per_trigger: int | None
    fail_on_data_loss: bool
    include_headers: bool
    method: str
    batch: int | None
    max_bytes: int | None
    push_filters: bool
    decompress: bool


@dataclass(frozen=True)
class WriteOptions(StreamOptions):
    """How rows are written; the fields are the options of ``docs/spark.md``."""

    subject: str | None
    max_in_flight: int
    ack_timeout: float
    min_duplicate_window: float
    prefix: str | None


def read_options(options: Mapping[str, str], purpose: Purpose) -> ReadOptions:
    """Parse the options of a reader; their names may be in any case.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    parser = _OptionParser(options, purpose)
    streaming = purpose == "readStream"
    return ReadOptions(
        parser.stream(),
        filters=parser.read("filterSubjects", _filters, default=()),
        start=parser.bound("starting", "latest" if streaming else "earliest"),
        end=parser.bound("ending", "latest"),
        min_partitions=parser.read("minPartitions", _at_least(1), default=1),
        max_records=parser.read("maxRecordsPerPartition", _at_least(1), default=None),
        max_per_trigger=parser.read("maxOffsetsPerTrigger", _at_least(1), default=None),
        fail_on_data_loss=parser.read("failOnDataLoss", _boolean, default=True),
        include_headers=parser.read("includeHeaders", _boolean, default=False),
        method=parser.read("fetchMethod", _one_of(_METHODS), default="auto"),
        batch=parser.read("fetchBatch", _between(1, _BIGGEST_FETCH), default=None),
        max_bytes=parser.read("fetchMaxBytes", _size, default=None),
        push_filters=parser.read("pushFilters", _boolean, default=False),
        decompress=parser.read("payloadCompression", _one_of(_COMPRESSIONS), default="none") == "zlib",
    )


def write_options(options: Mapping[str, str], purpose: Purpose) -> WriteOptions:
    """Parse the options of a writer; their names may be in any case.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    parser = _OptionParser(options, purpose)
    return WriteOptions(
        parser.stream(),
        subject=parser.read("subject", _subject, default=None),
        max_in_flight=parser.read("maxInFlight", _between(1, _MOST_IN_FLIGHT), default=1000),
        ack_timeout=parser.read("ackTimeout", parse_seconds, default=10.0),
        min_duplicate_window=parser.read("minDuplicateWindow", parse_seconds, default=120.0),
        prefix=parser.read("msgIdPrefix", _id_prefix, default=None),
    )


class _OptionParser:
    def __init__(self, options: Mapping[str, str], purpose: Purpose) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): name for name in _NAMES[purpose]}
        for name in options:
            if name.lower() not in known:
                raise SparkOptionError(_unknown(name, purpose, known))

    def stream(self) -> str:
        if "stream" not in self._options:
            raise SparkOptionError("expected the option stream, found none: name the stream to read or to write")
        if "jsdomain" in self._options and "apiprefix" in self._options:
            raise SparkOptionError("expected jsDomain or apiPrefix, found both: keep one")
        # Used by the connection; what is wrong with them is reported with the other options.
        self.read("jsDomain", _token, default=None)
        self.read("apiPrefix", _token, default=None)
        return self.read("stream", _stream, default="")

    def bound(self, which: str, default: str) -> Bound:
        offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
        if offsets.lower() in self._options and timestamp.lower() in self._options:
            raise SparkOptionError(f"expected {offsets} or {timestamp}, found both: keep one")
        if timestamp.lower() in self._options:
            return Bound(time=self.read(timestamp, _time, default=0))
        return self.read(offsets, _bound, default=Bound(extreme=default))

    def read(self, name: str, convert: Callable[[str], _Value], *, default: _Default) -> _Value | _Default:
        if name.lower() not in self._options:
            return default
        value = self._options[name.lower()]
        try:
            return convert(value)
        except ValueError as error:
            problem = str(error) if "found" in str(error) else f"{error}, found {value!r}"
            raise SparkOptionError(f"{name}: {problem}") from None


def _unknown(name: str, purpose: Purpose, known: dict[str, str]) -> str:
    elsewhere = [other for other, names in _NAMES.items() if other != "load" and name.lower() in map(str.lower, names)]
    if elsewhere:
        return f"the option {name} is for {' and '.join(elsewhere)}, not for {purpose}: drop it"
    if name.lower() == "path":
        return "expected no path: name the stream with the option stream"
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {known[near[0]]}?" if near else f"{purpose} takes {', '.join(sorted(known.values()))}"
    return f"expected known options, found {name!r}: {hint}"


def _at_least(low: int) -> Callable[[str], int]:
    return _between(low, (1 << 63) - 1)


def _between(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.strip().isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(text)

    return convert


def _boolean(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return text.strip().lower() == "true"


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text.strip().lower() not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text.strip().lower()

    return convert


def _size(text: str) -> int:
    size = parse_size(text)
    if size < 1:
        raise ValueError('expected a size such as "4MB"')
    return size


def _filters(text: str) -> tuple[str, ...]:
    filters = tuple(subject.strip() for subject in text.split(","))
    for subject in filters:
        if problem := subject_problem(subject):
            raise ValueError(f"expected subjects with commas between them ({problem})")
    if pair := first_overlap(filters):
        cover = next((wide for wide, narrow in (pair, pair[::-1]) if covers(wide, narrow)), None)
        hint = f"keep {cover}" if cover else "filter after reading"
        raise ValueError(f"expected subjects that don't overlap, found that {' and '.join(pair)} do: {hint}")
    return filters


def _subject(text: str) -> str:
    if problem := subject_problem(text, wildcards=False):
        raise ValueError(f"expected a subject without wildcards ({problem})")
    return text


def _matching(form: re.Pattern[str], expected: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not form.fullmatch(text):
            raise ValueError(f"expected {expected}")
        return text

    return convert


_stream = _matching(re.compile(r"[^\s.*>/\\]+"), "a stream's name, without dots, spaces and wildcards")
_token = _matching(re.compile(r"[A-Za-z0-9_$.-]+"), "letters, digits, dots, - and _")


def _id_prefix(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("expected printable text")
    return text


def _bound(text: str) -> Bound:
    if (name := text.strip().lower()) in _EXTREMES:
        return Bound(extreme=name)
    try:
        return Bound(sequence=_at_least(1)(text))
    except ValueError:
        raise ValueError("expected earliest, latest or a sequence from 1") from None


def _time(text: str) -> int:
    if text.strip().isdecimal():
        return int(text) * _MILLISECOND
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError('expected milliseconds since 1970, or a time with its zone such as "2026-11-21T15:00:00Z"')
    since = moment - datetime.fromisoformat("1970-01-01T00:00:00Z")
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
