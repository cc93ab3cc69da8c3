"""Running handlers in processes of their own: for work that keeps a CPU busy, and the only kind that can be ended.

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
from airflow_provider_jetstream.worker.logs import configure_logs, current_form
from airflow_provider_jetstream.worker.result import Outcome
from airflow_provider_jetstream.worker.thread_pool import HandlerThreads
from airflow_provider_jetstream.worker.traceback_digest import carry, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection as Pipe

    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.handler import Handler

_END_SECONDS = 5.0
_SEEN_SECONDS = 2.0


class HandlerProcess:
    """A process that does one job at a time; its methods block.

    It ends by itself when this process does.

    :param call: what it calls with each job
    """

    def __init__(self, call: Callable[[Any], Any]) -> None:
        # A fork would copy a process with threads in it.
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(call, self._theirs, current_form()), name="handler")
        self._lock = threading.Lock()
        self._killed = False
        self.started = False

    @property
    def usable(self) -> bool:
        """Whether it can do another job."""
        return not self._killed and (not self.started or self._process.is_alive())

    def boot(self) -> None:
        """Start it, and wait until it can take a job.

        :raises HandlerDiedError: it ended before that
        """
        with self._lock:
            if self._killed:
                raise HandlerDiedError("the handler's process was ended before it was started")
            self._process.start()
            self._theirs.close()
            self.started = True
        self._receive()

    def execute(self, job: Any) -> Any:
        """Do a job, and raise what the call raises.

        :param job: what the call takes
        :return: what it returns
        :raises HandlerDiedError: the process ended before it told
        """
        with suppress(OSError):
            self._pipe.send(job)
        outcome, cause, trace, failure = self._receive()
        if outcome.error is None:
            return outcome.value
        outcome.error.__cause__ = cause
        if trace:
            outcome.error.add_note(trace)
        carry(outcome.error, failure)
        raise outcome.error

    def kill(self) -> None:
        """End it at once, and whatever its handler has started with it."""
        with self._lock:
            self._killed = True
            if not self.started or self._process.pid is None:
                return
            if self._process.is_alive():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join(_END_SECONDS)

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise HandlerDiedError(self._obituary()) from None

    def _obituary(self) -> str:
        self._process.join(_END_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"the handler's process was ended by {signal.Signals(-code).name} before the job was done"
        return f"the handler's process ended with status {code} before the job was done"


class ProcessAttempt:
    """A handler at work in a process.

    :param process: the process
    :param result: what the handler returns or raises
    """

    def __init__(self, process: HandlerProcess, result: asyncio.Future[Any]) -> None:
        self._process = process
        self.result = result

    async def end(self) -> None:
        """Kill it, and wait until that is seen."""
        await asyncio.to_thread(self._process.kill)
        await asyncio.wait({self.result}, timeout=_SEEN_SECONDS)


class ProcessRunner:
    """Starts a handler in one of as many processes as it works on jobs at a time.

    :param call: the handler
    :raises WorkerSetupError: it can't be found again from another process
    """

    def __init__(self, call: Handler) -> None:
        _check(call)
        self._call = call
        # Each waits for its process.
        self._threads = HandlerThreads()
        self._idle: list[HandlerProcess] = []
        self._all: set[HandlerProcess] = set()

    async def start(self, job: Delivery) -> ProcessAttempt:
        """Start the handler for a job.

        :param job: the job
        :return: the handler at work
        """
        process = self._take()
        if not process.started:
            # Importing what the handler needs isn't its own time.
            booted = self._threads.start(HandlerProcess.boot, process)
            await asyncio.wait({booted})
            if booted.exception():
                self._all.discard(process)
                return ProcessAttempt(process, booted)
        result = self._threads.start(process.execute, job)
        result.add_done_callback(partial(self._release, process))
        return ProcessAttempt(process, result)

    def close(self) -> None:
        """Kill all."""
        for process in list(self._all):
            process.kill()
        self._threads.close()

    def _take(self) -> HandlerProcess:
        while self._idle:
            if (process := self._idle.pop()).usable:
                return process
            self._all.discard(process)
        process = HandlerProcess(self._call)
        self._all.add(process)
        return process

    def _release(self, process: HandlerProcess, _: asyncio.Future[Any]) -> None:
        if process.usable:
            self._idle.append(process)
        else:
            self._all.discard(process)


def _check(call: Callable[[Any], Any]) -> None:
    try:
        ForkingPickler.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise WorkerSetupError(
            "expected a handler that another process can import, such as a function at the top of a module, found"
            f" another: {error}"
        ) from None


def _serve(call: Callable[[Any], Any], pipe: Pipe, form: str | None) -> None:
    """Do the jobs that come through a pipe, in the process that was started for it."""
    # The worker decides when this process ends; a group of its own lets it end what the handler has started too.
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which programs that the handler starts would inherit.
        signal.signal(number, lambda *_: None)
    if form:
        configure_logs(form)
    with suppress(BrokenPipeError):
        pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        with Outcome() as outcome:
            outcome.value = call(job)
        with suppress(BrokenPipeError):
            pipe.send_bytes(_answer(outcome))


def _answer(outcome: Outcome) -> bytes:
    error = outcome.error
    trace = "".join(traceback.format_exception(error)) if error else ""
    cause = error.__cause__ if error else None
    failure = failure_of(error) if error else None
    for attempt in ((outcome, cause, trace, failure), (outcome, None, trace, failure)):
        with Outcome() as told:
            told.value = bytes(ForkingPickler.dumps(attempt))
            # Some errors can be written, but not read again.
            ForkingPickler.loads(told.value)
        if told.error is None:
            return bytes(told.value)
    stand_in = Outcome()
    what = f"the handler raised {error!r}" if error else f"the handler returned what can't be sent: {told.error}"
    stand_in.error = RuntimeError(what)
    return bytes(ForkingPickler.dumps((stand_in, None, trace, failure)))
