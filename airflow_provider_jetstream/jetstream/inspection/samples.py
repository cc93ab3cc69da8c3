"""Samples of all queues of a server, taken by one program at a time and stored for all: numbers, and states with times.

The samples are messages of one subject in a stream of their own. A program stores a sample on condition that the last
sample that it knows is still the last one (``Nats-Expected-Last-Subject-Sequence``); so two programs can't both
continue, and a sample is its program's lease as well: another one takes over once the last sample is older than
:data:`TAKE_OVER_SECONDS` by the server's clock.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

from airflow_provider_jetstream.jetstream.client.publish_ack import WRONG_LAST_SEQUENCE, store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import last_with_position, read_bulk
from airflow_provider_jetstream.jetstream.contract import SAMPLE_STREAM, SAMPLE_SUBJECT
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError
from airflow_provider_jetstream.jetstream.inspection.queue_state import Known, QueueState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueWatch

SAMPLE_SECONDS: Final = 20.0
# Two samples may be missed, as while a server restarts.
TAKE_OVER_SECONDS: Final = 50.0
_DAYS = 7
_MAX_BYTES = 64 * 2**20
# Anybody who may publish there can store anything.
_MAX_DECODED = 16 * 2**20
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class QueueSample:
    """A queue at one time.

    :param created: when its stream was created, in the server's own text
    :param dead: dead letters, if their number is known
    :param known: what is remembered of its parts
    """

    created: str
    pending: int
    in_flight: int
    stored: int
    last_sequence: int
    dead: int | None
    known: Mapping[str, Known] = field(default_factory=dict)

    @classmethod
    def of(cls, overview: QueueOverview, watch: QueueWatch, dead: int | None) -> Self | None:
        """Return the sample of a queue; ``None`` where its numbers are missing."""
        health = overview.health
        if health is None:
            return None
        numbers = (health.pending, health.in_flight, health.stored, health.last_sequence)
        known = {key: part for key, part in watch.known().items() if part.state != QueueState.IDLE or part.ended_at}
        return cls(health.created, *numbers, dead, known)


@dataclass(frozen=True, slots=True)
class ServerSample:
    """All queues of a server at one time.

    :param holder: the program that sampled
    :param at: when the server stored it
    :param sequence: its sequence in the stream
    """

    holder: str
    queues: Mapping[str, QueueSample]
    at: datetime
    sequence: int


class SampleStream:
    """The stream of the samples of one server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def make(self) -> None:
        """Make the stream where it doesn't exist.

        :raises ApiError: the server refused
        :raises PermissionDeniedError: the user may not make it
        """
        try:
            await stream_info(self._connection, SAMPLE_STREAM)
        except NotFoundError:
            config = {
                "name": SAMPLE_STREAM,
                "subjects": [SAMPLE_SUBJECT],
                "description": "Samples of the queues that Airflow's JetStream page shows",
                "retention": "limits",
                "discard": "old",
                "storage": "file",
                "max_age": _DAYS * 24 * 3600 * 10**9,
                "max_bytes": _MAX_BYTES,
                "allow_direct": True,
            }
            await self._connection.api(f"STREAM.CREATE.{SAMPLE_STREAM}", config)

    async def last(self) -> ServerSample | None:
        """Read the last sample; ``None`` where there is none."""
        try:
            message, position = await last_with_position(self._connection, SAMPLE_STREAM, SAMPLE_SUBJECT)
        except NotFoundError:
            return None
        if not position:
            return None
        # Anybody may have stored something there: the next one is stored after it all the same.
        sample = parse_sample(message) if message else None
        stored_at = message.stored_at if message else datetime.min.replace(tzinfo=UTC)
        return replace(sample, sequence=position) if sample else ServerSample("", {}, stored_at, position)

    async def append(self, holder: str, queues: Mapping[str, QueueSample], after: int) -> bool:
        """Store a sample; return whether it is stored, and not somebody else's.

        :param after: the sequence of the last sample that is known; 0 for none
        """
        headers = {"Nats-Expected-Last-Subject-Sequence": str(after)}
        try:
            await store(self._connection, SAMPLE_SUBJECT, encode_sample(holder, queues), headers)
        except ApiError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                return False
            raise
        return True

    async def read(self, start: int) -> AsyncGenerator[ServerSample, None]:
        """Read the samples from a sequence on, oldest first."""
        info = await stream_info(self._connection, SAMPLE_STREAM)
        async for message in read_bulk(self._connection, info, start):
            if sample := parse_sample(message):
                yield sample


def parse_sample(message: StoredMessage) -> ServerSample | None:
    """Parse a sample; ``None`` where the message isn't one."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(message.data, _MAX_DECODED)
        values = json.loads(text)
        queues = {str(name)[:_LONGEST_NAME]: _queue(item) for name, item in values["queues"].items()}
        holder = str(values["holder"])[:_LONGEST_NAME]
    except (zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, OSError):
        return None
    return ServerSample(holder, queues, message.stored_at, message.sequence)


def encode_sample(holder: str, queues: Mapping[str, QueueSample]) -> bytes:
    """Encode a sample."""
    values = {
        "version": 1,
        "holder": holder,
        "queues": {
            name: [
                *(queue.created, queue.pending, queue.in_flight, queue.stored, queue.last_sequence, queue.dead),
                {key: _known_values(known) for key, known in queue.known.items()},
            ]
            for name, queue in queues.items()
        },
    }
    return zlib.compress(json.dumps(values, separators=(",", ":")).encode())


def _known_values(known: Known) -> list[Any]:
    times = (known.since, known.ended_at, known.quiet_since)
    return [known.state.value, *(moment and round(moment.timestamp(), 3) for moment in times)]


def _queue(item: list[Any]) -> QueueSample:
    created, pending, in_flight, stored, last_sequence, dead, known = item
    numbers = (int(pending), int(in_flight), int(stored), int(last_sequence))
    parts = {
        str(key): Known(QueueState(state), _required_time(since), _time(ended_at), _time(quiet_since))
        for key, (state, since, ended_at, quiet_since) in known.items()
    }
    return QueueSample(str(created), *numbers, None if dead is None else int(dead), parts)


def _required_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(float(seconds), UTC)


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else _required_time(seconds)
