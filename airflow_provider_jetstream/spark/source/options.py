"""The options of the data source: one table, from which parsing, errors, hints and the reference are made.

Spark passes every value as a text; the names may be in any case.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping  # noqa: TC003  # pydantic needs them
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import core_schema

from airflow_provider_jetstream.jetstream.client.subjects import covers, first_overlap, subject_problem
from airflow_provider_jetstream.jetstream.units import parse_seconds, parse_size
from airflow_provider_jetstream.spark.connection_options import NAMED_CONNECTION, VARIABLES
from airflow_provider_jetstream.spark.errors import SparkOptionError

Purpose: TypeAlias = Literal["load", "read", "readStream", "write", "writeStream"]
_Value = TypeVar("_Value")
_Options = TypeVar("_Options", bound="_Given")

BUCKET_STREAM: Final = "KV_"
_READS: Final = ("read", "readStream")
_WRITES: Final = ("write", "writeStream")


class Bound(NamedTuple):
    """Where a read begins or ends: ``earliest`` or ``latest``, a sequence, or nanoseconds since 1970."""

    extreme: str | None = None
    sequence: int | None = None
    time: int | None = None


class PerStream(NamedTuple, Generic[_Value]):
    """One value for all streams, or one for each by name."""

    default: _Value
    named: Mapping[str, _Value] | None = None

    def of(self, stream: str) -> _Value:
        """Return the value of a stream."""
        return (self.named or {}).get(stream, self.default)


class SessionDefaults(NamedTuple):
    """Defaults of options from the session in which the format was registered.

    :param parallelism: how many tasks run at a time
    :param zone: of times without one
    """

    parallelism: int = 1
    zone: str = ""


NO_SESSION: Final = SessionDefaults()


@dataclass(frozen=True)
class Kind:
    """What an option takes, as part of a field's type.

    :param form: for the reference, with its unit
    :param parse: raises ``ValueError`` that says what was expected
    :param absent: the value of streams that a JSON object doesn't name, where the option may be one
    """

    form: str
    parse: Callable[..., Any]
    absent: Any = None
    zoned: bool = False

    def __get_pydantic_core_schema__(self, *_: object) -> core_schema.CoreSchema:
        """Make pydantic call the parser."""
        return core_schema.with_info_plain_validator_function(self._value)

    def _value(self, text: str, info: core_schema.ValidationInfo) -> Any:
        parse = partial(self.parse, zone=info.context) if self.zoned else self.parse
        if self.absent is None:
            return parse(text)
        if text.lstrip().startswith("{"):
            return PerStream(self.absent, _named_values(text, parse))
        return PerStream(parse(text))


def _named_values(text: str, parse: Callable[[str], _Value]) -> dict[str, _Value]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise ValueError('expected a JSON object such as {"orders": 17}') from None
    values: dict[str, _Value] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"expected each stream once, found {name} twice: drop one")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"expected a text or a number for {name}, found {value!r}")  # pydantic wants no TypeError
        try:
            values[name] = parse(str(value))
        except ValueError as error:
            raise ValueError(f"{name}: {_with_found(str(error), value)}") from None
    return values


def _whole(form: str, low: int = 1, high: int = (1 << 63) - 1) -> Kind:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(text)

    return Kind(form, parse)


def _one_of(*names: str) -> Kind:
    def parse(text: str) -> str:
        if text.strip().lower() not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text.strip().lower()

    return Kind(" or ".join(filter(None, [", ".join(f"``{name}``" for name in names[:-1]), f"``{names[-1]}``"])), parse)


def _text(form: str, pattern: str, expected: str) -> Kind:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text.strip()):
            raise ValueError(f"expected {expected}")
        return text.strip()

    return Kind(form, parse)


def _boolean(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return text.strip().lower() == "true"


def _above_0(parse: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def positive(text: str) -> Any:
        if not (value := parse(text)) or value < 0:
            raise ValueError(f"expected {expected}")
        return value

    return positive


def _subjects(text: str) -> tuple[str, ...]:
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


def _prefix(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("expected printable text")
    return text


_STREAM = r"[^\s.*>/\\]+"


def _streams(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not re.fullmatch(_STREAM, name):
            raise ValueError(f"expected names of streams with commas between them, found {name!r} among them")
        if names.count(name) > 1:
            raise ValueError(f"expected each stream once, found {name} twice: drop one")
    return names


def _offset(text: str) -> Bound:
    if (name := text.strip().lower()) in ("earliest", "latest"):
        return Bound(extreme=name)
    if not name.isdecimal() or not 1 <= int(name) < 1 << 63:
        raise ValueError("expected earliest, latest or a sequence from 1")
    return Bound(sequence=int(name))


def _time(text: str, zone: str) -> Bound:
    if text.strip().isdecimal():
        return Bound(time=int(text) * 1_000_000)
    try:
        moment = datetime.fromisoformat(text.strip())
        # Where the machine has no time zones, the time has to name its own.
        moment = moment if moment.tzinfo else moment.replace(tzinfo=ZoneInfo(zone))
    except (ValueError, ZoneInfoNotFoundError):
        raise ValueError(
            'expected milliseconds since 1970, or a time with its zone such as "2026-11-21T15:00:00Z"'
        ) from None
    since = moment - datetime.fromisoformat("1970-01-01T00:00:00Z")
    return Bound(time=(since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000)


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or not (last if dash else first).isdecimal() or int(last or first) < int(first):
            raise ValueError("expected ranges of sequences such as 101-150,200-210")
        ranges.append((int(first), int(last or first)))
    return tuple(ranges)


_EARLIEST, _LATEST = Bound(extreme="earliest"), Bound(extreme="latest")
_FLAG = Kind("boolean", _boolean)
_SEQUENCES = _whole("number of sequences")
_SECONDS = Kind("seconds", parse_seconds)
_SIZE = Kind("bytes, or a size such as ``4MB``", _above_0(parse_size, 'a size such as "4MB"'))
_DELAY = Kind("seconds, or a duration such as ``30s``", _above_0(parse_seconds, 'a duration above 0 such as "30s"'))
_OFFSET = Kind("``earliest``, ``latest`` or a sequence", _offset, absent=_LATEST)
_TIME = Kind("milliseconds since 1970, or a time, with a zone or in the session's", _time, absent=_LATEST, zoned=True)
_GLOB = (
    "a pattern such as orders-* with the wildcards *, ? and […], and without dots and spaces, which no stream's name"
    " has (it is no regular expression)"
)


class _Given(BaseModel):
    """The options that any read or write takes; the texts under the fields are the reference's."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    connection: Annotated[str, Kind("name", str)] = ""
    """the connection whose settings are in ``NATS_<NAME>_URL``, ``NATS_<NAME>_USER``… of the environment of the driver
    and of the executors"""
    connection_provider: Annotated[str, Kind("``package.module:function``", str)] = ""
    """a function that is called with ``connection`` wherever a connection is opened, and returns its options; needs
    ``spark.jetstream.allowedProviders``"""
    stream: Annotated[str, _text("name", _STREAM, "a stream's name, without dots, spaces and wildcards")] = ""
    """the stream to read or to write; only this one may store the rows"""

    def require_one_of(self, *fields: str, needed: bool = False) -> None:
        """Refuse two options that exclude each other, and none where one is needed."""
        given = [to_camel(field) for field in fields if field in self.model_fields_set]
        if len(given) > 1:
            raise ValueError(f"expected {given[0]} or {given[1]}, found both: keep one")
        if needed and not given:
            raise ValueError("expected the option stream, found none: name the stream to read or to write")


