"""Run something again and again, each time killed instead of making a later one of its calls to the server."""

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.ports import LOOPBACK
from testbed.processes import Process
from testbed.queues import eventually
from testbed.text_table import text_table

Counted = Literal["all", "changes"]

# Preparing takes longer than running; several wait for their servers at the same time.
_AHEAD = 10

_API = "$JS.API."
_READS = (
    *("INFO", "STREAM.INFO", "STREAM.NAMES", "STREAM.LIST", "STREAM.MSG.GET", "DIRECT.GET"),
    *("CONSUMER.INFO", "CONSUMER.NAMES", "CONSUMER.LIST", "CONSUMER.MSG.NEXT"),
)
_CHANGES = (
    *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE"),
    *("CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE"),
    *("CONSUMER.PAUSE", "CONSUMER.RESET", "CONSUMER.UNPIN"),
)


@dataclass(frozen=True, slots=True)
class CrashRun:
    """
    One run in a process of its own.

    :param call: the number of the counted call that it was to be killed instead of
    :param status: how its process ended: minus the signal's number, or 0 where it came through
    :param what: the kind of that call, such as ``$JS.API.STREAM.INFO``; empty where it came through
    :param subject: the subject of that call
    :param queue: the queue that the run had to itself
    """

    call: int
    status: int
    kind: str
    subject: str
    queue: WorkQueue


@dataclass(frozen=True, slots=True)
class CrashReport:
    """
    What became of all runs.

    :param runs: in order; only the last one came through
    """

    runs: tuple[CrashRun, ...]

    @property
    def statuses(self) -> list[int]:
        """How the processes ended."""
        return [run.status for run in self.runs]

    @property
    def queues(self) -> list[WorkQueue]:
        """The queues, the one of the run that came through last."""
        return [run.queue for run in self.runs]

    @property
    def killed_calls(self) -> list[str]:
        """The kinds of the calls that weren't made."""
        return [run.kind for run in self.runs if run.status]

    def table(self) -> str:
        """Show what was tried."""
        rows = [(run.kind or "nothing: it came through", run.call, run.status) for run in self.runs]
        return text_table(("killed instead of", "call", "status"), rows)


