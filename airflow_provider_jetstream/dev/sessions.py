"""Process sessions: find and kill everything that a process has started.

Run as a script it is the guard: it outlives the Python process that started it just long enough to kill the sessions
which that process left behind, however it ended. ``PR_SET_PDEATHSIG`` would reach the first process only and not the
children it forks, and it fires when the *thread* that started the process ends.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

# A killed process may hang in the kernel for ever.
_TIMEOUT = 10.0


def members(session: int) -> set[psutil.Process]:
    """Return the living processes of a session (its id is the process id of its leader) and all their descendants.

    Airflow gives each task its own process group and its bash its own session, so a group isn't enough.
    """
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session:
                found.add(process)
    for process in list(found):
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return _living(found)


def _living(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    living = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living


def kill_session(session: int, known: Iterable[psutil.Process] = ()) -> None:
    """Send SIGKILL to the processes of a session until none lives.

    ``known`` are processes seen earlier that may have left the session since.
    """
    seen = set(known)
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        # A process can fork between being listed and being killed, hence the loop.
        seen |= members(session)
        living = _living(seen)
        if not living:
            return
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        # No wait through psutil: it would consume the exit status that the parent process waits for.
        time.sleep(0.01)


def guard() -> None:
    """Read ``+session`` and ``-session`` lines from standard input; at its end kill the sessions that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        if line.startswith("+"):
            sessions.add(session)
        else:
            sessions.discard(session)
    for session in sessions:
        kill_session(session)


if __name__ == "__main__":
    guard()
