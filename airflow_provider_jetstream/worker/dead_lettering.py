"""Making a dead letter of a job that can't be done: a copy is stored first, and only then is the job terminated.

The server removes a terminated job with its body, so the other order could lose it. After a crash between the two the
job is delivered again; a dead letter with two copies counts once. Where no copy can be stored, the job stays, unless
the archive has its body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.headers import Headers, wire_size
from airflow_provider_jetstream.jetstream.client.publish_ack import store_once
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TERMINATED, copy_filter, copy_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.record import is_copy_of, record_headers
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    DeadlineError,
    JetStreamProviderError,
    JobTooLargeError,
    NotFoundError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT, PAUSE_AFTER_FAILURE, end_delivery
from airflow_provider_jetstream.worker.errors import GiveUpError, HandlerDeadlineError, JobExpiredError
from airflow_provider_jetstream.worker.handler import class_name, error_text, failure_of

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.worker.delivery import PulledMessage
    from airflow_provider_jetstream.worker.handler import Failure


log = logging.getLogger("jetstream.worker")

_WRITER = "worker"
_COPY_TIMEOUT = 5.0
# Shorter: a job that used up its deliveries stays in the queue with or without a copy.
_LAST_FAILURE_TIMEOUT = 2.0
# Detail of the headers, less and less for copies close to the size limit: length of each text, with place, with digest.
# The first one has the traceback, the worker and the time that it took as well.
_DETAIL_LEVELS = ((1_000, True, True), (100, True, True), (100, False, True), (0, False, True), (0, False, False))
_MAX_FIRST_FAILURES = 4_096


@dataclass(frozen=True, slots=True)
class DeadLetterTarget:
    """What a dead letter queue can store about the jobs of one consumer.

    ``problem`` says why it stores no copies and what to do, ``captures_terminations`` whether it stores the server's
    advisories about terminated jobs; ``max_message_size`` is in bytes, ``None`` for no limit.
    """

    stream: str
    problem: str | None = None
    captures_terminations: bool = False
    max_message_size: int | None = None


async def inspect_target(connection: Connection, queue: WorkQueue, consumer: str) -> DeadLetterTarget:
    """Read the dead letter queue's configuration from the server; a failed request becomes the target's problem."""
    if queue.dead_letters is None:
        return DeadLetterTarget(
            "", f"{queue.name} declares no dead letter queue: declare dead_letters and provision it"
        )
    stream = queue.dead_letters.name
    try:
        config = (await stream_info(connection, stream))["config"]
    except NotFoundError:
        return DeadLetterTarget(stream, f"the dead letter queue {stream} doesn't exist: provision the queue")
    except JetStreamProviderError as error:
        return DeadLetterTarget(stream, f"the dead letter queue {stream} can't be inspected: {error}")
    subjects = config.get("subjects") or []
    problem = None
    if not covered_by_any(subjects, f"{copy_filter(queue.name).removesuffix('>')}{consumer}.*"):
        problem = f'the dead letter queue {stream} captures no copies: add "{copy_filter(queue.name)}" to its subjects'
    elif config.get("retention") == "interest":
        # The server would acknowledge a copy and drop it at once if no consumer of the stream wants it.
        problem = f"the dead letter queue {stream} has interest retention: recreate it with limits retention"
    max_size = config.get("max_msg_size") or -1
    return DeadLetterTarget(
        stream,
        problem,
        captures_terminations=covered_by_any(subjects, f"{TERMINATED}.{queue.name}.{consumer}"),
        max_message_size=max_size if max_size > 0 else None,
    )


async def archive_exists(connection: Connection, queue: WorkQueue) -> bool:
    """Return whether the queue's archive is declared and exists on the server."""
    if queue.archive is None:
        return False
    try:
        await stream_info(connection, queue.archive.name)
    except JetStreamProviderError:
        return False
    return True


async def is_archived(connection: Connection, queue: WorkQueue, message: PulledMessage) -> bool:
    """Return whether the archive holds this job with its body, so that removing it from the queue loses nothing.

    :raises JetStreamProviderError: a request to the server failed
    """
    archive = await ArchiveReader.open(connection, queue, await stream_info(connection, queue.name))
    copy = await archive.find(message.sequence) if archive else None
    return copy is not None and message.is_same_as(copy) and copy.data == message.data


