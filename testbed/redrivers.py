"""Redrives in processes of their own, which can be killed at any request and at any instant.

One process imports the package and forks for each redrive, so that a redrive starts at once and several run beside each
other. A redrive is killed with SIGKILL in place of one of its calls to the server, or by SIGALRM, whose default action
ends a process just as suddenly.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    WorkQueue,
    connect,
    connection_settings,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from testbed.crash_points import kill_at_call
from testbed.leases import shorten_leases
from testbed.ports import LOOPBACK, free_port

_START_SECONDS = 30.0
# Longer than the leases of these processes.
_STOPPED_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class RedriveOutcome:
    """How a redrive in a process of its own ended.

    :param killed: whether it was killed before it finished
    :param killed_at: the kind of the call in place of which it was killed, empty where it was killed otherwise
    :param error: the error that it raised, empty where it raised none
    :param report: its report as JSON, where it finished
    :param redriven: original sequence → new sequence
    :param parked: sequences of the letters that were parked
    """

    killed: bool = False
    killed_at: str = ""
    error: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    redriven: Mapping[int, int] = field(default_factory=dict)
    parked: Sequence[int] = ()

    @property
    def complete(self) -> bool:
        """Whether it finished, and no letter failed."""
        return bool(self.report) and not self.report["failed"]


class Redrivers:
    """Starts redrives in processes; make it with :func:`redrivers`.

    :param servers: the addresses of the server
    :param port: where the process listens that forks for each redrive
    """

    def __init__(self, servers: Sequence[str], port: int) -> None:
        self._servers = list(servers)
        self._port = port

    async def redrive(
        self,
        queue: WorkQueue,
        request: Mapping[str, Any],
        *,
        kill_at: int | None = None,
        kill_after: float | None = None,
        stop_after: float | None = None,
        within: float = 120.0,
    ) -> RedriveOutcome:
        """Run a redrive in a process, and kill it unless it finishes before.

        :param request: the fields of the request as JSON
        :param kill_at: in place of which of its calls that change something it is killed, from 1
        :param kill_after: after how many seconds it is killed
        :param stop_after: after how many seconds it is stopped, for longer than its lease lasts
        :param within: seconds after which the redrive counts as stuck: TimeoutError
        """
        command = {
            "servers": self._servers,
            "queue": queue.model_dump(mode="json", exclude_unset=True),
            "request": dict(request),
            "kill_at": kill_at,
            "kill_after": kill_after,
            "stop_after": stop_after,
        }
        reader, writer = await asyncio.open_connection(LOOPBACK, self._port, limit=1 << 24)
        result: dict[str, Any] = {}
        try:
            writer.write(json.dumps(command).encode() + b"\n")
            async with asyncio.timeout(within):
                while line := await reader.readline():
                    result |= json.loads(line)
        finally:
            writer.close()
        if "report" in result:
            redriven = {int(old): new for old, new in result["redriven"].items()}
            return RedriveOutcome(report=result["report"], redriven=redriven, parked=result["parked"])
        if "error" in result:
            return RedriveOutcome(error=result["error"])
        if kill_at is None and kill_after is None:
            raise RuntimeError(f"a redrive of {queue.name} ended by itself, without a report")
        return RedriveOutcome(killed=True, killed_at=result.get("kind", ""))


@asynccontextmanager
async def redrivers(servers: Sequence[str], logs: Path) -> AsyncIterator[Redrivers]:
    """Start the process that forks for each redrive; it and all its redrives are killed at the end of the block."""
    port = free_port()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = Process.start(
        [sys.executable, "-m", "testbed.redrivers", str(port)], env=env, log_file=logs / "redrivers.log"
    )
    try:
        async with asyncio.timeout(_START_SECONDS):
            while True:
                try:
                    _, writer = await asyncio.open_connection(LOOPBACK, port)
                except OSError:
                    if not process.alive:
                        raise RuntimeError(f"the forking process ended:\n{process.tail()}") from None
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        yield Redrivers(servers, port)
    finally:
        process.kill()


def redrive_request(fields: Mapping[str, Any]) -> RedriveRequest:
    """Build a request from fields as JSON."""
    values = dict(fields)
    selection = Selection.of(values.pop("selection", None))
    protocol = Protocol(values.pop("protocol", Protocol.AUTO))
    return RedriveRequest(selection=selection, protocol=protocol, **values)


def _fork_for_each_connection(port: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server((LOOPBACK, port), backlog=100) as server:
        while True:
            sock, _ = server.accept()
            if not os.fork():
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with sock:
                    if line := sock.makefile().readline():
                        asyncio.run(_run(json.loads(line), sock))
                os._exit(0)
            sock.close()


async def _run(command: Mapping[str, Any], sock: socket.socket) -> None:
    queue = WorkQueue(**command["queue"])
    request = redrive_request(command["request"])
    shorten_leases(2.0)
    try:
        async with connect(connection_settings({"servers": tuple(command["servers"]), "timeout": 5})) as connection:
            if command["kill_at"] is not None:
                kill_at_call(connection, queue, command["kill_at"], "changes", lambda call: _send(sock, call))
            if command["kill_after"] is not None:
                signal.setitimer(signal.ITIMER_REAL, command["kill_after"])
            if command["stop_after"] is not None:
                _stop_for_a_while(command["stop_after"])
            report = await redrive_dead_letters(connection, queue, request)
            result = {"report": report.as_json(), "redriven": dict(report.redriven), "parked": list(report.parked)}
    except JetStreamProviderError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send(sock, result)


def _stop_for_a_while(after: float) -> None:
    pid = os.getpid()
    if not os.fork():
        time.sleep(after)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


def _send(sock: socket.socket, fields: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    _fork_for_each_connection(int(sys.argv[1]))
