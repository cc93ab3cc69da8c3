"""Running a handler under its deadline, in the way of its kind: as a task, in a thread, or in a process.

A task can be cancelled and a process killed. A thread can't be ended by anyone: it is left behind, and its job goes on
to its next delivery while the old one may still run.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

from airflow_provider_jetstream.worker.errors import HandlerCutOffError, HandlerDeadlineError, WorkerSetupError
from airflow_provider_jetstream.worker.result import Outcome
from airflow_provider_jetstream.worker.thread_pool import HandlerThreads

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.handler import Handler

log = logging.getLogger("jetstream.worker")

# For a task that catches its cancellation to clean up.
_CLEAN_UP_SECONDS = 2.0


class Attempt(Protocol):
    """A handler at work on one job."""

    result: asyncio.Future[Any]

    async def end(self) -> None:
        """Have it end, as far as that is possible; :attr:`result` is done then if it has."""


class Runner(Protocol):
    """Starts handlers."""

    async def start(self, job: Delivery) -> Attempt:
        """Start the handler for a job, once whatever it needs for that is there.

        :param job: the job
        :return: the handler at work
        """

    def close(self) -> None:
        """Let go of threads and processes."""


def runner_of(call: Handler, *, processes: bool) -> Runner:
    """Choose how a handler is run.

    :param call: the handler
    :param processes: whether it has asked for processes
    :return: the runner
    :raises WorkerSetupError: it can't run in a process
    """
    if not processes:
        return _Tasks(call) if call.is_async else _Threads(call)
    if call.is_async:
        raise WorkerSetupError(
            "expected a plain function for processes, found an async one: run it without processes, or make it plain"
        )
    # Few ask for them, and all would wait for what they import.
    from airflow_provider_jetstream.worker.process_pool import ProcessRunner

    return ProcessRunner(call)


class Supervisor:
    """Waits for handlers no longer than they may take.

    :param runner: starts them
    :param cut_off: done once nothing is waited for any longer
    """

    def __init__(self, runner: Runner, cut_off: asyncio.Future[None]) -> None:
        self._runner = runner
        self._cut_off = cut_off
        self.abandoned: set[asyncio.Future[Any]] = set()

    async def run(self, job: Delivery, seconds: float | None, cancelled: asyncio.Future[Any]) -> Outcome:
        """Do a job.

        :param job: the job
        :param seconds: the time it may take; ``None`` for any
        :param cancelled: done once the job is cancelled; one that fails tells nothing
        :return: what the handler returned or raised; that it was cancelled; a :class:`HandlerDeadlineError` where it
            took longer, a :class:`HandlerCutOffError` where the worker can't wait any longer
        """
        started = asyncio.get_running_loop().time()
        attempt = await self._runner.start(job)
        result = attempt.result
        await self._wait(seconds, result, cancelled)
        if not result.done() and not self._cut_off.done() and _happened(cancelled):
            await attempt.end()
            if result.done():
                outcome = _outcome(result)
                # One that was done just then is done.
                outcome.cancelled = outcome.error is not None
                return outcome
        if not result.done() and cancelled.done():
            # Nobody can end a thread, so it is waited for as if it weren't cancelled.
            left = None if seconds is None else max(0.0, started + seconds - asyncio.get_running_loop().time())
            await self._wait(left, result)
        if result.done():
            return _outcome(result)
        await attempt.end()
        if not result.done():
            self._abandon(job, result)
        elif not (outcome := _outcome(result)).error:
            # It was done just then.
            return outcome
        late = Outcome()
        if self._cut_off.done():
            late.error = HandlerCutOffError(ended=result.done())
        else:
            late.error = HandlerDeadlineError(f"expected the handler to be done within {seconds:g} s, found it running")
        return late

    async def _wait(self, seconds: float | None, *others: asyncio.Future[Any]) -> None:
        await asyncio.wait({self._cut_off, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _abandon(self, job: Delivery, result: asyncio.Future[Any]) -> None:
        self.abandoned.add(result)
        result.add_done_callback(self._came_back)
        log.warning("the handler of job %s goes on in its thread; there are %d such", job.id, len(self.abandoned))

    def _came_back(self, result: asyncio.Future[Any]) -> None:
        self.abandoned.discard(result)
        if not result.cancelled():
            # Nobody else asks for it, and asyncio complains about that.
            result.exception()


def _happened(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _outcome(result: asyncio.Future[Any]) -> Outcome:
    with Outcome() as outcome:
        outcome.value = result.result()
    return outcome


class _Task:
    def __init__(self, call: Handler, job: Delivery) -> None:
        self.result: asyncio.Future[Any] = asyncio.ensure_future(_called(call, job))

    async def end(self) -> None:
        self.result.cancel()
        await asyncio.wait({self.result}, timeout=_CLEAN_UP_SECONDS)


async def _called(call: Handler, job: Delivery) -> Any:
    # Inside the task, so that what the body lacks is the task's error.
    return await call(job)


class _Tasks:
    def __init__(self, call: Handler) -> None:
        self._call = call

    async def start(self, job: Delivery) -> Attempt:
        return _Task(self._call, job)

    def close(self) -> None:
        pass


class _Thread:
    def __init__(self, result: asyncio.Future[Any]) -> None:
        self.result = result

    async def end(self) -> None:
        pass


class _Threads:
    def __init__(self, call: Handler) -> None:
        self._call = call
        self._threads = HandlerThreads()

    async def start(self, job: Delivery) -> Attempt:
        return _Thread(self._threads.start(self._call, job))

    def close(self) -> None:
        self._threads.close()
