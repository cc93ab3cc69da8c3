"""What a query of streams reads: its offset, as Spark's checkpoint keeps it, and its streams as they are at one moment.

An offset has the positions of the query's streams by name, so the options may name other streams after a restart. It
also names the sequences that its batch has skipped because they are lost: offsets are all that Spark's progress has of
a Python data source.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.partition_planner import (
    Range,
    fetch_method,
    find_loss,
    first_sequence,
    plan_ranges,
    range_starts,
    record_matches,
    report_loss,
    with_share,
)
from airflow_provider_jetstream.spark.source.source_stream import SourceStream, names_of_streams, parse_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Loss

    Offset = dict[str, Any]
    Positions: TypeAlias = "Mapping[str, StreamPosition]"


class StreamPosition(NamedTuple):
    """The end of what was read of a stream.

    :param sequence: the last sequence that was read
    :param created: when the stream was created, as the server's text
    :param time: nothing after that sequence was stored before, in nanoseconds since 1970; 0 where that isn't known
    """

    sequence: int
    created: str
    time: int = 0

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> StreamPosition:
        """Read a position from an offset."""
        return cls(int(offset["seq"]), str(offset["created"]), int(offset.get("time", 0)))

    def offset(self) -> dict[str, Any]:
        """Return the position as an offset."""
        return {"seq": self.sequence, "created": self.created, "time": self.time}

    def since(self, start: StreamPosition) -> int:
        """Return how many sequences lie between an earlier position, or the beginning of a new stream, and this one."""
        return max(0, self.sequence - (start.sequence if start.created == self.created else 0))


_STREAMS = "streams"
# The start of the offset's batch. Of a query's first batch, and of a stream that has appeared, Spark's checkpoint has
# it nowhere else.
_START = "start"
# The first and the last sequence that were lost before this batch.
_LOST = "lost"


@dataclass(frozen=True)
class QueryOffset:
    """An offset as it was written.

    :param positions: by the streams' names
    :param starts: by the names, the positions after which the batch begins
    """

    positions: Mapping[str, StreamPosition]
    starts: Mapping[str, StreamPosition]

    @classmethod
    def parse(cls, offset: Mapping[str, Any], options: ReadOptions) -> QueryOffset:
        """Read an offset.

        :raises SparkOptionError: it is the offset of other streams, or of another source
        """
        try:
            entries: Mapping[str, Mapping[str, Any]] = offset[_STREAMS]
            positions = {name: StreamPosition.of(entry) for name, entry in entries.items()}
            starts = {name: StreamPosition.of(entry[_START]) for name, entry in entries.items() if _START in entry}
        except (LookupError, TypeError, AttributeError):
            raise SparkOptionError(
                f"expected a checkpoint of {options}, found one of another source or of another version: use another"
                " checkpoint"
            ) from None
        if positions and not any(map(options.selects, positions)):
            raise SparkOptionError(
                f"expected a checkpoint of {options}, found one of {', '.join(sorted(positions))}: use another"
                " checkpoint"
            )
        return cls(positions, starts)


def write_offset(
    positions: Mapping[str, StreamPosition],
    starts: Mapping[str, StreamPosition] | None = None,
    losses: Mapping[str, Loss] | None = None,
) -> dict[str, Any]:
    """Write an offset.

    :param starts: the positions after which the batch begins that ends here
    :param losses: what this batch skips
    """
    entries = {name: position.offset() for name, position in sorted(positions.items())}
    for name, start in (starts or {}).items():
        entries[name][_START] = start.offset()
    for name, loss in (losses or {}).items():
        entries[name][_LOST] = [loss.first, loss.last]
    return {_STREAMS: entries}


class ReportedPosition(NamedTuple):
    """How far a stream has been read, as an offset in Spark's progress tells it.

    :param lost: the first and the last sequence that the offset's batch has skipped
    """

    position: StreamPosition
    lost: tuple[int, int] | None = None


def reported_positions(text: str) -> dict[str, ReportedPosition]:
    """Read an offset of a query's progress; empty where there is none, or where another format wrote it."""
    try:
        return {name: _reported(entry) for name, entry in json.loads(text)[_STREAMS].items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _reported(entry: Mapping[str, Any]) -> ReportedPosition:
    position = StreamPosition.of(entry)
    if _LOST not in entry:
        return ReportedPosition(position)
    first, last = entry[_LOST]
    return ReportedPosition(position, (int(first), int(last)))


log = logging.getLogger(__name__)


class NewMessages(NamedTuple):
    """What a query hasn't read yet of a stream.

    :param stream: the stream
    :param start: where the last batch ended
    :param after: the sequence before the first one that is read
    :param end: where the batch ends
    :param oldest: nothing after it was stored before, in nanoseconds since 1970
    :param loss: what is lost between the two
    """

    stream: QueryStream
    start: StreamPosition
    after: int
    end: StreamPosition
    oldest: int = 0
    loss: Loss | None = None

    @property
    def pending(self) -> int:
        """How many sequences there are."""
        return max(0, self.end.sequence - self.after)

    @property
    def estimated_bytes(self) -> int:
        """How many bytes there may be, by the stream's average message; 0 where there is nothing."""
        return self.pending * self.stream.info.limits.average_size

    def without_gap(self) -> NewMessages:
        """Begin at the first message that the filters match; where there is none, there is nothing to read."""
        if not self.pending:
            return self
        message = self.stream.stream.next_of(self.after + 1, self.stream.options.filter_subjects)
        if message is None or message.sequence > self.end.sequence:
            return self._replace(after=self.end.sequence)
        return self._replace(after=message.sequence - 1, oldest=parse_time(message.time))

    def up_to(self, last: int) -> NewMessages:
        """End at a sequence, if that is earlier."""
        if last >= self.end.sequence:
            return self
        return self._replace(end=self.end._replace(sequence=last, time=self.oldest))

    def range(self) -> Range:
        """Return everything as one range, whose losses are looked for elsewhere."""
        info, options = self.stream.info, self.stream.options
        return Range(
            options.stream,
            self.after + 1,
            self.end.sequence,
            self.stream.method(),
            options.filter_subjects,
            info.created,
            detect_loss=False,
        )


class QueryStream:
    """A stream behind an open connection.

    :param options: how it is read
    :raises NotFoundError: it doesn't exist
    """

    def __init__(self, stream: SourceStream, options: ReadOptions) -> None:
        self.stream = stream
        self.options = options
        self.info = stream.info()

    def end(self) -> StreamPosition:
        """Return the position after everything that is stored."""
        return self._position(self.info.last)

    def beginning(self) -> StreamPosition:
        """Return the position before the first message that is stored."""
        return self._position(self.info.first - 1)

    def initial(self) -> StreamPosition:
        """Return the position at which a new query begins."""
        return self._position(first_sequence(self.stream, self.options, self.info) - 1)

    def method(self) -> str:
        """Return how the stream is read."""
        return fetch_method(self.options, self.info, self.stream.socket.version)

    def new_messages(self, start: StreamPosition, target: StreamPosition | None) -> NewMessages:
        """Return the messages to read after a position; where there are none, the end is the position itself.

        :param target: where the query ends, if it does
        """
        end, (last_read, loss) = self.end(), self.last_read(start)
        if target and target.created == end.created and target.sequence < end.sequence:
            end = target
        if last_read < end.sequence:
            return NewMessages(self, start, last_read, end, loss=loss)
        # The start means nothing here if the stream was recreated or restored.
        means_this = start.created == self.info.created and start.sequence <= self.info.last
        return NewMessages(self, start, last_read, start if means_this else end._replace(sequence=last_read))

    def first_read(self, start: StreamPosition) -> StreamPosition:
        """Return the position after which a batch begins; a batch that runs again is divided from there."""
        is_stored = start.created == self.info.created and start.sequence >= self.info.first - 1
        return start if is_stored else self.beginning()

    def plan(
        self, start: StreamPosition, begin: StreamPosition, end: StreamPosition, options: ReadOptions
    ) -> list[Range]:
        """Divide the messages between two positions among tasks.

        A batch that runs again has the same division, also where the stream begins later by then: a row that came to
        another task would be written under another message id. A range whose messages are gone is empty.

        :param start: where the last batch ended
        :param begin: where the batch was divided from
        :param options: with the stream's share of tasks
        """
        info = self.info
        # Spark asks for a query's first position anew where its first batch runs again.
        if begin.created == start.created and begin.sequence < start.sequence:
            start = begin
        first = self.last_read(start)[0] + 1
        if end.created != info.created:
            report_loss(f"{self.stream.name} was deleted and recreated after this batch was planned", options)
            return empty_ranges(begin, end, options)
        edges = range_starts(begin.sequence + 1, end.sequence, options)
        planned = record_matches(
            self.stream, info, sorted({max(first, edge) for edge in edges}), options.filter_subjects
        )
        ranges = plan_ranges(
            begin.sequence + 1, end.sequence, options, info, self.method(), options.filter_subjects, planned
        )
        return [replace(task, first=max(first, task.first)) for task in ranges]

    def last_read(self, start: StreamPosition) -> tuple[int, Loss | None]:
        """Return the last sequence that needn't be read again, and what is lost after the start, which is reported."""
        info, options, last_read = self.info, self.options, start.sequence
        name = self.stream.name
        if start.created != info.created:
            elsewhere = "or the checkpoint is of another server's or domain's stream of that name"
            report_loss(f"{name} was deleted and recreated after sequence {last_read} was read, {elsewhere}", options)
            return info.first - 1, None
        if last_read > info.last:
            self._require_past(last_read)
            return info.last, None
        if loss := find_loss(self.stream, info, last_read + 1, options.filter_subjects, oldest=start.time):
            report_loss(f"{name} begins at {info.first}, and {last_read + 1} wasn't read", options, loss)
        return max(last_read, info.first - 1), loss

    def _require_past(self, last_read: int) -> None:
        """Refuse a checkpoint of another stream, or of one that was restored from an older state."""
        last = self.info.last
        finding = f"the checkpoint is at {last_read}, and {self.stream.name} ends at {last}"
        if self.options.fail_on_data_loss:
            raise SparkOptionError(
                f"expected a checkpoint of this stream's past, found that {finding}: it was restored from a backup, or"
                " the checkpoint belongs to a stream of that name elsewhere; use another checkpoint, or set"
                f" failOnDataLoss to false to go on with what is stored after {last}"
            )
        log.warning("Going on after %d: %s.", last, finding)

    def _position(self, sequence: int) -> StreamPosition:
        """Make a position; its time tells later whether what was stored after it can have expired."""
        time = self.info.newest if sequence >= self.info.last else self.info.oldest
        return StreamPosition(sequence, self.info.created, time)


def empty_ranges(begin: StreamPosition, end: StreamPosition, options: ReadOptions) -> list[Range]:
    """Return an empty range for each task of a stream that is gone, so that later tasks keep their numbers."""
    count = len(range_starts(begin.sequence + 1, end.sequence, options))
    return [Range(options.stream, 1, 0, "consumer", (), end.created, detect_loss=False)] * count


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
        """Return the messages to read of each stream after an offset.

        A stream that isn't in the offset is read from its first message.

        :param target: where the query ends, if it does; streams that aren't in it aren't read
        :raises DataLossError: messages are gone, and that is an error
        """
        known = QueryOffset.parse(start, self._options).positions
        streams = self._present(known)
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
        known, new = (
            QueryOffset.parse(start, self._options).positions,
            {part.stream.stream.name: part for part in batch},
        )
        ends = {name: part.end for name, part in new.items()}
        if ends == known:
            return start
        changed = {name: part for name, part in new.items() if part.end != known.get(name)}
        starts = {name: part.stream.first_read(part.start) for name, part in changed.items()}
        losses = {name: part.loss for name, part in changed.items() if part.loss}
        return write_offset(ends, starts, losses)

    def plan(self, start: Offset, end: Offset) -> list[Range]:
        """Divide the messages between two offsets among tasks.

        :raises DataLossError: messages are gone, and that is an error
        """
        last, starts = QueryOffset.parse(end, self._options), QueryOffset.parse(start, self._options).positions
        ends = last.positions
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
        """Report deleted streams; streams that the options no longer select are left out."""
        for name in sorted({*known} - {*present}):
            sequence = known[name].sequence
            if self._options.selects(name):
                report_loss(f"{name} was deleted after sequence {sequence} was read", self._options.of(name))
            else:
                log.warning("%s isn't read after sequence %d, since the options don't name it.", name, sequence)
