"""Pulling jobs: from one consumer by credit, or from several, the most urgent one first.

From one consumer the next request goes out before the last one is used up, for no more jobs than the worker can start
when it goes out, all open requests together. The server serves open requests in turns and its messages don't say which
one they belong to, so each has an inbox of its own.

With several consumers each request is for jobs that can be delivered now, and a probe tells when a consumer has some:
a pull request too small to fit any message. The server answers such a request the moment a job can be delivered, and
leaves the job and its delivery count as they were. It doesn't answer while the consumer is paused or at its
``max_ack_pending``. So a worker can probe several consumers at a time, where real pull requests could deliver more jobs
than it can start. Measured with nats-server 2.15: after fifty probes a job's next real delivery had the number it would
have had without them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias

from airflow_provider_jetstream.jetstream.client.headers import STATUS_LINE
from airflow_provider_jetstream.jetstream.client.stream_api import pull_request
from airflow_provider_jetstream.jetstream.client.wire import DeliveryForm, encode_message, encode_subject
from airflow_provider_jetstream.jetstream.errors import UnreachableError, WireError
from airflow_provider_jetstream.worker.acknowledgement import acknowledge_markers
from airflow_provider_jetstream.worker.consumers import FAIRNESS_WINDOW
from airflow_provider_jetstream.worker.delivery import PulledMessage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.worker.consumers import BoundConsumer
    from airflow_provider_jetstream.worker.executor import JobExecutor
    from airflow_provider_jetstream.worker.in_flight import InFlightJobs


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
_INBOXES: Final = 4
# A request is sent for at least this part of what can be started: one for each job that ends would be many.
_SMALLEST_PART: Final = 4
_TOO_MANY_OPEN: Final = "Exceeded MaxWaiting"
# The server answers when the request expires; only a lost connection leaves the request unanswered.
_ANSWER_TIMEOUT: Final = 2 * PULL_EXPIRES
# Only a lost connection or a dead leader leaves a probe unanswered.
_PROBE_TIMEOUT = 1.5 * PULL_EXPIRES
# Long enough for idle workers that have the consumer as their own to pull first.
_FALLBACK_DELAY = 0.02


class PullSource(Protocol):
    """A consumer from which messages are pulled."""

    @property
    def next_subject(self) -> str:
        """The subject of pull requests."""

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of each pull request."""

    @property
    def is_fallback(self) -> bool:
        """Whether clients that have it as their own consumer come before this one."""


