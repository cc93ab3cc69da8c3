"""The jobs that a worker has pulled and not settled, from all of its consumers.

Its handlers run in slots, as many as its concurrency. A job whose handler is done has no slot any more while its
completion and its acknowledgement are confirmed in the background; no more jobs are pulled while twice as many as there
are slots aren't settled.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol

from airflow_provider_jetstream.worker.acknowledgement import nak
from airflow_provider_jetstream.worker.sweep import Sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.worker.bounded_run import BoundedRun
    from airflow_provider_jetstream.worker.delivery_outcome import DeliveryOutcome
    from airflow_provider_jetstream.worker.job_run import JobRun
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage
    from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy

log = logging.getLogger("jetstream.worker")

_SETTLE_TIMEOUT: Final = 5.0
_UNSETTLED_PER_SLOT: Final = 2


class JobStarter(Protocol):
    """Starts the jobs of one consumer."""

    @property
    def redelivery(self) -> RedeliveryPolicy:
        """When the server delivers a job again."""

    def start(self, message: PulledMessage) -> None:
        """Start a job."""

    def start_batch(self, messages: Sequence[PulledMessage]) -> None:
        """Start jobs in one call of a batch handler."""


class InFlightJobs:
    """Starts up to ``concurrency`` handlers at a time, and none once ``stopping`` is set.

    :param batch: how many jobs a handler takes at most; ``None`` where it takes one, and no list of jobs

    :param bounds: when the run ends by itself; ``None`` where it doesn't

    :ivar denial: that the worker may not settle its jobs, so that each would only use up its deliveries
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
        self._arrived: list[tuple[JobStarter, PulledMessage]] = []
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

    def deliver(self, starter: JobStarter, messages: Sequence[PulledMessage]) -> None:
        """Start jobs in the next turn of the event loop."""
        if self.bounds is not None:
            for _ in messages:
                self.bounds.note_arrival()
        self._arrived += [(starter, message) for message in messages]
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
        for starter, messages in self._in_calls(arrived):
            try:
                self._start(starter, messages)
            except Exception:
                log.exception("jobs of %s can't be started", messages[0].stream)
        self._has_turn = False
        self.on_turn()

    def _in_calls(
        self, arrived: Sequence[tuple[JobStarter, PulledMessage]]
    ) -> Iterator[tuple[JobStarter, Sequence[PulledMessage]]]:
        """Divide the jobs among calls of the handler."""
        if self._batch is None:
            for starter, message in arrived:
                yield starter, (message,)
            return
        for starter, jobs in groupby(arrived, key=itemgetter(0)):
            for messages in _batched((message for _, message in jobs), self._batch):
                yield starter, messages

    def _start(self, starter: JobStarter, messages: Sequence[PulledMessage]) -> None:
        # A pull request that was delayed with the connection may deliver more jobs than the worker can start by then.
        left = None if self.bounds is None else self.bounds.left
        if self._stopping.is_set() or self._used >= self._concurrency or (left is not None and left < len(messages)):
            # A nak of the last delivery would make a dead letter of a job that was never started.
            is_last = starter.redelivery.is_last
            self._not_started += (message for message in messages if not is_last(message.attempt))
            messages = [message for message in messages if is_last(message.attempt)]
            self.changed.set()
        if self._batch is None:
            for message in messages:
                starter.start(message)
        elif messages:
            starter.start_batch(messages)


def _batched(messages: Iterable[PulledMessage], size: int) -> Iterator[list[PulledMessage]]:
    rest = iter(messages)
    while batch := list(islice(rest, size)):
        yield batch


def _nothing() -> None:
    pass


def _no() -> bool:
    return False
