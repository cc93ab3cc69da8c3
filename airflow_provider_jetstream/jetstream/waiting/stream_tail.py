"""Following what one stream stores, by a consumer of one's own that acknowledges nothing.

Protocol: an ephemeral pull consumer of NATS ADR-13 with ``ack_policy`` none, asked for batches with a heartbeat. It
lives in the server's memory and goes by itself once nobody asks it any more. Its count of deliveries proves that
nothing is missing; after a gap, a silence or a new connection another one goes on from the last message that was seen.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.message_reader import follow, read_range
from airflow_provider_jetstream.jetstream.client.pull_request import pull_request, pull_subject
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError, UnreachableError
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger(__name__)

_BATCH = 500
_HEARTBEAT = 5
_SILENCE = 2.5 * _HEARTBEAT
_INACTIVE = 60
_LOOK = 0.5
_RETRY_PAUSE = 0.5

_PULL = pull_request(_BATCH, expires=30, idle_heartbeat=_HEARTBEAT)
_IDLE = "100"
_LAST_DELIVERY = "Nats-Last-Consumer"
_EXPIRED = {str(status.value) for status in (HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_TIMEOUT)}


@dataclass(frozen=True, slots=True)
class TailedMessage:
    """A message, as far as it matters to who waits.

    :param sequence: its sequence in the stream that is followed
    :param stored_at: when it was stored
    :param data: its body
    """

    sequence: int
    stored_at: datetime
    data: bytes


class StreamTail:
    """Follows a stream.

    :param connection: the server
    :param stream: the stream
    :param subjects: filters
    :param start: the first sequence
    :param take: is called with each message, in order
    :param stop: the last sequence; ``None`` to go on for ever
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subjects: tuple[str, ...],
        start: int,
        take: Callable[[TailedMessage], None],
        *,
        stop: int | None = None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._subjects = subjects
        self._next = start
        self._take = take
        self._stop = stop
        self._created: str | None = None
        self._inbox = ""
        self._delivered = 0
        self._asked = 0
        self._heard = 0.0
        self._broken: JetStreamProviderError | None = None
        self._bell = asyncio.Event()
        self.caught_up = asyncio.Event()

    async def run(self) -> None:
        """Follow until what was stored up to ``stop`` has been taken, or for ever.

        :raises NotFoundError: the stream doesn't exist
        :raises ApiError: the server refuses to have it followed
        :raises UnreachableError: the connection was closed, so that it won't come back by itself
        """
        while not self._finished():
            try:
                await self._follow()
            except TransientError as error:
                if self._connection.is_closed:
                    raise UnreachableError(
                        f"the connection is closed while following {self._stream}: open a new one and go on from"
                        f" sequence {self._next}"
                    ) from None
                self.caught_up.clear()
                log.warning("Following %s was interrupted, going on: %s", self._stream, error)
                await asyncio.sleep(_RETRY_PAUSE)

    def _finished(self) -> bool:
        return self._stop is not None and (self.caught_up.is_set() or self._next > self._stop)

    async def _follow(self) -> None:
        info = await stream_info(self._connection, self._stream)
        if self._created not in (None, info["created"]):
            log.warning("%s was created anew and is read from its beginning", self._stream)
            self._next = 1
        self._created = info["created"]
        if info["config"].get("retention") == "limits":
            await self._pull_all()
        else:
            # Each message of such a stream is for one consumer, which isn't ours.
            await asyncio.gather(*(self._read_all(subject) for subject in self._subjects))

    async def _read_all(self, subject: str) -> None:
        if self._stop is None:
            messages = follow(self._connection, self._stream, subject, self._next)
            self.caught_up.set()
        else:
            messages = read_range(self._connection, self._stream, subject, self._next, self._stop)
        async with aclosing(messages):
            async for message in messages:
                self._take(TailedMessage(message.sequence, message.stored_at, message.data))
        self.caught_up.set()

    async def _pull_all(self) -> None:
        connection, name = self._connection, f"tail-{uuid4().hex}"
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next,
            "ack_policy": "none",
            "filter_subjects": list(self._subjects),
            "inactive_threshold": _INACTIVE * NANOSECONDS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        self._inbox, self._delivered, self._asked, self._broken = connection.new_inbox(), 0, 0, None
        reconnects = connection.reconnects
        try:
            answers = await connection.subscribe(self._inbox, self._arrived)
        except UnreachableError as error:
            raise UnreachableError(f"{self._stream} can't be followed: {error}") from None
        try:
            create = {"stream_name": self._stream, "config": config, "action": "create"}
            created = await connection.api(f"CONSUMER.CREATE.{self._stream}.{name}", create)
            if not created["num_pending"]:
                self.caught_up.set()
            self._heard = asyncio.get_running_loop().time()
            while not self._finished():
                if self._asked <= 0:
                    self._asked = _BATCH
                    await connection.publish(pull_subject(self._stream, name), _PULL, reply=self._inbox)
                self._bell.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK):
                        await self._bell.wait()
                self._check(reconnects)
        finally:
            with suppress(Exception):
                await answers.unsubscribe()
                # Nobody needs the answer, and the server forgets it anyway.
                await connection.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}", b"")

    def _check(self, reconnects: int) -> None:
        if self._broken:
            raise self._broken
        connection = self._connection
        if connection.is_closed:
            raise UnreachableError("the connection is closed")
        if connection.is_connected and connection.reconnects != reconnects:
            raise UnreachableError("what was on its way went with the connection")
        if asyncio.get_running_loop().time() - self._heard > _SILENCE:
            raise UnreachableError(f"the server has been silent for {_SILENCE:g} s")

    async def _arrived(self, message: Msg) -> None:
        if message.subject == self._inbox:
            self._told(message)
            return
        metadata = message.metadata
        if self._broken or metadata.sequence.consumer != self._delivered + 1:
            self._break(f"delivery {self._delivered + 1} is missing")
            return
        self._delivered += 1
        self._asked -= 1
        self._heard = asyncio.get_running_loop().time()
        sequence = metadata.sequence.stream
        if self._stop is None or sequence <= self._stop:
            self._take(TailedMessage(sequence, metadata.timestamp, message.data))
        self._next = sequence + 1
        if not metadata.num_pending:
            self.caught_up.set()
        if self._asked <= 0 or self._finished():
            self._bell.set()

    def _told(self, answer: Msg) -> None:
        headers = answer.headers or {}
        status = headers.get("Status", "")
        self._heard = asyncio.get_running_loop().time()
        if status == _IDLE:
            # After a burst of which the client dropped the end, nothing else tells of it.
            if int(headers.get(_LAST_DELIVERY, 0)) > self._delivered:
                self._break(f"delivery {self._delivered + 1} is missing")
        elif status in _EXPIRED:
            self._asked = 0
            self._bell.set()
        else:
            self._break(f"{headers.get('Description') or 'nobody serves it'} (status {status})")

    def _break(self, why: str) -> None:
        self._broken = self._broken or UnreachableError(why)
        self._bell.set()
