"""How much a batch of a query reads: at most so many sequences or bytes, and at least so many where that can wait.

No server tells how many bytes a range of sequences has, so a limit of bytes is found by reading sizes.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.columns import SIZE, RequestedColumns
from airflow_provider_jetstream.spark.source.fetch_consumer import DEFAULT_BATCH
from airflow_provider_jetstream.spark.source.fetch_direct import DEFAULT_BATCH as SMALL_BATCH
from airflow_provider_jetstream.spark.source.partition_reader import fetch, scans
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range
    from airflow_provider_jetstream.spark.source.query import NewMessages
    from airflow_provider_jetstream.spark.source.source_stream import StreamInfo

    Integers = NDArray[np.int64]

_SEQUENCE = "seq"
_COLUMNS = RequestedColumns((_SEQUENCE, SIZE), (True, True))
_FEWEST_MESSAGES = 50


class BytesUpTo(NamedTuple):
    """Where a limit ends a range.

    :param last: the last sequence within it; the first message is within every limit
    :param size: the bytes of the messages up to there
    """

    last: int
    size: int


def last_within(
    raw_options: Mapping[str, str], options: ReadOptions, info: StreamInfo, task: Range, limit: int
) -> BytesUpTo:
    """Find the last sequence of a range up to which messages have no more bytes than a limit.

    :param raw_options: the data source's options, from which connections are made
    :param limit: bytes of subjects, headers and bodies
    :raises TransientError: the server is away
    """
    sequences, sizes = _sizes(raw_options, options, info, task, limit)
    totals = np.cumsum(sizes)
    within = int(np.searchsorted(totals, limit, "right"))
    if within == len(totals):
        return BytesUpTo(task.last, int(totals[-1]) if within else 0)
    if within == 0:
        return BytesUpTo(int(sequences[0]), int(sizes[0]))
    # The sequences before the first message beyond the limit are a gap.
    return BytesUpTo(int(sequences[within]) - 1, int(totals[within - 1]))


def _sizes(
    raw_options: Mapping[str, str], options: ReadOptions, info: StreamInfo, task: Range, limit: int
) -> tuple[Integers, Integers]:
    """Read sequences and sizes in order, of each filter at least until its sizes exceed the limit."""
    settings = socket_settings(raw_options)
    most = options.fetch_batch or (DEFAULT_BATCH if task.method == "consumer" else SMALL_BATCH)
    # Three pulls are on their way when the limit is found to be reached: few messages where the limit is small.
    options = options.model_copy(
        update={"fetch_batch": min(most, max(limit // info.limits.average_size, _FEWEST_MESSAGES))}
    )
    sequences, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with closing(NatsSocket(settings)) as other:
        observed = SourceStream(other, options.stream)
        for subjects in scans(task):
            total = 0
            with closing(NatsSocket(settings)) as socket:
                stream = SourceStream(socket, options.stream)
                batches = fetch(
                    stream,
                    task,
                    subjects,
                    _COLUMNS,
                    options,
                    observed.next_sequence,
                    first=task.first,
                    pipelined=False,
                )
                with closing(batches):
                    for batch, _, _ in batches:
                        sequences.append(np.asarray(batch.column(_SEQUENCE)))
                        sizes.append(np.asarray(batch.column(SIZE)))
                        total += int(sizes[-1].sum())
                        if total > limit:
                            break
    every = np.concatenate(sequences)
    order = np.argsort(every, kind="stable")
    return every[order], np.concatenate(sizes)[order]


# As with Spark's Kafka source.
_MAX_DELAY = 15 * 60.0


class TriggerPace:
    """Divides a query's new messages into batches.

    :param raw_options: the data source's options, from which connections are made
    """

    def __init__(self, raw_options: Mapping[str, str]) -> None:
        self._raw_options = raw_options
        # When the last batch began; a query that has just started doesn't wait.
        self._last_batch: float | None = None

    def batch(self, streams: Sequence[NewMessages], limits: ReadOptions, *, may_wait: bool) -> list[NewMessages] | None:
        """Return what the next batch reads of each stream; ``None`` if it waits for more.

        A limit is divided among streams by how much there is of each, and lets at least one message of each pass, so
        that none of them waits forever.

        :param may_wait: whether there will be later triggers
        """
        if not any(new.pending for new in streams):
            return list(streams)
        found = [new.without_gap() for new in streams] if limits.given_limits else list(streams)
        total = sum(new.pending for new in found)
        if (
            may_wait
            and limits.min_offsets_per_trigger
            and total < limits.min_offsets_per_trigger
            and not self._is_due(limits.max_trigger_delay or _MAX_DELAY)
        ):
            return None
        self._last_batch = time.monotonic()
        if (most := limits.max_offsets_per_trigger) and total > most:
            found = [new.up_to(new.after + max(1, most * new.pending // total)) for new in found]
        return self._within_bytes(found, limits.max_bytes_per_trigger) if limits.max_bytes_per_trigger else found

    def _is_due(self, delay: float) -> bool:
        return self._last_batch is None or time.monotonic() - self._last_batch >= delay

    def _within_bytes(self, streams: Sequence[NewMessages], limit: int) -> list[NewMessages]:
        found = list(streams)
        weights = [new.estimated_bytes for new in streams]
        bytes_left, weight_left = limit, sum(weights)
        # What a stream leaves of its share goes to those with more.
        for index in sorted((index for index, weight in enumerate(weights) if weight), key=weights.__getitem__):
            new, stream = found[index], found[index].stream
            share = max(1, bytes_left * weights[index] // weight_left)
            last, size = last_within(self._raw_options, stream.options, stream.info, new.range(), share)
            found[index] = new.up_to(last)
            bytes_left, weight_left = max(0, bytes_left - size), weight_left - weights[index]
        return found
