"""The ids of awaited jobs by their sequences: compact in memory, and a document for a process that goes on waiting.

A worker that only acknowledges leaves no trace of a job's id, so what reports on single jobs has to know it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter, ValidationError

from airflow_provider_jetstream.jetstream.documents import DocumentParts, DocumentWriter, read_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.documents import DocumentName, DocumentPart
    from airflow_provider_jetstream.jetstream.publishing.batch import Batch

_PARTS = TypeAdapter(DocumentParts)
_ROWS = TypeAdapter(list[tuple[Annotated[int, Field(strict=True, ge=1, lt=2**64)], str]])


class JobIds:
    """Ids of jobs, in the order in which they were published until their sequences are known."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("Q")
        self._sequences: Sequence[int] = ()
        self._order: Sequence[int] = ()

    def note(self, batch: Batch) -> None:
        """Note the ids of the next jobs."""
        ids = batch.job_ids()
        ends = accumulate(map(len, ids), initial=len(self._text))
        self._text += b"".join(ids)
        self._ends.extend(islice(ends, 1, None))

    def _append(self, job_id: str) -> None:
        self._text += job_id.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))

    def locate(self, sequences: Sequence[int]) -> None:
        """Take the stream sequences of the jobs, by their indexes; 0 where a job isn't stored."""
        known = sequences[: len(self._ends)]
        if all(known[index] < known[index + 1] for index in range(len(known) - 1)):
            self._sequences, self._order = known, range(len(known))
            return
        self._order = array("Q", sorted(range(len(known)), key=known.__getitem__))
        self._sequences = array("Q", (known[index] for index in self._order))

    def get(self, sequence: int) -> str | None:
        """Return the id of a job; ``None`` where it isn't known."""
        position = bisect_left(self._sequences, sequence)
        if not sequence or position >= len(self._sequences) or self._sequences[position] != sequence:
            return None
        return self._id(self._order[position])

    def _id(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode("utf-8", "surrogatepass")

    async def store(self, connection: Connection, name: DocumentName) -> list[DocumentPart]:
        """Store the ids as a document, and return the references to its parts.

        :raises JetStreamProviderError: a part can't be stored, or isn't known to be
        """
        writer = DocumentWriter(connection, name)
        await writer.add(
            (sequence, self._id(index))
            for sequence, index in zip(self._sequences, self._order, strict=True)
            if sequence
        )
        return await writer.finish()

    @classmethod
    async def read(cls, connection: Connection, name: DocumentName, parts: object) -> JobIds:
        """Read the ids of a document; a part that isn't stored any more is left out.

        :param parts: what :meth:`store` returned, as JSON; none where it is something else
        :raises TransientError: a part can't be read just now
        """
        ids, sequences = cls(), array("Q")
        try:
            references = _PARTS.validate_python(parts)
        except ValidationError:
            references = []
        async for rows in read_parts(connection, name, references, _ROWS):
            for sequence, job_id in rows or ():
                ids._append(job_id)
                sequences.append(sequence)
        ids.locate(sequences)
        return ids