class ReadOptions(_Given):
    """How streams are read; :meth:`of` returns how one of them is."""

    streams: Annotated[tuple[str, ...], Kind("names, separated by commas", _streams)] = ()
    """read several streams, in place of ``stream``"""
    stream_pattern: Annotated[str, _text("pattern with ``*``, ``?`` and ``[…]``", r"[^\s.>/\\]+", _GLOB)] = ""
    """read the streams whose names match, in place of ``stream``; a query looks for new ones at each batch"""
    bucket: Annotated[str, _text("name", r"[A-Za-z0-9_-]+", "a bucket's name: letters, digits, - and _")] = ""
    """a key-value bucket in place of a stream; adds the columns ``key`` and ``rowKind``"""
    filter_subjects: Annotated[tuple[str, ...], Kind("subjects, separated by commas", _subjects)] = ()
    """read these subjects only, which may not overlap; all where absent"""
    starting_offsets: Annotated[PerStream[Bound] | None, _OFFSET] = None
    """the first sequence that is read; ``earliest`` where absent, for a streaming query ``latest``. A query with a
    checkpoint resumes from there"""
    starting_timestamp: Annotated[PerStream[Bound] | None, _TIME] = None
    """read what was stored from then on, instead of an offset"""
    min_partitions: Annotated[int | None, _whole("number of tasks")] = None
    """divide the sequences evenly among so many tasks. Where absent, a batch has as many as the cluster runs at a time,
    with 100,000 sequences each at least, and a query one, since its batches have to be divided alike on any cluster"""
    max_records_per_partition: Annotated[int | None, _SEQUENCES] = None
    """make more tasks where one would have more"""
    fail_on_data_loss: Annotated[bool, _FLAG] = True
    """fail where messages that the filters match were lost before they were read, or the stream was made anew"""
    accepted_loss: Annotated[PerStream[Any], Kind("ranges such as ``101-150,200``", _ranges, absent=())] = PerStream(())
    """sequences whose loss is accepted, as the error about a loss names them"""
    include_headers: Annotated[bool, _FLAG] = False
    """add the column ``headers``"""
    fetch_method: Annotated[str, _one_of("auto", "consumer", "direct", "api")] = "auto"
    """how messages are read: ``consumer`` by an ephemeral consumer in memory without acknowledgements, ``direct`` by
    direct gets of many messages, ``api`` by a request for each message. ``auto`` takes ``consumer`` for a limits
    stream, ``direct`` for others with ``allow_direct`` (nats-server 2.11), else ``api``"""
    fetch_batch: Annotated[int | None, _whole("number of messages, 1 to 10,000", 1, 10_000)] = None
    """messages of a request; 10,000 by consumer and 256 by direct get"""
    fetch_max_bytes: Annotated[int | None, _SIZE] = None
    """bytes of a request; 8 MiB by consumer, else 4 MiB"""
    payload_compression: Annotated[str, _one_of("none", "zlib")] = "none"
    """decompress bodies in the format of zlib or gzip, up to 16 MiB each"""
    latest_per_subject: Annotated[bool, _FLAG] = False
    """read the last message of each subject at the time of the action, in one task"""
    ending_offsets: Annotated[PerStream[Bound] | None, _OFFSET] = None
    """the first sequence that is not read any more; ``latest`` where absent"""
    ending_timestamp: Annotated[PerStream[Bound] | None, _TIME] = None
    """read what was stored before then, instead of an offset"""
    max_offsets_per_trigger: Annotated[int | None, _SEQUENCES] = None
    """so many at most in a batch of a query; gaps at its start don't count; Spark 4.2"""
    max_bytes_per_trigger: Annotated[int | None, _SIZE] = None
    """so many bytes of subjects, headers and bodies at most in a batch of a query; a larger message is a batch of its
    own; Spark 4.2"""
    min_offsets_per_trigger: Annotated[int | None, _SEQUENCES] = None
    """a batch waits until there are so many; the first one after a start doesn't wait, nor does a query with
    ``availableNow``; Spark 4.2"""
    max_trigger_delay: Annotated[float | None, _DELAY] = None
    """time since the last batch after which it waits no longer, 15 minutes where absent; with
    ``minOffsetsPerTrigger``"""

    # No options: the default start, how many tasks run at a time, and what ``of`` sets.
    default_start: Bound = _EARLIEST
    parallelism: int = 1
    start: Bound = _EARLIEST
    end: Bound = _LATEST
    losses: tuple[tuple[int, int], ...] = ()

    @property
    def decompress(self) -> bool:
        """Whether bodies are decompressed."""
        return self.payload_compression == "zlib"

    @property
    def given_limits(self) -> tuple[str, ...]:
        """The given options that bound a query's batches."""
        return tuple(to_camel(field) for field in PER_TRIGGER[:-1] if getattr(self, field))

    def unlimited(self) -> Self:
        """Return the same without bounds of a query's batches."""
        return self.model_copy(update=dict.fromkeys(PER_TRIGGER[:-1]))

    @property
    def names(self) -> tuple[str, ...]:
        """The streams' names; empty where a pattern selects them."""
        one = f"{BUCKET_STREAM}{self.bucket}" if self.bucket else self.stream
        return () if self.stream_pattern else self.streams or (one,)

    @property
    def several(self) -> bool:
        """Whether options name streams with their values: unless the option is ``stream`` or ``bucket``."""
        return bool(self.streams or self.stream_pattern)

    def __str__(self) -> str:
        return f"streams that match {self.stream_pattern}" if self.stream_pattern else ", ".join(self.names)

    def selects(self, name: str) -> bool:
        """Return whether a stream of this name is read."""
        return fnmatchcase(name, self.stream_pattern) if self.stream_pattern else name in self.names

    def matching(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return which of some streams are read, in order."""
        return tuple(sorted(filter(self.selects, names)))

    def of(self, name: str) -> Self:
        """Return how a stream is read."""
        start = self.starting_timestamp or self.starting_offsets or PerStream(self.default_start)
        end = self.ending_timestamp or self.ending_offsets or PerStream(_LATEST)
        own = {"stream": name, "start": start.of(name), "end": end.of(name), "losses": self.accepted_loss.of(name)}
        return self.model_copy(update=own)

    def require_bounds(self, names: Iterable[str]) -> None:
        """Require that bounds that name streams name all of them.

        :raises SparkOptionError: one is missing
        """
        for field in _BOUNDS:
            value = getattr(self, field)
            missing = [name for name in names if value and value.named is not None and name not in value.named]
            if missing:
                raise SparkOptionError(
                    f"{to_camel(field)}: expected a value for every stream, found none for {', '.join(missing)}: add"
                    " it, or give earliest or latest for all"
                )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self.require_one_of("stream", "streams", "stream_pattern", "bucket", needed=True)
        self.require_one_of("starting_offsets", "starting_timestamp")
        self.require_one_of("ending_offsets", "ending_timestamp")
        divided = (*_BOUNDS, "min_partitions", "max_records_per_partition")
        if self.latest_per_subject and (found := [to_camel(name) for name in divided if name in self.model_fields_set]):
            raise ValueError(f"expected no {found[0]} with latestPerSubject, which reads the whole stream: drop one")
        few, many = self.min_offsets_per_trigger, self.max_offsets_per_trigger
        if self.max_trigger_delay and not few:
            raise ValueError(
                "expected minOffsetsPerTrigger with maxTriggerDelay, which limits the wait for it, found none: give it"
                " too, or drop maxTriggerDelay"
            )
        if few and many and few > many:
            raise ValueError(
                f"expected minOffsetsPerTrigger up to maxOffsetsPerTrigger, found {few} and {many}: lower the first, or"
                " raise the second"
            )
        named = {name for field in (*_BOUNDS, "accepted_loss") for name in self._check_names(field)}
        self.require_bounds(self.names)
        for name in {*self.names, *named} or {""}:
            self.of(name).require_order()
        return self

    def _check_names(self, field: str) -> Iterable[str]:
        """Require that values which name streams name selected ones, and that sequences have the name of a stream."""
        value = getattr(self, field) or PerStream(Bound())
        if other := [name for name in value.named or () if not self.selects(name)]:
            raise ValueError(f"{to_camel(field)}: expected values for {self}, found one for {other[0]!r}: drop it")
        loss = field == "accepted_loss"
        if self.several and value.named is None and (value.default if loss else value.default.sequence):
            example = {(self.names or ("orders",))[0]: "101-150" if loss else 17}
            raise ValueError(
                f"{to_camel(field)}: expected sequences with the name of their stream, such as {json.dumps(example)},"
                " found none: each of several streams counts its own"
            )
        return value.named or ()

    def require_order(self) -> None:
        """Require that a stream's end isn't before its start."""
        pairs = ("Offsets", self.start.sequence, self.end.sequence), ("Timestamp", self.start.time, self.end.time)
        for kind, first, last in pairs:
            if first is not None and last is not None and first > last:
                raise ValueError(
                    f"expected ending{kind} at or after starting{kind}, found {last} before {first}: exchange them"
                )
        if self.start == _LATEST and self.end == _EARLIEST:
            raise ValueError("expected endingOffsets after startingOffsets, found latest to earliest: exchange them")


_BOUNDS: Final = ("starting_offsets", "starting_timestamp", "ending_offsets", "ending_timestamp")


class WriteOptions(_Given):
    """How rows are written."""

    subject: Annotated[str | None, Kind("subject", _subject)] = None
    """the subject of rows that have none"""
    max_in_flight: Annotated[int, _whole("number of rows, 1 to 10,000", 1, 10_000)] = 1000
    """rows of a task that are sent and not acknowledged yet, 32 MiB at most"""
    ack_timeout: Annotated[float, _SECONDS] = 10.0
    """time without any acknowledgement after which a task reconnects"""
    min_duplicate_window: Annotated[float, _SECONDS] = 120.0
    """refuse a stream with a shorter ``duplicate_window``"""
    msg_id_prefix: Annotated[str | None, Kind("text", _prefix)] = None
    """what ids of messages begin with, in place of the write's own identity"""
    null_value: Annotated[str, _one_of("error", "empty")] = "error"
    """refuse a row whose ``value`` is null, or store a message without a body"""
    nats_headers: Annotated[str, _one_of("keep", "drop")] = "keep"
    """whether headers that begin with ``Nats-`` are left out of the column ``headers``"""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self.require_one_of("stream", needed=True)
        return self


class Option(NamedTuple):
    """An option as the reference has it."""

    field: str
    purposes: tuple[str, ...]
    form: str
    text: str
    default: str


def _table() -> Iterable[tuple[str, Option]]:
    for model, purposes in ((ReadOptions, _READS), (WriteOptions, _WRITES)):
        for field, info in model.model_fields.items():
            of_one = ("read",) if field in _OF_BATCHES else ("readStream",) if field in PER_TRIGGER else purposes
            every = (*_READS, *_WRITES) if field in _Given.model_fields else of_one
            default, text = info.default, " ".join((info.description or "").split())
            shown = f"{default:g}" if isinstance(default, float) else str(default or "")
            for kind in info.metadata:
                if isinstance(kind, Kind):
                    shown = "" if kind.absent is not None else str(default).lower() if kind is _FLAG else shown
                    yield to_camel(field), Option(field, every, kind.form, text, shown)


# Spark passes its own options to the sink.
OF_SPARK: Final = ("checkpointLocation", "queryName")
# The options that bound the batches of a query.
PER_TRIGGER: Final = (
    "max_offsets_per_trigger",
    "max_bytes_per_trigger",
    "min_offsets_per_trigger",
    "max_trigger_delay",
)
_OF_BATCHES: Final = ("latest_per_subject", "ending_offsets", "ending_timestamp")
OPTIONS: Final[dict[str, Option]] = dict(_table())
# A table's properties, and what SQL adds to its options: Spark passes them where it infers a table's columns.
_OF_TABLES: Final = ("provider", "owner", "location", "is_managed_location", "external", "comment", "collation")
_BY_CHECKPOINT: Final = "drop it: there is no consumer group, Spark's checkpoint holds the offset"
_BY_TIMEOUT: Final = "drop it: a broken connection is reopened within timeout"
# The names of Spark's Kafka source and sink, by which people look first.
_OF_KAFKA: Final = {
    "subscribe": "name the stream with the option stream, or several with streams",
    "subscribepattern": "give streamPattern, such as orders-*, which is no regular expression",
    "assign": "name the stream with the option stream, or several with streams, and subjects with filterSubjects",
    "topic": "name the stream with the option stream, and give subject, or a column subject",
    "startingoffsetsbytimestamp": "give startingTimestamp",
    "endingoffsetsbytimestamp": "give endingTimestamp",
    "startingoffsetsbytimestampstrategy": "drop it: a startingTimestamp after the last message begins at the next one",
    "kafka.bootstrap.servers": "give servers",
    "kafka.group.id": _BY_CHECKPOINT,
    "groupidprefix": _BY_CHECKPOINT,
    "usedeprecatedoffsetfetching": _BY_CHECKPOINT,
    "kafkaconsumer.polltimeoutms": "give timeout",
    "fetchoffset.numretries": _BY_TIMEOUT,
    "fetchoffset.retryintervalms": _BY_TIMEOUT,
}


def option_names(purpose: Purpose) -> tuple[str, ...]:
    """Return the names of the options for a purpose, Spark's own included."""
    # Spark requests the schema before the data source learns whether a batch or a query is read.
    purposes = _READS if purpose == "load" else (purpose,)
    own = [name for name, option in OPTIONS.items() if set(purposes) & set(option.purposes)]
    return (*VARIABLES, *own, *(OF_SPARK if purpose == "writeStream" else ()))


def is_of_table(options: Iterable[str]) -> bool:
    """Return whether options come with a table's properties: Spark asks about its columns for each query."""
    return any(name.lower() in _OF_TABLES or name.lower().startswith("option.") for name in options)


def read_options(options: Mapping[str, str], purpose: Purpose, session: SessionDefaults = NO_SESSION) -> ReadOptions:
    """Parse the options of a reader.

    :param session: for what its options leave out
    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    parsed = _parsed(ReadOptions, options, purpose, session.zone)
    if purpose == "readStream":
        parsed = parsed.model_copy(update={"default_start": _LATEST})
    else:
        parsed = parsed.model_copy(update={"parallelism": session.parallelism})
    return parsed if parsed.several else parsed.of(parsed.names[0])


def write_options(options: Mapping[str, str], purpose: Purpose) -> WriteOptions:
    """Parse the options of a writer.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    return _parsed(WriteOptions, options, purpose)


def _parsed(model: type[_Options], given: Mapping[str, str], purpose: Purpose, zone: str = "") -> _Options:
    if not given:
        raise SparkOptionError(
            "expected the option stream, found no options: Spark passes a Python data source none of a table's own, so"
            " give them with the query (FROM jobs WITH (stream 'orders', …), INSERT INTO jobs WITH (…)), or make a"
            " temporary view"
        )
    known = {name.lower(): name for name in option_names(purpose)}
    for name in given:
        if name.lower() not in known and not is_of_table([name]):
            raise SparkOptionError(_unknown(name, purpose, known))
    names = {known[name.lower()]: value for name, value in given.items() if name.lower() in known}
    for name in ("jsDomain", "apiPrefix"):
        if name in names and not re.fullmatch(r"[A-Za-z0-9_$.-]+", names[name]):
            raise SparkOptionError(f"{name}: expected letters, digits, dots, - and _, found {names[name]!r}")
    if {"jsDomain", "apiPrefix"} <= names.keys():
        raise SparkOptionError("expected jsDomain or apiPrefix, found both: keep one")
    fields = {OPTIONS[name].field: value for name, value in names.items() if name in OPTIONS}
    try:
        return model.model_validate(fields, context=zone)
    except ValidationError as error:
        problem = error.errors()[0]
    text, place = str(problem["ctx"]["error"]), problem["loc"]
    # Not "from": the text of the cause says nothing more, and Spark prints it first.
    raise SparkOptionError(f"{to_camel(str(place[0]))}: {_with_found(text, problem['input'])}" if place else text)


def _with_found(problem: str, value: object) -> str:
    return problem if "found" in problem else f"{problem}, found {value!r}"


def _unknown(name: str, purpose: Purpose, known: Mapping[str, str]) -> str:
    lowered = name.lower()
    purposes = {own.lower(): option.purposes for own, option in OPTIONS.items()}
    purposes |= dict.fromkeys(map(str.lower, OF_SPARK), ("writeStream",))
    if lowered in purposes:
        return f"the option {name} is for {' and '.join(purposes[lowered])}, not for {purpose}: drop it"
    if lowered == "path":
        return "expected no path: name the stream with the option stream"
    found = f"expected known options, found {name!r}"
    if lowered in _OF_KAFKA or lowered.startswith("kafka."):
        of_connection = f"the connection's are {', '.join(sorted((*VARIABLES, *NAMED_CONNECTION)))}"
        return f"{found}, which is Kafka's: {_OF_KAFKA.get(lowered, of_connection)}"
    if lowered.startswith("nats."):
        return f"{found}, which is nats-spark-connector's: its page in the documentation has ours beside each"
    near = difflib.get_close_matches(lowered, known, 1)
    hint = f"did you mean {known[near[0]]}?" if near else f"{purpose} takes {', '.join(sorted(known.values()))}"
    return f"{found}: {hint}"
