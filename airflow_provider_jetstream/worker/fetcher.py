"""Pull requests for jobs that can be delivered now, for workers with several consumers."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, Self

from airflow_provider_jetstream.jetstream.client.headers import STATUS_LINE
from airflow_provider_jetstream.jetstream.client.pull_request import pull_request
from airflow_provider_jetstream.jetstream.errors import UnreachableError, WireError
from airflow_provider_jetstream.worker.pulled_message import PulledMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger("jetstream.worker")

PULL_EXPIRES = 1.0
PAUSE_AFTER_REFUSAL = 0.5
NO_MESSAGES = {str(HTTPStatus.NOT_FOUND.value), str(HTTPStatus.REQUEST_TIMEOUT.value)}

# The shortest and longest expiry of a no_wait request. Without an expiry, such a request stays open and unanswered
# while the consumer is at its max_ack_pending. A slow server may need longer than the shortest expiry to deliver.
_NO_WAIT_EXPIRES = (0.02, 0.16)
# Shorter: while it is open, it comes before the probes of workers that have the consumer as their own.
_FALLBACK_NO_WAIT_EXPIRES = (0.005, 0.005)
_REQUESTS_PENDING = "Requests Pending"
_TOO_LARGE = "Message Size Exceeds MaxBytes"
# The server sends it, with status 409, after the last message of a request that names bytes (2.10 to 2.15).
_COMPLETED = "Batch Completed"


class PullSource(Protocol):
    """A consumer from which messages are pulled."""

    @property
    def next_subject(self) -> str:
        """The subject of pull requests."""

    @property
    def request_fields(self) -> dict[str, Any]:
        """What goes into each pull request."""

    @property
    def is_fallback(self) -> bool:
        """Whether clients that have it as their own consumer come before this one."""


class ConsumerFetcher:
    """Fetches from one consumer, with one pull request at a time, and calls ``start`` with each message."""

    def __init__(self, connection: Connection, consumer: PullSource, start: Callable[[PulledMessage], None]) -> None:
        self._connection = connection
        self._subject = consumer.next_subject
        self._request_fields = consumer.request_fields
        self._start = start
        self._inbox = connection.new_inbox()
        self._prefix = f"{self._inbox}.".encode()
        self._subscription: Subscription | None = None
        self._requests = 0
        self._remaining = 0
        self._refusal: str | None = None
        self._denial: PermissionDeniedError | None = None
        self._has_pending_requests = False
        self._shortest, self._longest = _FALLBACK_NO_WAIT_EXPIRES if consumer.is_fallback else _NO_WAIT_EXPIRES
        self._expires = self._shortest
        self._last_empty_at = 0.0
        self._ended = asyncio.Event()

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the last request."""
        return self._refusal is not None

    async def __aenter__(self) -> Self:
        self._subscription = await self._connection.subscribe_raw(f"{self._inbox}.*", self._on_message, self._on_denied)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription:
            await self._subscription.unsubscribe()

    async def fetch_ready(self, count: int) -> int:
        """Fetch messages that can be delivered now, and return how many arrived; must not be cancelled."""
        if not self._connection.is_connected:
            return 0
        repeated = time.monotonic() - self._last_empty_at < PULL_EXPIRES
        self._expires = min(2 * self._expires, self._longest) if repeated else self._shortest
        await self._pull(count, self._expires, PULL_EXPIRES, no_wait=True)
        if self._has_pending_requests:
            # The message may be too large for the pending requests: those may be probes of other workers.
            await self._pull(count, self._expires, PULL_EXPIRES)
        received = count - self._remaining
        self._last_empty_at = 0.0 if received else time.monotonic()
        return received

    async def fetch(self, count: int, seconds: float, max_bytes: int = 0) -> bool:
        """Fetch messages until there are so many, or the time is up; ends as well when the connection was lost.

        :param max_bytes: what the messages may have together; 0 for no limit
        :return: whether the next message is larger than that alone
        :raises UnreachableError: the server refused, or the connection is lost
        :raises PermissionDeniedError: the user may not pull
        """
        reconnects, deadline = self._connection.reconnects, time.monotonic() + seconds + PULL_EXPIRES
        self._begin(count)
        body = pull_request(count, expires=seconds, max_bytes=max_bytes, priority=self._request_fields)
        await self._connection.publish(self._subject, body, reply=f"{self._inbox}.{self._requests}")
        # The server forgets the requests of a connection that is lost.
        while not self._ended.is_set() and self._connection.reconnects == reconnects and time.monotonic() < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(PULL_EXPIRES):
                    await self._ended.wait()
        if self._denial:
            raise self._denial
        if self._refusal and max_bytes and _TOO_LARGE in self._refusal:
            return self._remaining == count
        if self._refusal:
            raise UnreachableError(f"the pull request on {self._subject} was refused: {self._refusal}")
        return False

    def _begin(self, count: int) -> None:
        self._requests += 1
        self._remaining, self._refusal, self._has_pending_requests = count, None, False
        self._ended.clear()

    async def _pull(self, count: int, expires: float, wait_seconds: float, *, no_wait: bool = False) -> None:
        self._begin(count)
        body = pull_request(count, expires=expires, no_wait=no_wait, priority=self._request_fields)
        try:
            await self._connection.publish(self._subject, body, reply=f"{self._inbox}.{self._requests}")
            async with asyncio.timeout(wait_seconds):
                await self._ended.wait()
        except TimeoutError:
            return
        except UnreachableError as error:
            self._refusal = str(error)
        if self._denial:
            raise self._denial
        if self._refusal:
            log.warning("the pull request on %s was refused: %s", self._subject, self._refusal)

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        if denial.subject in (self._subject, f"{self._inbox}.*"):
            self._denial = denial
            self._ended.set()

    def _on_message(self, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        if subject.startswith(self._prefix):
            self._on_status(subject, headers or b"")
            return
        self._remaining -= 1
        if self._remaining <= 0:
            self._ended.set()
        try:
            self._start(PulledMessage.parse(subject, reply, headers, payload))
        except WireError as error:
            log.warning("a message that was pulled is dropped: %s", error)

    def _on_status(self, subject: bytes, headers: bytes) -> None:
        if subject != b"%b%d" % (self._prefix, self._requests):
            return
        status, description = parse_status(headers)
        if status not in NO_MESSAGES and description != _COMPLETED:
            self._refusal = f"{description} (status {status})"
        self._has_pending_requests = description == _REQUESTS_PENDING
        self._ended.set()


def parse_status(headers: bytes) -> tuple[str, str]:
    """Return the status and the description with which the server answered a pull request.

    :param headers: as they are on the wire; empty where it has none
    """
    line = headers.partition(b"\r\n")[0].removeprefix(STATUS_LINE).decode(errors="replace")
    status, _, description = line.strip().partition(" ")
    # For "no responders" the answer has no description.
    return status, description.strip() or "no responders"
