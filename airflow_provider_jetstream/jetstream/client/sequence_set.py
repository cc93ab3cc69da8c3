"""Which messages a stream holds, known without getting any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info

if TYPE_CHECKING:
    from collections.abc import Container

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# What fits into one answer of the server.
_MOST_DELETED = 50_000


@dataclass(frozen=True, slots=True)
class SequenceSet:
    """The sequences that a stream held when it was asked.

    :param first: the lowest
    :param last: the highest
    :param deleted: those between that are gone
    :param exact: whether ``deleted`` has all of them; there may be too many for one answer
    """

    first: int
    last: int
    deleted: Container[int] = ()
    exact: bool = True

    def __contains__(self, sequence: int) -> bool:
        # An empty stream begins and ends with 0.
        return max(1, self.first) <= sequence <= self.last and sequence not in self.deleted


async def stored_sequences(connection: Connection, stream: str) -> SequenceSet:
    """Ask which messages a stream holds.

    :param connection: the server
    :param stream: the stream
    :return: their sequences
    :raises NotFoundError: the stream doesn't exist
    """
    state = (await stream_info(connection, stream))["state"]
    deleted = state.get("num_deleted", 0)
    if deleted > _MOST_DELETED:
        return SequenceSet(state["first_seq"], state["last_seq"], exact=False)
    if deleted:
        state = (await connection.api(f"STREAM.INFO.{stream}", {"deleted_details": True}))["state"]
    return SequenceSet(state["first_seq"], state["last_seq"], frozenset(state.get("deleted") or ()))
