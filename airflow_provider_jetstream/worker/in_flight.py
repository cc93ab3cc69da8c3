"""The jobs that a worker has pulled and not settled, from all of its consumers.

Its handlers run in slots, as many as its concurrency. A job whose handler is done has no slot any more while its
completion and its acknowledgement are confirmed in the background; no more jobs are pulled while twice as many as there
are slots aren't settled. One timer serves all jobs: their in-progress signals, deadlines and unconfirmed requests.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import groupby, islice
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol

from airflow_provider_jetstream.worker.acknowledgement import nak

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.worker.acknowledgement import RedeliveryPolicy
    from airflow_provider_jetstream.worker.bounded_run import BoundedRun
    from airflow_provider_jetstream.worker.delivery import Delivery, PulledMessage
    from airflow_provider_jetstream.worker.logs import DeliveryOutcome
    from airflow_provider_jetstream.worker.runners import HandlerRun


log = logging.getLogger("jetstream.worker")

# The least number of seconds between two sweeps: each checks every job.
_SHORTEST_PAUSE: Final = 0.02
_SIGNALS_PER_ACK_WAIT: Final = 3
# Seconds between two messages about the progress of one job.
_PROGRESS_PAUSE: Final = 1.0
_SETTLE_TIMEOUT: Final = 5.0
_UNSETTLED_PER_SLOT: Final = 2


class Sweep:
    """Runs whatever is due for all runs, by one timer: a timer for each job would cost more than most jobs do."""

    def __init__(self, runs: Collection[JobRun]) -> None:
        self._runs = runs
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at = inf

    def expect(self, due: float) -> None:
        """Note that something is due at a time."""
        if due < self._at:
            self._schedule(due)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()

    def _schedule(self, at: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._at = at
        self._timer = None if at == inf else self._loop.call_at(at, self._handle_due)

    def _handle_due(self) -> None:
        now, self._at, self._timer = self._loop.time(), inf, None
        # Copied: a run may end here and leave the collection.
        for run in [run for run in self._runs if run.due <= now]:
            run.on_due(now)
        self._schedule(max(min((run.due for run in self._runs), default=inf), now + _SHORTEST_PAUSE))


class JobStarter(Protocol):
    """Executes the jobs of one consumer."""

    @property
    def redelivery(self) -> RedeliveryPolicy:
        """When the server delivers a job again."""

    def start(self, message: PulledMessage, requested_at: float) -> None:
        """Start a job."""

    def start_batch(self, jobs: Sequence[tuple[PulledMessage, float]]) -> None:
        """Start jobs, each with the time of its request, in one call of a batch handler."""

    def on_due(self, run: JobRun, now: float) -> None:
        """Do what is due for a run."""

    def supervise(self, run: JobRun) -> None:
        """Look whether a run's handler has to be ended."""

    def expect(self, run: JobRun) -> None:
        """Note that something of a run is due sooner than before."""


class JobRun:
    """A job from its arrival until it is settled; all times are the event loop's.

    :ivar requested_at: a time before its delivery: when the request for it was sent
    :ivar holds_slot: whether it occupies a slot
    :ivar seconds: its time limit; ``None`` for none
    :ivar attempt: its handler, where that was started without a task that watches over it
    :ivar call: supervises the call of a batch handler while its job is part of one
    :ivar task: the task that ends the run, where more than the server's next answer is awaited
    :ivar payload: its encoded completion; empty until that is sent, where it has no result
    :ivar progress: the last progress of its handler, where the queue stores attempts
    :ivar is_stored: whether its completion is stored
    :ivar reconnects: how often the connection was lost before the delivery
    :ivar request: the number of its unconfirmed request
    :ivar due: the earliest of the times below
    :ivar signal_at: when the server is told next that the job is in progress
    :ivar deadline_at: when its handler has to be done
    :ivar progress_at: when its progress is sent
    :ivar answer_at: when its unconfirmed request is sent again
    """

    __slots__ = (
        "_owner",
        "answer_at",
        "attempt",
        "began",
        "call",
        "deadline_at",
        "due",
        "holds_slot",
        "interval",
        "is_stored",
        "job",
        "message",
        "payload",
        "progress",
        "progress_at",
        "reconnects",
        "request",
        "requested_at",
        "seconds",
        "signal_at",
        "task",
    )

    def __init__(
        self,
        owner: JobStarter,
        message: PulledMessage,
        job: Delivery,
        ack_wait: float,
        seconds: float | None,
        now: float,
    ) -> None:
        self._owner = owner
        self.message = message
        self.job = job
        self.began = self.requested_at = now
        self.interval = ack_wait / _SIGNALS_PER_ACK_WAIT
        self.seconds = seconds
        self.holds_slot = False
        self.attempt: HandlerRun | None = None
        self.call: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.payload = b""
        self.is_stored = False
        self.reconnects = 0
        self.request = 0
        self.signal_at = now + self.interval
        self.progress: JobProgress | None = None
        self.deadline_at = self.answer_at = self.progress_at = inf
        self.due = self.signal_at

    def stop_signals(self) -> None:
        """Send no more signals; called before a nak, since a signal after it would delay the next delivery."""
        self.signal_at = inf

    def expect_progress(self, at: float) -> None:
        """Have its progress sent at a time, unless its handler is done by then."""
        if self.progress is not None:
            self.progress_at = at
            self.due = min(self.due, at)
            self._owner.expect(self)

    def end_progress(self) -> tuple[float, str] | None:
        """Send no more progress, whatever a thread of the handler still reports; return the last report."""
        self.progress_at = inf
        progress, self.progress = self.progress, None
        return progress.latest if progress else None

    def on_due(self, now: float) -> None:
        """Act on all due times, and set the next one."""
        self._owner.on_due(self, now)
        self.due = min(self.signal_at, self.deadline_at, self.answer_at, self.progress_at)

    def supervise(self) -> None:
        """Look whether the handler has to be ended."""
        self._owner.supervise(self)


