"""How far queries are behind their streams, and what they have lost: read from the offsets in Spark's progress.

Spark gives a Python data source no metrics of its own, and runs it in a process of its own. What reaches the
application is the progress of each query, with the offsets that the data source has returned.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import StreamingQueryListener
from typing_extensions import override

from airflow_provider_jetstream.spark.source.query import reported_positions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        SourceProgress,
        StreamingQueryProgress,
    )

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamLag:
    """How far a query is behind a stream.

    :param stream: the stream's name
    :param read: the last sequence of the query's batch
    :param last: the stream's last sequence when the batch was planned, or when an idle query looked; none if Spark
        doesn't tell
    :param lag: how many sequences lie between the two, deleted messages and other subjects included
    :param lost: the first and the last sequence that were lost before the batch, and that the options let it skip
    :param recreated: whether the stream was deleted and created again since the batch before
    """

    stream: str
    read: int
    last: int | None
    lag: int | None
    lost: tuple[int, int] | None = None
    recreated: bool = False

    def __str__(self) -> str:
        return f"{self.stream} to {self.read}" + ("" if self.lag is None else f" of {self.last} (lag {self.lag})")


@dataclass(frozen=True)
class QueryLag:
    """How far a query is behind its streams.

    :param id: the query's id, which outlives restarts
    :param name: the query's name, if it has one
    :param batch: the number of the batch; of the next one while the query is idle
    :param timestamp: when the batch began, as Spark's text
    :param streams: by name; several sources of one query may read the same stream
    """

    id: str
    name: str | None
    batch: int
    timestamp: str
    streams: tuple[StreamLag, ...]


class LagListener(StreamingQueryListener):
    """Logs, and publishes, how far each query of the format ``jetstream`` is behind its streams and what it has lost.

    Give it to ``spark.streams.addListener``. It is called after each batch, and every ten seconds (Spark's
    ``spark.sql.streaming.noDataProgressEventInterval``) while a query has nothing to do or waits for more.

    :param session: whose queries are watched
    :param publish: is called with each :class:`QueryLag`, in a thread of Spark's
    """

    def __init__(self, session: SparkSession, publish: Callable[[QueryLag], None] | None = None) -> None:
        self._session = session
        self._publish = publish

    @override
    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: no batch has been planned."""

    @override
    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Publish how far a batch has come."""
        self._report(event.progress, idle=False)

    @override
    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Publish how far a query is behind that runs no batch; the event itself has no offsets."""
        for query in self._session.streams.active:
            if str(query.id) == str(event.id) and (progress := query.lastProgress):
                self._report(progress, idle=True)

    @override
    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing: the last batch was published."""

    def _report(self, progress: StreamingQueryProgress, *, idle: bool) -> None:
        streams = tuple(lag for source in progress.sources for lag in _stream_lags(source, idle=idle))
        if not streams:
            return
        query = QueryLag(str(progress.id), progress.name, progress.batchId, progress.timestamp, streams)
        label = query.name or query.id
        for stream in streams:
            if stream.lost:
                log.warning("Query %s lost %s: sequences %d to %d are gone.", label, stream.stream, *stream.lost)
            if stream.recreated:
                log.warning(
                    "Query %s: %s was deleted and created again; its old messages are gone.", label, stream.stream
                )
        log.info("Query %s, batch %d: %s", label, query.batch, ", ".join(map(str, streams)))
        if self._publish:
            self._publish(query)


def _stream_lags(source: SourceProgress, *, idle: bool) -> list[StreamLag]:
    """Return how far a source is behind each of its streams.

    :param idle: whether no batch was run: the offset is of an earlier batch, whose losses were published
    """
    starts, ends = reported_positions(source.startOffset), reported_positions(source.endOffset)
    latest = reported_positions(source.latestOffset)
    lags = []
    for name, (end, lost) in ends.items():
        start, last = starts.get(name), latest.get(name)
        recreated = start is not None and start.position.created != end.created
        lags.append(
            StreamLag(
                name,
                end.sequence,
                last.position.sequence if last else None,
                last.position.since(end) if last else None,
                None if idle else lost,
                recreated and not idle,
            )
        )
    return lags