class DeadLetterWriter:
    """Stores copies of one consumer's dead letters, and terminates the jobs that its handler gives up."""

    def __init__(
        self, connection: Connection, queue: WorkQueue, consumer: str, max_deliver: int, worker: str | None = None
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._consumer = consumer
        self._max_deliver = max_deliver
        self._worker = worker
        self._target = DeadLetterTarget("", "not inspected yet")
        self._first_failures: OrderedDict[tuple[int, int], datetime] = OrderedDict()

    async def inspect_target(self) -> None:
        """Check whether copies can be stored, and log what is lost if not."""
        self._target = await inspect_target(self._connection, self._queue, self._consumer)
        if self._target.problem is None:
            return
        if self._target.captures_terminations and await archive_exists(self._connection, self._queue):
            consequence = "are terminated, and only the archive keeps their bodies"
        else:
            consequence = "are handed back, since terminating them would destroy their bodies"
        log.warning(
            "jobs of %s/%s that a handler gives up %s, and the reasons of failures aren't stored: %s",
            self._queue.name,
            self._consumer,
            consequence,
            self._target.problem,
        )

    async def record_failure(self, message: PulledMessage, error: Exception, seconds: float | None = None) -> None:
        """Record a failed delivery; on the last one store a copy with the reason, within a short time limit.

        :param seconds: how long the handler ran
        """
        reason = Reason.DEADLINE if isinstance(error, HandlerDeadlineError) else Reason.MAX_DELIVERIES
        death = self._death(message, reason, error, failure_of(error), seconds=seconds)
        if not 0 < self._max_deliver <= message.attempt or self._target.problem:
            return
        try:
            await self._store_copy(message, death, _LAST_FAILURE_TIMEOUT)
        except JetStreamProviderError as problem:
            log.warning("the reason why job %d of %s is dead isn't stored: %s", death.sequence, death.stream, problem)

    async def terminate(self, message: PulledMessage, error: GiveUpError, seconds: float | None = None) -> bool:
        """Terminate a job once its body is preserved; returns whether the job is settled, else it must be nak'ed.

        :param seconds: how long the handler ran
        """
        reason = Reason.EXPIRED if isinstance(error, JobExpiredError) else Reason.TERMINATED
        # A subclass of GiveUpError is as informative as a cause.
        cause = error.__cause__ or (None if type(error) is GiveUpError else error)
        death = self._death(message, reason, cause, failure_of(error), error_text(error), seconds)
        try:
            await self._store_copy(message, death, _COPY_TIMEOUT)
        except DeadLetterGoneError as gone:
            log.warning("%s", gone)
            return True
        except JetStreamProviderError as failure:
            problem: JetStreamProviderError | None = failure
        else:
            problem = None
        if problem:
            if not await self._is_safe_without_copy(message):
                log.error(
                    "job %d of %s is handed back although its handler gave it up, since terminating it would destroy"
                    " its body: %s",
                    death.sequence,
                    death.stream,
                    problem,
                )
                return False
            log.warning(
                "job %d of %s is terminated with its body in the archive only: %s",
                death.sequence,
                death.stream,
                problem,
            )
        payload = f"+TERM {one_line(death.explanation) or ''}".rstrip().encode()
        what = f"the termination of job {death.sequence}"
        await end_delivery(self._connection, message, payload, what, reconnects=None)
        return True

    def _death(
        self,
        message: PulledMessage,
        reason: Reason,
        error: BaseException | None,
        failure: Failure | None,
        explanation: str | None = None,
        seconds: float | None = None,
    ) -> Death:
        now = datetime.now(UTC)
        # The sequences of a recreated stream start again at 1.
        key = (message.sequence, message.stored_nanoseconds)
        if message.attempt == 1:
            self._first_failures[key] = now
            if len(self._first_failures) > _MAX_FIRST_FAILURES:
                self._first_failures.popitem(last=False)
        return Death(
            stream=self._queue.name,
            created="",
            sequence=message.sequence,
            consumer=self._consumer,
            reason=reason,
            died_at=now,
            first_failed_at=self._first_failures.get(key),
            deliveries=message.attempt,
            explanation=explanation,
            error_class=None if error is None else class_name(type(error)),
            error_message=None if error is None else error_text(error),
            traceback_digest=failure.digest if failure else None,
            error_place=failure.place if failure else None,
            traceback=failure.functions if failure else (),
            worker=self._worker,
            seconds=seconds,
        )

    async def _store_copy(self, message: PulledMessage, death: Death, seconds: float) -> None:
        """Store a copy, with retries until the time is up."""
        end = time.monotonic() + seconds
        while True:
            try:
                # A request that was lost with the connection must not use up the time for its retries.
                async with asyncio.timeout(min(ANSWER_TIMEOUT, end - time.monotonic())):
                    return await self._try_store_copy(message, death)
            except TransientError as error:
                problem: TransientError = error
            except TimeoutError:
                problem = DeadlineError("the server gave no answer in time")
            if time.monotonic() + PAUSE_AFTER_FAILURE >= end:
                raise problem
            await asyncio.sleep(PAUSE_AFTER_FAILURE)

    async def _try_store_copy(self, message: PulledMessage, death: Death) -> None:
        if self._target.problem:
            # It may have been provisioned in the meantime.
            self._target = await inspect_target(self._connection, self._queue, self._consumer)
        if self._target.problem:
            raise NotFoundError(self._target.problem)
        # In this order: a stream that is recreated in between has another message at this sequence, or none.
        created = (await stream_info(self._connection, death.stream))["created"]
        stored = await get_message(self._connection, death.stream, death.sequence)
        if stored is None or not message.is_same_as(stored):
            raise DeadLetterGoneError(
                f"job {death.sequence} of {death.stream} is no longer stored: it was settled or deleted while its"
                " handler was running"
            )
        subject = copy_subject(death.stream, death.consumer, death.sequence)
        # This machine's clock may be behind the server's, and no job dies before it was stored.
        died_at = max(death.died_at, stored.stored_at)
        # Of a stored subject that isn't UTF-8 the server may show only a part; it is delivered as it is.
        headers = self._headers(replace(death, created=created, died_at=died_at), stored, message.subject)

        is_own = partial(is_copy_of, death, stored.data)
        ack = await store_once(self._connection, subject, stored.data, headers, is_own)
        if ack.stream != self._target.stream:
            raise NotFoundError(f"expected {self._target.stream} to store {subject}, found {ack.stream}")

    def _headers(self, death: Death, stored: StoredMessage, subject: str) -> Headers:
        limit = min(self._connection.max_payload, self._target.max_message_size or self._connection.max_payload)
        for number, (length, with_place, with_digest) in enumerate(_DETAIL_LEVELS):
            bare: dict[str, Any] = {"traceback": (), "worker": None, "seconds": None} if number else {}
            shortened = replace(
                death,
                **bare,
                explanation=(death.explanation or "")[:length],
                error_message=(death.error_message or "")[:length],
                error_place=death.error_place if with_place else None,
                traceback_digest=death.traceback_digest if with_digest else None,
            )
            headers = record_headers(
                shortened, subject=subject, time=stored.time, headers=stored.headers, writer=_WRITER
            )
            if (size := wire_size(headers) + len(stored.data)) <= limit:
                return headers
        raise JobTooLargeError(
            f"expected a copy of at most {limit} bytes, found {size} for job {death.sequence} with the headers of a"
            " dead letter: raise max_payload of the server, or max_msg_size of the dead letter queue"
        )

    async def _is_safe_without_copy(self, message: PulledMessage) -> bool:
        """Return whether the archive has the job's body and the dead letter queue captures its termination."""
        try:
            async with asyncio.timeout(_COPY_TIMEOUT):
                target = await inspect_target(self._connection, self._queue, self._consumer)
                return target.captures_terminations and await is_archived(self._connection, self._queue, message)
        except (JetStreamProviderError, TimeoutError):
            return False