async def crash_at_every_call(
    servers: Sequence[str],
    function: str,
    prepare: Callable[[int], Awaitable[WorkQueue]],
    *,
    logs: Path,
    options: Mapping[str, Any] | None = None,
    counted: Counted = "all",
    first_call: int = 1,
    max_calls: int = 100,
    within: float = 60.0,
) -> CrashReport:
    """
    Kill a coroutine's process instead of its first call to the server, the next time instead of its second, and so on.

    Each run has a real process and a queue to itself. It ends with SIGKILL, and whatever its client had not yet sent
    ends with it. It goes on until a run makes all its calls.

    :param servers: the servers' addresses
    :param function: ``module:name`` of a coroutine function that takes a connection, a queue and the options
    :param prepare: gives the queue for the run with this number; called for several at a time, some for nothing
    :param logs: the folder for what the processes write
    :param options: further arguments by name, as far as JSON has them
    :param counted: ``all`` calls, or only ``changes``: not what reads, and not the pulling of jobs
    :param first_call: the number of the first call to be killed at
    :param most: runs after which it fails
    :param within: seconds that each run may take
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()
    server = await asyncio.start_server(lambda *wire: arrived.set_result(wire), LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    # What this Python can import, the processes can: the function may be one of a test module.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = Process.start(
        [sys.executable, "-m", "testbed.crash_points", str(port), function], env=env, log_file=logs / "dying.log"
    )
    runs: list[CrashRun] = []
    prepared: list[WorkQueue] = []
    try:
        await eventually(lambda: arrived.done() or not process.alive, within)
        if not arrived.done():
            raise RuntimeError(f"the process that forks ended with {process.returncode}:\n{process.tail()}")
        reader, writer = arrived.result()
        for call in range(first_call, first_call + max_calls):
            if not prepared:
                prepared += await asyncio.gather(*map(prepare, range(call, call + _AHEAD)))
            queue = prepared.pop(0)
            order = {
                "servers": list(servers),
                "queue": queue.model_dump(mode="json", exclude_unset=True),
                "options": dict(options or {}),
                "counted": counted,
                "call": call,
            }
            writer.write(json.dumps(order).encode() + b"\n")
            async with asyncio.timeout(within):
                told = await _told(reader, process)
            runs.append(CrashRun(call, told["status"], told.get("what", ""), told.get("subject", ""), queue))
            if not told["status"]:
                writer.close()
                return CrashReport(tuple(runs))
    finally:
        process.kill()
        server.close()
    raise RuntimeError(f"{function} makes more than {max_calls} calls:\n{CrashReport(tuple(runs)).table()}")


def call_kind(subject: str, queue: WorkQueue) -> str:
    """
    Name the kind of a call to the server.

    :param subject: the subject it is sent on
    :param queue: the queue whose jobs are told from other messages
    """
    if subject.startswith(_API):
        return _API + (_listed(subject, (*_READS, *_CHANGES)) or subject.removeprefix(_API))
    if subject.startswith("$JS."):
        return ".".join(subject.split(".")[:2])
    if covered_by_any(queue.subjects, subject):
        return "publish jobs"
    tokens = ("<queue>" if token == queue.name else "*" if token.isdigit() else token for token in subject.split("."))
    return f"publish {'.'.join(tokens)}"


def changes_state(subject: str) -> bool:
    """
    Tell whether a call changes what the server has stored.

    :param subject: the subject it is sent on
    """
    return not (subject.startswith(_API) and _listed(subject, _READS))


def _listed(subject: str, kinds: Sequence[str]) -> str | None:
    asked = subject.removeprefix(_API)
    return next((kind for kind in kinds if asked == kind or asked.startswith(f"{kind}.")), None)


async def _told(reader: asyncio.StreamReader, process: Process) -> dict[str, Any]:
    told: dict[str, Any] = {}
    while "status" not in told:
        line = await reader.readline()
        if not line:
            raise RuntimeError(f"the process that forks ended:\n{process.tail()}")
        told |= json.loads(line)
    if told["status"] and "what" not in told:
        raise RuntimeError(f"a run ended with {told['status']} by itself:\n{process.tail()}")
    return told


def _fork_for_each_order(port: int, function: str) -> None:
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    with socket.create_connection((LOOPBACK, port)) as wire:
        for line in wire.makefile():
            child = os.fork()
            if not child:
                # What it raises ends the child as it ends any Python.
                asyncio.run(_run(call, json.loads(line), wire))
                return
            _tell(wire, {"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


async def _run(call: Callable[..., Coroutine[Any, Any, object]], order: dict[str, Any], wire: socket.socket) -> None:
    queue = WorkQueue(**order["queue"])
    async with connect(connection_settings({"servers": tuple(order["servers"])})) as connection:
        _die_instead_of(connection, queue, order, wire)
        await call(connection, queue, **order["options"])


def _die_instead_of(connection: Connection, queue: WorkQueue, order: dict[str, Any], wire: socket.socket) -> None:
    publish, made = connection.client.publish, 0

    # All that the client sends to the server goes through publish, its requests too.
    async def dying(subject: str, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        if order["counted"] == "all" or changes_state(subject):
            made += 1
            if made == order["call"]:
                _tell(wire, {"what": call_kind(subject, queue), "subject": subject})
                os.kill(os.getpid(), signal.SIGKILL)
        await publish(subject, *args, **kwargs)

    connection.client.publish = dying  # type: ignore[method-assign]


def _tell(wire: socket.socket, told: dict[str, Any]) -> None:
    wire.sendall(json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    _fork_for_each_order(int(sys.argv[1]), sys.argv[2])
