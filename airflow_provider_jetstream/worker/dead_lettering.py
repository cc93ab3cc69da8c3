"""Giving up jobs that can't be done: a copy is stored first, and only then is the job terminated.

A terminated job is removed with its body, so the other order could lose it. A crash in between delivers the job again,
and a letter with two copies is still one letter. Where no copy can be stored, the job stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import Headers, wire_size
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, store
from airflow_provider_jetstream.jetstream.client.stream_api import get_message, stream_info
from airflow_provider_jetstream.jetstream.contract import MSG_ID, copy_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.record import one_line, record_headers
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    DeadlineError,
    JetStreamProviderError,
    JobTooLargeError,
    NotFoundError,
    TransientError,
)
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT, PAUSE_AFTER_FAILURE, send_until_confirmed
from airflow_provider_jetstream.worker.dead_letter_target import (
    DeadLetterTarget,
    archive_exists,
    inspect_target,
    is_archived,
    is_same_message,
)
from airflow_provider_jetstream.worker.errors import GiveUpError, HandlerDeadlineError, JobExpiredError
from airflow_provider_jetstream.worker.traceback_digest import class_name, failure_of

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.worker.traceback_digest import Failure

log = logging.getLogger("jetstream.worker")

_TELLER = "worker"
_COPY_SECONDS = 5.0
# With or without a copy, a job that used up its deliveries stays in the queue.
_LAST_FAILURE_SECONDS = 2.0
# What is told where less and less room is left: so much of each text, whether the place, whether the digest.
_TELLING = ((1_000, True, True), (100, True, True), (100, False, True), (0, False, True), (0, False, False))
_REMEMBERED = 4_096


class DeadLetterWriter:
    """Keeps the jobs of one consumer that can't be done.

    :param connection: the server
    :param queue: the work queue
    :param consumer: the consumer's name
    :param last_attempt: the consumer's ``max_deliver`` on the server
    """

    def __init__(self, connection: Connection, queue: WorkQueue, consumer: str, last_attempt: int) -> None:
        self._connection = connection
        self._queue = queue
        self._consumer = consumer
        self._last_attempt = last_attempt
        self._shelter = DeadLetterTarget("", "nobody has looked yet")
        self._first_failures: OrderedDict[tuple[int, datetime], datetime] = OrderedDict()

    async def inspect_target(self) -> None:
        """See whether copies can be stored, and log what is at risk if not."""
        self._shelter = await inspect_target(self._connection, self._queue, self._consumer)
        if self._shelter.problem is None:
            return
        if self._shelter.captures_terminations and await archive_exists(self._connection, self._queue):
            fate = "are terminated, their bodies stay in the archive alone"
        else:
            fate = "are handed back, since terminating them would destroy their bodies"
        log.warning(
            "jobs of %s/%s that a handler gives up %s, and why jobs failed isn't kept: %s",
            self._queue.name,
            self._consumer,
            fate,
            self._shelter.problem,
        )

    async def record_failure(self, message: Msg, error: Exception) -> None:
        """Note a failure; on the last delivery store a copy that tells why, if that is possible in a short time.

        :param message: the job
        :param error: what the handler raised, or what became of it
        """
        late = isinstance(error, HandlerDeadlineError)
        death = self._death(message, Reason.DEADLINE if late else Reason.MAX_DELIVERIES, error, failure_of(error))
        if not 0 < self._last_attempt <= message.metadata.num_delivered or self._shelter.problem:
            return
        try:
            await self._keep(message, death, _LAST_FAILURE_SECONDS)
        except JetStreamProviderError as problem:
            log.warning("why job %d of %s is dead isn't kept: %s", death.sequence, death.stream, problem)

    async def terminate(self, message: Msg, given_up: GiveUpError) -> bool:
        """Terminate a job whose body is safe.

        :param message: the job
        :param given_up: what the handler raised
        :return: whether the job is settled; if not, it has to be handed back
        """
        reason = Reason.EXPIRED if isinstance(given_up, JobExpiredError) else Reason.TERMINATED
        # A class of its own says as much as a cause.
        cause = given_up.__cause__ or (None if type(given_up) is GiveUpError else given_up)
        death = self._death(message, reason, cause, failure_of(given_up), error_text(given_up))
        try:
            await self._keep(message, death, _COPY_SECONDS)
        except DeadLetterGoneError as gone:
            log.warning("%s", gone)
            return True
        except JetStreamProviderError as error:
            problem: JetStreamProviderError | None = error
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
            log.warning("job %d of %s is left to the archive: %s", death.sequence, death.stream, problem)
        told = f"+TERM {one_line(death.explanation) or ''}".rstrip().encode()
        terminate = partial(self._connection.client.request, message.reply, told, timeout=ANSWER_TIMEOUT)
        await send_until_confirmed(terminate, f"the termination of job {death.sequence}")
        return True

    def _death(
        self,
        message: Msg,
        reason: Reason,
        error: BaseException | None,
        failure: Failure | None,
        explanation: str | None = None,
    ) -> Death:
        now, metadata = datetime.now(UTC), message.metadata
        # Sequences begin anew in a recreated stream.
        key = (metadata.sequence.stream, metadata.timestamp)
        if metadata.num_delivered == 1:
            self._first_failures[key] = now
            if len(self._first_failures) > _REMEMBERED:
                self._first_failures.popitem(last=False)
        return Death(
            stream=self._queue.name,
            created="",
            sequence=metadata.sequence.stream,
            consumer=self._consumer,
            reason=reason,
            died_at=now,
            first_failed_at=self._first_failures.get(key),
            deliveries=metadata.num_delivered,
            explanation=explanation,
            error_class=None if error is None else class_name(type(error)),
            error_message=None if error is None else error_text(error),
            traceback_digest=failure.digest if failure else None,
            error_place=failure.place if failure else None,
        )

    async def _keep(self, message: Msg, death: Death, seconds: float) -> None:
        """Store a copy, if need be by several attempts within a time."""
        end = time.monotonic() + seconds
        while True:
            try:
                # A request that was lost with the connection must not use up the time of those after it.
                async with asyncio.timeout(min(ANSWER_TIMEOUT, end - time.monotonic())):
                    return await self._keep_once(message, death)
            except TransientError as error:
                problem: TransientError = error
            except TimeoutError:
                problem = DeadlineError("the server gave no answer in time")
            if time.monotonic() + PAUSE_AFTER_FAILURE >= end:
                raise problem
            await asyncio.sleep(PAUSE_AFTER_FAILURE)

    async def _keep_once(self, message: Msg, death: Death) -> None:
        if self._shelter.problem:
            # It may have been provisioned since.
            self._shelter = await inspect_target(self._connection, self._queue, self._consumer)
        if self._shelter.problem:
            raise NotFoundError(self._shelter.problem)
        # In this order: a stream that is recreated in between has another message there, or none.
        created = (await stream_info(self._connection, death.stream))["created"]
        stored = await get_message(self._connection, death.stream, death.sequence)
        if stored is None or not is_same_message(stored, message):
            raise DeadLetterGoneError(
                f"job {death.sequence} of {death.stream} is no longer stored: it was settled or deleted while its"
                " handler was at it"
            )
        subject = copy_subject(death.stream, death.consumer, death.sequence)
        # This machine's clock may be behind the server's, and nothing dies before it was stored.
        died_at = max(death.died_at, stored.stored_at)
        headers = self._headers(replace(death, created=created, died_at=died_at), stored)
        receipt = await self._store(subject, stored.data, headers)
        if receipt.duplicate and await get_message(self._connection, receipt.stream, receipt.sequence) is None:
            # The server remembers an id for a while after its message was removed, which a redrive does.
            other = (MSG_ID, f"{headers[MSG_ID]}:{death.died_at.isoformat()}")
            again = Headers(other if pair[0] == MSG_ID else pair for pair in headers.items())
            await self._store(subject, stored.data, again)

    def _headers(self, death: Death, stored: StoredMessage) -> Headers:
        limit = min(
            self._connection.client.max_payload, self._shelter.max_message_size or self._connection.client.max_payload
        )
        for length, with_place, with_digest in _TELLING:
            shorter = replace(
                death,
                explanation=(death.explanation or "")[:length],
                error_message=(death.error_message or "")[:length],
                error_place=death.error_place if with_place else None,
                traceback_digest=death.traceback_digest if with_digest else None,
            )
            headers = record_headers(
                shorter, subject=stored.subject, time=stored.time, headers=stored.headers, teller=_TELLER
            )
            if (size := wire_size(headers) + len(stored.data)) <= limit:
                return headers
        raise JobTooLargeError(
            f"expected a copy of at most {limit} bytes, found {size} for job {death.sequence} with the headers that"
            " tell of its death: raise max_payload of the server, or max_msg_size of the dead letter queue"
        )

    async def _store(self, subject: str, body: bytes, headers: Headers) -> PubAck:
        receipt = await store(self._connection, subject, body, headers)
        if receipt.stream != self._shelter.stream:
            raise NotFoundError(f"expected {self._shelter.stream} to store {subject}, found {receipt.stream}")
        return receipt

    async def _is_safe_without_copy(self, message: Msg) -> bool:
        """Tell whether the job's body is in the archive, and the dead letter queue will hear of its death."""
        try:
            async with asyncio.timeout(_COPY_SECONDS):
                shelter = await inspect_target(self._connection, self._queue, self._consumer)
                return shelter.captures_terminations and await is_archived(self._connection, self._queue, message)
        except (JetStreamProviderError, TimeoutError):
            return False


def error_text(error: BaseException) -> str:
    """Give an error's own words.

    :param error: the error, perhaps of a handler's own class
    :return: its text; nothing where it fails to tell
    """
    with suppress(Exception):
        return str(error)
    return ""
