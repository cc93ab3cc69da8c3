"""Storing that a job was done, before it is acknowledged.

A crash between storing and acknowledging runs the job once more, and its second completion is dropped as a duplicate of
the first. The other order could lose the completion.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.cancellation.cancel import cancelled_message
from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.contract import MSG_ID, TRACE_PARENT, TRACE_STATE, completion_subject, end_id
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT, send_until_confirmed

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.worker.delivery import Delivery

log = logging.getLogger("jetstream.worker")

_HEADER_ROOM = 1024
_TRACE = (TRACE_PARENT, TRACE_STATE)


class CompletionWriter:
    """Tells the ends of jobs that went well.

    :param connection: the server
    :param queue: the work queue
    :param consumer: the consumer's name
    :param worker: the worker's name
    """

    def __init__(self, connection: Connection, queue: WorkQueue, consumer: str, worker: str) -> None:
        self._connection = connection
        self._queue = queue
        self._consumer = consumer
        self._worker = worker

    def payload(self, job: Delivery, result: Any) -> bytes:
        """Write a completion.

        :param job: the job
        :param result: what the handler returned
        :return: the message's body
        :raises ValueError: the result isn't JSON, or too large
        """
        from airflow_provider_jetstream.jetstream.advisories import Completion

        completion = Completion(
            id=job.id,
            timestamp=datetime.now(UTC),
            stream=self._queue.name,
            consumer=self._consumer,
            stream_seq=job.sequence,
            deliveries=job.attempt,
            job_id=job.id,
            worker=self._worker,
            result=result,
        )
        payload = completion.model_dump_json(exclude_none=True).encode()
        if len(payload) > (limit := self._connection.client.max_payload - _HEADER_ROOM):
            raise ValueError(
                f"expected a result whose completion has at most {limit} bytes, found {len(payload)}: return a"
                " reference instead of the data"
            )
        return payload

    async def store_cancellation(self, message: Msg, job: Delivery, cancellation: Cancellation) -> None:
        """Store that a job was cancelled, where its completion would go.

        :param message: the job as it was pulled
        :param job: the job
        :param cancellation: its cancellation
        """
        end = cancelled_message(
            cancellation,
            queue=self._queue.name,
            consumer=self._consumer,
            sequence=job.sequence,
            stored_at=message.metadata.timestamp,
            deliveries=job.attempt,
            worker=self._worker,
        )
        publish = self._connection.client.jetstream(timeout=ANSWER_TIMEOUT).publish
        stored = partial(publish, end.subject, end.body, headers=end.headers)
        await send_until_confirmed(stored, f"the cancellation of job {job.id}")

    async def store(self, message: Msg, job: Delivery, payload: bytes) -> None:
        """Store a completion, and report it to the job's own subject where it names one.

        :param message: the job as it was pulled
        :param job: the job
        :param payload: what :meth:`payload` gave
        """
        trace = {name: job.headers[name] for name in _TRACE if name in job.headers}
        if self._queue.events:
            subject = completion_subject(self._queue.name, self._consumer, job.sequence)
            # The time tells this job from one of the same sequence in a recreated stream.
            once = end_id(self._queue.name, job.sequence, message.metadata.timestamp)
            publish = self._connection.client.jetstream(timeout=ANSWER_TIMEOUT).publish
            headers = {MSG_ID: once, **trace}
            await send_until_confirmed(
                partial(publish, subject, payload, headers=headers), f"the completion of job {job.id}"
            )
        if not (advisory := job.advisory):
            return
        if problem := subject_problem(advisory, wildcards=False):
            log.warning("%s can't report job %s to %r: %s", self._worker, job.id, advisory, problem)
            return
        await self._connection.client.publish(advisory, payload, headers=trace or None)
