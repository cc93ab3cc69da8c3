"""Detects that a consumer has jobs without pulling one: a pull request too small to fit any message.

The server answers such a request the moment a job can be delivered, and leaves the job and its delivery count as they
were. It doesn't answer while the consumer is paused or at its ``max_ack_pending``. So a worker can probe several
consumers at a time, where real pull requests could deliver more jobs than it can start. Measured with nats-server 2.15:
after fifty probes a job's next real delivery had the number it would have had without them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.client.pull_request import pull_request
from airflow_provider_jetstream.jetstream.errors import UnreachableError
from airflow_provider_jetstream.worker.fetcher import (
    NO_MESSAGES,
    PAUSE_AFTER_REFUSAL,
    PULL_EXPIRES,
    parse_status,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.worker.consumers import BoundConsumer

log = logging.getLogger("jetstream.worker")

_TOO_LARGE = "Message Size Exceeds MaxBytes"
# Only a lost connection or a dead leader leaves a probe unanswered.
_ANSWER_TIMEOUT = 1.5 * PULL_EXPIRES
# Long enough for idle workers that have the consumer as their own to pull first.
_FALLBACK_DELAY = 0.02


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
            async with asyncio.timeout(_ANSWER_TIMEOUT):
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
