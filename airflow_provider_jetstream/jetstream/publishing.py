"""Publishing many jobs with a bounded number in flight, and the fate of each.

At least once with deduplication: a job counts as stored only with the server's acknowledgement; one without an answer
is sent again under the same id, and reported by its index if it stays unanswered.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    JobError,
    JobNotSerializableError,
    JobTooLargeError,
    NotFoundError,
    PublishIncompleteError,
    PublishRefusedError,
    TerminalError,
    TransientError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.jobs import OutgoingJob

_FULL = 10077
_TOO_LARGE = 10054
_NAMED_FAILURES = 5
_ABSENT_PAUSE = 0.25


class QueueFullError(TransientError):
    """The stream is at its limit and discards what is new."""

    code = "JS220"


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that isn't known to be stored.

    :param index: its place among the published
    :param job_id: its ``Nats-Msg-Id``
    :param error: why
    :param certain: whether it is certain that it isn't stored; otherwise the answer got lost
    """

    index: int
    job_id: str
    error: JetStreamProviderError
    certain: bool


@dataclass(slots=True)
class PublishReport:
    """The fate of every job of one call.

    :param stream: the stream that stored them
    :param sequences: by index, the stream sequence; 0 where a job isn't known to be stored
    :param duplicates: how many of them the server knew already
    :param failures: those not known to be stored
    """

    stream: str | None = None
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    duplicates: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """How many jobs are stored."""
        return len(self.sequences) - len(self.failures)

    def raise_for_failures(self) -> None:
        """Do nothing if all jobs are stored.

        :raises PublishRefusedError: some can never be stored as they are
        :raises PublishIncompleteError: some weren't stored this time
        """
        if not self.failures:
            return
        failures = sorted(self.failures, key=lambda failure: failure.index)
        named = "; ".join(
            f"job {failure.index} (id {failure.job_id}) {'is not stored' if failure.certain else 'may be stored'}:"
            f" {failure.error}"
            for failure in failures[:_NAMED_FAILURES]
        )
        rest = len(failures) - _NAMED_FAILURES
        message = (
            f"{self.stored} of {len(self.sequences)} jobs are stored{self._where()}; {len(failures)} are not known to"
            f" be: {named}{f'; and {rest} more' if rest > 0 else ''}"
        )
        terminal = any(isinstance(failure.error, TerminalError) for failure in failures)
        raise (PublishRefusedError if terminal else PublishIncompleteError)(message, self)

    def _where(self) -> str:
        spans = ranges(self.sequences)
        if not spans:
            return ""
        shown = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in spans[:_NAMED_FAILURES])
        return f" in {self.stream} (sequences {shown}{', …' if len(spans) > _NAMED_FAILURES else ''})"


