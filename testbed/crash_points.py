"""Runs a coroutine repeatedly, each time killed in place of a later one of its calls to the server."""

import asyncio
import importlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import WorkQueue, connect, connection_settings
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from testbed.leases import shorten_leases
from testbed.ports import LOOPBACK
from testbed.queues import eventually
from testbed.sent_frames import sent_messages
from testbed.text_table import text_table

Counted = Literal["all", "changes"]

# Preparing a queue takes longer than a run, so several are prepared concurrently.
_PREPARED_AT_ONCE = 10

_API = "$JS.API."
_NUMBER_OR_ID = re.compile(r"^(\d+|[0-9a-f]{32})$")
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
    """One run in a process of its own.

    ``call`` is the number of the call in place of which it was to be killed, ``status`` the exit status of its process
    (minus the signal's number, or 0 where the run finished); ``kind``, such as ``$JS.API.STREAM.INFO``, and ``subject``
    are those of that call, empty where the run finished.
    """

    call: int
    status: int
    kind: str
    subject: str
    queue: WorkQueue


@dataclass(frozen=True, slots=True)
class CrashReport:
    """All runs in command; only the last one finished."""

    runs: tuple[CrashRun, ...]

    @property
    def statuses(self) -> list[int]:
        """The exit statuses of the processes."""
        return [run.status for run in self.runs]

    @property
    def queues(self) -> list[WorkQueue]:
        """The queues of the runs; the last one is that of the run that finished."""
        return [run.queue for run in self.runs]

    @property
    def killed_calls(self) -> list[str]:
        """The kinds of the calls that weren't made."""
        return [run.kind for run in self.runs if run.status]

    def table(self) -> str:
        """Format the runs as text."""
        rows = [(run.kind or "nothing: it finished", run.call, run.status) for run in self.runs]
        return text_table(("killed instead of", "call", "status"), rows)


async def crash_at_every_call(
    servers: Sequence[str],
    function: str,
    prepare: Callable[[int], Awaitable[WorkQueue]],
    *,
    logs: Path,
    options: Mapping[str, Any] | None = None,
    counted: Counted = "all",
    kinds: Collection[str] = (),
    first_call: int = 1,
    max_calls: int = 100,
    within: float = 60.0,
) -> CrashReport:
    """Kill a coroutine's process in place of its first call to the server, the next time of its second, and so on.

    Each run has a process and a queue of its own. It ends with SIGKILL, and what its client had not yet sent is lost
    with it. The runs go on until one makes all its calls.

    :param function: ``module:name`` of a coroutine function that takes a connection, a queue and ``options``
    :param prepare: creates the queue for the run with this number; called for several runs concurrently, and for some
        that never happen
    :param counted: ``all`` calls, or only ``changes``: neither reads nor pull requests
    :param kinds: of calls in place of which it is killed in any case. The order of calls that are made concurrently
        differs between runs, so that the number of a call doesn't name the same call in each.
    :param max_calls: runs after which it fails
    :param within: seconds per run
    """
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()
    server = await asyncio.start_server(lambda *streams: connected.set_result(streams), LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    # The processes can import what this one can: the function may be in a test module.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = Process.start(
        [sys.executable, "-m", "testbed.crash_points", str(port), function], env=env, log_file=logs / "crash_points.log"
    )
    runs: list[CrashRun] = []
    prepared: list[WorkQueue] = []
    try:
        await eventually(lambda: connected.done() or not process.alive, within)
        if not connected.done():
            raise RuntimeError(f"the forking process ended with {process.returncode}:\n{process.tail()}")
        reader, writer = connected.result()

        async def run(number: int, call: int | str) -> CrashRun:
            if not prepared:
                prepared.extend(await asyncio.gather(*map(prepare, range(number, number + _PREPARED_AT_ONCE))))
            queue = prepared.pop(0)
            command = {
                "servers": list(servers),
                "queue": queue.model_dump(mode="json", exclude_unset=True),
                "options": dict(options or {}),
                "counted": counted,
                "call": call,
            }
            writer.write(json.dumps(command).encode() + b"\n")
            async with asyncio.timeout(within):
                result = await _read_result(reader, process)
            return CrashRun(number, result["status"], result.get("kind", ""), result.get("subject", ""), queue)

        for call in range(first_call, first_call + max_calls):
            runs.append(await run(call, call))
            if not runs[-1].status:
                missed = sorted(set(kinds).difference(run.kind for run in runs))
                more = [await run(call + number, kind) for number, kind in enumerate(missed, start=1)]
                writer.close()
                return CrashReport((*runs[:-1], *more, runs[-1]))
    finally:
        process.kill()
        server.close()
    raise RuntimeError(f"{function} makes more than {max_calls} calls:\n{CrashReport(tuple(runs)).table()}")


