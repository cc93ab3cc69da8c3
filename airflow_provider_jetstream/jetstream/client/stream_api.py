"""What streams and consumers are and hold, by requests to JetStream's API; pull requests, pauses, the server's time.

Protocol: "JetStream wire API Reference" in the NATS documentation; ADR-13, "Pull Subscribe internals"; ADR-42, "Pull
Consumer Priority Groups". CONSUMER.PAUSE needs server 2.11; the server compares the end of a pause with its own clock,
so it is calculated from the server's time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.client.diagnostics import not_found
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError, UnreachableError
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping

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


async def _pages(
    connection: Connection, subject: str, field: str, request: Mapping[str, Any] | None = None
) -> AsyncGenerator[tuple[dict[str, Any], Any], None]:
    """Yield the answers to a request for a list, one request per page, each with its part of the list.

    :param field: the name of the list in an answer, or in the state in an answer
    :raises ApiError: the server refused
    """
    offset = 0
    while True:
        answer = await connection.api(subject, {"offset": offset} | dict(request or {}))
        page = answer.get("state", answer).get(field) or ()
        yield answer, page
        offset += len(page)
        if not page or offset >= answer.get("total", 0):
            return


async def list_streams(connection: Connection, subject: str | None = None) -> list[dict[str, Any]]:
    """Read the configuration and state of all streams.

    :param subject: only streams that have a subject which overlaps with this filter
    :raises ApiError: the server refused
    """
    request = {} if subject is None else {"subject": subject}
    return [info async for _, page in _pages(connection, "STREAM.LIST", "streams", request) for info in page]


async def stream_names(connection: Connection) -> list[str]:
    """Read the names of all streams.

    :raises ApiError: the server refused
    """
    return [name async for _, page in _pages(connection, "STREAM.NAMES", "streams") for name in page]


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
    """Read each subject that matches a filter with its number of stored messages.

    :raises ApiError: the server refused
    """
    request = {"subjects_filter": subject}
    async for _, page in _pages(connection, f"STREAM.INFO.{stream}", "subjects", request):
        for item in dict(page).items():
            yield item


async def consumer_info(connection: Connection, stream: str, consumer: str) -> dict[str, Any]:
    """Read a consumer's configuration and state.

    :raises NotFoundError: the stream or the consumer doesn't exist
    """
    try:
        return await connection.api(f"CONSUMER.INFO.{stream}.{consumer}")
    except ApiError as error:
        raise not_found(error, f"consumer {consumer} of stream {stream}") from None


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
    """Read the configuration and state of a stream's consumers by name.

    nats-server 2.14 and later list internal consumers with ``sourcing`` in their configuration, earlier ones don't.

    :raises NotFoundError: the stream doesn't exist
    :raises UnreachableError: the server of a consumer is away or elects a leader
    """
    consumers = ListedConsumers()
    try:
        async for answer, page in _pages(connection, f"CONSUMER.LIST.{stream}", "consumers"):
            if missing := answer.get("missing"):
                raise UnreachableError(
                    f"expected the state of every consumer of {stream}, found none of {', '.join(missing)}: their"
                    " servers are away or elect a leader; try again"
                )
            for info in page:
                (consumers.internal if _is_internal(info["config"]) else consumers)[info["name"]] = info
    except ApiError as error:
        raise not_found(error, f"stream {stream}") from None
    return consumers


def _is_internal(config: Mapping[str, Any]) -> bool:
    return bool(config.get("sourcing") or config.get("direct"))


@dataclass(frozen=True, slots=True)
class ServerClock:
    """Counts on from the time in an answer of the server; late by the time that the answer took, and never early.

    :param answered_at: the time in the answer
    :param read_at: when it arrived, by this process's monotonic clock
    """

    answered_at: datetime
    read_at: float

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """Read the time in STREAM.INFO or CONSUMER.INFO, which has just arrived."""
        return cls(datetime.fromisoformat(info["ts"]), time.monotonic())

    @classmethod
    async def read(cls, connection: Connection, stream: str) -> Self:
        """Ask the server for the time.

        :param stream: any stream that exists
        """
        return cls.of(await stream_info(connection, stream))

    def now(self) -> datetime:
        """Return the time."""
        return self.answered_at + timedelta(seconds=time.monotonic() - self.read_at)

    def seconds_until(self, moment: datetime) -> float:
        """Return the seconds until a moment; 0 or less where it is past."""
        return (moment - self.now()).total_seconds()


PRIORITIZED = "prioritized"
PINNED = "pinned_client"


def pull_subject(stream: str, consumer: str, api_prefix: str) -> str:
    """Return the subject of a consumer's pull requests."""
    return f"{api_prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}"