def ranges(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Write sequences as ranges, which stay small where jobs were stored in a row.

    :param sequences: in any order; zeros are left out
    :return: first and last of each run
    """
    spans: list[tuple[int, int]] = []
    for sequence in sorted(set(sequences) - {0}):
        if spans and spans[-1][1] == sequence - 1:
            spans[-1] = (spans[-1][0], sequence)
        else:
            spans.append((sequence, sequence))
    return spans


async def publish(
    connection: Connection,
    jobs: Iterable[OutgoingJob],
    *,
    window: int = 512,
    ack_timeout: float = 5.0,
    attempts: int = 3,
) -> PublishReport:
    """Publish jobs and learn what became of each.

    :param connection: where to
    :param jobs: read only as fast as the window allows
    :param window: jobs sent and not yet acknowledged
    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: how often a job is sent at the most
    :return: the report, also of jobs that failed; nothing is raised for them
    :raises UnreachableError: the connection was closed before anything was sent
    """
    publisher = _Publisher(connection, window, ack_timeout, attempts)
    await publisher.open()
    try:
        for index, job in enumerate(jobs):
            await publisher.send(index, job)
        await publisher.settle(0)
    finally:
        await publisher.close()
    return publisher.report


@dataclass(slots=True)
class _InFlight:
    job: OutgoingJob
    payload: bytes
    deadline: float
    sent: int = 1


class _Publisher:
    def __init__(self, connection: Connection, window: int, ack_timeout: float, attempts: int) -> None:
        self.report = PublishReport()
        self._connection = connection
        self._client = connection.client
        self._window = window
        self._ack_timeout = ack_timeout
        self._attempts = attempts
        self._in_flight: OrderedDict[int, _InFlight] = OrderedDict()
        self._progress = asyncio.Event()
        self._inbox = self._client.new_inbox()

    async def open(self) -> None:
        from nats import errors

        try:
            self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        except errors.Error as error:
            raise UnreachableError(f"nothing was published: {error}") from None

    async def close(self) -> None:
        from nats import errors

        try:
            await self._subscription.unsubscribe()
        except errors.Error as error:
            self._connection.last_error = error

    async def send(self, index: int, job: OutgoingJob) -> None:
        self.report.sequences.append(0)
        try:
            payload = job.job.payload()
        except JobNotSerializableError as error:
            self._fail(index, job, error, certain=True)
            return
        await self.settle(self._window - 1)
        self._in_flight[index] = _InFlight(job, payload, time.monotonic() + self._ack_timeout)
        await self._put(index)

    async def settle(self, at_most: int) -> None:
        """Wait until no more than so many jobs are unanswered."""
        while len(self._in_flight) > at_most:
            self._progress.clear()
            oldest = next(iter(self._in_flight.values()))
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + oldest.deadline - time.monotonic()):
                    await self._progress.wait()
            except TimeoutError:
                await self._again()

    async def _again(self) -> None:
        now = time.monotonic()
        for index, flight in [(index, flight) for index, flight in self._in_flight.items() if flight.deadline <= now]:
            if index not in self._in_flight:
                continue
            if flight.sent >= self._attempts:
                del self._in_flight[index]
                reason = f"no acknowledgement after {flight.sent} attempts of {self._ack_timeout:g} s"
                if self._connection.last_error:
                    reason += f" (the connection last reported: {self._connection.last_error})"
                self._fail(index, flight.job, UnreachableError(reason), certain=False)
                continue
            flight.sent += 1
            flight.deadline = now + self._ack_timeout
            self._in_flight.move_to_end(index)
            await self._put(index)

    async def _put(self, index: int) -> None:
        from nats import errors

        flight = self._in_flight[index]
        try:
            await self._client.publish(
                flight.job.subject, flight.payload, reply=f"{self._inbox}.{index}", headers=flight.job.headers
            )
        except errors.MaxPayloadError:
            del self._in_flight[index]
            limit = self._client.max_payload
            self._fail(index, flight.job, _too_large(f"the server's limit of {limit} bytes"), certain=True)
        except errors.OutboundBufferLimitError:
            # Only while the connection is away; the deadline sends it again.
            return
        except errors.Error as error:
            del self._in_flight[index]
            self._fail(index, flight.job, UnreachableError(f"it was not sent: {error}"), certain=flight.sent == 1)

    async def _on_answer(self, message: Msg) -> None:
        index = int(message.subject.rsplit(".", 1)[1])
        flight = self._in_flight.pop(index, None)
        self._progress.set()
        if flight is None:
            return
        if not message.data and flight.sent < self._attempts:
            # Nobody listens on the subject: no stream has it, or the server is just starting. Only time tells.
            flight.deadline = time.monotonic() + _ABSENT_PAUSE
            self._in_flight[index] = flight
            self._in_flight.move_to_end(index, last=False)
            return
        if not message.data:
            error: JetStreamProviderError = NotFoundError(
                f"no stream captures {flight.job.subject}: provision the queue first, or check the subject"
            )
            self._fail(index, flight.job, error, certain=True)
            return
        answer = json.loads(message.data)
        if refusal := answer.get("error"):
            self._fail(index, flight.job, _refusal(refusal, answer.get("stream")), certain=True)
            return
        self.report.stream = answer["stream"]
        self.report.sequences[index] = answer["seq"]
        self.report.duplicates += bool(answer.get("duplicate"))

    def _fail(self, index: int, job: OutgoingJob, error: JetStreamProviderError, *, certain: bool) -> None:
        self.report.failures.append(Failure(index, job.message_id, error, certain))


def _refusal(error: dict[str, object], stream: str | None) -> JetStreamProviderError:
    description = str(error.get("description"))
    if error.get("err_code") == _FULL:
        return QueueFullError(
            f"{stream} is full ({description}): let workers or a redrive make room, or raise the limit, then try again"
        )
    if error.get("err_code") == _TOO_LARGE:
        return _too_large(f"max_msg_size of {stream}")
    if error.get("code") == HTTPStatus.SERVICE_UNAVAILABLE:
        return UnreachableError(f"{stream} can't store it just now ({description})")
    return JobError(f"{stream} refused it: {description} (error {error.get('err_code')})")


def _too_large(limit: str) -> JobTooLargeError:
    return JobTooLargeError(
        f"body and headers exceed {limit}: send a reference instead of the data, or raise the limit"
    )
