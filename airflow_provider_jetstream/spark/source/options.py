"""The options of the data source: one table, of which parsing, errors, hints and the reference are made."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.spark.connection_options import NAMED_CONNECTION, VARIABLES
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.key_columns import BUCKET_STREAM
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
    is_object,
    nanoseconds,
    object_of,
    one_of,
    positive_seconds,
    sequence_ranges,
    stream_glob,
    stream_name,
    stream_names,
    token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Purpose: TypeAlias = Literal["load", "read", "readStream", "write", "writeStream"]

_Value = TypeVar("_Value")
_Ranges: TypeAlias = tuple[tuple[int, int], ...]

_BATCHES: Final = ("read",)
_QUERIES: Final = ("readStream",)
_READS: Final = (*_BATCHES, *_QUERIES)
_WRITES: Final = ("write", "writeStream")
# As with Spark's Kafka source.
_MAX_DELAY = 15 * 60.0


class Option(NamedTuple):
    """An option of the data source.

    :param purposes: what it is for
    :param form: what it takes, with its unit
    :param parse: raises ``ValueError`` that says what was expected
    :param text: what it does
    :param default: its value where it is absent, as it could be given; empty where none is the same as its absence
    """

    purposes: tuple[str, ...]
    form: str
    parse: Callable[[str], Any]
    text: str
    default: str = ""


def _time(text: str) -> Bound:
    return Bound(time=nanoseconds(text))


_OFFSET = "``earliest``, ``latest`` or a sequence"
_TIME = "milliseconds since 1970, or a time with a zone"
_SIZE = "bytes, or a size such as "

OPTIONS: Final[dict[str, Option]] = {
    "connection": Option(
        (*_READS, *_WRITES),
        "name",
        str,
        "the connection whose settings are in ``NATS_<NAME>_URL``, ``NATS_<NAME>_USER``… of the environment of the"
        " driver and of the executors",
    ),
    "connectionProvider": Option(
        (*_READS, *_WRITES),
        "``package.module:function``",
        str,
        "a function that is called with ``connection`` wherever a connection is opened, and returns its options; needs"
        " ``spark.jetstream.allowedProviders``",
    ),
    "stream": Option(
        (*_READS, *_WRITES),
        "name",
        stream_name,
        "the stream to read or to write; only this one may store the rows",
    ),
    "streams": Option(
        _READS, "names, separated by commas", stream_names, "read several streams, in place of ``stream``"
    ),
    "streamPattern": Option(
        _READS,
        "pattern with ``*``, ``?`` and ``[…]``",
        stream_glob,
        "read the streams whose names match, in place of ``stream``; a query looks for new ones at each batch",
    ),
    "bucket": Option(
        _READS,
        "name",
        bucket_name,
        "a key-value bucket in place of a stream; adds the columns ``key`` and ``rowKind``",
    ),
    "filterSubjects": Option(
        _READS,
        "subjects, separated by commas",
        filter_subjects,
        "read these subjects only, which may not overlap; all where absent",
    ),
    "startingOffsets": Option(
        _READS,
        _OFFSET,
        bound,
        "the first sequence that is read; ``earliest`` where absent, for a streaming query ``latest``. A query with a"
        " checkpoint resumes from there",
    ),
    "startingTimestamp": Option(_READS, _TIME, _time, "read what was stored from then on, instead of an offset"),
    "minPartitions": Option(
        _READS, "number of tasks", at_least(1), "divide the sequences evenly among so many tasks", "1"
    ),
    "maxRecordsPerPartition": Option(
        _READS, "number of sequences", at_least(1), "make more tasks where one would have more"
    ),
    "failOnDataLoss": Option(
        _READS,
        "boolean",
        boolean,
        "fail where messages that the filters match were lost before they were read, or the stream was made anew",
        "true",
    ),
    "acceptedLoss": Option(
        _READS,
        "ranges such as ``101-150,200``",
        sequence_ranges,
        "sequences whose loss is accepted, as the error about a loss names them",
    ),
    "includeHeaders": Option(_READS, "boolean", boolean, "add the column ``headers``", "false"),
    "fetchMethod": Option(
        _READS,
        "``auto``, ``consumer``, ``direct`` or ``api``",
        one_of(("auto", "consumer", "direct", "api")),
        "how messages are read: ``consumer`` by an ephemeral consumer in memory without acknowledgements, ``direct`` by"
        " direct gets of many messages, ``api`` by a request for each message. ``auto`` takes ``consumer`` for a limits"
        " stream, ``direct`` for others with ``allow_direct`` (nats-server 2.11), else ``api``",
        "auto",
    ),
    "fetchBatch": Option(
        _READS,
        "number of messages, 1 to 10,000",
        between(1, 10_000),
        "messages of a request; 10,000 by consumer and 256 by direct get",
    ),
    "fetchMaxBytes": Option(_READS, _SIZE + "``4MB``", byte_size, "bytes of a request; 8 MiB by consumer, else 4 MiB"),
    "payloadCompression": Option(
        _READS,
        "``none`` or ``zlib``",
        one_of(("none", "zlib")),
        "decompress bodies in the format of zlib or gzip, up to 16 MiB each",
        "none",
    ),
    "latestPerSubject": Option(
        _BATCHES,
        "boolean",
        boolean,
        "read the last message of each subject at the time of the action, in one task",
        "false",
    ),
    "endingOffsets": Option(_BATCHES, _OFFSET, bound, "the first sequence that is not read any more", "latest"),
    "endingTimestamp": Option(_BATCHES, _TIME, _time, "read what was stored before then, instead of an offset"),
    "maxOffsetsPerTrigger": Option(
        _QUERIES,
        "number of sequences",
        at_least(1),
        "so many at most in a batch of a query; gaps at its start don't count; Spark 4.2",
    ),
    "maxBytesPerTrigger": Option(
        _QUERIES,
        _SIZE + "``64MB``",
        byte_size,
        "so many bytes of subjects, headers and bodies at most in a batch of a query; a larger message is a batch of"
        " its own; Spark 4.2",
    ),
    "minOffsetsPerTrigger": Option(
        _QUERIES,
        "number of sequences",
        at_least(1),
        "a batch waits until there are so many; the first one after a start doesn't wait, nor does a query with"
        " ``availableNow``; Spark 4.2",
    ),
    "maxTriggerDelay": Option(
        _QUERIES,
        "seconds, or a duration such as ``30s``",
        positive_seconds,
        "time since the last batch after which it waits no longer, 15 minutes where absent; with"
        " ``minOffsetsPerTrigger``",
    ),
    "subject": Option(_WRITES, "subject", exact_subject, "the subject of rows that have none"),
    "maxInFlight": Option(
        _WRITES,
        "number of rows, 1 to 10,000",
        between(1, 10_000),
        "rows of a task that are sent and not acknowledged yet, 32 MiB at most",
        "1000",
    ),
    "ackTimeout": Option(
        _WRITES, "seconds", parse_seconds, "time without any acknowledgement after which a task reconnects", "10"
    ),
    "minDuplicateWindow": Option(
        _WRITES, "seconds", parse_seconds, "refuse a stream with a shorter ``duplicate_window``", "120"
    ),
    "msgIdPrefix": Option(
        _WRITES, "text", id_prefix, "what ids of messages begin with, in place of the write's own identity"
    ),
    "nullValue": Option(
        _WRITES,
        "``error`` or ``empty``",
        one_of(("error", "empty")),
        "refuse a row whose ``value`` is null, or store a message without a body",
        "error",
    ),
    "natsHeaders": Option(
        _WRITES,
        "``keep`` or ``drop``",
        one_of(("keep", "drop")),
        "whether headers that begin with ``Nats-`` are left out of the column ``headers``",
        "keep",
    ),
}
# Spark passes its own options to the sink.
OF_SPARK: Final = ("checkpointLocation", "queryName")
# What bounds the batches of a query.
PER_TRIGGER: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
# What chooses sequences or divides them.
_OF_RANGES = (
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "minPartitions",
    "maxRecordsPerPartition",
)
# A table's properties, and what SQL adds to its options: Spark passes them where it infers a table's columns.
_OF_TABLES = ("provider", "owner", "location", "is_managed_location", "external", "comment", "collation")
_TABLE_OPTION = "option."
_BY_CHECKPOINT = "drop it: there is no consumer group, Spark's checkpoint holds the offset"
_BY_TIMEOUT = "drop it: a broken connection is reopened within timeout"
# What Spark's Kafka source and sink call it, by whose names people look first.
_OF_KAFKA = {
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
    return any(name.lower() in _OF_TABLES or name.lower().startswith(_TABLE_OPTION) for name in options)


def _require_known(names: Iterable[str], purpose: Purpose) -> None:
    known = {name.lower(): name for name in option_names(purpose)}
    for name in names:
        if name.lower() not in (*known, *_OF_TABLES) and not name.lower().startswith(_TABLE_OPTION):
            raise SparkOptionError(_unknown(name, purpose, known))


def _unknown(name: str, purpose: Purpose, known: dict[str, str]) -> str:
    lowered = name.lower()
    purposes = {own.lower(): option.purposes for own, option in OPTIONS.items()} | dict.fromkeys(
        map(str.lower, OF_SPARK), ("writeStream",)
    )
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


@dataclass(frozen=True)
class PerStream(Generic[_Value]):
    """The value of an option that may be one for each stream.

    :param option: its name
    :param default: of streams that aren't named
    :param named: by the streams' names; none where there is one value for all
    """

    option: str
    default: _Value
    named: Mapping[str, _Value] | None = None

    def of(self, stream: str) -> _Value:
        """Return the value of a stream."""
        return (self.named or {}).get(stream, self.default)


class _Given:
    """The options that were given, whose names may be in any case.

    :raises SparkOptionError: there are none, or one isn't known, or two exclude each other
    """

    def __init__(self, options: Mapping[str, str], purpose: Purpose) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        _require_known(options, purpose)
        if not options:
            raise SparkOptionError(
                "expected the option stream, found no options: Spark passes a Python data source none of a table's own,"
                " so give them with the query (FROM jobs WITH (stream 'orders', …), INSERT INTO jobs WITH (…)), or make"
                " a temporary view"
            )
        self.require_one_of("jsDomain", "apiPrefix")
        # Used by the connection; what is wrong with them is reported with the other options.
        for name in ("jsDomain", "apiPrefix"):
            self._parse(name, token)

    def has(self, name: str) -> bool:
        """Return whether an option is given."""
        return name.lower() in self._options

    def require_one_of(self, *names: str) -> None:
        """Refuse two options of which there may be one."""
        given = [name for name in names if self.has(name)]
        if len(given) > 1:
            raise SparkOptionError(f"expected {given[0]} or {given[1]}, found both: keep one")

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option, or its default.

        :raises SparkOptionError: naming the option, what was expected and what was found
        """
        option = OPTIONS[name]
        if self.has(name):
            return self._parse(name, option.parse)
        return option.parse(option.default) if option.default else None

    def stream(self) -> str:
        """Return the name of the only stream."""
        self.require_one_of("stream", "bucket")
        if self.has("bucket"):
            return f"{BUCKET_STREAM}{self['bucket']}"
        if not self.has("stream"):
            raise SparkOptionError("expected the option stream, found none: name the stream to read or to write")
        return str(self["stream"])

    def bound(self, which: str, default: str) -> PerStream[Bound]:
        """Return where reading starts or ends, by offset or by time."""
        offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
        self.require_one_of(offsets, timestamp)
        return self.per_stream(timestamp if self.has(timestamp) else offsets, Bound(extreme=default))

    def per_stream(self, name: str, default: _Value) -> PerStream[_Value]:
        """Return an option that may be a JSON object with a value for each stream."""
        if not self.has(name):
            return PerStream(name, default)
        if is_object(self._options[name.lower()]):
            return PerStream(name, default, self._parse(name, object_of(OPTIONS[name].parse)))
        return PerStream(name, self[name])

    def _parse(self, name: str, convert: Callable[[str], Any]) -> Any:
        if (value := self._options.get(name.lower())) is None:
            return None
        try:
            return convert(value)
        except ValueError as error:
            problem = str(error) if "found" in str(error) else f"{error}, found {value!r}"
            raise SparkOptionError(f"{name}: {problem}") from None