class ConsumerFetcher:
    """Fetches from one consumer, with one pull request at a time.

    :param start: gets each message, and a time of the event loop before its delivery
    """

    def __init__(
        self, connection: Connection, consumer: PullSource, start: Callable[[PulledMessage, float], None]
    ) -> None:
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
        self._requested_at = 0.0
        self._ended = asyncio.Event()
        self._ended.set()

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
        """Fetch a number of messages, or as many as come in time; ends as well when the connection was lost.

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
        if self._ended.is_set():
            # Jobs of a request that was given up may still come.
            self._requested_at = asyncio.get_running_loop().time()
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
            self._start(PulledMessage.parse(subject, reply, headers, payload), self._requested_at)
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


class _PullInbox:
    """One pull request at a time, on an inbox of its own.

    :ivar remaining: how many jobs the open request may still deliver; 0 where none is open
    :ivar requested_at: when the request was sent whose jobs arrive, or an earlier one's whose jobs may still come
    """

    def __init__(
        self,
        inbox: str,
        deliver: Callable[[Sequence[PulledMessage], float], None],
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
        self._is_unanswered = False
        self.remaining = 0
        self.requested_at = 0.0

    def open(self, count: int, now: float) -> bytes:
        """Note a request for jobs, and return the subject for its answers."""
        self._requests += 1
        self.remaining, self._requested, self._opened_at = count, count, now
        if not self._is_unanswered:
            self.requested_at = now
        self._is_unanswered = False
        return self._reply

    def close(self) -> None:
        """Expect no more jobs of the open request."""
        self.remaining = 0

    def close_unanswered(self, now: float) -> None:
        """Close a request to which the server should have answered long ago."""
        if self.remaining and now - self._opened_at > _ANSWER_TIMEOUT:
            self._is_unanswered = True
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
        self._deliver(messages, self.requested_at)

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
        """Fetch jobs for a while, and each time that one can be started; must not be cancelled."""
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

    def _deliver(self, executor: JobExecutor, messages: Sequence[PulledMessage], requested_at: float) -> None:
        if jobs := acknowledge_markers(self._connection, messages):
            self._jobs.deliver(executor, jobs, requested_at)

    def _pull_if_none_open(self) -> None:
        # Only once no request is open: an idle worker would otherwise renew several small requests one by one.
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
            # The consumer's limit counts open requests of all workers, so this one keeps to a single request.
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


class AvailabilityProbe:
    """Knows whether a consumer has jobs; while it has none the probe waits for the next one.

    :param on_available: is called when the consumer has jobs again
    :param on_denied: is called where the user may not probe
    """

    def __init__(
        self,
        connection: Connection,
        consumer: BoundConsumer,
        on_available: Callable[[], None],
        on_denied: Callable[[PermissionDeniedError], None],
    ) -> None:
        self._connection = connection
        self._subject = consumer.next_subject
        self._body = pull_request(1, max_bytes=1, expires=PULL_EXPIRES, priority=consumer.request_fields)
        self._delay = _FALLBACK_DELAY if consumer.is_fallback else 0.0
        self._on_available = on_available
        self._when_denied = on_denied
        self._inbox = connection.new_inbox()
        self._requests = 0
        self._pause = 0.0
        self._answer: asyncio.Future[bytes] | None = None
        # Not armed at first, so that the first fetches go by urgency rather than by the order of the answers.
        self._armed = asyncio.Event()

    @property
    def available(self) -> bool:
        """Whether the consumer had jobs at the last fetch or probe."""
        return not self._armed.is_set()

    def arm(self, pause: float = 0.0) -> None:
        """Note that the consumer has no more jobs, and start to probe for the next one after ``pause`` seconds."""
        self._pause = pause
        self._armed.set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Self]:
        """Probe until the block ends. No job is consumed by probing."""
        subscription = await self._connection.subscribe_raw(f"{self._inbox}.*", self._on_answer, self._on_denied)
        running = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await subscription.unsubscribe()

    async def _run(self) -> None:
        while True:
            await self._armed.wait()
            await asyncio.sleep(self._pause)
            self._pause = 0.0
            if await self._probe():
                await asyncio.sleep(self._delay)
                self._armed.clear()
                self._on_available()

    async def _probe(self) -> bool:
        if not self._connection.is_connected:
            await asyncio.sleep(PAUSE_AFTER_REFUSAL)
            return False
        self._requests += 1
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self._connection.publish(self._subject, self._body, reply=f"{self._inbox}.{self._requests}")
            async with asyncio.timeout(_PROBE_TIMEOUT):
                status, description = parse_status(await self._answer)
        except TimeoutError:
            return False
        except UnreachableError as error:
            status, description = "none", str(error)
        if description == _TOO_LARGE or status in NO_MESSAGES:
            return description == _TOO_LARGE
        log.warning("the probe on %s was refused: %s (status %s)", self._subject, description, status)
        await asyncio.sleep(PAUSE_AFTER_REFUSAL)
        return False

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        if denial.subject in (self._subject, f"{self._inbox}.*"):
            self._when_denied(denial)

    def _on_answer(self, subject: bytes, _reply: bytes, headers: bytes | None, _payload: bytes) -> None:
        if self._answer and not self._answer.done() and subject == f"{self._inbox}.{self._requests}".encode():
            self._answer.set_result(headers or b"")


class PriorityScheduler:
    """Chooses the most urgent consumer with jobs, unless another one has been skipped for too many jobs.

    Consumers are numbered from 0, the most urgent one, and there are at most
    :data:`~airflow_provider_jetstream.worker.consumers.FAIRNESS_WINDOW` of them. With ``strict`` no consumer is ever
    owed a job.
    """

    def __init__(self, consumers: int, *, strict: bool = False) -> None:
        self.strict = strict
        self._skipped = [0] * consumers
        # All other consumers may reach their limit at the same time.
        self._max_skipped = FAIRNESS_WINDOW - (consumers - 1)

    def next(self, ready: Sequence[bool], free: int) -> tuple[int, int] | None:
        """Return the next consumer and how many jobs to fetch from it; ``None`` where no consumer has jobs.

        :param ready: for each consumer whether it has jobs
        :param free: how many jobs the worker can start
        """
        waiting = [consumer for consumer, has_jobs in enumerate(ready) if has_jobs]
        if not waiting:
            return None
        first, *others = waiting
        if self.strict:
            return first, free
        most_skipped = max(waiting, key=self._skipped.__getitem__)
        if self._skipped[most_skipped] >= self._max_skipped:
            return most_skipped, 1
        return first, min([free, *(self._max_skipped - self._skipped[other] for other in others)])

    def record(self, consumer: int, count: int, ready: Sequence[bool]) -> None:
        """Record how many jobs the chosen consumer delivered; ``ready`` is the argument of :meth:`next`."""
        for other, has_jobs in enumerate(ready):
            self._skipped[other] = self._skipped[other] + count if has_jobs and other != consumer else 0


class PriorityFetcher:
    """Fetches from several consumers, the most urgent one first."""

    def __init__(
        self,
        fetchers: Sequence[ConsumerFetcher],
        probes: Sequence[AvailabilityProbe],
        jobs: InFlightJobs,
        wake: asyncio.Event,
        scheduler: PriorityScheduler,
    ) -> None:
        self._fetchers = fetchers
        self._probes = probes
        self._jobs = jobs
        self._wake = wake
        self._scheduler = scheduler
        jobs.on_turn = wake.set

    async def fetch(self) -> None:
        """Fetch jobs once from the consumer whose turn it is, or wait a while for some; must not be cancelled."""
        self._wake.clear()
        ready = [probe.available for probe in self._probes]
        free = self._jobs.free
        choice = self._scheduler.next(ready, free) if free else None
        if choice is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PULL_EXPIRES):
                    await self._wake.wait()
            return
        consumer, requested = choice
        fetcher = self._fetchers[consumer]
        received = await fetcher.fetch_ready(requested)
        self._scheduler.record(consumer, received, ready)
        # A server under load may deliver fewer jobs than it has. With strict priorities that must not let others start.
        if received < requested and not (received and self._scheduler.strict):
            self._probes[consumer].arm(PAUSE_AFTER_REFUSAL if fetcher.is_refused else 0.0)

    async def drain(self) -> None:
        """Do nothing: no request is open after a fetch."""


Fetcher: TypeAlias = CreditFetcher | PriorityFetcher


def _deliver(jobs: InFlightJobs, consumer: BoundConsumer, message: PulledMessage, requested_at: float) -> None:
    if found := acknowledge_markers(consumer.executor.connection, [message]):
        jobs.deliver(consumer.executor, found, requested_at)


@asynccontextmanager
async def open_fetcher(
    connection: Connection,
    consumers: Sequence[BoundConsumer],
    jobs: InFlightJobs,
    wake: asyncio.Event,
    *,
    strict: bool = False,
) -> AsyncIterator[Fetcher]:
    """Open a fetcher for one consumer, or for several with the most urgent one first.

    :param jobs: gets the jobs
    :param wake: is set to end a wait for jobs
    :param strict: whether a consumer gets no job started while a more urgent one has any
    """
    async with AsyncExitStack() as stack:
        if len(consumers) == 1:
            yield await stack.enter_async_context(CreditFetcher(connection, consumers[0], jobs, wake))
            return
        fetchers = [
            await stack.enter_async_context(ConsumerFetcher(connection, consumer, partial(_deliver, jobs, consumer)))
            for consumer in consumers
        ]

        def on_denied(denial: PermissionDeniedError) -> None:
            jobs.denial = denial
            wake.set()

        probes = [
            await stack.enter_async_context(AvailabilityProbe(connection, consumer, wake.set, on_denied).watching())
            for consumer in consumers
        ]
        yield PriorityFetcher(fetchers, probes, jobs, wake, PriorityScheduler(len(probes), strict=strict))
