"""A real PostgreSQL on the loopback address, as Airflow's metadata database."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from airflow_provider_jetstream.dev.process import Process
from testbed.ports import LOOPBACK, free_port

_DATABASE = "airflow"
_USER = "postgres"
# Debian keeps the programs of a server outside of PATH.
_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


class PostgreSQLError(RuntimeError):
    """PostgreSQL isn't installed, or didn't become ready."""


class PostgreSQL:
    """One PostgreSQL server whose data outlive its process.

    Its folder isn't one of pytest's: PostgreSQL runs as a user of its own, who may not enter those of root.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
        self._data = self._folder / "data"
        self._port = free_port()
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """The database for SQLAlchemy."""
        return f"postgresql+psycopg2://{_USER}@{LOOPBACK}:{self._port}/{_DATABASE}"

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            shutil.chown(self._folder, _USER)
        self._run("initdb", "--pgdata", self._data, "--username", _USER, "--auth", "trust", "--encoding", "UTF8")
        self.start()
        self._run("createdb", *self._address(), _DATABASE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, timeout: float = 60.0) -> None:
        """Start the server and wait until it answers."""
        options = ["-D", self._data, "-h", LOOPBACK, "-p", self._port, "-k", self._folder]
        self._process = Process.start(
            list(map(str, self._command("postgres", *options))),
            log_file=self._folder.parent / f"{self._folder.name}.log",
        )
        deadline = time.monotonic() + timeout
        while self._call("pg_isready", *self._address()).returncode:
            if time.monotonic() > deadline or not self._process.alive:
                raise PostgreSQLError(f"PostgreSQL isn't ready:\n{self._process.tail()}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server with SIGKILL, as a crash of its machine does."""
        if self._process:
            self._process.kill()
            self._process = None

    def rows(self, query: str) -> list[str]:
        """Return the first column of a query's rows, as text."""
        return self._run("psql", *self._address(), "--no-align", "--tuples-only", "-c", query, _DATABASE).splitlines()

    def _address(self) -> list[object]:
        return ["--host", LOOPBACK, "--port", self._port, "--username", _USER]

    def _run(self, program: str, *arguments: object) -> str:
        done = self._call(program, *arguments)
        if done.returncode:
            raise PostgreSQLError(f"{program} failed with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _call(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = list(map(str, self._command(program, *arguments)))
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd="/")

    def _command(self, program: str, *arguments: object) -> list[object]:
        found = next((folder / program for folder in _FOLDERS if (folder / program).exists()), shutil.which(program))
        if found is None:
            raise PostgreSQLError(f"expected {program} of PostgreSQL, found none: install the package postgresql")
        # A server refuses to run as root.
        user = ["runuser", "-u", _USER, "--"] if os.geteuid() == 0 else []
        return [*user, found, *arguments]
