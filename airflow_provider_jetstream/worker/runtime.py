"""The worker: pull no more than there are free slots, run the handler, store the completion, only then acknowledge.

A crash between storing and acknowledging runs the job once more, and its second completion is dropped as a duplicate of
the first. The other order could lose the completion.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import Completion
from airflow_provider_jetstream.jetstream.connection import Connection, ConnectionSettings, connect
from airflow_provider_jetstream.jetstream.names import JOB_ADVISORY, JOB_ID, MSG_ID, completion_subject
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.jetstream.stored import consumer_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

log = logging.getLogger("jetstream.worker")

_PULL_SECONDS = 1.0
_PAUSE_AFTER_FAILURE = 0.5
_STORE_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job as a handler gets it.

    :param id: the job's own id, or its stream sequence where it has none
    :param subject: its subject
    :param body: its body
    :param headers: its headers
    :param sequence: its stream sequence
    :param attempt: 1 for the first delivery
    """

    id: str
    subject: str
    body: bytes
    headers: dict[str, str]
    sequence: int
    attempt: int

    def json(self) -> Any:
        """Decode the body.

        :return: the JSON value
        :raises ValueError: if the body isn't JSON
        """
        return json.loads(self.body)


class Worker:
    """Runs a handler for the jobs of one consumer until it is stopped.

    :param queue: the queue's declaration, its dict, or the path of its YAML file
    :param consumer: the name of one of the queue's consumers; it has to exist on the server
    :param handler: takes a :class:`Delivery`; a plain function runs in a thread. What it returns is stored with the
        completion, an exception hands the job back for its next delivery
    :param settings: the connection; from the environment where absent
    :param concurrency: jobs at a time
    :param name: tells workers apart in logs and completions
    :param grace: seconds for running jobs to finish after :meth:`stop`
    """

    def __init__(
        self,
        queue: WorkQueue | dict[str, Any] | str,
        consumer: str,
        handler: Callable[[Delivery], Any],
        settings: ConnectionSettings,
        *,
        concurrency: int = 1,
        name: str | None = None,
        grace: float = 30.0,
    ) -> None:
        self.queue = WorkQueue.load(queue)
        self.consumer = self.queue.consumer(consumer)
        self.name = name or f"{socket.gethostname()}-{consumer}"
        self._handler = handler
        self._settings = settings
        self._concurrency = concurrency
        self._grace = grace
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Take no more jobs; :meth:`run` returns when the running ones are done, or the grace time is over."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until :meth:`stop`.

        Jobs that the grace time cuts off are delivered again after the consumer's ack wait.

        :raises NotFoundError: the stream or the consumer doesn't exist
        :raises JetStreamProviderError: the first connection failed
        """
        async with connect(self._settings) as connection:
            await consumer_info(connection, self.queue.name, self.consumer.name)
            jetstream = connection.client.jetstream(timeout=connection.timeout)
            pull = await jetstream.pull_subscribe_bind(self.consumer.name, stream=self.queue.name)
            log.info("%s takes jobs of %s/%s", self.name, self.queue.name, self.consumer.name)
            stopped = asyncio.create_task(self._stopping.wait())
            while not stopped.done():
                if len(self._running) < self._concurrency:
                    await self._take(connection, pull)
                else:
                    await asyncio.wait([stopped, *self._running], return_when=asyncio.FIRST_COMPLETED)
            if self._running:
                log.info("%s finishes %d running jobs", self.name, len(self._running))
                _, unfinished = await asyncio.wait(self._running, timeout=self._grace)
                for task in unfinished:
                    task.cancel()
                await asyncio.gather(*unfinished, return_exceptions=True)
            log.info("%s stopped", self.name)

    async def _take(self, connection: Connection, pull: JetStreamContext.PullSubscription) -> None:
        from nats import errors
        from nats.js import errors as js_errors

        try:
            # Never cancelled: a cancelled pull burns a delivery of whatever it would have brought.
            messages = await pull.fetch(self._concurrency - len(self._running), timeout=_PULL_SECONDS)
        except TimeoutError:
            return
        except (errors.Error, js_errors.Error) as error:
            log.warning("%s can't pull just now: %s", self.name, error)
            await asyncio.sleep(_PAUSE_AFTER_FAILURE)
            return
        for message in messages:
            task = asyncio.create_task(self._work(connection, message))
            self._running.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s could not settle a job, it will be delivered again: %s", self.name, error)

    async def _work(self, connection: Connection, message: Msg) -> None:
        job = _delivery(message)
        try:
            result = await self._handle(job)
        except Exception:
            log.exception("%s failed job %s, attempt %d", self.name, job.id, job.attempt)
            await message.nak(delay=self._retry_delay(job.attempt))
            return
        await self._store_completion(connection, message, job, result)
        await message.ack_sync(timeout=connection.timeout)
        log.info("%s completed job %s, attempt %d", self.name, job.id, job.attempt)

    async def _handle(self, job: Delivery) -> Any:
        if inspect.iscoroutinefunction(self._handler):
            return await self._handler(job)
        return await asyncio.to_thread(self._handler, job)

    def _retry_delay(self, attempt: int) -> float | None:
        # The server ignores a consumer's backoff for jobs that are handed back, so it has to be told. The last delivery
        # is handed back at once: its death shall not wait.
        backoff, last = self.consumer.backoff, self.consumer.max_deliver
        if not backoff or attempt == last:
            return None
        return backoff[min(attempt, len(backoff)) - 1] / 1e9

    async def _store_completion(self, connection: Connection, message: Msg, job: Delivery, result: Any) -> None:
        completion = Completion(
            timestamp=datetime.now(UTC),
            stream=self.queue.name,
            consumer=self.consumer.name,
            stream_seq=job.sequence,
            deliveries=job.attempt,
            job_id=job.id,
            worker=self.name,
            result=result,
        )
        payload = completion.model_dump_json(exclude_none=True).encode()
        if self.queue.events:
            subject = completion_subject(self.queue.name, self.consumer.name, job.sequence)
            # The time tells this job from one of the same sequence in a recreated stream.
            once = f"done:{self.queue.name}:{job.sequence}:{message.metadata.timestamp.timestamp()}"
            await _publish_stored(connection, subject, payload, once)
        if advisory := job.headers.get(JOB_ADVISORY):
            await connection.client.publish(advisory, payload)


async def _publish_stored(connection: Connection, subject: str, payload: bytes, message_id: str) -> None:
    from nats import errors
    from nats.js import errors as js_errors

    jetstream = connection.client.jetstream(timeout=connection.timeout)
    for attempt in range(1, _STORE_ATTEMPTS + 1):
        try:
            await jetstream.publish(subject, payload, headers={MSG_ID: message_id})
        except (errors.Error, js_errors.Error) as error:
            if attempt == _STORE_ATTEMPTS:
                raise
            log.warning("A completion isn't stored yet (%s): %s", subject, error)
            await asyncio.sleep(_PAUSE_AFTER_FAILURE * attempt)
        else:
            return


def _delivery(message: Msg) -> Delivery:
    headers = dict(message.headers or {})
    metadata = message.metadata
    return Delivery(
        id=headers.get(JOB_ID) or str(metadata.sequence.stream),
        subject=message.subject,
        body=message.data,
        headers=headers,
        sequence=metadata.sequence.stream,
        attempt=metadata.num_delivered,
    )
