"""What streams and consumers are and hold, by requests to JetStream's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.diagnostics import not_found
from airflow_provider_jetstream.jetstream.errors import ApiError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# More deleted sequences than these don't fit into one answer of the server.
_MAX_DELETED = 50_000


@dataclass(frozen=True, slots=True)
class SequenceSet:
    """The sequences that a stream stored at the time of a request.

    :param first: the lowest
    :param last: the highest
    :param deleted: those in between that are gone
    :param exact: whether ``deleted`` is complete; one answer can't hold too many
    """

    first: int
    last: int
    deleted: Collection[int] = ()
    exact: bool = True

    def __contains__(self, sequence: int) -> bool:
        # An empty stream begins and ends with 0.
        return max(1, self.first) <= sequence <= self.last and sequence not in self.deleted

    def count(self, first: int, last: int) -> int:
        """Count the sequences of a range, both ends included."""
        low, high = max(1, self.first, first), min(self.last, last)
        return max(0, high - low + 1) - sum(low <= sequence <= high for sequence in self.deleted)


async def stream_info(connection: Connection, stream: str) -> dict[str, Any]:
    """Read a stream's configuration and state.

    :raises NotFoundError: the stream doesn't exist
    """
    try:
        return await connection.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        raise not_found(error, f"stream {stream}") from None


async def list_streams(connection: Connection, subject: str | None = None) -> list[dict[str, Any]]:
    """Read the configuration and state of all streams, one request per page.

    :param subject: only streams that have a subject which overlaps with this filter
    :raises ApiError: the server refused
    """
    request = {} if subject is None else {"subject": subject}
    streams: list[dict[str, Any]] = []
    while True:
        answer = await connection.api("STREAM.LIST", {"offset": len(streams)} | request)
        page: list[dict[str, Any]] = answer.get("streams") or []
        streams += page
        if not page or len(streams) >= answer.get("total", 0):
            return streams


async def stream_names(connection: Connection) -> list[str]:
    """Read the names of all streams, one request per page.

    :raises ApiError: the server refused
    """
    names: list[str] = []
    while True:
        answer = await connection.api("STREAM.NAMES", {"offset": len(names)})
        page: list[str] = answer.get("streams") or []
        names += page
        if not page or len(names) >= answer.get("total", 0):
            return names


async def stored_sequences(connection: Connection, stream: str, state: Mapping[str, Any] | None = None) -> SequenceSet:
    """Read which sequences a stream stores, without reading any message.

    :param state: the stream's state where it was just read; no request is needed if no sequence is deleted
    :raises NotFoundError: the stream doesn't exist
    """
    state = state or (await stream_info(connection, stream))["state"]
    deleted = state.get("num_deleted", 0)
    if deleted > _MAX_DELETED:
        return SequenceSet(state["first_seq"], state["last_seq"], exact=False)
    if deleted:
        state = (await connection.api(f"STREAM.INFO.{stream}", {"deleted_details": True}))["state"]
    return SequenceSet(state["first_seq"], state["last_seq"], frozenset(state.get("deleted") or ()))


async def subject_counts(connection: Connection, stream: str, subject: str) -> AsyncGenerator[tuple[str, int], None]:
    """Read each subject that matches a filter with its number of stored messages, one request per page.

    :raises ApiError: the server refused
    """
    offset = 0
    while True:
        answer = await connection.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject, "offset": offset})
        page: dict[str, int] = answer["state"].get("subjects") or {}
        for item in page.items():
            yield item
        offset += len(page)
        if not page or offset >= answer.get("total", 0):
            return


async def consumer_info(connection: Connection, stream: str, consumer: str) -> dict[str, Any]:
    """Read a consumer's configuration and state.

    :raises NotFoundError: the stream or the consumer doesn't exist
    """
    try:
        return await connection.api(f"CONSUMER.INFO.{stream}.{consumer}")
    except ApiError as error:
        raise not_found(error, f"consumer {consumer} of stream {stream}") from None


async def consumer_names(connection: Connection, stream: str) -> list[str]:
    """Read the names of a stream's consumers, one request per page.

    :raises NotFoundError: the stream doesn't exist
    """
    names: list[str] = []
    while True:
        try:
            answer = await connection.api(f"CONSUMER.NAMES.{stream}", {"offset": len(names)})
        except ApiError as error:
            raise not_found(error, f"stream {stream}") from None
        page: list[str] = answer.get("consumers") or []
        names += page
        if not page or len(names) >= answer.get("total", 0):
            return names


class ListedConsumers(dict[str, dict[str, Any]]):
    """CONSUMER.INFO of a stream's consumers by name, but for the internal ones.

    :ivar internal: the internal ones: those of streams that source or mirror this one belong to no worker
    """

    def __init__(self) -> None:
        super().__init__()
        self.internal: dict[str, dict[str, Any]] = {}

    @property
    def held_above(self) -> int | None:
        """The sequence above which acknowledged messages may be stored still; ``None`` where none is.

        Since nats-server 2.14 a message leaves a work queue only when a stream that sources it has it, too.
        """
        floors = [
            info["ack_floor"]["stream_seq"]
            for info in self.internal.values()
            if info["config"].get("ack_policy") != "none" and (info["num_pending"] or info["num_ack_pending"])
        ]
        return min(floors, default=None)


async def list_consumers(connection: Connection, stream: str) -> ListedConsumers:
    """Read the configuration and state of a stream's consumers by name, one request per page.

    nats-server 2.14 and later list internal consumers with ``sourcing`` in their configuration, earlier ones don't.

    :raises NotFoundError: the stream doesn't exist
    :raises UnreachableError: the server of a consumer is away or elects a leader
    """
    consumers = ListedConsumers()
    offset = 0
    while True:
        try:
            answer = await connection.api(f"CONSUMER.LIST.{stream}", {"offset": offset})
        except ApiError as error:
            raise not_found(error, f"stream {stream}") from None
        if missing := answer.get("missing"):
            raise UnreachableError(
                f"expected the state of every consumer of {stream}, found none of {', '.join(missing)}: their servers"
                " are away or elect a leader; try again"
            )
        page: list[dict[str, Any]] = answer.get("consumers") or []
        for info in page:
            (consumers.internal if _is_internal(info["config"]) else consumers)[info["name"]] = info
        offset += len(page)
        if not page or offset >= answer.get("total", 0):
            return consumers


def _is_internal(config: Mapping[str, Any]) -> bool:
    return bool(config.get("sourcing") or config.get("direct"))
