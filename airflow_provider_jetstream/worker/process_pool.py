"""Processes for handlers that keep a CPU busy; the only handlers that can be killed.

Not :class:`concurrent.futures.ProcessPoolExecutor`: when one of its processes dies, every job in every other one fails.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.worker.errors import HandlerDiedError, WorkerSetupError
from airflow_provider_jetstream.worker.handler import HandlerResult
from airflow_provider_jetstream.worker.logs import configure_logging, configured_format
from airflow_provider_jetstream.worker.thread_pool import HandlerThreads
from airflow_provider_jetstream.worker.traceback_digest import attach_failure, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection as Pipe

    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.handler import Handler

_EXIT_TIMEOUT = 5.0
_KILL_TIMEOUT = 2.0


class HandlerProcess:
    """A process that runs one job at a time and exits when its parent does; the methods of this class block."""

    def __init__(self, handler: Callable[[Any], Any]) -> None:
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

    def execute(self, job: Any) -> Any:
        """Run the handler for a job; returns what it returns, and raises what it raises.

        :raises HandlerDiedError: the process exited before it sent a result
        """
        with suppress(OSError):
            self._pipe.send(job)
        result, cause, trace, failure = self._receive()
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


class ProcessAttempt:
    """A handler running in a process."""

    def __init__(self, process: HandlerProcess, result: asyncio.Future[Any]) -> None:
        self._process = process
        self.result = result

    async def end(self) -> None:
        """Kill the process, and wait for the result to show it."""
        await asyncio.to_thread(self._process.kill)
        await asyncio.wait({self.result}, timeout=_KILL_TIMEOUT)


class ProcessRunner:
    """Starts a handler in processes, one per job at a time.

    :raises WorkerSetupError: another process can't import the handler
    """

    def __init__(self, handler: Handler) -> None:
        _require_picklable(handler)
        self._handler = handler
        # Each thread waits for one process.
        self._threads = HandlerThreads()
        self._idle: list[HandlerProcess] = []
        self._all: set[HandlerProcess] = set()

    starts_at_once = False

    def launch(self, job: Delivery | list[Delivery]) -> ProcessAttempt:
        """Do nothing: a process may have to be started first."""
        raise NotImplementedError

    async def start(self, job: Delivery) -> ProcessAttempt:
        """Start the handler for a job."""
        process = self._acquire()
        if not process.is_started:
            # The time for importing the handler's modules doesn't count towards its deadline.
            booted = self._threads.start(HandlerProcess.boot, process)
            await asyncio.wait({booted})
            if booted.exception():
                self._all.discard(process)
                return ProcessAttempt(process, booted)
        result = self._threads.start(process.execute, job)
        result.add_done_callback(partial(self._release, process))
        return ProcessAttempt(process, result)

    def close(self) -> None:
        """Kill all processes."""
        for process in list(self._all):
            process.kill()
        self._threads.close()

    def _acquire(self) -> HandlerProcess:
        while self._idle:
            if (process := self._idle.pop()).is_usable:
                return process
            self._all.discard(process)
        process = HandlerProcess(self._handler)
        self._all.add(process)
        return process

    def _release(self, process: HandlerProcess, _: asyncio.Future[Any]) -> None:
        if process.is_usable:
            self._idle.append(process)
        else:
            self._all.discard(process)


def _require_picklable(handler: Callable[[Any], Any]) -> None:
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
        with HandlerResult() as result:
            result.value = handler(job)
        with suppress(BrokenPipeError):
            pipe.send_bytes(_encode(result))


def _encode(result: HandlerResult) -> bytes:
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
