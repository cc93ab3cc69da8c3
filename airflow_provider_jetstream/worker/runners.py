"""Running a handler under its deadline: as a task, in a thread, or in a process.

A task can be cancelled and a process killed. A thread can't be ended: it is abandoned, and its job is delivered again
while the abandoned handler may still run.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from airflow_provider_jetstream.worker.errors import (
    HandlerCutOffError,
    HandlerDeadlineError,
    HandlerDiedError,
    WorkerSetupError,
)
from airflow_provider_jetstream.worker.handler import HandlerResult, attach_failure, failure_of
from airflow_provider_jetstream.worker.logs import configure_logging, configured_format

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from multiprocessing.connection import Connection as Pipe

    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.handler import Handler


log = logging.getLogger("jetstream.worker")

# For a task that catches its cancellation to clean up.
_CLEAN_UP_SECONDS = 2.0
_EXIT_TIMEOUT = 5.0
_KILL_TIMEOUT = 2.0

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class HandlerRun:
    """A running handler."""

    def __init__(self, result: asyncio.Future[Any]) -> None:
        self.result = result

    async def end(self) -> None:
        """Cancel or kill the handler where that is possible; :attr:`result` is done afterwards if it has ended."""


class Runner(ABC):
    """Starts a handler for jobs.

    :cvar starts_at_once: whether :meth:`launch` can be used
    """

    starts_at_once = True

    @abstractmethod
    def launch(self, job: Delivery | list[Delivery]) -> HandlerRun:
        """Start the handler for a job."""

    async def start(self, job: Delivery) -> HandlerRun:
        """Start the handler for a job, once the process it needs is ready."""
        return self.launch(job)

    def close(self) -> None:  # noqa: B027 - a task needs nothing
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
    return _ProcessRunner(handler)


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
    """Return the outcome of a finished handler: its value, or its error."""
    try:
        value = future.result()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the job's outcome
        return HandlerResult.of_error(error)
    result = HandlerResult()
    result.value = value
    return result


class _HandlerTask(HandlerRun):
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


class _TaskRunner(Runner):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def launch(self, job: Delivery | list[Delivery]) -> HandlerRun:
        return _HandlerTask(_start_task(_call(self._handler, job)))


class HandlerThreads:
    """A pool with one thread per running function, used from one event loop.

    Not :func:`asyncio.to_thread`: its pool may have fewer threads than the worker's concurrency, so that jobs would
    wait while their ack wait passes, and a function that hangs would keep the process from exiting.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0

    def start(self, function: Callable[[_Argument], _Result], argument: _Argument) -> asyncio.Future[_Result]:
        """Run a function in a thread.

        The future holds what the function returns or raises, a :class:`RuntimeError` where the function tried to exit
        the process. Cancelling the future doesn't end the function.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        context = contextvars.copy_context()

        def call() -> None:
            with HandlerResult() as result:
                result.value = context.run(function, argument)
            # The loop is closed when the worker stopped without waiting for this thread.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._resolve, future, result)

        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            Thread(target=self._serve, daemon=True, name=f"handler-{self._threads}").start()
        self._calls.put(call)
        return future

    def close(self) -> None:
        """Let each thread end after its current call."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _serve(self) -> None:
        while call := self._calls.get():
            call()

    def _resolve(self, future: asyncio.Future[_Result], result: HandlerResult) -> None:
        self._idle += 1
        if not future.done():
            resolve = (
                partial(future.set_exception, result.error)
                if result.error
                else partial(future.set_result, result.value)
            )
            resolve()


class _ThreadRunner(Runner):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._threads = HandlerThreads()

    def launch(self, job: Delivery | list[Delivery]) -> HandlerRun:
        return HandlerRun(self._threads.start(self._handler, job))

    def close(self) -> None:
        self._threads.close()


class _Progress(NamedTuple):
    """What a handler in a process reports."""

    fraction: float
    text: str