def pull_request(
    batch: int,
    *,
    expires: float = 0.0,
    no_wait: bool = False,
    max_bytes: int = 0,
    idle_heartbeat: float = 0.0,
    priority: Mapping[str, Any] | None = None,
) -> bytes:
    """Build the body of a pull request.

    :param batch: how many messages are requested
    :param expires: seconds after which the server ends the request; 0 for the server's default
    :param no_wait: whether the server ends the request at once where it has no message
    :param max_bytes: bytes that the messages may have together; 0 for no limit
    :param idle_heartbeat: seconds of silence after which the server reports that it is alive; 0 for never
    :param priority: what :func:`priority_fields` returns
    """
    request: dict[str, Any] = {"batch": batch}
    if expires:
        request["expires"] = round(expires * NANOSECONDS)
    if no_wait:
        request["no_wait"] = True
    if max_bytes:
        request["max_bytes"] = max_bytes
    if idle_heartbeat:
        request["idle_heartbeat"] = round(idle_heartbeat * NANOSECONDS)
    if priority:
        request |= priority
    return json.dumps(request).encode()


def priority_fields(config: Mapping[str, Any], priority: int = 0) -> dict[str, Any]:
    """Return the fields that a pull request needs where a consumer has priority groups; empty where it has none.

    The server refuses a request that names no group of such a consumer.

    :param config: the consumer's configuration as the server returns it
    :param priority: 0 for the clients that are served first, where the consumer's policy is ``prioritized``
    """
    groups = config.get("priority_groups")
    if not groups:
        return {}
    return {"group": groups[0]} | ({"priority": priority} if config.get("priority_policy") == PRIORITIZED else {})


log = logging.getLogger(__name__)

# The level of JetStream's API that knows pauses.
PAUSE_LEVEL = 1

_PAUSE = timedelta(seconds=10)
_RENEWAL_SECONDS = 3.0


class ConsumerPause:
    """A pause of a consumer that lasts as long as a block runs.

    :param before: until when somebody else has paused the consumer, if so; it is never paused for less
    :ivar left_alone: whether the pause isn't ended with the block, but runs out by itself
    """

    def __init__(
        self, connection: Connection, stream: str, consumer: str, clock: ServerClock, before: str | None
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._clock = clock
        self._before = before
        self._renewal: asyncio.Task[None] | None = None
        self._requesting = asyncio.Lock()
        self._unanswered: TransientError | None = None
        self._until: str | None = None
        self.left_alone = False

    async def begin(self) -> None:
        """Pause the consumer for a few seconds, again and again."""
        await self._pause_for(_PAUSE)
        self._renewal = asyncio.create_task(self._renew())

    async def prolong(self, seconds: float) -> None:
        """Pause the consumer for some seconds from now on: what reaches the server meanwhile finds it paused.

        :raises ApiError: the server refused
        :raises TransientError: it isn't known to be paused for so long
        """
        await self._stop_renewal()
        if self._unanswered:
            # An earlier request with a shorter time that arrives now would end the pause early.
            raise UnreachableError(f"an earlier request to pause the consumer wasn't answered: {self._unanswered}")
        await self._pause_for(timedelta(seconds=seconds))

    async def end(self) -> None:
        """End the pause, but for one that somebody else has set, before or meanwhile."""
        await self._stop_renewal()
        if not self.left_alone:
            with suppress(ApiError, NotFoundError, TransientError):
                info = await consumer_info(self._connection, self._stream, self._consumer)
                found = info["config"].get("pause_until")
                # A reset in place counts on its pause.
                if found and self._until and datetime.fromisoformat(found) == datetime.fromisoformat(self._until):
                    await self._set(self._before)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            async with self._requesting:
                try:
                    await self._pause_for(_PAUSE)
                except TransientError as error:
                    self._unanswered = error
                except ApiError as error:
                    log.warning("The pause of consumer %s can't be renewed: %s", self._consumer, error)

    async def _stop_renewal(self) -> None:
        async with self._requesting:
            if self._renewal is not None:
                self._renewal.cancel()
                self._renewal = None

    async def _pause_for(self, duration: timedelta) -> None:
        until = self._clock.now() + duration
        if self._before and datetime.fromisoformat(self._before) > until:
            await self._set(self._before)
            return
        await self._set(until.astimezone(UTC).isoformat().replace("+00:00", "Z"))

    async def _set(self, until: str | None) -> None:
        self._until = until
        request = {"pause_until": until} if until else {}
        await self._connection.api(f"CONSUMER.PAUSE.{self._stream}.{self._consumer}", request)


@asynccontextmanager
async def paused(connection: Connection, stream: str, consumer: str) -> AsyncIterator[ConsumerPause]:
    """Pause a consumer for the block, and restore a longer pause that was set before.

    Deliveries in flight go on and can be acknowledged. A pause that can't be renewed runs out: before a step that
    depends on it, read CONSUMER.INFO's ``paused`` and ``pause_remaining``.

    :raises NotFoundError: the stream or the consumer doesn't exist
    :raises ApiError: the server refused
    """
    info = await consumer_info(connection, stream, consumer)
    before, clock = info["config"].get("pause_until"), ServerClock.of(info)
    if before and datetime.fromisoformat(before) <= clock.answered_at + _PAUSE:
        # A pause of a process that was killed, or a pause that is about to end.
        before = None
    pause = ConsumerPause(connection, stream, consumer, clock, before)
    await pause.begin()
    try:
        yield pause
    finally:
        await pause.end()