@dataclass(frozen=True)
class TriggerOptions:
    """How much a batch of a query reads.

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
    """How a stream is read.

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
    accepted_loss: _Ranges = ()
    of_bucket: bool = False
    latest: bool = False
    per_trigger: TriggerOptions = field(default_factory=TriggerOptions)
    among_several: bool = False


@dataclass(frozen=True)
class WriteOptions(StreamOptions):
    """How rows are written."""

    subject: str | None
    max_in_flight: int
    ack_timeout: float
    min_duplicate_window: float
    prefix: str | None
    null_is_empty: bool = False
    drop_nats_headers: bool = False


@dataclass(frozen=True)
class SourceOptions:
    """Which streams are read, and how.

    :param shared: how each of them is read, apart from its name and its bounds
    :param names: their names; empty where a pattern selects them
    :param pattern: of their names; where there is one, streams may come and go
    :param several: whether offsets name streams, which they do unless the option is ``stream`` or ``bucket``
    :param start: where reading of each starts
    :param end: where reading of each ends
    :param losses: the accepted losses of each
    """

    shared: ReadOptions
    names: tuple[str, ...]
    pattern: str | None
    several: bool
    start: PerStream[Bound]
    end: PerStream[Bound]
    losses: PerStream[_Ranges]

    def __str__(self) -> str:
        return f"streams that match {self.pattern}" if self.pattern else ", ".join(self.names)

    def selects(self, name: str) -> bool:
        """Return whether a stream of this name is read."""
        return fnmatchcase(name, self.pattern) if self.pattern else name in self.names

    def matching(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return which of some streams are read, in order."""
        return tuple(sorted(name for name in names if self.selects(name)))

    def of(self, name: str) -> ReadOptions:
        """Return how a stream is read."""
        return replace(
            self.shared,
            stream=name,
            start=self.start.of(name),
            end=self.end.of(name),
            accepted_loss=self.losses.of(name),
            among_several=self.several,
        )

    def require_bounds(self, names: Iterable[str]) -> None:
        """Require that bounds that name streams name all of them.

        :raises SparkOptionError: one is missing
        """
        for bounds in (self.start, self.end):
            missing = [name for name in names if bounds.named is not None and name not in bounds.named]
            if missing:
                raise SparkOptionError(
                    f"{bounds.option}: expected a value for every stream, found none for {', '.join(missing)}: add it,"
                    " or give earliest or latest for all"
                )


def source_options(options: Mapping[str, str], purpose: Purpose) -> SourceOptions:
    """Parse the options of a reader; their names may be in any case.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    given = _Given(options, purpose)
    given.require_one_of("stream", "streams", "streamPattern", "bucket")
    pattern = given["streamPattern"]
    names = () if pattern else given["streams"] or (given.stream(),)
    source = SourceOptions(
        _shared_options(given),
        names,
        pattern,
        several=given.has("streams") or pattern is not None,
        start=given.bound("starting", "latest" if purpose == "readStream" else "earliest"),
        end=given.bound("ending", "latest"),
        losses=given.per_stream("acceptedLoss", ()),
    )
    _require_names(source)
    source.require_bounds(names)
    for name in (*names, *(source.start.named or ()), *(source.end.named or ())) or ("",):
        _require_order(source.of(name))
    return source


def read_options(options: Mapping[str, str], purpose: Purpose) -> ReadOptions:
    """Parse the options of a reader of one stream.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    source = source_options(options, purpose)
    return source.of(source.names[0])


def write_options(options: Mapping[str, str], purpose: Purpose) -> WriteOptions:
    """Parse the options of a writer; their names may be in any case.

    :raises SparkOptionError: naming the option, what was expected and what was found
    """
    given = _Given(options, purpose)
    return WriteOptions(
        given.stream(),
        subject=given["subject"],
        max_in_flight=given["maxInFlight"],
        ack_timeout=given["ackTimeout"],
        min_duplicate_window=given["minDuplicateWindow"],
        prefix=given["msgIdPrefix"],
        null_is_empty=given["nullValue"] == "empty",
        drop_nats_headers=given["natsHeaders"] == "drop",
    )


def _shared_options(given: _Given) -> ReadOptions:
    """Return what holds for every stream of a read, with neither a name nor bounds."""
    latest = given["latestPerSubject"]
    if latest and (found := [name for name in _OF_RANGES if given.has(name)]):
        raise SparkOptionError(
            f"expected no {found[0]} with latestPerSubject, which reads the whole stream in one task: drop one of them"
        )
    return ReadOptions(
        "",
        filters=given["filterSubjects"] or (),
        start=Bound(extreme="earliest"),
        end=Bound(extreme="latest"),
        min_partitions=given["minPartitions"],
        max_records=given["maxRecordsPerPartition"],
        fail_on_data_loss=given["failOnDataLoss"],
        include_headers=given["includeHeaders"],
        method=given["fetchMethod"],
        batch=given["fetchBatch"],
        max_bytes=given["fetchMaxBytes"],
        decompress=given["payloadCompression"] == "zlib",
        of_bucket=given.has("bucket"),
        latest=latest,
        per_trigger=_per_trigger(given),
    )


def _per_trigger(given: _Given) -> TriggerOptions:
    options = TriggerOptions(
        max_offsets=given["maxOffsetsPerTrigger"],
        max_bytes=given["maxBytesPerTrigger"],
        min_offsets=given["minOffsetsPerTrigger"],
        max_delay=given["maxTriggerDelay"] or _MAX_DELAY,
    )
    if given.has("maxTriggerDelay") and not options.min_offsets:
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


def _require_names(source: SourceOptions) -> None:
    """Require that values which name streams name selected ones, and that sequences have the name of a stream."""
    values: tuple[tuple[PerStream[Any], Any, str], ...] = (
        (source.start, source.start.default.sequence, "17"),
        (source.end, source.end.default.sequence, "17"),
        (source.losses, source.losses.default, '"101-150"'),
    )
    for value, sequences, example in values:
        for name in value.named or ():
            if not source.selects(name):
                raise SparkOptionError(f"{value.option}: expected values for {source}, found one for {name!r}: drop it")
        if source.several and sequences:
            raise SparkOptionError(
                f"{value.option}: expected sequences with the name of their stream, such as"
                f" {{{json.dumps((source.names or ('orders',))[0])}: {example}}}, found none: each of several streams"
                " counts its own"
            )


def _require_order(options: ReadOptions) -> None:
    start, end = options.start, options.end
    pairs = ("Offsets", start.sequence, end.sequence), ("Timestamp", start.time, end.time)
    for kind, first, last in pairs:
        if first is not None and last is not None and first > last:
            raise SparkOptionError(
                f"expected ending{kind} at or after starting{kind}, found {last} before {first}: exchange them"
            )
    if start.extreme == "latest" and end.extreme == "earliest":
        raise SparkOptionError("expected endingOffsets after startingOffsets, found latest to earliest: exchange them")
