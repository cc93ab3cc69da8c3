"""Start a program as a process and end it without leaving any of its child processes behind."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from airflow_provider_jetstream.dev import sessions


class _Guard:
    """The pipe to the guard process; see :mod:`airflow_provider_jetstream.dev.sessions`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def add(self, session: int) -> None:
        self._send(f"+{session}")

    def remove(self, session: int) -> None:
        self._send(f"-{session}")

    def close(self) -> None:
        """End the guard process of this process."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                    self._process.communicate(timeout=5)
                self._process = None

    def _send(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._owner = os.getpid()
                self._process = subprocess.Popen(
                    # Isolated: the modules beside the script must not shadow modules that psutil imports.
                    [sys.executable, "-I", sessions.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(line + "\n")
                    self._process.stdin.flush()


_guard = _Guard()
_started: set["Process"] = set()


@atexit.register
def _kill_all() -> None:
    for process in list(_started):
        if process.owner == os.getpid():
            process.kill()
    _guard.close()


class Process:
    """A running program, the leader of a session of its own.

    ``env`` is its whole environment, ``None`` for a copy of this process's; its output is appended to ``log_file``.
    """

    def __init__(
        self,
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        log_file: Path,
        cwd: Path | None = None,
    ) -> None:
        self.args = [str(arg) for arg in args]
        self.log_file = log_file
        self.owner = os.getpid()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_file.stat().st_size if log_file.exists() else 0
        with log_file.open("ab") as log:
            self._popen = subprocess.Popen(
                self.args,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )
        _started.add(self)
        _guard.add(self.pid)

    @classmethod
    def start(
        cls,
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        log_file: Path,
        cwd: Path | None = None,
    ) -> Self:
        """Start a program; see :class:`Process`."""
        return cls(args, env=env, log_file=log_file, cwd=cwd)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group and its session."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the program itself is running."""
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit code; negative for a signal, ``None`` while the program runs."""
        return self._popen.poll()

    def pids(self) -> list[int]:
        """Return the ids of the program's process and of every living process that it has started."""
        return sorted(process.pid for process in sessions.members(self.pid))

    def signal(self, number: int) -> None:
        """Send a signal to the program itself, not to its children."""
        self._popen.send_signal(number)

    def terminate(self, grace: float = 5.0) -> None:
        """Send SIGTERM to the program, and after ``grace`` seconds kill what is left of its session."""
        terminate_all([self], grace)

    def kill(self, *, known: Iterable[psutil.Process] = ()) -> None:
        """Kill the program and everything it has started; ``known`` processes may have left its session since."""
        sessions.kill_session(self.pid, known)
        self._popen.wait()
        _started.discard(self)
        _guard.remove(self.pid)

    def output(self) -> str:
        """Return what this program has written, without what the file held before."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of the program's output."""
        return "\n".join(self.output().splitlines()[-lines:])


def terminate_all(processes: Sequence[Process], grace: float = 5.0) -> None:
    """Send SIGTERM to several programs at once, and after ``grace`` seconds kill what is left of their sessions.

    Only the programs themselves get the signal: one that shuts down in order ends its children itself, and would take
    them for crashed if they got the signal too.
    """
    known = {process: sessions.members(process.pid) for process in processes}
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(process.alive for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        process.kill(known=known[process])
