"""Rows as they go over the wire, kept until each is answered: to be sent again, and to be named if they fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from airflow_provider_jetstream.spark.source.row_encoder import digits, joined
from airflow_provider_jetstream.spark.wire.arrow_buffers import content_and_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from airflow_provider_jetstream.spark.source.row_encoder import EncodedRows


@dataclass(frozen=True)
class PublishBatch:
    """Some rows that follow each other.

    :param start: the number of the first
    :param end: the number after the last
    :param subjects: the rows' subjects
    :param ids: what the stream knows repeats by
    :param content: their frames, one after another
    :param bounds: where each frame begins, with the end as one more
    """

    start: int
    end: int
    subjects: pa.BinaryArray
    ids: pa.BinaryArray
    content: memoryview
    bounds: NDArray[np.int32]

    @classmethod
    def from_rows(cls, messages: EncodedRows, start: int, reply: bytes) -> PublishBatch:
        """Write frames.

        :param messages: the rows
        :param start: the number of the first
        :param reply: what the subjects of answers begin with; a row's number follows
        :return: the rows as they are published
        """
        end = start + len(messages.sizes)
        numbers = digits(np.arange(start, end))
        frames = joined(b"HPUB ", messages.subjects, b" " + reply, numbers, messages.rests)
        content, bounds = content_and_offsets(frames)
        return cls(start, end, messages.subjects, messages.ids, memoryview(content), bounds)

    def frames(self, first: int, last: int) -> memoryview:
        """Give frames that follow each other.

        :param first: the number of the first row
        :param last: the number after the last
        :return: their bytes
        """
        return self.content[self.bounds[first - self.start] : self.bounds[last - self.start]]

    def subject(self, index: int) -> bytes:
        """Give a row's subject.

        :param index: its number
        :return: the subject
        """
        found: bytes = self.subjects[index - self.start].as_py()
        return found

    def row_name(self, index: int) -> str:
        """Name a row to its user.

        :param index: its number
        :return: its subject and its id
        """
        return f"{self.subject(index).decode()} {self.ids[index - self.start].as_py().decode()}"

    def chunks(self, without: Sequence[int], rows: int, size: int) -> Iterator[tuple[int, int]]:
        """Divide the rows into stretches that are sent together.

        :param without: rows that aren't sent, ascending
        :param rows: at most so many in one
        :param size: bytes after which one ends
        :return: of each, the number of the first row and the one after the last
        """
        first = self.start
        for edge in [*without, self.end]:
            while first < edge:
                full = self.bounds[first - self.start] + size
                last = self.start + int(np.searchsorted(self.bounds, full, "right"))
                last = min(max(last - 1, first + 1), first + rows, edge)
                yield first, last
                first = last
            first = edge + 1
