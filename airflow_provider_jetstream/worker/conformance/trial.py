"""One trial of a worker: a queue of its own with some jobs, which the worker works on behind a proxy.

The proxy reads the steps of the worker's contract in what the worker sends, and breaks off at some of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel, cancel_stored
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.streams import get_message, read_range
from airflow_provider_jetstream.jetstream.client.wire import SentFrameReader
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID, completion_subject, copy_subject, end_id
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, WireError
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.worker.errors import WorkerSetupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.wire import SentFrame


# ADR-15: domain and account are missing in some versions, and so is the last token.
_ACKNOWLEDGEMENT: Final = re.compile(
    r"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?([^.]+)\.([^.]+)\.\d+\.(\d{1,18})\.\d+\.\d+\.\d+(?:\..*)?"
)
_STORED: Final = re.compile(r"(completed|dead)\.([^.]+)\.([^.]+)\.(\d{1,18})")
_PAUSE: Final = 0.2
# A command that ends so soon, so often, doesn't work on jobs.
_SOON: Final = 2.0
_SOON_ENDS: Final = 5
_SHOWN: Final = 1_000
_HOST: Final = "127.0.0.1"
_CHUNK: Final = 65_536
# For the server to act on the last frame that it gets.
_SECONDS_TO_ACT: Final = 0.3
_SECONDS_TO_END: Final = 2.0
CONSUMER: Final = "worker"
ACK_WAIT_SECONDS: Final = 2
# The largest message of the events stream: the completion of a job with a longer id is refused.
LARGEST_END: Final = 2_500
_DELIVERIES: Final = 20
_LOOK_EVERY: Final = 0.2
_OTHER_CONSUMER: Final = "other"


class WorkerStep(Enum):
    """What a worker sends about a job; the value names it in the lines of a report."""

    PROGRESS = "in-progress"
    COMPLETION = "completion"
    """Or the end of a cancelled job, which has the same subject."""
    ACKNOWLEDGEMENT = "acknowledgement"
    FAILURE = "failure"
    RECORD = "record"
    TERMINATION = "termination"


class SentStep(NamedTuple):
    """A step, and the stream sequence of the job that it is about."""

    step: WorkerStep
    sequence: int


_STORED_STEPS: Final = {"completed": WorkerStep.COMPLETION, "dead": WorkerStep.RECORD}
_ANSWERS: Final = {
    b"+WPI": WorkerStep.PROGRESS,
    b"-NAK": WorkerStep.FAILURE,
    b"+TERM": WorkerStep.TERMINATION,
    b"+ACK": WorkerStep.ACKNOWLEDGEMENT,
}


def step_of(frame: SentFrame, queue: str, consumer: str) -> SentStep | None:
    """Return the step that a frame takes; ``None`` where it isn't about a job of this consumer."""
    if match := _STORED.fullmatch(frame.subject):
        kind, stream, name, sequence = match.groups()
        step = _STORED_STEPS[kind]
    elif match := _ACKNOWLEDGEMENT.fullmatch(frame.subject):
        stream, name, sequence = match.groups()
        # An empty answer acknowledges too, and so does one that the server doesn't know.
        step = _ANSWERS.get(frame.payload.partition(b" ")[0], WorkerStep.ACKNOWLEDGEMENT)
    else:
        return None
    return SentStep(step, int(sequence)) if (stream, name) == (queue, consumer) else None


@dataclass(slots=True)
class ForeignWorker:
    """A worker in any language, run by its command.

    :param command: program and arguments
    :param environment: what the program gets besides the environment of this process
    :param log_file: takes what all its processes print
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log_file: Path
    _process: asyncio.subprocess.Process | None = None
    _is_killed: bool = False

    def kill(self) -> None:
        """Kill the worker with all processes that it has started, by SIGKILL."""
        if self._process and self._process.returncode is None:
            self._is_killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def run(self) -> None:
        """Keep the command running until this is cancelled.

        :raises WorkerSetupError: it can't be started, or ends by itself again and again
        """
        soon_ends = 0
        try:
            while True:
                self._is_killed = False
                began = time.monotonic()
                status = await self._run_once()
                if not self._is_killed:
                    soon_ends = soon_ends + 1 if time.monotonic() - began < _SOON else 0
                if soon_ends == _SOON_ENDS:
                    raise WorkerSetupError(
                        f"expected a worker that keeps running, found that {shown_value(self.command[0])} ends by"
                        f" itself with status {status}; it printed last: {self._last_output()}"
                    )
                await asyncio.sleep(_PAUSE)
        finally:
            self.kill()

    async def _run_once(self) -> int:
        with self.log_file.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | dict(self.environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise WorkerSetupError(
                    f"expected a program that can be run, found {shown_value(self.command[0])}: {error.strerror}"
                ) from None
        return await self._process.wait()

    def _last_output(self) -> str:
        return one_line(self.log_file.read_bytes()[-_SHOWN:].decode(errors="replace")) or "nothing"


@asynccontextmanager
async def running(worker: ForeignWorker) -> AsyncIterator[asyncio.Task[None]]:
    """Keep a worker running until the block ends; the task fails where the worker can't be kept running."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, WorkerSetupError):
            await task


