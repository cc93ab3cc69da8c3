"""Publishes jobs with a bounded number in flight and reports the fate of each.

At least once with deduplication: a job counts as stored only when the server has acknowledged it. A job without an
answer is sent again under the same id, and reported by its index if it stays unanswered.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.headers import wire_size
from airflow_provider_jetstream.jetstream.client.publish_ack import parse_publish_ack
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    JobError,
    JobNotSerializableError,
    JobTooLargeError,
    NotFoundError,
    QueueFullError,
    ServerTooOldError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.job import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.report import PublishFailure, PublishReport
from airflow_provider_jetstream.jetstream.publishing.schedules import ONCE_LEVEL, SCHEDULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_STREAM_FULL = 10077
_MESSAGE_TOO_LARGE = 10054
_NO_STREAM_PAUSE = 0.25


async def publish(
    connection: Connection,
    queue: WorkQueue | None,
    jobs: Iterable[object],
    *,
    subject: str | None = None,
    origin: Origin | None = None,
) -> PublishReport:
    """Publish jobs and make sure that all of them are stored.

    :param queue: where the jobs go; ``None`` for subjects without partitions and without schedules
    :param jobs: :class:`~airflow_provider_jetstream.jetstream.Job` objects, or just their bodies
    :param subject: the subject of jobs that name none; with ``{partition}`` in place of a token where consumers divide
        the jobs
    :param origin: the publishing task; its jobs have the same ids when the task is tried again
    :return: the fate of every job
    :raises JobError: a job can't be published as it is; the jobs before it may be stored
    :raises PublishError: some jobs aren't known to be stored; carries the report
    """
    prepared = prepare_jobs(jobs, subject=subject, origin=origin, batch=uuid4().hex, queue=queue)
    report = await publish_prepared(connection, prepared)
    report.raise_for_failures()
    return report


async def publish_prepared(
    connection: Connection,
    jobs: Iterable[OutgoingJob],
    *,
    window: int = 512,
    ack_timeout: float = 5.0,
    attempts: int = 3,
    stored_sequence: Callable[[int, OutgoingJob], int | None] = lambda _index, _job: None,
) -> PublishReport:
    """Publish jobs that have their subjects, ids and headers.

    :param jobs: read only as fast as the window allows
    :param window: the largest number of unacknowledged jobs
    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: the largest number of times that a job is sent
    :param stored_sequence: returns the stream sequence of a job that is known to be stored, and isn't sent again
    :return: the report, which includes the jobs that failed; nothing is raised for them
    :raises UnreachableError: the connection was closed before anything was sent
    """
    publisher = _Publisher(connection, window, ack_timeout, attempts)
    await publisher.open()
    try:
        for index, job in enumerate(jobs):
            if sequence := stored_sequence(index, job):
                publisher.report.add_stored(sequence, scheduled=job.scheduled)
            else:
                await publisher.send(index, job)
        await publisher.wait_for_answers(0)
    finally:
        await publisher.close()
    return publisher.report


@dataclass(slots=True)
class _InFlight:
    job: OutgoingJob
    payload: bytes
    deadline: float
    attempts: int = 1
    foreign_answer: bool = False
    no_stream: bool = False
    answer_lost: bool = False


class _Publisher:
    def __init__(self, connection: Connection, window: int, ack_timeout: float, attempts: int) -> None:
        self.report = PublishReport()
        self._connection = connection
        self._window = window
        self._ack_timeout = ack_timeout
        self._attempts = attempts
        self._in_flight: OrderedDict[int, _InFlight] = OrderedDict()
        self._progress = asyncio.Event()
        self._last_answer = time.monotonic()
        self._silent = False
        self._inbox = connection.new_inbox()

    async def open(self) -> None:
        try:
            self._subscription = await self._connection.subscribe(f"{self._inbox}.*", self._on_answer)
        except UnreachableError as error:
            raise UnreachableError(f"nothing was published: {error}") from None

    async def close(self) -> None:
        await self._subscription.unsubscribe()

    async def send(self, index: int, job: OutgoingJob) -> None:
        self.report.sequences.append(0)
        try:
            payload = job.job.payload()
        except JobNotSerializableError as error:
            self._fail(index, job, error, certain=True)
            return
        if job.api_level > self._connection.api_level:
            # An older server stores a schedule as a message like any other and never makes a job of it.
            self._fail(index, job, _too_old(job, self._connection), certain=True)
            return
        await self.wait_for_answers(self._window - 1)
        if self._silent:
            reason = "it was not sent: the jobs before it got no answer"
            self._fail(index, job, UnreachableError(reason + self._last_report()), certain=True)
            return
        self._in_flight[index] = _InFlight(job, payload, time.monotonic() + self._ack_timeout)
        await self._put(index)

    async def wait_for_answers(self, max_in_flight: int) -> None:
        while len(self._in_flight) > max_in_flight:
            self._progress.clear()
            oldest = next(iter(self._in_flight.values()))
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + oldest.deadline - time.monotonic()):
                    await self._progress.wait()
            except TimeoutError:
                await self._resend_late()

    async def _resend_late(self) -> None:
        now = time.monotonic()
        for index, flight in [(index, flight) for index, flight in self._in_flight.items() if flight.deadline <= now]:
            if index not in self._in_flight:
                continue
            if flight.attempts >= self._attempts:
                del self._in_flight[index]
                self._silent = self._last_answer < flight.deadline - self._ack_timeout
                reason = f"no acknowledgement after {flight.attempts} attempts of {self._ack_timeout:g} s"
                if flight.foreign_answer:
                    reason += f": what answers on {flight.job.subject} isn't a stream; provision the queue first"
                self._fail(index, flight.job, UnreachableError(reason + self._last_report()), certain=False)
                continue
            flight.answer_lost |= not flight.no_stream
            flight.no_stream = False
            flight.attempts += 1
            flight.deadline = now + self._ack_timeout
            self._in_flight.move_to_end(index)
            await self._put(index)

    async def _put(self, index: int) -> None:
        flight = self._in_flight[index]
        limit = self._connection.max_payload
        # The client counts the body only; for body and headers together the server would close the connection.
        if len(flight.payload) + wire_size(flight.job.headers) > limit:
            del self._in_flight[index]
            self._fail(index, flight.job, _too_large(f"the server's limit of {limit} bytes"), certain=True)
            return
        try:
            await self._connection.publish(
                flight.job.subject, flight.payload, flight.job.headers, f"{self._inbox}.{index}"
            )
        except UnreachableError as error:
            if not self._connection.is_connected and not self._connection.is_closed:
                # The client's buffer for a lost connection is full; the job is sent again after its deadline.
                return
            del self._in_flight[index]
            self._fail(index, flight.job, error, certain=flight.attempts == 1)

    async def _on_answer(self, message: Msg) -> None:
        index = int(message.subject.rsplit(".", 1)[1])
        flight = self._in_flight.get(index)
        ack = refusal = None
        try:
            # An empty answer is the server's own: no stream captures the subject.
            ack = parse_publish_ack(message.subject, message.data) if message.data else None
        except ApiError as error:
            refusal = error
        except UnreachableError:
            # From a subscriber to the subject that is no stream; the stream's own answer may still come.
            if flight:
                flight.foreign_answer = True
            return
        self._last_answer, self._silent = time.monotonic(), False
        self._progress.set()
        if flight is None:
            return
        if not message.data and flight.attempts < self._attempts:
            # Either no stream captures the subject or the server is just starting: only time shows which.
            flight.no_stream = True
            flight.deadline = time.monotonic() + _NO_STREAM_PAUSE
            self._in_flight.move_to_end(index, last=False)
            return
        del self._in_flight[index]
        if refusal:
            self._fail(index, flight.job, _job_error(refusal), certain=True)
        elif ack is None:
            missing = NotFoundError(
                f"no stream captures {flight.job.subject}: provision the queue first, or check the subject"
            )
            # An attempt whose answer was lost may have been stored before the stream went away.
            self._fail(index, flight.job, missing, certain=not flight.answer_lost)
        else:
            self.report.add_acknowledged(index, ack, scheduled=flight.job.scheduled)

    def _last_report(self) -> str:
        error = self._connection.last_error
        return f" (the connection last reported: {error})" if error else ""

    def _fail(self, index: int, job: OutgoingJob, error: JetStreamProviderError, *, certain: bool) -> None:
        self.report.failures.append(PublishFailure(index, job.message_id, error, certain))


def _too_old(job: OutgoingJob, connection: Connection) -> ServerTooOldError:
    version = ".".join(map(str, connection.server_version))
    return ServerTooOldError(
        f"expected nats-server {'2.12' if job.api_level == ONCE_LEVEL else '2.14'} or later for"
        f" {job.headers[SCHEDULE]!r}, found {version}: upgrade every server, or publish it when it is due"
    )


def _job_error(refusal: ApiError) -> JetStreamProviderError:
    stream, description = refusal.stream, refusal.description
    if refusal.err_code == _STREAM_FULL:
        return QueueFullError(
            f"{stream} is full ({description}): let workers or a redrive free space, or raise the limit, then try again"
        )
    if refusal.err_code == _MESSAGE_TOO_LARGE:
        return _too_large(f"max_msg_size of {stream}")
    if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return UnreachableError(f"{stream} can't store it just now ({description})")
    return JobError(f"{stream} refused it: {description} (error {refusal.err_code})")


def _too_large(limit: str) -> JobTooLargeError:
    return JobTooLargeError(
        f"body and headers exceed {limit}: send a reference instead of the data, or raise the limit"
    )
