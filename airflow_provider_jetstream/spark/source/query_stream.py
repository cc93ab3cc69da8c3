"""A stream that a query reads, as it is at one moment: where it ends, what is to be read, and what of that is lost."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.data_loss import find_loss, record_matches, report_loss
from airflow_provider_jetstream.spark.source.partition_planner import (
    Range,
    empty_ranges,
    fetch_method,
    first_sequence,
    plan_ranges,
    range_starts,
)
from airflow_provider_jetstream.spark.source.source_stream import parse_time
from airflow_provider_jetstream.spark.source.stream_position import StreamPosition

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.source.data_loss import Loss
    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream

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
        """Return what is to be read after a position; the end is the position itself where that is nothing.

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
