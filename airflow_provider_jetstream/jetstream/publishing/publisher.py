"""Publishing many jobs with a bounded number in flight, and the fate of each.

At least once with deduplication: a job counts as stored only with the server's acknowledgement; one without an answer
is sent again under the same id, and reported by its index if it stays unanswered.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    JobError,
    JobNotSerializableError,
    JobTooLargeError,
    NotFoundError,
    QueueFullError,
    ServerTooOldError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.report import Failure, PublishReport, ranges
from airflow_provider_jetstream.jetstream.publishing.schedules import ONCE_LEVEL, SCHEDULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

__all__ = ["Failure", "PublishReport", "publish", "ranges"]

_FULL = 10077
_TOO_LARGE = 10054
_ABSENT_PAUSE = 0.25


async def publish(
    connection: Connection,
    jobs: Iterable[OutgoingJob],
    *,
    window: int = 512,
    ack_timeout: float = 5.0,
    attempts: int = 3,
    known: Callable[[int, OutgoingJob], int | None] = lambda _index, _job: None,
) -> PublishReport:
    """Publish jobs and learn what became of each.

    :param connection: where to
    :param jobs: read only as fast as the window allows
    :param window: jobs sent and not yet acknowledged
    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: how often a job is sent at the most
    :param known: gives the stream sequence of a job that is known to be stored, and isn't sent again
    :return: the report, also of jobs that failed; nothing is raised for them
    :raises UnreachableError: the connection was closed before anything was sent
    """
    publisher = _Publisher(connection, window, ack_timeout, attempts)
    await publisher.open()
    try:
        for index, job in enumerate(jobs):
            if sequence := known(index, job):
                publisher.report.add_known(sequence, scheduled=job.scheduled)
            else:
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
    foreign: bool = False
    absent: bool = False
    lost: bool = False


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
        self._last_answer = time.monotonic()
        self._silent = False
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
        if job.api_level > self._connection.api_level:
            # It would store the schedule as a message like any other, and nothing would ever come of it.
            self._fail(index, job, _too_old(job, self._connection), certain=True)
            return
        await self.settle(self._window - 1)
        if self._silent:
            reason = "it was not sent: the jobs before it got no answer"
            self._fail(index, job, UnreachableError(reason + self._last_report()), certain=True)
            return
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
                self._silent = self._last_answer < flight.deadline - self._ack_timeout
                reason = f"no acknowledgement after {flight.sent} attempts of {self._ack_timeout:g} s"
                if flight.foreign:
                    reason += f": what answers on {flight.job.subject} isn't a stream; provision the queue first"
                self._fail(index, flight.job, UnreachableError(reason + self._last_report()), certain=False)
                continue
            flight.lost |= not flight.absent
            flight.absent = False
            flight.sent += 1
            flight.deadline = now + self._ack_timeout
            self._in_flight.move_to_end(index)
            await self._put(index)

    async def _put(self, index: int) -> None:
        from nats import errors

        flight = self._in_flight[index]
        limit = self._client.max_payload
        # The client counts the body only; for body and headers together the server would close the connection.
        if len(flight.payload) + _size(flight.job.headers) > limit:
            del self._in_flight[index]
            self._fail(index, flight.job, _too_large(f"the server's limit of {limit} bytes"), certain=True)
            return
        try:
            await self._client.publish(
                flight.job.subject, flight.payload, reply=f"{self._inbox}.{index}", headers=flight.job.headers
            )
        except errors.OutboundBufferLimitError:
            # Only while the connection is away; the deadline sends it again.
            return
        except errors.Error as error:
            del self._in_flight[index]
            self._fail(index, flight.job, UnreachableError(f"it was not sent: {error}"), certain=flight.sent == 1)

    async def _on_answer(self, message: Msg) -> None:
        index = int(message.subject.rsplit(".", 1)[1])
        answer = _answer(message.data)
        if answer is None:
            # From somebody else who listens on the subject; the stream's own answer may still come.
            if flight := self._in_flight.get(index):
                flight.foreign = True
            return
        self._last_answer, self._silent = time.monotonic(), False
        flight = self._in_flight.pop(index, None)
        self._progress.set()
        if flight is None:
            return
        if not message.data and flight.sent < self._attempts:
            # Nobody listens on the subject: no stream has it, or the server is just starting. Only time tells.
            flight.absent = True
            flight.deadline = time.monotonic() + _ABSENT_PAUSE
            self._in_flight[index] = flight
            self._in_flight.move_to_end(index, last=False)
            return
        if not message.data:
            error: JetStreamProviderError = NotFoundError(
                f"no stream captures {flight.job.subject}: provision the queue first, or check the subject"
            )
            # An attempt whose answer got lost may have been stored before the stream went away.
            self._fail(index, flight.job, error, certain=not flight.lost)
            return
        if refusal := answer.get("error"):
            self._fail(index, flight.job, _refusal(refusal, answer.get("stream")), certain=True)
            return
        self.report.stream = answer["stream"]
        self.report.sequences[index] = answer["seq"]
        self.report.duplicates += bool(answer.get("duplicate"))
        if flight.job.scheduled:
            self.report.scheduled.add(index)

    def _last_report(self) -> str:
        error = self._connection.last_error
        return f" (the connection last reported: {error})" if error else ""

    def _fail(self, index: int, job: OutgoingJob, error: JetStreamProviderError, *, certain: bool) -> None:
        self.report.failures.append(Failure(index, job.message_id, error, certain))


def _too_old(job: OutgoingJob, connection: Connection) -> ServerTooOldError:
    version = ".".join(map(str, connection.server_version))
    return ServerTooOldError(
        f"expected nats-server {'2.12' if job.api_level == ONCE_LEVEL else '2.14'} or later for"
        f" {job.headers[SCHEDULE]!r}, found {version}: upgrade every server, or publish it when it is due"
    )


def _size(headers: dict[str, str]) -> int:
    lines = sum(len(name.encode()) + len(value.encode()) + len(": \r\n") for name, value in headers.items())
    return len("NATS/1.0\r\n\r\n") + lines


def _answer(data: bytes) -> dict[str, Any] | None:
    """Read a stream's acknowledgement or refusal; empty where nobody listens, ``None`` for anybody else's answer."""
    if not data:
        return {}
    try:
        answer = json.loads(data)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    acknowledged = isinstance(answer.get("stream"), str) and isinstance(answer.get("seq"), int)
    return answer if acknowledged or isinstance(answer.get("error"), dict) else None


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