def call_kind(subject: str, queue: WorkQueue) -> str:
    """Return the kind of a call to the server by its subject; the queue's jobs are a kind of their own."""
    if subject.startswith(_API):
        return _API + (_matching_kind(subject, (*_READS, *_CHANGES)) or subject.removeprefix(_API))
    if subject.startswith("$JS."):
        return ".".join(subject.split(".")[:2])
    if covered_by_any(queue.subjects, subject):
        return "publish jobs"
    tokens = ("<queue>" if token == queue.name else _NUMBER_OR_ID.sub("*", token) for token in subject.split("."))
    return f"publish {'.'.join(tokens)}"


def changes_state(subject: str) -> bool:
    """Return whether a call on this subject changes what the server stores."""
    return not (subject.startswith(_API) and _matching_kind(subject, _READS))


def _matching_kind(subject: str, kinds: Sequence[str]) -> str | None:
    operation = subject.removeprefix(_API)
    return next((kind for kind in kinds if operation == kind or operation.startswith(f"{kind}.")), None)


async def _read_result(reader: asyncio.StreamReader, process: Process) -> dict[str, Any]:
    result: dict[str, Any] = {}
    while "status" not in result:
        line = await reader.readline()
        if not line:
            raise RuntimeError(f"the forking process ended:\n{process.tail()}")
        result |= json.loads(line)
    if result["status"] and "kind" not in result:
        raise RuntimeError(f"a run ended with {result['status']} by itself:\n{process.tail()}")
    return result


def _fork_for_each_command(port: int, function: str) -> None:
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    with socket.create_connection((LOOPBACK, port)) as sock:
        for line in sock.makefile():
            child = os.fork()
            if not child:
                # An exception ends the child process as it ends any Python program.
                asyncio.run(_run(call, json.loads(line), sock))
                return
            _send(sock, {"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


async def _run(call: Callable[..., Coroutine[Any, Any, object]], command: dict[str, Any], sock: socket.socket) -> None:
    queue = WorkQueue(**command["queue"])
    shorten_leases(0.5)
    async with connect(connection_settings({"servers": tuple(command["servers"])})) as connection:
        kill_at_call(connection, queue, command["call"], command["counted"], lambda fields: _send(sock, fields))
        await call(connection, queue, **command["options"])


def kill_at_call(
    connection: NatsPyConnection,
    queue: WorkQueue,
    call: int | str,
    counted: Counted,
    report: Callable[[dict[str, str]], None],
) -> None:
    """Let this process be killed with SIGKILL in place of one of the connection's calls to the server.

    :param call: its number, from 1, or its kind
    :param counted: ``all`` calls, or only ``changes``: neither reads nor pull requests
    :param report: called just before, with ``kind`` and ``subject`` of the call
    """
    write, calls = connection.write, 0

    def is_last(subject: str) -> bool:
        nonlocal calls
        calls += counted == "all" or changes_state(subject)
        return call in (calls, call_kind(subject, queue))

    def kill(subject: str) -> None:
        report({"kind": call_kind(subject, queue), "subject": subject})
        os.kill(os.getpid(), signal.SIGKILL)

    # The connection sends everything through this, its requests too.
    def counted_write(frames: bytes, messages: int = 1) -> None:
        before = b""
        for subject, message in sent_messages(frames):
            if is_last(subject):
                # A part of what is written together may arrive.
                if before:
                    send_now(connection, before)
                kill(subject)
            before += message
        write(frames, messages)

    connection.write = counted_write  # type: ignore[method-assign]


def send_now(connection: NatsPyConnection, messages: bytes) -> None:
    """Send what is written, and these messages, at once: what is written later may be lost with the process."""
    connection.send(messages)
    connection.flush()


def _send(sock: socket.socket, fields: dict[str, Any]) -> None:
    sock.sendall(json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    _fork_for_each_command(int(sys.argv[1]), sys.argv[2])
