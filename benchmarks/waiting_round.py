"""One measurement of one way to wait: a server, a process that waits, and one that ends jobs."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from testbed.nats_server import NatsServer

QUEUE = "jobs"
BODY = b"x" * 200
IN_FLIGHT = 500
HOUR = 3600.0
# What a way may take that isn't up to it, beyond the time in which the jobs end.
PATIENCE = 30.0

OURS, IDLE, TASKIQ = "ours", "idle", "taskiq-nats"
WAYS = {
    IDLE: "benchmarks.waiting_methods.Idle",
    OURS: "airflow_provider_jetstream.triggers.completion.JobCompletionTrigger",
    "connection-each": "benchmarks.waiting_methods.ConnectionEach",
    "poll-each": "benchmarks.waiting_methods.Polling",
    TASKIQ: "benchmarks.waiting_methods.Taskiq",
}


@dataclass
class Measured:
    """What one measurement gave; times in seconds.

    :param grown: bytes by which the waiting process grew
    :param start: until all waited
    :param connections: to the server, while all waited
    :param subscriptions: of those connections
    :param consumers: on streams other than the queue itself
    :param cpu: of the waiting process, from the first end on
    :param lags: of its event loop
    :param latencies: from the confirmation that an end is stored until the trigger's event
    :param from_sending: the same from when the end was sent
    :param failures: waiters without an event of their own job, by cause
    """

    grown: float
    start: float
    connections: int = 0
    subscriptions: int = 0
    consumers: int = 0
    cpu: float = 0.0
    lags: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    from_sending: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


def measure(way: str, count: int, rate: float) -> Measured:
    """
    Let many wait in one process while another ends their jobs.

    :param way: how they wait
    :param count: how many wait, each for one job
    :param rate: how many jobs end per second
    :return: what was measured
    """
    with tempfile.TemporaryDirectory() as home, NatsServer() as server:
        arguments = asyncio.run(_prepare(server.url, count))
        limit = count / rate + PATIENCE
        place = {"conn_type": "nats", "host": "127.0.0.1", "port": server.port}
        environment = {"AIRFLOW_HOME": home, "AIRFLOW_CONN_NATS_DEFAULT": json.dumps(place)}
        waiters = ["waiting_process", WAYS[way], json.dumps(arguments), count, limit]
        with _process(waiters, environment, Path(home) / "waiting") as waiting:
            found = Measured(*_told(waiting, "bytes", "start"))
            if way == IDLE:
                waiting.communicate("stop\n")
                return found
            _look(server, found)
            kind = "results" if way == TASKIQ else "completions"
            ends = ["waiting_completer", kind, server.url, QUEUE, count, rate, limit]
            with _process(ends, environment, Path(home) / "completer") as completer:
                _line(completer)
                for process in (waiting, completer):
                    _stream(process.stdin).write("go\n")
                    _stream(process.stdin).flush()
                stored: dict[str, list[float]] = json.loads(_line(completer))
                found.cpu, found.lags, fired, errors = _told(waiting, "cpu", "lags", "fired", "errors")
    _count(found, count, stored, fired, errors)
    return found


async def _prepare(url: str, count: int) -> dict[str, Any]:
    """Store the jobs, and give the arguments of the trigger that waits for the first."""
    declared: dict[str, Any] = {
        "name": QUEUE,
        "subjects": [f"{QUEUE}.new"],
        "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s", "max_ack_pending": -1}],
        "dead_letters": f"{QUEUE}-dead",
        "events": f"{QUEUE}-events",
        "archive": False,
        "audit": False,
    }
    queue = WorkQueue(**declared)
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        await provision(connection, queue)
        mark = await take_cursor(connection, queue)
        jetstream = connection.client.jetstream(timeout=30)
        for start in range(0, count, IN_FLIGHT):
            jobs = (jetstream.publish(f"{QUEUE}.new", BODY) for _ in range(min(IN_FLIGHT, count - start)))
            last = max(ack.seq for ack in await asyncio.gather(*jobs))
    if last != count:
        raise SystemExit(f"expected {count} jobs stored, found {last}")
    return {
        "nats_conn_id": "nats_default",
        "mark": asdict(mark),
        "sequences": [[1, 1]],
        "tolerance": {"max_dead": 0, "max_cancelled": 0, "max_vanished": 0, "min_completed": None},
        "deadline": time.time() + HOUR,
        # Long ago, so that nothing is held back for Airflow's sake.
        "deferred_at": time.time() - HOUR,
        "summary": {"published": 1, "duplicates": 0, "stream": QUEUE, "sequences": [[1, 1]], "scheduled": 0},
        "cancel_on_kill": False,
    }


def _look(server: NatsServer, found: Measured) -> None:
    connections = server.monitor("connz?limit=100000")["connections"]
    found.connections = len(connections)
    found.subscriptions = sum(connection["subscriptions"] for connection in connections)
    streams = server.monitor("jsz?streams=true&consumers=true")["account_details"][0]["stream_detail"]
    found.consumers = sum(len(stream.get("consumer_detail") or ()) for stream in streams if stream["name"] != QUEUE)


def _count(
    found: Measured,
    count: int,
    stored: dict[str, list[float]],
    fired: Sequence[tuple[int, float]],
    errors: dict[str, int],
) -> None:
    times = Counter(sequence for sequence, _ in fired)
    found.failures.update(errors)
    found.failures["fired more than once"] = sum(1 for number in times.values() if number > 1)
    found.failures["fired although its end wasn't stored"] = sum(1 for each in times if str(each) not in stored)
    found.failures["no event in time"] = count - len(times) - sum(errors.values())
    found.failures = +found.failures
    ends = [(at, *stored[str(sequence)]) for sequence, at in fired if str(sequence) in stored]
    found.latencies = [at - confirmed for at, _, confirmed in ends]
    found.from_sending = [at - sent for at, sent, _ in ends]


@contextmanager
def _process(command: Sequence[object], environment: dict[str, str], errors: Path) -> Iterator[subprocess.Popen[str]]:
    module, *arguments = map(str, command)
    with errors.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    except json.JSONDecodeError:
        raise SystemExit(f"{module} ended early: {errors.read_text()[-2000:]}") from None
    finally:
        process.kill()
        process.communicate()


def _stream(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise ValueError("expected a pipe")
    return pipe


def _line(process: subprocess.Popen[str]) -> str:
    return _stream(process.stdout).readline()


def _told(process: subprocess.Popen[str], *names: str) -> list[Any]:
    told = json.loads(_line(process))
    return [told[name] for name in names]