@dataclass(frozen=True, slots=True)
class Fault:
    """A place at which the connection breaks, once.

    :param after: whether the server still gets what the worker sends there, and only its answer is lost
    """

    at: SentStep
    after: bool


@dataclass(slots=True)
class StepProxy:
    """Forwards bytes between workers of one consumer and the server.

    :param server: host and port of the server
    :param faults: the places at which connections break, each once
    :param broken_off: called at each of them, before the connection is closed
    :ivar seen: the steps in their order
    """

    server: tuple[str, int]
    queue: str
    consumer: str
    faults: set[Fault] = field(default_factory=set)
    broken_off: Callable[[], object] = lambda: None
    seen: list[SentStep] = field(default_factory=list)
    port: int = 0
    _open: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The address for the worker."""
        return f"nats://{_HOST}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes of one connection."""
        if task := asyncio.current_task():
            self._open[task] = writer
            task.add_done_callback(self._open.pop)
        with suppress(OSError, WireError):
            link = _Link(self, reader, writer, *await asyncio.open_connection(*self.server))
            await link.run()
        writer.transport.abort()

    async def close(self) -> None:
        """Close all connections."""
        for writer in self._open.values():
            writer.transport.abort()
        # They end by themselves: asyncio complains of a connection whose task is cancelled.
        if self._open:
            await asyncio.wait(tuple(self._open), timeout=_SECONDS_TO_END)

    def fault_at(self, sent: SentStep) -> Fault | None:
        """Note a step, and return the fault that it meets; the fault doesn't occur again."""
        self.seen.append(sent)
        fault = next((fault for fault in self.faults if fault.at == sent), None)
        if fault:
            self.faults.remove(fault)
        return fault


@dataclass(slots=True)
class _Link:
    proxy: StepProxy
    from_worker: asyncio.StreamReader
    to_worker: asyncio.StreamWriter
    from_server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    is_answered: bool = True

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._to_server()), asyncio.create_task(self._to_worker())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.to_server.transport.abort()

    async def _to_server(self) -> None:
        frames = SentFrameReader()
        while chunk := await self.from_worker.read(_CHUNK):
            for frame in frames.feed(chunk):
                sent = step_of(frame, self.proxy.queue, self.proxy.consumer) if frame.subject else None
                fault = self.proxy.fault_at(sent) if sent else None
                if fault:
                    await self._break_off(frame.data if fault.after else b"")
                    return
                self.to_server.write(frame.data)
            await self.to_server.drain()

    async def _break_off(self, last: bytes) -> None:
        self.is_answered = False
        self.to_server.write(last)
        await self.to_server.drain()
        await asyncio.sleep(_SECONDS_TO_ACT)
        self.proxy.broken_off()

    async def _to_worker(self) -> None:
        while chunk := await self.from_server.read(_CHUNK):
            if self.is_answered:
                self.to_worker.write(chunk)
                await self.to_worker.drain()


@asynccontextmanager
async def step_proxy(proxy: StepProxy) -> AsyncIterator[StepProxy]:
    """Open a proxy on a free port until the block ends."""
    server = await asyncio.start_server(proxy.serve, _HOST, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


class WhenCancelled(Enum):
    """When a job is cancelled: by its id, except ``BY_SEQUENCE``."""

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
    """The results of a trial.

    :param queue: the name of its work queue
    :ivar jobs: by name, what was stored
    :ivar ends: by name, what is stored on the subject of the job's completion
    :ivar records: by name, what is stored on the subject of the job's record
    :ivar attempts: what is stored of attempts
    :ivar left: the jobs that are still in the queue
    """

    queue: str
    proxy: StepProxy
    jobs: dict[str, StoredMessage] = field(default_factory=dict)
    ends: dict[str, list[StoredMessage]] = field(default_factory=dict)
    records: dict[str, list[StoredMessage]] = field(default_factory=dict)
    attempts: list[StoredMessage] = field(default_factory=list)
    left: set[str] = field(default_factory=set)

    def steps(self, job: str) -> list[WorkerStep]:
        """Return the steps that the worker has sent about a job, in order."""
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
        self.attempts = [message async for message in read_range(connection, f"{self.queue}-attempts")]
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
    """Let the worker work on jobs, and return the result.

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
        "attempts": True,
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
