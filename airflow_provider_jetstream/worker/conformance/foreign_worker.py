"""A worker's command, kept running as a supervisor does: whenever it ends, it is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.worker.errors import WorkerSetupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

_PAUSE: Final = 0.2
# A command that ends so soon, so often, doesn't work on jobs.
_SOON: Final = 2.0
_SOON_ENDS: Final = 5
_SHOWN: Final = 1_000


@dataclass(slots=True)
class ForeignWorker:
    """A worker that this package knows nothing of.

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
