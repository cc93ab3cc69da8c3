"""Which streams are read, and how each of them is, by the data source's options."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.option_parser import OptionParser, PerStream
from airflow_provider_jetstream.spark.source.option_values import (
    Bound,
    sequence_ranges,
    stream_glob,
    stream_names,
)
from airflow_provider_jetstream.spark.source.options import ReadOptions, shared_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.spark.source.option_names import Purpose

    _Ranges = tuple[tuple[int, int], ...]


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
    parser = OptionParser(options, purpose)
    names, pattern = _selection(parser)
    source = SourceOptions(
        shared_options(parser),
        names,
        pattern,
        several=parser.has("streams") or pattern is not None,
        start=parser.bound("starting", "latest" if purpose == "readStream" else "earliest"),
        end=parser.bound("ending", "latest"),
        losses=parser.per_stream("acceptedLoss", sequence_ranges, ()),
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


def _selection(parser: OptionParser) -> tuple[tuple[str, ...], str | None]:
    """Return the streams' names, or a pattern of them."""
    parser.require_one_of("stream", "streams", "streamPattern", "bucket")
    if parser.has("streamPattern"):
        return (), parser.read("streamPattern", stream_glob, default=None)
    if parser.has("streams"):
        return parser.read("streams", stream_names, default=()), None
    return (parser.stream(),), None


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
