"""One measurement of one method of waiting: a server, a process that waits, and one that ends jobs."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from testbed.nats_server import NatsServer

QUEUE = "jobs"
BODY = b"x" * 200
IN_FLIGHT = 500
HOUR = 3600.0
# Extra time for a method that can't keep up, beyond the time in which the jobs end.
EXTRA_SECONDS = 30.0

OURS, IDLE, TASKIQ = "ours", "idle", "taskiq-nats"
METHODS = {
    IDLE: "benchmarks.waiting_methods.Idle",
    OURS: "airflow_provider_jetstream.triggers.completion.JobCompletionTrigger",
    "connection-each": "benchmarks.waiting_methods.ConnectionEach",
    "poll-each": "benchmarks.waiting_methods.Polling",
    TASKIQ: "benchmarks.waiting_methods.Taskiq",
}


@dataclass
class Measured:
    """One measurement; times in seconds.

    :param memory_growth: bytes by which the waiting process grew
    :param start: until all triggers waited
    :param connections: to the server, while all waited
    :param subscriptions: of those connections
    :param consumers: on streams other than the queue itself
    :param cpu: of the waiting process, from the first end on
    :param lags: of its event loop
    :param own_lag: the longest of them less the collector's passes in it
    :param collection: the longest pass of Python's collector
    :param latencies: from the confirmation that an end is stored until the trigger's event
    :param from_sending: the same from the sending of the end
    :param failures: waiters without an event of their own job, by cause
    """

    memory_growth: float
    start: float
    connections: int = 0
    subscriptions: int = 0
    consumers: int = 0
    cpu: float = 0.0
    lags: list[float] = field(default_factory=list)
    own_lag: float = 0.0
    collection: float = 0.0
    latencies: list[float] = field(default_factory=list)
    from_sending: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


def measure(method: str, count: int, rate: float) -> Measured:
    """Run ``count`` waiters in one process while another ends their jobs at ``rate`` a second."""
    with tempfile.TemporaryDirectory() as home, NatsServer() as server:
        arguments = asyncio.run(_prepare(server.url, count))
        limit = count / rate + EXTRA_SECONDS
        nats_connection = {"conn_type": "nats", "host": "127.0.0.1", "port": server.port}
        environment = {"AIRFLOW_HOME": home, "AIRFLOW_CONN_NATS_DEFAULT": json.dumps(nats_connection)}
        waiters = ["waiting_process", METHODS[method], json.dumps(arguments), count, limit]
        with _process(waiters, environment, Path(home) / "waiting") as waiting:
            measured = Measured(*_read_fields(waiting, "bytes", "start"))
            if method == IDLE:
                waiting.communicate("stop\n")
                return measured
            _count_connections(server, measured)
            kind = "results" if method == TASKIQ else "completions"
            ends = ["waiting_completer", kind, server.url, QUEUE, count, rate, limit]
            with _process(ends, environment, Path(home) / "completer") as completer:
                _line(completer)
                for process in (waiting, completer):
                    _stream(process.stdin).write("go\n")
                    _stream(process.stdin).flush()
                stored: dict[str, list[float]] = json.loads(_line(completer))
                measured.cpu, measured.lags, measured.own_lag, measured.collection, fired, errors = _read_fields(
                    waiting, "cpu", "lags", "own_lag", "collection", "fired", "errors"
                )
    _count_events(measured, count, stored, fired, errors)
    return measured


async def _prepare(url: str, count: int) -> dict[str, Any]:
    """Store the jobs, and return the arguments of the trigger that waits for the first."""
    declaration: dict[str, Any] = {
        "name": QUEUE,
        "subjects": [f"{QUEUE}.new"],
        "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s", "max_ack_pending": -1}],
        "dead_letters": f"{QUEUE}-dead",
        "events": f"{QUEUE}-events",
        "archive": False,
        "audit": False,
    }
    queue = WorkQueue(**declaration)
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        await provision(connection, queue)
        cursor = await take_cursor(connection, queue)
        jetstream = connection.client.jetstream(timeout=30)
        for start in range(0, count, IN_FLIGHT):
            jobs = (jetstream.publish(f"{QUEUE}.new", BODY) for _ in range(min(IN_FLIGHT, count - start)))
            last = max(ack.seq for ack in await asyncio.gather(*jobs))
    if last != count:
        raise SystemExit(f"expected {count} jobs stored, found {last}")
    return {
        "nats_conn_id": "nats_default",
        "handle": JobsHandle(cursor=cursor, sequences=[(1, 1)]).as_json(),
        "tolerance": {"max_dead": 0, "max_cancelled": 0, "max_unaccounted": 0, "min_completed": None},
        "deadline": time.time() + HOUR,
        # In the past, so that no event is delayed by the guard against early events.
        "deferred_at": time.time() - HOUR,
        "summary": {"published": 1, "duplicates": 0, "stream": QUEUE, "sequences": [[1, 1]], "scheduled": 0},
        "cancel_on_kill": False,
    }


def _count_connections(server: NatsServer, measured: Measured) -> None:
    connections = server.monitor("connz?limit=100000")["connections"]
    measured.connections = len(connections)
    measured.subscriptions = sum(connection["subscriptions"] for connection in connections)
    streams = server.monitor("jsz?streams=true&consumers=true")["account_details"][0]["stream_detail"]
    measured.consumers = sum(len(stream.get("consumer_detail") or ()) for stream in streams if stream["name"] != QUEUE)


def _count_events(
    measured: Measured,
    count: int,
    stored: dict[str, list[float]],
    fired: Sequence[tuple[int, float]],
    errors: dict[str, int],
) -> None:
    times = Counter(sequence for sequence, _ in fired)
    measured.failures.update(errors)
    measured.failures["fired more than once"] = sum(1 for number in times.values() if number > 1)
    measured.failures["fired although its end wasn't stored"] = sum(
        1 for sequence in times if str(sequence) not in stored
    )
    measured.failures["no event in time"] = count - len(times) - sum(errors.values())
    measured.failures = +measured.failures
    ends = [(at, *stored[str(sequence)]) for sequence, at in fired if str(sequence) in stored]
    measured.latencies = [at - confirmed for at, _, confirmed in ends]
    measured.from_sending = [at - sent for at, sent, _ in ends]


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


def _read_fields(process: subprocess.Popen[str], *names: str) -> list[Any]:
    fields = json.loads(_line(process))
    return [fields[name] for name in names]
