"""Finds how far a batch of a query may go so that its messages have no more bytes than a limit.

The server doesn't know how many bytes a range of sequences has, so the messages are read: without their bodies from a
stream that allows a consumer, as a whole from another.
"""

from __future__ import annotations

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
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range
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
