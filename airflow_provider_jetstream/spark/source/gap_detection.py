"""Whether messages that didn't come were deleted one by one, or the beginning of the stream overtook the reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.partition_planner import report_loss
from airflow_provider_jetstream.spark.source.stream_api import SourceStream

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    import pyarrow as pa
    from numpy.typing import NDArray

    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.partition_planner import Range


class Fetched(NamedTuple):
    """Some messages of a span.

    :param batch: the messages
    :param following: the sequence to go on with after them
    :param missing: the first sequence before that of which there was no message
    """

    batch: pa.RecordBatch
    following: int
    missing: int | None


def first_missing(expected: int, sequences: NDArray[np.int64]) -> int | None:
    """Find the first gap.

    :param expected: the sequence that was to come
    :param sequences: those that came, ascending, at least one
    :return: the first one that isn't among them and before the last
    """
    count = len(sequences)
    if sequences[0] == expected and sequences[-1] == expected + count - 1:
        return None
    return expected + int(np.argmax(sequences != np.arange(expected, expected + count)))


class GapDetector:
    """Asks the stream about gaps, over a connection that is opened for the first of them.

    :param given: the data source's options, from which the connection is made
    :param options: the same ones, understood
    :param part: the range that is read
    """

    def __init__(self, given: Mapping[str, str], options: ReadOptions, part: Range) -> None:
        self._given = given
        self._options = options
        self._watched = part.detect_loss
        self._must_exist = part.fail_on_loss
        self._wire: NatsSocket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wire:
            self._wire.close()

    def look(self, missing: int) -> None:
        """Tell if the stream begins after a message that didn't come; before that it was deleted, and that is no loss.

        :param missing: the first sequence that didn't come
        :raises DataLossError: the stream begins later, and that is an error
        """
        if not self._watched:
            return
        self._wire = self._wire or NatsSocket(socket_settings(self._given))
        facts = SourceStream(self._wire, self._options.stream, self._options.api_prefix).info()
        if facts.first > missing:
            name = self._options.stream
            report_loss(f"{name} begins at {facts.first} now, and {missing} was being read", fail=self._must_exist)
            # Once is enough.
            self._watched = False
