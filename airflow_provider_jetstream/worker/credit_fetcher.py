"""Pulling from one consumer by credit: the next request goes out before the last one is used up.

A request is for no more jobs than the worker can start when it goes out, all open requests together. The server serves
open requests in turns and its messages don't say which one they belong to, so each has an inbox of its own.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Self

from airflow_provider_jetstream.jetstream.client.pull_request import pull_request
from airflow_provider_jetstream.jetstream.client.wire import DeliveryForm, encode_message, encode_subject
from airflow_provider_jetstream.jetstream.errors import UnreachableError, WireError
from airflow_provider_jetstream.worker.acknowledgement import acknowledge_markers
from airflow_provider_jetstream.worker.fetcher import (
    NO_MESSAGES,
    PAUSE_AFTER_REFUSAL,
    PULL_EXPIRES,
    parse_status,
)
from airflow_provider_jetstream.worker.pulled_message import PulledMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.worker.consumers import BoundConsumer
    from airflow_provider_jetstream.worker.executor import JobExecutor
    from airflow_provider_jetstream.worker.in_flight import InFlightJobs

log = logging.getLogger("jetstream.worker")

_INBOXES: Final = 4
# A request is sent for at least this part of what can be started: one for each job that ends would be many.
_SMALLEST_PART: Final = 4
_TOO_MANY_OPEN: Final = "Exceeded MaxWaiting"
# The server answers when the request expires; only a lost connection leaves the request unanswered.
_ANSWER_TIMEOUT: Final = 2 * PULL_EXPIRES


class _PullInbox:
    """One pull request at a time, on an inbox of its own.

    :ivar remaining: how many jobs the open request may still deliver; 0 where none is open
    """

    def __init__(
        self,
        inbox: str,
        deliver: Callable[[Sequence[PulledMessage]], None],
        on_end: Callable[[str | None, float | None], None],
    ) -> None:
        self.filter = f"{inbox}.*"
        self._prefix = f"{inbox}.".encode()
        self.form = DeliveryForm(self._prefix, PulledMessage.of, self._on_jobs)
        self._deliver = deliver
        self._on_end = on_end
        self._requests = 0
        self._opened_at = 0.0
        self._requested = 0
        self.remaining = 0

    def open(self, count: int, now: float) -> bytes:
        """Note a request for jobs, and return the subject for its answers."""
        self._requests += 1
        self.remaining, self._requested, self._opened_at = count, count, now
        return self._reply

    def close(self) -> None:
        """Expect no more jobs of the open request."""
        self.remaining = 0

    def close_unanswered(self, now: float) -> None:
        """Close a request to which the server should have answered long ago."""
        if self.remaining and now - self._opened_at > _ANSWER_TIMEOUT:
            self.close()

    @property
    def _reply(self) -> bytes:
        return b"%b%d" % (self._prefix, self._requests)

    def on_message(self, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        """Take a job, or the status with which the server ends a request."""
        if subject.startswith(self._prefix):
            if subject == self._reply:
                status, description = parse_status(headers or b"")
                empty_since = self._opened_at if self.remaining == self._requested else None
                self.close()
                if status in NO_MESSAGES:
                    self._on_end(None, empty_since)
                else:
                    self._on_end(f"{description} (status {status})", None)
            return
        try:
            self._on_jobs([PulledMessage.parse(subject, reply, headers, payload)])
        except WireError as error:
            self._count(1)
            log.warning("a message that was pulled is dropped: %s", error)

    def _on_jobs(self, messages: Sequence[PulledMessage]) -> None:
        self._count(len(messages))
        self._deliver(messages)

    def _count(self, messages: int) -> None:
        self.remaining = max(0, self.remaining - messages)


class CreditFetcher:
    """Fetches from one consumer as many jobs as the worker can start.

    :param jobs: gets the jobs
    :param wake: is set to end a wait for jobs
    """

    def __init__(
        self, connection: Connection, consumer: BoundConsumer, jobs: InFlightJobs, wake: asyncio.Event
    ) -> None:
        self._connection = connection
        self._subject = consumer.next_subject
        self._encoded_subject = encode_subject(self._subject)
        self._jobs = jobs
        self._wake = wake
        self._stack = AsyncExitStack()
        inbox = connection.new_inbox()
        self._inboxes = [
            _PullInbox(f"{inbox}.{number}", partial(self._deliver, consumer.executor), self._on_end)
            for number in range(_INBOXES)
        ]
        self._is_open = False
        self._refusal: str | None = None
        self._denial: PermissionDeniedError | None = None
        self._loop = asyncio.get_running_loop()
        self._most_open = _INBOXES
        self._max_batch = consumer.max_batch
        expires = min(PULL_EXPIRES, consumer.max_expires or PULL_EXPIRES)
        self._body = lru_cache(maxsize=256)(
            lambda count: pull_request(count, expires=expires, priority=consumer.request_fields)
        )

    async def __aenter__(self) -> Self:
        for inbox in self._inboxes:
            subscription = await self._connection.subscribe_raw(
                inbox.filter, inbox.on_message, self._on_denied, inbox.form
            )
            self._stack.push_async_callback(subscription.unsubscribe)
        self._jobs.on_turn = self._pull
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def fetch(self) -> None:
        """Fetch jobs for a while, and each time that one can be started."""
        self._wake.clear()
        if not self._connection.is_connected:
            # Every request that is sent after the connection is restored delivers messages.
            await asyncio.sleep(PAUSE_AFTER_REFUSAL)
            return
        self._is_open = True
        self._pull_if_none_open()
        with suppress(TimeoutError):
            async with asyncio.timeout(PULL_EXPIRES):
                await self._wake.wait()
        self._close_unanswered()
        if self._denial:
            raise self._denial
        if self._refusal:
            log.warning("the pull request on %s was refused: %s", self._subject, self._refusal)
            await asyncio.sleep(PAUSE_AFTER_REFUSAL)
            self._refusal = None

    async def drain(self) -> None:
        """Send no more requests, and wait until none is open."""
        self._is_open = False
        while any(inbox.remaining for inbox in self._inboxes):
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PULL_EXPIRES / 10):
                    await self._wake.wait()
            self._close_unanswered()

    def _deliver(self, executor: JobExecutor, messages: Sequence[PulledMessage]) -> None:
        if jobs := acknowledge_markers(self._connection, messages):
            self._jobs.deliver(executor, jobs)

    def _pull_if_none_open(self) -> None:
        # Requests that end without a job become one again; otherwise an idle worker repeats each of its last parts.
        if not any(inbox.remaining for inbox in self._inboxes):
            self._pull()

    def _pull(self) -> None:
        if not self._is_open or self._refusal or self._denial or not self._connection.is_connected:
            return
        if (bounds := self._jobs.bounds) is not None and bounds.is_over:
            self._wake.set()
            return
        requested, inbox, are_open = 0, None, 0
        for candidate in self._inboxes:
            if candidate.remaining:
                requested += candidate.remaining
                are_open += 1
            else:
                inbox = candidate
        free = self._jobs.free
        count = min(free - requested, self._max_batch or free)
        if (
            inbox is None
            or are_open >= self._most_open
            or count <= 0
            or count * _SMALLEST_PART < min(free, self._max_batch or free)
        ):
            return
        reply = inbox.open(count, self._loop.time())
        try:
            self._connection.write(encode_message(self._encoded_subject, self._body(count), reply=reply))
        except UnreachableError as error:
            inbox.close()
            self._on_end(str(error), None)

    def _on_end(self, refusal: str | None, empty_since: float | None) -> None:
        """Take the end of a request.

        :param empty_since: when it was opened, where it has delivered no message
        """
        if refusal and _TOO_MANY_OPEN in refusal and any(inbox.remaining for inbox in self._inboxes):
            # Those of all workers count together: one is enough for each.
            self._most_open, refusal = 1, None
        if refusal:
            self._refusal = refusal
        bounds = self._jobs.bounds
        if bounds is not None:
            if refusal:
                bounds.note_refusal(refusal)
            elif empty_since is not None:
                bounds.note_no_messages(empty_since)
        if refusal or not self._is_open:
            self._wake.set()
        else:
            self._pull_if_none_open()

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        if denial.subject == self._subject or any(denial.subject == inbox.filter for inbox in self._inboxes):
            self._denial = denial
            self._wake.set()

    def _close_unanswered(self) -> None:
        now = self._loop.time()
        for inbox in self._inboxes:
            inbox.close_unanswered(now)
