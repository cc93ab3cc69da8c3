"""The offset of a query: how far it has read each stream, as Spark's checkpoint keeps it.

A query of one stream has that stream's position alone, without its name, as the first versions of this package wrote
it. A query that can have several has their positions by name. Either can go on from the other's checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.stream_position import StreamPosition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.spark.source.source_options import SourceOptions

_STREAMS = "streams"
# Of a stream that appeared in the batch which the offset ends: where it is read from.
_START = "start"


@dataclass(frozen=True)
class QueryOffset:
    """An offset as it was written.

    :param positions: by the streams' names
    :param starts: where streams that appeared in this batch are read from
    :param unnamed: the position of the only stream, where that is all there is
    """

    positions: Mapping[str, StreamPosition]
    starts: Mapping[str, StreamPosition] = field(default_factory=dict)
    unnamed: StreamPosition | None = None

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> QueryOffset:
        """Read an offset of either form."""
        if _STREAMS not in offset:
            return cls({}, unnamed=StreamPosition.of(offset))
        entries: Mapping[str, Mapping[str, Any]] = offset[_STREAMS]
        return cls(
            {name: StreamPosition.of(entry) for name, entry in entries.items()},
            {name: StreamPosition.of(entry[_START]) for name, entry in entries.items() if _START in entry},
        )

    def named(self, options: SourceOptions, creations: Callable[[], Mapping[str, str]]) -> Mapping[str, StreamPosition]:
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
    options: SourceOptions, positions: Mapping[str, StreamPosition], starts: Mapping[str, StreamPosition] | None = None
) -> dict[str, Any]:
    """Write an offset.

    :param starts: of streams that appeared in the batch which it ends
    """
    if not options.several:
        return positions[options.names[0]].offset()
    entries = {name: position.offset() for name, position in sorted(positions.items())}
    for name, start in (starts or {}).items():
        entries[name][_START] = start.offset()
    return {_STREAMS: entries}
