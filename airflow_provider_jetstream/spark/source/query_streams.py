"""The streams that a query reads, as they are at one moment; under a pattern they come and go."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.spark.source.data_loss import report_loss
from airflow_provider_jetstream.spark.source.partition_planner import empty_ranges, with_share
from airflow_provider_jetstream.spark.source.query_offset import QueryOffset, write_offset
from airflow_provider_jetstream.spark.source.query_stream import NewMessages, QueryStream
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, names_of_streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range
    from airflow_provider_jetstream.spark.source.stream_position import StreamPosition

    Offset = dict[str, Any]
    Positions = Mapping[str, StreamPosition]

log = logging.getLogger(__name__)


class QueryStreams:
    """The streams behind an open connection.

    :param options: which streams, and how they are read
    """

    def __init__(self, socket: NatsSocket, options: ReadOptions) -> None:
        self._socket = socket
        self._options = options

    def initial(self) -> dict[str, StreamPosition]:
        """Return the positions at which a new query begins."""
        names = self._options.names or self._options.matching(names_of_streams(self._socket))
        self._options.require_bounds(names)
        return {name: stream.initial() for name, stream in self._open(names).items()}

    def ends(self) -> dict[str, StreamPosition]:
        """Return the positions after everything that is stored."""
        return {name: stream.end() for name, stream in self._present().items()}

    def new_messages(self, start: Offset, target: Positions | None) -> list[NewMessages]:
        """Return what is to be read after an offset, of each stream.

        A stream that isn't in the offset is read from its first message.

        :param target: where the query ends, if it does; streams that aren't in it aren't read
        :raises DataLossError: messages are gone, and that is an error
        """
        written = QueryOffset.parse(start)
        streams = self._present(written.positions)
        known = self._known(written, streams)
        self._report_gone(known, streams)
        messages: list[NewMessages] = []
        for name, stream in streams.items():
            position = known.get(name)
            if target is None or name in target:
                messages.append(stream.new_messages(position or stream.beginning(), (target or {}).get(name)))
            elif position:
                messages.append(NewMessages(stream, position, position.sequence, position))
        return messages

    def end_of(self, start: Offset, batch: Iterable[NewMessages]) -> Offset:
        """Return the offset of the end of a batch; the start itself where nothing changes."""
        written, new = QueryOffset.parse(start), {part.stream.stream.name: part for part in batch}
        ends = {name: part.end for name, part in new.items()}
        known = self._known(written, {name: part.stream for name, part in new.items()})
        if ends == known:
            return start
        changed = {name: part for name, part in new.items() if part.end != known.get(name)}
        starts = {name: part.stream.first_read(part.start) for name, part in changed.items()}
        losses = {name: part.loss for name, part in changed.items() if part.loss}
        return write_offset(self._options, ends, starts, losses)

    def plan(self, start: Offset, end: Offset) -> list[Range]:
        """Divide the messages between two offsets among tasks.

        :raises DataLossError: messages are gone, and that is an error
        """
        last, first = QueryOffset.parse(end), QueryOffset.parse(start)
        ends = last.named(self._options, lambda: _creations(self._present()))
        starts = first.named(self._options, lambda: {name: position.created for name, position in ends.items()})
        self._report_gone(starts, ends)
        changed = {name: position for name, position in ends.items() if position != starts.get(name)}
        streams = self._open(filter(self._options.selects, changed))
        begins = {name: stream.first_read(starts.get(name) or stream.beginning()) for name, stream in streams.items()}
        begins |= {name: begin for name, begin in last.starts.items() if name in changed}
        total = sum(changed[name].since(begin) for name, begin in begins.items())
        ranges: list[Range] = []
        for name, after in sorted(changed.items()):
            if name not in streams and self._options.selects(name):
                report_loss(f"{name} was deleted after this batch was planned", self._options.of(name))
            if begin := begins.get(name):
                options = with_share(self._options.of(name), after.since(begin), total)
                stream = streams.get(name)
                ranges += (
                    stream.plan(starts.get(name, begin), begin, after, options)
                    if stream
                    else empty_ranges(begin, after, options)
                )
        return ranges

    def _known(self, written: QueryOffset, streams: Mapping[str, QueryStream]) -> Positions:
        return written.named(self._options, lambda: _creations(streams))

    def _present(self, known: Iterable[str] = ()) -> dict[str, QueryStream]:
        """Open the streams that there are.

        :param known: streams that were there before, which a list of many pages may leave out
        """
        names = self._options.names
        return self._open(names or self._options.matching({*known, *names_of_streams(self._socket)}))

    def _open(self, names: Iterable[str]) -> dict[str, QueryStream]:
        """Open streams; only one that was named has to exist."""
        streams: dict[str, QueryStream] = {}
        for name in names:
            try:
                streams[name] = QueryStream(SourceStream(self._socket, name), self._options.of(name))
            except NotFoundError:
                if not self._options.stream_pattern:
                    raise
        return streams

    def _report_gone(self, known: Positions, present: Iterable[str]) -> None:
        """Report streams that were deleted; those that the options no longer select are left out."""
        for name in sorted({*known} - {*present}):
            sequence = known[name].sequence
            if self._options.selects(name):
                report_loss(f"{name} was deleted after sequence {sequence} was read", self._options.of(name))
            else:
                log.warning("%s isn't read after sequence %d, since the options don't name it.", name, sequence)


def _creations(streams: Mapping[str, QueryStream]) -> dict[str, str]:
    return {name: stream.info.created for name, stream in streams.items()}
