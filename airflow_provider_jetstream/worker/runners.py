"""Running a handler under its deadline: as a task, in a thread, or in a process.

A task can be cancelled and a process killed. A thread can't be ended: it is abandoned, and its job is delivered again
while the abandoned handler may still run.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any, Protocol

from airflow_provider_jetstream.worker.errors import HandlerCutOffError, HandlerDeadlineError, WorkerSetupError
from airflow_provider_jetstream.worker.handler import HandlerResult
from airflow_provider_jetstream.worker.thread_pool import HandlerThreads

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.handler import Handler

log = logging.getLogger("jetstream.worker")

# For a task that catches its cancellation to clean up.
_CLEAN_UP_SECONDS = 2.0


class HandlerRun(Protocol):
    """A running handler."""

    result: asyncio.Future[Any]

    async def end(self) -> None:
        """Cancel or kill the handler where that is possible; :attr:`result` is done afterwards if it has ended."""


class Runner(Protocol):
    """Starts handlers.

    :ivar starts_at_once: whether :meth:`launch` can be used
    """

    starts_at_once: bool

    def launch(self, job: Delivery | list[Delivery]) -> HandlerRun:
        """Start the handler for a job."""

    async def start(self, job: Delivery) -> HandlerRun:
        """Start the handler for a job, once the process it needs is ready."""

    def close(self) -> None:
        """Release threads and processes."""


def create_runner(handler: Handler, *, processes: bool) -> Runner:
    """Choose the runner for a handler.

    :raises WorkerSetupError: the handler can't run in a process
    """
    if not processes:
        return _TaskRunner(handler) if handler.is_async else _ThreadRunner(handler)
    if handler.is_async:
        raise WorkerSetupError(
            "expected a plain function for processes, found an async one: run it without processes, or make it plain"
        )
    # Few workers use processes; imported here, the module costs the others no start-up time.
    from airflow_provider_jetstream.worker.process_pool import ProcessRunner

    return ProcessRunner(handler)


class Supervisor:
    """Runs handlers and enforces deadline, cancellation and, once ``grace_over`` is done, the end of the worker."""

    def __init__(self, runner: Runner, grace_over: asyncio.Future[None]) -> None:
        self._runner = runner
        self._grace_over = grace_over
        self.abandoned: set[asyncio.Future[Any]] = set()

    @property
    def starts_at_once(self) -> bool:
        """Whether a handler starts without waiting, by :meth:`start`."""
        return self._runner.starts_at_once

    def start(self, job: Delivery | list[Delivery]) -> HandlerRun:
        """Start the handler for a job; :meth:`supervise` watches over it where that is needed."""
        return self._runner.launch(job)

    async def run(self, job: Delivery, seconds: float | None, cancelled: asyncio.Future[Any]) -> HandlerResult:
        """Run the handler for a job.

        The result holds what the handler returned or raised, or that it was cancelled; a :class:`HandlerDeadlineError`
        where it took longer than ``seconds``; a :class:`HandlerCutOffError` where the worker stops waiting.

        :param seconds: time limit; ``None`` for none
        :param cancelled: succeeds once the job is cancelled; a failure of this future is ignored
        """
        # The time in which a process gets ready doesn't count.
        attempt = await self._runner.start(job)
        began = asyncio.get_running_loop().time()
        return await self.supervise(job, attempt, seconds, cancelled, began=began)

    async def supervise(
        self,
        job: Delivery,
        attempt: HandlerRun,
        seconds: float | None,
        cancelled: asyncio.Future[Any],
        *,
        began: float,
    ) -> HandlerResult:
        """Watch over a handler that was started at a time of the event loop; see :meth:`run`."""
        future = attempt.result
        await self._wait(_left(seconds, began), future, cancelled)
        if not future.done() and not self._grace_over.done() and _has_succeeded(cancelled):
            await attempt.end()
            if future.done():
                result = result_of(future)
                # A handler that finished in spite of the cancellation counts as completed.
                result.cancelled = result.error is not None
                return result
        if not future.done() and cancelled.done():
            # A thread can't be ended, so it gets the rest of its time as if the job weren't cancelled.
            await self._wait(_left(seconds, began), future)
        if future.done():
            return result_of(future)
        await attempt.end()
        if not future.done():
            self._abandon(job, future)
        elif not (result := result_of(future)).error:
            # The handler finished between the deadline and the cancellation.
            return result
        late = HandlerResult()
        if self._grace_over.done():
            late.error = HandlerCutOffError(ended=future.done())
        else:
            late.error = HandlerDeadlineError(f"expected the handler to be done within {seconds:g} s, found it running")
        return late

    async def hold(self, seconds: float, cancelled: asyncio.Future[Any]) -> HandlerResult | None:
        """Wait until a handler may be started; a result says why it won't be: the job is cancelled, the worker ends."""
        await self._wait(seconds, cancelled)
        result = HandlerResult()
        if _has_succeeded(cancelled):
            result.cancelled = True
        elif self._grace_over.done():
            result.error = HandlerCutOffError(ended=True)
        else:
            return None
        return result

    async def _wait(self, seconds: float | None, *futures: asyncio.Future[Any]) -> None:
        await asyncio.wait({self._grace_over, *futures}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _abandon(self, job: Delivery, future: asyncio.Future[Any]) -> None:
        self.abandoned.add(future)
        future.add_done_callback(self._on_late_end)
        log.warning(
            "the handler of job %s goes on in its thread past its time; %d such handlers are running",
            job.shown_id,
            len(self.abandoned),
        )

    def _on_late_end(self, future: asyncio.Future[Any]) -> None:
        self.abandoned.discard(future)
        if not future.cancelled():
            # Nothing else reads the exception, and asyncio logs exceptions that are never read.
            future.exception()


def _has_succeeded(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _left(seconds: float | None, began: float) -> float | None:
    return None if seconds is None else max(0.0, began + seconds - asyncio.get_running_loop().time())


def result_of(future: asyncio.Future[Any]) -> HandlerResult:
    """Return what a handler that is done has returned or raised."""
    try:
        value = future.result()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the job's outcome
        return HandlerResult.of_error(error)
    result = HandlerResult()
    result.value = value
    return result


class _TaskAttempt:
    def __init__(self, handler: Handler, job: Delivery | list[Delivery]) -> None:
        self.result: asyncio.Future[Any] = _start_task(_call(handler, job))

    async def end(self) -> None:
        self.result.cancel()
        await asyncio.wait({self.result}, timeout=_CLEAN_UP_SECONDS)


async def _call(handler: Handler, job: Delivery | list[Delivery]) -> Any:
    # Called inside the task, so that an invalid body becomes the task's error.
    try:
        return await handler(job)
    except SystemExit as error:
        # Out of a task it would end the event loop, with all other jobs.
        raise RuntimeError(f"the handler raised {error!r}") from error


if sys.version_info >= (3, 12):

    def _start_task(call: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        # The handler runs up to where it first waits, at once; many are done by then.
        return asyncio.Task(call, loop=asyncio.get_running_loop(), eager_start=True)

else:

    def _start_task(call: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        return asyncio.create_task(call)


class _TaskRunner:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    starts_at_once = True

    def launch(self, job: Delivery | list[Delivery]) -> HandlerRun:
        return _TaskAttempt(self._handler, job)

    async def start(self, job: Delivery) -> HandlerRun:
        return self.launch(job)

    def close(self) -> None:
        pass


class _ThreadAttempt:
    def __init__(self, result: asyncio.Future[Any]) -> None:
        self.result = result

    async def end(self) -> None:
        pass


class _ThreadRunner:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._threads = HandlerThreads()

    starts_at_once = True

    def launch(self, job: Delivery | list[Delivery]) -> HandlerRun:
        return _ThreadAttempt(self._threads.start(self._handler, job))

    async def start(self, job: Delivery) -> HandlerRun:
        return self.launch(job)

    def close(self) -> None:
        self._threads.close()
