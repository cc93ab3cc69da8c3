"""The offset of a query: how far it has read each stream, as Spark's checkpoint keeps it.

A query of one stream has that stream's position alone; its name is beside it, for whoever watches the query's progress,
and the first versions of this package wrote none. A query that can have several has their positions by name. Either can
go on from the other's checkpoint.

An offset also names the sequences that its batch has skipped because they are lost: offsets are all that Spark's
progress has of a Python data source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.stream_position import StreamPosition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.spark.source.data_loss import Loss
    from airflow_provider_jetstream.spark.source.options import ReadOptions

_STREAMS = "streams"
# Where the batch that the offset ends begins: the first position of a query, or of a stream that has appeared, is
# nowhere else in Spark's checkpoint.
_START = "start"
_STREAM = "stream"
# The first and the last sequence that were lost before this batch.
_LOST = "lost"


@dataclass(frozen=True)
class QueryOffset:
    """An offset as it was written.

    :param positions: by the streams' names
    :param starts: after which positions the batch reads them
    :param unnamed: the position of the only stream, where that is all there is
    :param stream: the name of that stream, where the offset has it
    """

    positions: Mapping[str, StreamPosition]
    starts: Mapping[str, StreamPosition] = field(default_factory=dict)
    unnamed: StreamPosition | None = None
    stream: str | None = None

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> QueryOffset:
        """Read an offset of either form."""
        if _STREAMS not in offset:
            starts = {offset[_STREAM]: StreamPosition.of(offset[_START])} if _START in offset else {}
            return cls({}, starts, StreamPosition.of(offset), offset.get(_STREAM))
        entries: Mapping[str, Mapping[str, Any]] = offset[_STREAMS]
        return cls(
            {name: StreamPosition.of(entry) for name, entry in entries.items()},
            {name: StreamPosition.of(entry[_START]) for name, entry in entries.items() if _START in entry},
        )

    def named(self, options: ReadOptions, creations: Callable[[], Mapping[str, str]]) -> Mapping[str, StreamPosition]:
        """Return the positions by name.

        :param creations: when the streams were created, which tells what stream a position without a name is of
        :raises SparkOptionError: it is the offset of other streams
        """
        if self.unnamed is None:
            if self.positions and not any(map(options.selects, self.positions)):
                raise SparkOptionError(
                    f"expected a checkpoint of {options}, found one of {', '.join(sorted(self.positions))}: use another"
                    " checkpoint"
                )
            return self.positions
        if self.stream is not None and not options.selects(self.stream):
            raise SparkOptionError(
                f"expected a checkpoint of {options}, found one of {self.stream}: use another checkpoint, or read"
                f" {self.stream}"
            )
        if self.stream is not None:
            return {self.stream: self.unnamed}
        if len(options.names) == 1:
            return {options.names[0]: self.unnamed}
        for name, created in creations().items():
            if created == self.unnamed.created:
                return {name: self.unnamed}
        raise SparkOptionError(
            f"expected a checkpoint of {options}, found one of a single stream that was created at"
            f" {self.unnamed.created}, which is none of these: use another checkpoint"
        )


def write_offset(
    options: ReadOptions,
    positions: Mapping[str, StreamPosition],
    starts: Mapping[str, StreamPosition] | None = None,
    losses: Mapping[str, Loss] | None = None,
) -> dict[str, Any]:
    """Write an offset.

    :param starts: after which positions the batch reads what it ends
    :param losses: what this batch skips
    """
    entries = {name: position.offset() for name, position in sorted(positions.items())}
    for name, start in (starts or {}).items():
        entries[name][_START] = start.offset()
    for name, loss in (losses or {}).items():
        entries[name][_LOST] = [loss.first, loss.last]
    if options.several:
        return {_STREAMS: entries}
    name = options.names[0]
    return {**entries[name], _STREAM: name}


class ReportedPosition(NamedTuple):
    """How far a stream has been read, as an offset in Spark's progress tells it.

    :param lost: the first and the last sequence that the offset's batch has skipped
    """

    position: StreamPosition
    lost: tuple[int, int] | None = None


def reported_positions(text: str) -> dict[str, ReportedPosition]:
    """Read an offset of a query's progress; empty where there is none, or where another format wrote it."""
    try:
        offset = json.loads(text)
        entries = offset[_STREAMS] if _STREAMS in offset else {offset[_STREAM]: offset}
        return {name: _reported(entry) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _reported(entry: Mapping[str, Any]) -> ReportedPosition:
    position = StreamPosition.of(entry)
    if _LOST not in entry:
        return ReportedPosition(position)
    first, last = entry[_LOST]
    return ReportedPosition(position, (int(first), int(last)))
