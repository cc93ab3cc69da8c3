"""Follows a stream with an ephemeral consumer that acknowledges nothing.

Protocol: a pull consumer of NATS ADR-13 with ``ack_policy`` none and batches with a heartbeat. It is in the server's
memory, which drops it once no pull request comes. Its delivery numbers prove that no message is missing; after a gap, a
silence or a reconnect another consumer continues after the last message received.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.headers import STATUS_LINE, first_values
from airflow_provider_jetstream.jetstream.client.stream_api import pull_request, pull_subject, stream_info
from airflow_provider_jetstream.jetstream.client.streams import follow, read_range
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError, UnreachableError
from airflow_provider_jetstream.jetstream.evidence import is_from_elsewhere
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger(__name__)

_BATCH: Final = 500
# Before the last are used up, so that the server goes on.
_PULL_AGAIN_AT: Final = 250
_HEARTBEAT = 5
_MAX_SILENCE = 2.5 * _HEARTBEAT
_INACTIVE_THRESHOLD = 60
_CHECK_INTERVAL = 0.5
_RETRY_PAUSE = 0.5

_PULL = pull_request(_BATCH, expires=30, idle_heartbeat=_HEARTBEAT)
_IDLE = "100"
_SHORT_REPLY: Final = 9
_MESSAGE_ID = re.compile(rb"\r\n%b:([^\r\n]*)" % MSG_ID.encode())
_LAST_DELIVERY = "Nats-Last-Consumer"
_EXPIRED = {str(status.value) for status in (HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_TIMEOUT)}


class TailedMessage(NamedTuple):
    """The parts of a followed message that a waiter needs."""

    subject: str
    sequence: int
    stored_at: datetime
    data: bytes
    message_id: str = ""
    is_from_elsewhere: bool = False


class StreamTail:
    """Follows a stream.

    :param start: the first sequence
    :param on_message: called with each message, in order
    :param stop: the last sequence; ``None`` to follow without end
    :param created: when the stream was created in which ``start`` is a position, where that is known
    :param on_created: called with the time of creation of the stream that is followed, before its messages
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subjects: tuple[str, ...],
        start: int,
        on_message: Callable[[TailedMessage], None],
        *,
        stop: int | None = None,
        created: str | None = None,
        on_created: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._subjects = subjects
        self._next = start
        self._on_message = on_message
        self._stop = stop
        self._created = created
        self._on_created = on_created
        self._inbox = self._pull_subject = ""
        self._inbox_subject = b""
        self._delivered = 0
        self._requested = 0
        self._last_message_at = 0.0
        self._failure: JetStreamProviderError | None = None
        self._wakeup = asyncio.Event()
        self.caught_up = asyncio.Event()

    async def run(self) -> None:
        """Follow until every message up to ``stop`` has been read, or without end.

        :raises NotFoundError: the stream doesn't exist
        :raises ApiError: the server refuses the consumer
        :raises UnreachableError: the connection was closed, so it isn't restored by itself
        """
        while not self._is_finished():
            try:
                await self._follow()
            except TransientError as error:
                if self._connection.is_closed:
                    raise UnreachableError(
                        f"the connection is closed while following {self._stream}: open a new one and go on from"
                        f" sequence {self._next}"
                    ) from None
                self.caught_up.clear()
                log.warning("Following %s was interrupted, trying again: %s", self._stream, error)
                await asyncio.sleep(_RETRY_PAUSE)

    def _is_finished(self) -> bool:
        return self._stop is not None and (self.caught_up.is_set() or self._next > self._stop)

    async def _follow(self) -> None:
        info = await stream_info(self._connection, self._stream)
        if self._created not in (None, info["created"]):
            log.warning("%s was created anew and is read from its beginning", self._stream)
            self._next = 1
        self._created = info["created"]
        self._on_created(info["created"])
        if info["config"].get("retention") == "limits":
            await self._pull()
        else:
            # Such a stream admits one consumer per message, and that one belongs to another client.
            await asyncio.gather(*(self._read(subject) for subject in self._subjects))

    async def _read(self, subject: str) -> None:
        if self._stop is None:
            messages = follow(self._connection, self._stream, subject, self._next)
            self.caught_up.set()
        else:
            messages = read_range(self._connection, self._stream, subject, self._next, self._stop)
        async with aclosing(messages):
            async for message in messages:
                message_id = message.header(MSG_ID) or ""
                self._on_message(
                    TailedMessage(
                        *(message.subject, message.sequence, message.stored_at, message.data, message_id),
                        is_from_elsewhere=is_from_elsewhere(name for name, _ in message.headers),
                    )
                )
        self.caught_up.set()

    async def _pull(self) -> None:
        connection, name = self._connection, f"tail-{uuid4().hex}"
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next,
            "ack_policy": "none",
            "filter_subjects": list(self._subjects),
            "inactive_threshold": _INACTIVE_THRESHOLD * NANOSECONDS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        self._inbox, self._delivered, self._requested, self._failure = connection.new_inbox(), 0, 0, None
        self._inbox_subject = self._inbox.encode()
        self._pull_subject = pull_subject(self._stream, name, connection.api_prefix)
        reconnects = connection.reconnects
        try:
            subscription = await connection.subscribe_raw(self._inbox, self._on_delivery, self._on_denied)
        except UnreachableError as error:
            raise UnreachableError(f"{self._stream} can't be followed: {error}") from None
        try:
            create = {"stream_name": self._stream, "config": config, "action": "create"}
            created = await connection.api(f"CONSUMER.CREATE.{self._stream}.{name}", create)
            if not created["num_pending"]:
                self.caught_up.set()
            self._last_message_at = asyncio.get_running_loop().time()
            while not self._is_finished():
                if self._requested <= _PULL_AGAIN_AT:
                    self._requested += _BATCH
                    await connection.publish(self._pull_subject, _PULL, reply=self._inbox)
                self._wakeup.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_INTERVAL):
                        await self._wakeup.wait()
                self._require_progress(reconnects)
        finally:
            with suppress(Exception):
                await subscription.unsubscribe()
                # Without waiting for the answer: the server drops an idle consumer anyway.
                await connection.publish(f"{connection.api_prefix}.CONSUMER.DELETE.{self._stream}.{name}", b"")

    def _require_progress(self, reconnects: int) -> None:
        if self._failure:
            raise self._failure
        connection = self._connection
        if connection.is_closed:
            raise connection.close_reason or UnreachableError("the connection is closed")
        if connection.is_connected and connection.reconnects != reconnects:
            raise UnreachableError("messages in flight were lost with the connection")
        if asyncio.get_running_loop().time() - self._last_message_at > _MAX_SILENCE:
            raise UnreachableError(f"the server has been silent for {_MAX_SILENCE:g} s")

    def _on_delivery(self, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        if subject == self._inbox_subject:
            self._on_status(headers or b"")
            return
        sequence, delivery, time, pending = _delivery(reply)
        if self._failure or delivery != self._delivered + 1:
            self._fail(f"delivery {self._delivered + 1} is missing")
            return
        self._delivered += 1
        self._requested -= 1
        self._last_message_at = asyncio.get_running_loop().time()
        # Before the message is taken: one that can't be isn't read for ever.
        self._next = sequence + 1
        if self._stop is None or sequence <= self._stop:
            stored_at = datetime.fromtimestamp(time / NANOSECONDS, UTC)
            name, message_id = subject.decode(errors="replace"), _message_id(headers or b"")
            elsewhere = b"\r\nNats-S" in (headers or b"") and is_from_elsewhere(first_values(headers or b""))
            self._on_message(TailedMessage(name, sequence, stored_at, payload, message_id, is_from_elsewhere=elsewhere))
        if not pending:
            self.caught_up.set()
        if self._requested <= _PULL_AGAIN_AT or self._is_finished():
            self._wakeup.set()

    def _on_status(self, headers: bytes) -> None:
        line, _, _ = headers.removeprefix(STATUS_LINE).partition(b"\r\n")
        status, _, description = line.decode(errors="replace").partition(" ")
        self._last_message_at = asyncio.get_running_loop().time()
        if status == _IDLE:
            # Only the heartbeat shows that the last messages of a burst were lost.
            if int(first_values(headers).get(_LAST_DELIVERY, 0)) > self._delivered:
                self._fail(f"delivery {self._delivered + 1} is missing")
            else:
                # Messages that were pending may have been removed since: then no delivery says that none is.
                self.caught_up.set()
                self._wakeup.set()
        elif status in _EXPIRED:
            self._requested = 0
            self._wakeup.set()
        else:
            self._fail(f"{description.strip() or 'no responders'} (status {status})")

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        if denial.subject in (self._inbox, self._pull_subject):
            self._failure = denial
            self._wakeup.set()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or UnreachableError(reason)
        self._wakeup.set()


def _delivery(reply: bytes) -> tuple[int, int, int, int]:
    """Return stream sequence, number of the delivery, time and number of pending messages of a delivery.

    ``$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<delivery>.<time>.<pending>``, with domain and account
    behind ``ACK`` where there are more than nine tokens (NATS ADR-15).
    """
    tokens = reply.split(b".")
    first = 5 if len(tokens) == _SHORT_REPLY else 7
    sequence, delivery, time, pending = map(int, tokens[first : first + 4])
    return sequence, delivery, time, pending


def _message_id(headers: bytes) -> str:
    found = _MESSAGE_ID.search(headers)
    return found[1].strip().decode(errors="replace") if found else ""