class JobProgress:
    """The last progress of one running job; its handler reports it from any thread, as often as it likes."""

    __slots__ = ("_is_announced", "_loop", "_run", "_sent_at", "latest")

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._is_announced = False
        self._sent_at = -inf
        self.latest: tuple[float, str] | None = None

    def __call__(self, fraction: float, text: str) -> None:
        """Note progress; one wake-up of the event loop sends all that came before it."""
        self.latest = (fraction, text)
        if not self._is_announced:
            self._is_announced = True
            # The loop is closed when the worker stopped without waiting for this thread.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        self._run.expect_progress(max(self._loop.time(), self._sent_at + _PROGRESS_PAUSE))

    @property
    def is_due(self) -> bool:
        """Whether there is unsent progress that may be sent now."""
        return self._is_announced and self._loop.time() >= self._sent_at + _PROGRESS_PAUSE

    def take(self) -> tuple[float, str] | None:
        """Return the progress that is to be sent now."""
        # Reset before reading: progress that is noted from here on wakes the loop again.
        self._is_announced = False
        self._sent_at = self._loop.time()
        return self.latest


class InFlightJobs:
    """Starts up to ``concurrency`` handlers at a time, and none once ``stopping`` is set.

    :param batch: how many jobs a handler takes at most; ``None`` where it takes one, and no list of jobs

    :param bounds: when the run ends by itself; ``None`` where it doesn't

    :ivar denial: the error that says that the worker may not settle its jobs: each would only use up its deliveries
    :ivar is_stuck: tells whether so many handlers hang that no more jobs may be started
    :ivar on_turn: is called once in a turn of the event loop in which jobs have arrived or ended
    :ivar changed: is set whenever a job has ended or freed its slot
    """

    def __init__(
        self,
        worker: str,
        concurrency: int,
        stopping: asyncio.Event,
        batch: int | None = None,
        bounds: BoundedRun | None = None,
    ) -> None:
        self._worker = worker
        self._concurrency = concurrency
        self._stopping = stopping
        self._batch = batch
        self._jobs_per_slot = batch or 1
        self.bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._runs: dict[JobRun, None] = {}
        self._used = 0
        self._arrived: list[tuple[JobStarter, PulledMessage, float]] = []
        self._has_turn = False
        self._not_started: list[PulledMessage] = []
        self.sweep = Sweep(self._runs.keys())
        self.changed = asyncio.Event()
        self.denial: PermissionDeniedError | None = None
        self.is_stuck: Callable[[], bool] = _no
        self.on_turn: Callable[[], None] = _nothing

    @property
    def free(self) -> int:
        """How many more jobs can be started, and settled."""
        if self._stopping.is_set() or self.is_stuck():
            return 0
        arrived = len(self._arrived)
        unsettled = self._concurrency * self._jobs_per_slot * _UNSETTLED_PER_SLOT - len(self._runs)
        free = min((self._concurrency - self._used) * self._jobs_per_slot, unsettled)
        if self.bounds is not None and self.bounds.left is not None:
            free = min(free, self.bounds.left)
        return max(0, free - arrived)

    @property
    def is_busy(self) -> bool:
        """Whether a handler is running."""
        return self._used > 0

    @property
    def has_not_started(self) -> bool:
        """Whether jobs have arrived that couldn't be started."""
        return bool(self._not_started)

    def count(self, stream: str, consumer: str) -> int:
        """Count a consumer's jobs that aren't settled; may be called from any thread."""
        messages = [run.message for run in list(self._runs)]
        return sum(message.stream == stream and message.consumer == consumer for message in messages)

    def deliver(self, starter: JobStarter, messages: Sequence[PulledMessage], requested_at: float) -> None:
        """Start jobs in the next turn of the event loop.

        :param requested_at: a time of the event loop before their deliveries: when the request for them was sent
        """
        if self.bounds is not None:
            for _ in messages:
                self.bounds.note_arrival()
        self._arrived += [(starter, message, requested_at) for message in messages]
        if not self._has_turn:
            self._take_turn()

    def add(self, run: JobRun) -> None:
        """Note that a job has begun."""
        if self.bounds is not None:
            self.bounds.note_begin()
        self._runs[run] = None
        self.sweep.expect(run.due)

    def take_slot(self, run: JobRun) -> None:
        """Note that a job's handler starts."""
        run.holds_slot = True
        self._used += 1

    def use_slot(self) -> None:
        """Note that a handler of several jobs starts."""
        self._used += 1

    def free_slot(self) -> None:
        """Note that a handler of several jobs is done."""
        self._used -= 1
        self._note_change()

    def release(self, run: JobRun) -> None:
        """Note that a job's handler is done."""
        if run.holds_slot:
            run.holds_slot = False
            self.free_slot()

    def end(self, runs: Iterable[JobRun], outcome: DeliveryOutcome) -> None:
        """Note that jobs are settled."""
        for run in runs:
            if self.bounds is not None:
                self.bounds.note_end(run.job, outcome)
            if run.holds_slot:
                self.release(run)
            self._runs.pop(run, None)
        self._note_change()

    def supervise(self, cancellation: Cancellation) -> None:
        """Look whether the running jobs that a cancellation is about have to be ended."""
        for run in list(self._runs):
            if cancellation.key in (run.job.id, run.job.sequence):
                run.supervise()

    async def nak_not_started(self, connection: Connection) -> None:
        """Nak the jobs that weren't started; called while no pull request is open, which would fetch them again."""
        if self._arrived:
            self._turn()
        while self._not_started:
            message = self._not_started.pop()
            await nak(connection, message)
            log.info("%s hands job %d back without starting it", self._worker, message.sequence)

    async def finish(self, grace: float, grace_over: asyncio.Future[None]) -> None:
        """Wait ``grace`` seconds for the jobs in flight, then resolve ``grace_over`` and cancel what is left."""
        if not self._runs:
            return
        log.info("%s finishes %d running jobs", self._worker, len(self._runs))
        if await self._wait_until_empty(grace):
            return
        grace_over.set_result(None)
        for run in list(self._runs):
            run.supervise()
        await self._wait_until_empty(_SETTLE_TIMEOUT)
        unsettled = [run.task for run in self._runs if run.task]
        for task in unsettled:
            task.cancel()
        await asyncio.gather(*unsettled, return_exceptions=True)

    async def _wait_until_empty(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._runs:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def _note_change(self) -> None:
        self.changed.set()
        if not self._has_turn:
            self._take_turn()

    def _take_turn(self) -> None:
        self._has_turn = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        arrived, self._arrived = self._arrived, []
        for starter, jobs in self._in_calls(arrived):
            try:
                self._start(starter, jobs)
            except Exception:
                log.exception("jobs of %s can't be started", jobs[0][0].stream)
        self._has_turn = False
        self.on_turn()

    def _in_calls(
        self, arrived: Sequence[tuple[JobStarter, PulledMessage, float]]
    ) -> Iterator[tuple[JobStarter, Sequence[tuple[PulledMessage, float]]]]:
        """Divide the jobs among calls of the handler."""
        if self._batch is None:
            for starter, message, requested_at in arrived:
                yield starter, ((message, requested_at),)
            return
        for starter, found in groupby(arrived, key=itemgetter(0)):
            for jobs in _batched(((message, requested_at) for _, message, requested_at in found), self._batch):
                yield starter, jobs

    def _start(self, starter: JobStarter, jobs: Sequence[tuple[PulledMessage, float]]) -> None:
        # A pull request that was delayed with the connection may deliver more jobs than the worker can start by then.
        left = None if self.bounds is None else self.bounds.left
        if self._stopping.is_set() or self._used >= self._concurrency or (left is not None and left < len(jobs)):
            # A nak of the last delivery would make a dead letter of a job that was never started.
            is_last = starter.redelivery.is_last
            self._not_started += (message for message, _ in jobs if not is_last(message.attempt))
            jobs = [job for job in jobs if is_last(job[0].attempt)]
            self.changed.set()
        if self._batch is None:
            for message, requested_at in jobs:
                starter.start(message, requested_at)
        elif jobs:
            starter.start_batch(jobs)


def _batched(jobs: Iterable[tuple[PulledMessage, float]], size: int) -> Iterator[list[tuple[PulledMessage, float]]]:
    rest = iter(jobs)
    while batch := list(islice(rest, size)):
        yield batch


def _nothing() -> None:
    pass


def _no() -> bool:
    return False