class _ProgressPipe:
    """Sends the progress of one job to the worker, from any thread of the handler, until the handler is done."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._is_open = True

    def send(self, fraction: float, text: str) -> None:
        """Send progress."""
        with self._lock:
            if self._is_open:
                with suppress(OSError):
                    self._pipe.send(_Progress(fraction, text))

    def close(self) -> None:
        """Send nothing any more: what came after the result would be about the next job."""
        with self._lock:
            self._is_open = False


class _HandlerProcess:
    """A process that runs one job at a time and exits when its parent does; the methods of this class block.

    Not :class:`concurrent.futures.ProcessPoolExecutor`: when one of its processes dies, every job in every other one
    fails.
    """

    def __init__(self, handler: Callable[[Any], Any]) -> None:
        # Few workers use processes: the others start without it.
        import multiprocessing

        # A fork would copy a process that has threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, self._child_pipe = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(handler, self._child_pipe, configured_format()), name="handler"
        )
        self._lock = threading.Lock()
        self._killed = False
        self.is_started = False

    @property
    def is_usable(self) -> bool:
        """Whether it can run another job."""
        return not self._killed and (not self.is_started or self._process.is_alive())

    def boot(self) -> None:
        """Start the process, and wait until it is ready for a job.

        :raises HandlerDiedError: it exited before that
        """
        with self._lock:
            if self._killed:
                raise HandlerDiedError("the handler's process was ended before it was started")
            self._process.start()
            self._child_pipe.close()
            self.is_started = True
        self._receive()

    def execute(self, job: Delivery | list[Delivery]) -> Any:
        """Run the handler for a job; returns what it returns, and raises what it raises.

        :raises HandlerDiedError: the process exited before it sent a result
        """
        with suppress(OSError):
            self._pipe.send(job)
        # Reports of progress come before the result.
        while isinstance(answer := self._receive(), _Progress):
            if not isinstance(job, list):
                job.progress(*answer)
        result, cause, trace, failure = answer
        if result.error is None:
            return result.value
        result.error.__cause__ = cause
        if trace:
            result.error.add_note(trace)
        attach_failure(result.error, failure)
        raise result.error

    def kill(self) -> None:
        """Kill the process, and every program that its handler has started."""
        with self._lock:
            self._killed = True
            if not self.is_started or self._process.pid is None:
                return
            if self._process.is_alive():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join(_EXIT_TIMEOUT)

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise HandlerDiedError(self._exit_text()) from None

    def _exit_text(self) -> str:
        self._process.join(_EXIT_TIMEOUT)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"the handler's process was ended by {signal.Signals(-code).name} before the job was done"
        return f"the handler's process ended with status {code} before the job was done"


class _ProcessRun(HandlerRun):
    def __init__(self, process: _HandlerProcess, result: asyncio.Future[Any]) -> None:
        super().__init__(result)
        self._process = process

    async def end(self) -> None:
        # The result shows it.
        await asyncio.to_thread(self._process.kill)
        await asyncio.wait({self.result}, timeout=_KILL_TIMEOUT)


class _ProcessRunner(Runner):
    starts_at_once = False

    def __init__(self, handler: Handler) -> None:
        _require_picklable(handler)
        self._handler = handler
        # Each thread waits for one process.
        self._threads = HandlerThreads()
        self._idle: list[_HandlerProcess] = []
        self._all: set[_HandlerProcess] = set()

    def launch(self, job: Delivery | list[Delivery]) -> HandlerRun:
        # A process may have to be started first.
        raise NotImplementedError

    async def start(self, job: Delivery) -> HandlerRun:
        process = self._acquire()
        if not process.is_started:
            # The time for importing the handler's modules doesn't count towards its deadline.
            booted = self._threads.start(_HandlerProcess.boot, process)
            await asyncio.wait({booted})
            if booted.exception():
                self._all.discard(process)
                return _ProcessRun(process, booted)
        result = self._threads.start(process.execute, job)
        result.add_done_callback(partial(self._release, process))
        return _ProcessRun(process, result)

    def close(self) -> None:
        for process in list(self._all):
            process.kill()
        self._threads.close()

    def _acquire(self) -> _HandlerProcess:
        while self._idle:
            if (process := self._idle.pop()).is_usable:
                return process
            self._all.discard(process)
        process = _HandlerProcess(self._handler)
        self._all.add(process)
        return process

    def _release(self, process: _HandlerProcess, _: asyncio.Future[Any]) -> None:
        if process.is_usable:
            self._idle.append(process)
        else:
            self._all.discard(process)


def _require_picklable(handler: Callable[[Any], Any]) -> None:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.dumps(handler)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise WorkerSetupError(
            "expected a handler that another process can import, such as a function at the top of a module, found"
            f" another: {error}"
        ) from None


def _serve(handler: Callable[[Any], Any], pipe: Pipe, log_format: str | None) -> None:
    """Run the jobs that arrive on a pipe; the main function of a handler's process."""
    # The worker decides when this process ends; in a process group of its own it is killed with its child processes.
    os.setpgid(0, 0)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which programs that the handler starts would inherit.
        signal.signal(signal_number, lambda *_: None)
    if log_format:
        configure_logging(log_format)
    with suppress(BrokenPipeError):
        pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        progress = _ProgressPipe(pipe)
        job.report_to(progress.send)
        with HandlerResult() as result:
            result.value = handler(job)
        progress.close()
        with suppress(BrokenPipeError):
            pipe.send_bytes(_encode(result))


def _encode(result: HandlerResult) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    error = result.error
    trace = "".join(traceback.format_exception(error)) if error else ""
    cause = error.__cause__ if error else None
    failure = failure_of(error) if error else None
    for answer in ((result, cause, trace, failure), (result, None, trace, failure)):
        with HandlerResult() as pickled:
            pickled.value = bytes(ForkingPickler.dumps(answer))
            # Some errors can be pickled, but not unpickled.
            ForkingPickler.loads(pickled.value)
        if pickled.error is None:
            return bytes(pickled.value)
    substitute = HandlerResult()
    text = f"the handler raised {error!r}" if error else f"the handler returned what can't be sent: {pickled.error}"
    substitute.error = RuntimeError(text)
    return bytes(ForkingPickler.dumps((substitute, None, trace, failure)))
