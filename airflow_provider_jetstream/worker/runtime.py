"""The worker: pull no more than there are free slots, run the handler, store the completion, only then acknowledge.

A crash between storing and acknowledging runs the job once more, and its second completion is dropped as a duplicate of
the first. The other order could lose the completion. What can't be done is left to :mod:`.giving_up`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import Completion
from airflow_provider_jetstream.jetstream.connection import Connection, ConnectionSettings, connect
from airflow_provider_jetstream.jetstream.errors import GiveUpError
from airflow_provider_jetstream.jetstream.names import JOB_ADVISORY, MSG_ID, completion_subject
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.jetstream.stored import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.subjects import subject_problem
from airflow_provider_jetstream.worker.delivery import Delivery
from airflow_provider_jetstream.worker.giving_up import LetterKeeper
from airflow_provider_jetstream.worker.pulling import Puller
from airflow_provider_jetstream.worker.settling import ANSWER_SECONDS, insist
from airflow_provider_jetstream.worker.threads import HandlerThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg

log = logging.getLogger("jetstream.worker")

_HEADER_ROOM = 1024


class Worker:
    """Runs a handler for the jobs of one consumer until it is stopped.

    :param queue: the queue's declaration, its dict, or the path of its YAML file
    :param consumer: the name of one of the queue's consumers; it has to exist on the server
    :param handler: takes a :class:`Delivery`; a plain function runs in a thread. What it returns is stored with the
        completion, a :class:`GiveUpError` makes the job a dead letter at once, and any other exception hands it back
        for its next delivery
    :param settings: the connection
    :param concurrency: jobs at a time
    :param name: tells workers apart in logs and completions
    :param grace: seconds for running jobs to finish after :meth:`stop`
    :raises QueueDeclarationError: the declaration can't be used, or has no such consumer
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
        if concurrency < 1:
            raise ValueError(f"expected a concurrency of at least 1, found {concurrency}")
        self.queue = WorkQueue.load(queue)
        self.consumer = self.queue.consumer(consumer)
        self.name = name or f"{socket.gethostname()}-{consumer}"
        self._handler = handler
        self._settings = settings
        self._concurrency = concurrency
        self._grace = grace
        self._threads = HandlerThreads()
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Take no more jobs; :meth:`run` returns when the running ones are done, or the grace time is over."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until :meth:`stop`.

        Jobs that the grace time cuts off are delivered again after the consumer's ack wait.

        :raises NotFoundError: the stream, the consumer or the stream of events doesn't exist
        :raises JetStreamProviderError: the first connection failed
        """
        async with connect(self._settings) as connection:
            info = await consumer_info(connection, self.queue.name, self.consumer.name)
            if self.queue.events:
                await stream_info(connection, self.queue.events.name)
            last_attempt = info["config"].get("max_deliver", -1)
            letters = LetterKeeper(connection, self.queue, self.consumer.name, last_attempt)
            await letters.look()
            log.info("%s takes jobs of %s/%s", self.name, self.queue.name, self.consumer.name)
            take = partial(self._take, connection, letters)
            async with Puller(connection, self.queue.name, self.consumer.name, take) as puller:
                stopped = asyncio.create_task(self._stopping.wait())
                while not stopped.done():
                    if free := max(0, self._concurrency - len(self._running)):
                        await puller.pull(free)
                    else:
                        await asyncio.wait([stopped, *self._running], return_when=asyncio.FIRST_COMPLETED)
            if self._running:
                log.info("%s finishes %d running jobs", self.name, len(self._running))
                _, unfinished = await asyncio.wait(self._running, timeout=self._grace)
                for task in unfinished:
                    task.cancel()
                await asyncio.gather(*unfinished, return_exceptions=True)
            self._threads.close()
            log.info("%s stopped", self.name)

    def _take(self, connection: Connection, letters: LetterKeeper, message: Msg) -> None:
        task = asyncio.create_task(self._work(connection, letters, message))
        self._running.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s could not settle a job, it will be delivered again: %s", self.name, error)

    async def _work(self, connection: Connection, letters: LetterKeeper, message: Msg) -> None:
        job = Delivery.of(message)
        try:
            payload = self._completion(connection, job, await self._handle(job))
        except GiveUpError as error:
            log.warning("%s gives up job %s, attempt %d: %s", self.name, job.id, job.attempt, error)
            if not await letters.give_up(message, error):
                await message.nak(delay=self._retry_delay(job.attempt))
            return
        except Exception as error:
            log.exception("%s failed job %s, attempt %d", self.name, job.id, job.attempt)
            try:
                await letters.failed(message, error)
            finally:
                await message.nak(delay=self._retry_delay(job.attempt))
            return
        await self._store_completion(connection, message, job, payload)
        await insist(partial(message.ack_sync, timeout=ANSWER_SECONDS), f"the acknowledgement of job {job.id}")
        log.info("%s completed job %s, attempt %d", self.name, job.id, job.attempt)

    async def _handle(self, job: Delivery) -> Any:
        if inspect.iscoroutinefunction(self._handler):
            return await self._handler(job)
        return await self._threads.run(self._handler, job)

    def _retry_delay(self, attempt: int) -> float | None:
        # The server applies a consumer's backoff to a job that is handed back only if a delay is given, and then waits
        # for that delay plus this delivery's backoff less the first one: the first makes it exactly the backoff. The
        # last delivery is handed back at once, since its death shall not wait.
        backoff, last = self.consumer.backoff, self.consumer.max_deliver
        if not backoff or attempt == last:
            return None
        return backoff[0] / 1e9

    def _completion(self, connection: Connection, job: Delivery, result: Any) -> bytes:
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
        if len(payload) > (limit := connection.client.max_payload - _HEADER_ROOM):
            raise ValueError(
                f"expected a result whose completion has at most {limit} bytes, found {len(payload)}: return a"
                " reference instead of the data"
            )
        return payload

    async def _store_completion(self, connection: Connection, message: Msg, job: Delivery, payload: bytes) -> None:
        if self.queue.events:
            subject = completion_subject(self.queue.name, self.consumer.name, job.sequence)
            # The time tells this job from one of the same sequence in a recreated stream.
            once = f"done:{self.queue.name}:{job.sequence}:{message.metadata.timestamp.timestamp()}"
            publish = connection.client.jetstream(timeout=ANSWER_SECONDS).publish
            await insist(partial(publish, subject, payload, headers={MSG_ID: once}), f"the completion of job {job.id}")
        if not (advisory := job.headers.get(JOB_ADVISORY)):
            return
        if problem := subject_problem(advisory, wildcards=False):
            log.warning("%s can't report job %s to %r: %s", self.name, job.id, advisory, problem)
            return
        await connection.client.publish(advisory, payload)
