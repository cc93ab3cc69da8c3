"""``jetstream-queue dev`` as a process, and what is left of it."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil

from airflow_provider_jetstream.dev.process import Process
from testbed.ports import free_ports
from testbed.queues import eventually

_SECONDS_TO_START = 180.0


class DevCommand:
    """The command as a process of its own, with a folder of its own for temporary files.

    :param folder: of the log and of the temporary files
    :param options: further ones of the command line
    :param python: the interpreter that has the package
    """

    def __init__(self, folder: Path, *options: str, python: str | Path = sys.executable) -> None:
        self.page_port, self.nats_port = free_ports(2)
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        ports = ["--port", str(self.page_port), "--nats-port", str(self.nats_port)]
        command = [python, "-m", "airflow_provider_jetstream.command.program", "dev", "--no-browser"]
        # The credentials are for another server.
        env = {**os.environ, "TMPDIR": str(self.temporary), "NATS_USER": "somebody", "NATS_PASSWORD": "else"}
        env["AIRFLOW_CONN_WAREHOUSE"] = "sqlite://"
        self.process = Process.start([*command, *ports, *options], env=env, log_file=folder / "dev.log", cwd=folder)
        self._seen: set[psutil.Process] = set()

    def output(self) -> str:
        """Return what the command has printed."""
        return self.process.output()

    async def prints(self, text: str) -> None:
        """Wait until the command has printed a text."""

        async def printed() -> bool:
            self._seen.update(psutil.Process(self.process.pid).children(recursive=True))
            if not self.process.alive:
                raise RuntimeError(f"it ended with {self.process.returncode}: {self.output()}")
            return text in self.output()

        await eventually(printed, _SECONDS_TO_START)

    async def stop(self, number: signal.Signals) -> list[str]:
        """Send a signal, wait for the end, and return the processes and files that are left."""
        self._seen.update(psutil.Process(self.process.pid).children(recursive=True))
        self.process.signal(number)
        await eventually(lambda: not self.process.alive, 30)
        left = []
        for process in self._seen:
            # An ended process whose new parent hasn't asked for its status yet has no command line.
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running():
                    left.append(" ".join(process.cmdline()))
        return left + [str(path) for path in self.temporary.rglob("*")]

    @property
    def running(self) -> list[psutil.Process]:
        """The processes that it has started and that run now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def seen(self) -> int:
        """How many processes it has started so far."""
        return len(self._seen)
