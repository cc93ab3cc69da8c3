"""One trial of a worker: a queue of its own with some jobs, which the worker works on behind a proxy."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel, cancel_stored
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, read_range
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID, completion_subject, copy_subject, end_id
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.worker.conformance.foreign_worker import ForeignWorker, running
from airflow_provider_jetstream.worker.conformance.step_proxy import Fault, StepProxy, step_proxy
from airflow_provider_jetstream.worker.conformance.steps import SentStep, WorkerStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

CONSUMER: Final = "worker"
ACK_WAIT_SECONDS: Final = 2
# What the events stream takes; the completion of a job with a longer id is refused.
LARGEST_END: Final = 2_500
_DELIVERIES: Final = 20
_LOOK_EVERY: Final = 0.2
_OTHER_CONSUMER: Final = "other"


class WhenCancelled(Enum):
    """When a job is cancelled: by its id, but for the last."""

    NEVER = "never"
    BEFORE = "before it is published"
    AFTER = "after it is published"
    BY_SEQUENCE = "after it is published, by its sequence"


@dataclass(frozen=True, slots=True)
class TrialJob:
    """A job of a trial.

    :param name: tells it from the trial's others
    :param job_id: its header ``Job-Id``
    :param failures: after how many failures nothing more is expected of it; 0 where it has to leave the queue
    :param is_id_taken: whether another message is stored under the id of its end, before the worker starts
    :param is_end_refused: whether the events stream refuses its completion, so that it has to stay in the queue
    """

    name: str
    body: str
    job_id: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    cancelled: WhenCancelled = WhenCancelled.NEVER
    failures: int = 0
    is_id_taken: bool = False
    is_end_refused: bool = False


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Where a trial breaks the worker's connection.

    :param job: the job's name
    :param after: whether the server still gets the step
    """

    job: str
    step: WorkerStep
    after: bool


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What all trials of a worker have in common.

    :param server: host and port of the server
    :param command: the worker's
    :param folder: for what the workers print, and for queue files
    :param limit: seconds for one trial
    """

    server: tuple[str, int]
    command: Sequence[str]
    folder: Path
    limit: float


@dataclass(slots=True)
class Trial:
    """What a worker has made of the jobs of a trial.

    :param queue: the name of its work queue
    :ivar jobs: by name, what was stored
    :ivar ends: by name, what is stored on the subject of the job's completion
    :ivar records: by name, what is stored on the subject of the job's record
    :ivar left: the jobs that are still in the queue
    """

    queue: str
    proxy: StepProxy
    jobs: dict[str, StoredMessage] = field(default_factory=dict)
    ends: dict[str, list[StoredMessage]] = field(default_factory=dict)
    records: dict[str, list[StoredMessage]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def steps(self, job: str) -> list[WorkerStep]:
        """Return what the worker has sent about a job, in its order."""
        sequence = self.jobs[job].sequence
        return [sent.step for sent in self.proxy.seen if sent.sequence == sequence]

    async def is_settled(self, connection: Connection, job: TrialJob) -> bool:
        """Return whether nothing more is expected of a job."""
        steps = self.steps(job.name)
        if job.failures and steps.count(WorkerStep.FAILURE) >= job.failures:
            return True
        if job.is_end_refused and WorkerStep.COMPLETION in steps:
            return True
        return await get_message(connection, self.queue, self.jobs[job.name].sequence) is None

    async def gather(self, connection: Connection) -> None:
        """Read what is stored about each job."""
        ends = [message async for message in read_range(connection, f"{self.queue}-events")]
        records = [message async for message in read_range(connection, f"{self.queue}-dead")]
        for name, job in self.jobs.items():
            end = completion_subject(self.queue, CONSUMER, job.sequence)
            record = copy_subject(self.queue, CONSUMER, job.sequence)
            self.ends[name] = [message for message in ends if message.subject == end]
            self.records[name] = [message for message in records if message.subject == record]
            if await get_message(connection, self.queue, job.sequence):
                self.left.add(name)


async def run_trial(
    connection: Connection,
    settings: TrialSettings,
    name: str,
    jobs: Sequence[TrialJob],
    *,
    break_offs: Sequence[BreakOff] = (),
    kills: bool = False,
) -> Trial:
    """Let the worker work on jobs, and return what it has made of them.

    :param name: of the queue, and what the names of its other streams begin with
    :param kills: whether the worker is killed where its connection breaks
    :raises WorkerSetupError: the worker can't be kept running
    """
    proxy = StepProxy(settings.server, name, CONSUMER)
    trial = Trial(name, proxy)
    async with _queue(connection, name, settings.folder) as (queue, file), step_proxy(proxy):
        for job in jobs:
            trial.jobs[job.name] = await _publish(connection, queue, job)
        for place in break_offs:
            proxy.faults.add(Fault(SentStep(place.step, trial.jobs[place.job].sequence), place.after))
        environment = {"NATS_URL": proxy.url, "JOB_STREAM": name, "JOB_CONSUMER": CONSUMER, "JOB_QUEUE": str(file)}
        worker = ForeignWorker(settings.command, environment, settings.folder / f"{name}.log")
        if kills:
            proxy.broken_off = worker.kill
        async with running(worker) as task:
            await _wait_until_settled(connection, settings, trial, jobs, task)
            # A worker that doesn't wait for the end to be stored has acknowledged its job by then.
            if any(job.is_end_refused for job in jobs):
                await asyncio.sleep(ACK_WAIT_SECONDS)
            await trial.gather(connection)
    return trial


async def _wait_until_settled(
    connection: Connection, settings: TrialSettings, trial: Trial, jobs: Sequence[TrialJob], task: asyncio.Task[None]
) -> None:
    deadline = time.monotonic() + settings.limit
    unsettled = list(jobs)
    while (unsettled or trial.proxy.faults) and time.monotonic() < deadline:
        await asyncio.wait([task], timeout=_LOOK_EVERY)
        if task.done():
            task.result()
        unsettled = [job for job in unsettled if not await trial.is_settled(connection, job)]


async def _publish(connection: Connection, queue: WorkQueue, job: TrialJob) -> StoredMessage:
    headers = dict(job.headers) | ({JOB_ID: job.job_id} if job.job_id else {})
    if job.cancelled is WhenCancelled.BEFORE:
        await cancel(connection, queue, job.job_id, by="conform")
    ack = await store(connection, f"{queue.name}.jobs", job.body.encode(), headers)
    if job.cancelled is WhenCancelled.AFTER:
        await cancel(connection, queue, job.job_id, by="conform")
    if job.cancelled is WhenCancelled.BY_SEQUENCE:
        await cancel_stored(connection, queue.name, f"{queue.name}-events", [ack.sequence], by="conform")
    stored = await get_message(connection, queue.name, ack.sequence)
    if stored is None:
        raise NotFoundError(f"expected the job that was just stored in {queue.name}, found none")
    if job.is_id_taken:
        taken = {MSG_ID: end_id(queue.name, stored.sequence, nanoseconds_of(stored.time))}
        await store(connection, completion_subject(queue.name, _OTHER_CONSUMER, stored.sequence), b"{}", taken)
    return stored


def nanoseconds_of(time: str) -> int:
    """Return a time of the server's text in nanoseconds since 1970."""
    seconds, _, decimals = time.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(f"{seconds}+00:00").timestamp()) * NANOSECONDS + int(decimals.ljust(9, "0"))


@asynccontextmanager
async def _queue(connection: Connection, name: str, folder: Path) -> AsyncIterator[tuple[WorkQueue, Path]]:
    """Create a queue, and remove it and its streams at the end of the block; its file is for workers that read one."""
    declaration: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.jobs"],
        "consumers": [
            {"name": CONSUMER, "ack_wait": f"{ACK_WAIT_SECONDS}s", "max_deliver": _DELIVERIES, "sample_freq": "0"}
        ],
        "dead_letters": f"{name}-dead",
        "events": {"name": f"{name}-events", "max_msg_size": LARGEST_END},
    }
    queue = WorkQueue(**declaration)
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(declaration), encoding="utf-8")
    try:
        await provision(connection, queue)
        yield queue, file
    finally:
        for stream in (name, *queue.companion_names()):
            with suppress(ApiError):
                await connection.api(f"STREAM.DELETE.{stream}")
