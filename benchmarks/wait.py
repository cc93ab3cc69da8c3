"""W5: ten thousand waiting triggers, and one that waits for a million jobs whose ends are stored already.

The second is the worst case of a task that publishes very many jobs: workers end them while it still publishes, and its
trigger then has the ends of all of them to read. The other triggers of its process wait for as long as it holds the
event loop, so the lag of the loop counts as much as the time. Lag is how late a timer is, with all that other processes
of the machine do meanwhile. A hold is how long the loop's thread worked on one callback, by its own CPU time and
without the collector.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.contract import MSG_ID, completion_subject
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from benchmarks.loop_lag import Holds, LoopLags
from benchmarks.report import Goal, Sample, Table, Way, Workload, measure_in_turns, run_workload, server_cpu
from testbed.nats_server import NatsServer
from testbed.queues import eventually
from testbed.text_table import text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WAITED_QUEUE = "jobs"
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
        arguments = asyncio.run(_prepare_waiters(server.url, count))
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
            ends = ["waiting_completer", kind, server.url, WAITED_QUEUE, count, rate, limit]
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


async def _prepare_waiters(url: str, count: int) -> dict[str, Any]:
    """Store the jobs, and return the arguments of the trigger that waits for the first."""
    declaration: dict[str, Any] = {
        "name": WAITED_QUEUE,
        "subjects": [f"{WAITED_QUEUE}.new"],
        "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s", "max_ack_pending": -1}],
        "dead_letters": f"{WAITED_QUEUE}-dead",
        "events": f"{WAITED_QUEUE}-events",
        "archive": False,
        "audit": False,
    }
    queue = WorkQueue(**declaration)
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        await provision(connection, queue)
        cursor = await take_cursor(connection, queue)
        jetstream = connection.client.jetstream(timeout=30)
        for start in range(0, count, IN_FLIGHT):
            jobs = (jetstream.publish(f"{WAITED_QUEUE}.new", BODY) for _ in range(min(IN_FLIGHT, count - start)))
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
        "summary": {"published": 1, "duplicates": 0, "stream": WAITED_QUEUE, "sequences": [[1, 1]], "scheduled": 0},
        "cancel_on_kill": False,
    }


def _count_connections(server: NatsServer, measured: Measured) -> None:
    connections = server.monitor("connz?limit=100000")["connections"]
    measured.connections = len(connections)
    measured.subscriptions = sum(connection["subscriptions"] for connection in connections)
    streams = server.monitor("jsz?streams=true&consumers=true")["account_details"][0]["stream_detail"]
    measured.consumers = sum(
        len(stream.get("consumer_detail") or ()) for stream in streams if stream["name"] != WAITED_QUEUE
    )


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


PEERS = """The cost of ten thousand waiting triggers and their latency, beside other methods of waiting.

Fairness: every method gets a server of its own with the default ``sync_interval``, and a process of its own in which
each waiter is a trigger, made from its stored arguments as a triggerer makes it, with the Airflow connection in an
environment variable. Another process ends the jobs at a steady rate, in the same order for every method: it stores a
completion, or for taskiq a result in taskiq's own store. Methods take turns; figures are medians, but ``max`` is the
maximum of all rounds. A round counts only if every waiter fired exactly once, for its own job; waiters that failed are
shown as failed, since the peers have their limits, and fail the run if they are this package's.

Memory is the growth of the process while its waiters started, less the growth of a process with as many idle triggers
with the same arguments. Latency is from the moment at which the other process had the server's confirmation that an end
is stored until the trigger's event, by a clock that all processes of the machine share; it is below zero where the
event precedes the confirmation. From the sending of the end it is longer, by the time to store it. CPU is the waiting
process's, with the ticker of 5 ms that measures the lag of the event loop.

The peers get better conditions than in practice: polls are spread over the second and share one connection; a waiter
with its own connection receives a completion before it is stored. Neither looks for dead jobs. Airflow's time from the
trigger's event until the task resumes is the same for all and not in the figures.
"""

Scenario = tuple[str, int]

MANY, EQUAL, FEW = 10_000, 1_000, 100
# With fewer waiters, most of the growth is the process's own.
MEMORY_MIN_WAITERS = 1_000
SCENARIOS: list[Scenario] = [
    (IDLE, MANY),
    (OURS, MANY),
    (IDLE, EQUAL),
    (OURS, EQUAL),
    ("connection-each", EQUAL),
    ("poll-each", EQUAL),
    (OURS, FEW),
    (TASKIQ, FEW),
    (TASKIQ, EQUAL),
]
# One connection with one inbox for answers; three subscriptions and consumers for a queue with dead letters and audit.
OUR_SUBSCRIPTIONS, OUR_CONSUMERS = 5, 3


def measure_beside_peers(arguments: Sequence[str]) -> int:
    """Measure all methods of waiting, and print the tables."""
    parser = argparse.ArgumentParser(prog="wait --peers", description=PEERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1_000.0, help="how many jobs end per second")
    parser.add_argument("--scenarios", nargs="+", type=_scenario, default=SCENARIOS, help="such as ours:10000")
    options = parser.parse_args(arguments)
    scenarios: list[Scenario] = options.scenarios
    if find_spec("taskiq_nats") is None:
        print("taskiq-nats isn't installed and is left out: it comes with uv run --group bench")
        scenarios = [scenario for scenario in scenarios if scenario[0] != TASKIQ]
    results: dict[Scenario, list[Measured]] = {scenario: [] for scenario in scenarios}
    for turn in range(1, options.rounds + 1):
        print(f"round {turn} of {options.rounds}", file=sys.stderr)
        for method, count in scenarios:
            measured = measure(method, count, options.rate)
            if method == OURS:
                _require_counts(measured, count)
            results[method, count].append(measured)
    waiting_results = {scenario: rounds for scenario, rounds in results.items() if scenario[0] != IDLE}
    print(_costs(waiting_results, results), end="\n\n")
    print(_times(waiting_results), end="\n\n")
    for (method, count), rounds in waiting_results.items():
        for cause, number in sum((measured.failures for measured in rounds), Counter[str]()).most_common(3):
            print(f"{method}, {count:,} waiters: {number:,} times {cause}")
    return 0


def _scenario(text: str) -> Scenario:
    method, _, count = text.partition(":")
    if method not in METHODS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(METHODS)}, found {method!r}")
    return method, int(count)


def _require_counts(measured: Measured, count: int) -> None:
    counts = (measured.connections, measured.subscriptions, measured.consumers)
    if measured.failures or counts[0] != 1 or counts[1] > OUR_SUBSCRIPTIONS or counts[2] > OUR_CONSUMERS:
        raise SystemExit(
            f"ours, {count:,} waiters: expected one event each over 1 connection, {OUR_SUBSCRIPTIONS} subscriptions and"
            f" {OUR_CONSUMERS} consumers, found {counts} and failures {dict(measured.failures)}"
        )


def _costs(waiting_results: dict[Scenario, list[Measured]], results: dict[Scenario, list[Measured]]) -> str:
    count_names = ("connections", "subscriptions", "consumers")
    head = ("method", "waiters", *count_names, "bytes each", "all wait after s", "CPU us each")
    rows = []
    for (method, count), rounds in waiting_results.items():
        full = _full(rounds)
        rows.append(
            (
                method,
                f"{count:,}",
                *(f"{statistics.median(getattr(measured, name) for measured in rounds):,.0f}" for name in count_names),
                _bytes(full, results.get((IDLE, count), []), count),
                _median([measured.start for measured in full], "{:.2f}"),
                _median([measured.cpu / count * 1e6 for measured in full], "{:,.0f}"),
            )
        )
    return text_table(head, rows)


def _times(waiting_results: dict[Scenario, list[Measured]]) -> str:
    head = ("method, times in ms", "waiters", "full rounds", "failed", "lag p50", "p99", "max")
    rows = []
    for (method, count), rounds in waiting_results.items():
        full = _full(rounds)
        failed = statistics.median(sum(measured.failures.values()) for measured in rounds)
        rows.append(
            (
                method,
                f"{count:,}",
                f"{len(full)} of {len(rounds)}",
                f"{failed:,.0f}",
                *_quantiles([measured.lags for measured in full]),
                *_quantiles([measured.latencies for measured in full]),
                *_quantiles([measured.from_sending for measured in full])[:2],
            )
        )
    return text_table((*head, "latency p50", "p99", "max", "from sending p50", "p99"), rows)


def _full(rounds: Sequence[Measured]) -> list[Measured]:
    return [measured for measured in rounds if not measured.failures]


def _bytes(full: Sequence[Measured], idle: Sequence[Measured], count: int) -> str:
    if count < MEMORY_MIN_WAITERS or not idle:
        return "-"
    idle_bytes = statistics.median(measured.memory_growth for measured in idle)
    return _median([(measured.memory_growth - idle_bytes) / count for measured in full], "{:,.0f}")


def _quantiles(rounds: Sequence[Sequence[float]]) -> tuple[str, str, str]:
    def quantile(share: float) -> Callable[[Sequence[float]], float]:
        return lambda values: sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3

    worst = f"{max(max(values) for values in rounds) * 1e3:,.1f}" if rounds else "-"
    return (
        _median([quantile(0.5)(values) for values in rounds], "{:,.1f}"),
        _median([quantile(0.99)(values) for values in rounds], "{:,.1f}"),
        worst,
    )


def _median(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else "-"


QUEUE, CONSUMER = "many", "worker"
FLUSHED_AT_ONCE = 2_000
TICK_SECONDS = 0.002
LAG, MEMORY, BYTES, LATENCY = "loop lag max ms", "MiB", "bytes a waiter", "p50 ms"
OWN_LAG, COLLECTOR, HOLD = "without the collector", "collector max ms", "longest hold ms"


def many_jobs(count: int, server: NatsServer) -> Sample:
    """Wait for jobs whose completions are stored, in a process of its own."""
    arguments = asyncio.run(_prepare(server.url, count))
    before = server_cpu(server)
    with tempfile.TemporaryDirectory() as home:
        connection = {"conn_type": "nats", "host": "127.0.0.1", "port": server.port}
        environment = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW_CONN_NATS_DEFAULT": json.dumps(connection)}
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.wait", "--trigger", json.dumps(arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    measured = json.loads(process.stdout.splitlines()[-1])
    if measured["completed"] != [[1, count]]:
        raise SystemExit(f"expected {count:,} jobs completed, found {measured['completed'][:5]}")
    lags = {LAG: "lag", OWN_LAG: "own", COLLECTOR: "collector", HOLD: "hold"}
    extra = {name: measured[key] * 1e3 for name, key in lags.items()} | {MEMORY: measured["memory"] / 2**20}
    return Sample(count, measured["seconds"], measured["cpu"], server_cpu(server) - before, extra)


async def _prepare(url: str, count: int) -> dict[str, Any]:
    """Store a completion for each job, and return the arguments of the trigger that waits for all."""
    queue = WorkQueue(
        name=QUEUE,
        subjects=[f"{QUEUE}.new"],
        consumers=[{"name": CONSUMER, "max_deliver": 1}],
        events=f"{QUEUE}-events",
    )
    async with connect(connection_settings({"servers": (url,), "timeout": 60})) as connection:
        await provision(connection, queue)
        cursor = await take_cursor(connection, queue)
        for start in range(1, count + 1, FLUSHED_AT_ONCE):
            sequences = range(start, min(count + 1, start + FLUSHED_AT_ONCE))
            connection.write(b"".join(map(_completion, sequences)), len(sequences))
            # The server answers once it has taken them; it stores them in this order.
            await connection.client.flush(60)
            await stream_info(connection, f"{QUEUE}-events")

        async def are_stored() -> bool:
            return int((await stream_info(connection, f"{QUEUE}-events"))["state"]["messages"]) == count

        await eventually(are_stored, within=60)
    return {
        "nats_conn_id": "nats_default",
        "handle": JobsHandle(cursor=cursor, sequences=[(1, count)]).as_json(),
        "tolerance": {"max_dead": 0, "max_cancelled": 0, "max_unaccounted": 0, "min_completed": None},
        "deadline": time.time() + HOUR,
        "deferred_at": time.time() - HOUR,
        "summary": {},
    }


def _completion(sequence: int) -> bytes:
    """Encode the completion of a job as a worker of this package publishes it."""
    body = (
        f'{{"id":"job-{sequence}","timestamp":"{datetime.now(UTC).isoformat()[:-6]}Z","stream":"{QUEUE}",'
        f'"consumer":"{CONSUMER}","stream_seq":{sequence},"deliveries":1,'
        f'"type":"io.airflow.jetstream.v1.completion","job_id":"job-{sequence}","worker":"worker-1"}}'
    )
    headers = encode_headers({MSG_ID: f"done:{QUEUE}:{sequence}:{time.time_ns()}"})
    return encode_message(completion_subject(QUEUE, CONSUMER, sequence).encode(), body.encode(), headers)


async def wait_for_many(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a trigger, and measure its process."""
    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger

    # A triggerer has imported Airflow's connections, and has read this one, when its second trigger starts.
    async with JetStreamHook(arguments["nats_conn_id"]).shared():
        pass
    gc.collect()
    holds = Holds()
    holds.install()
    lags = LoopLags(TICK_SECONDS)
    lags.start()
    memory, cpu, began = psutil.Process().memory_info().rss, time.process_time(), time.perf_counter()
    trigger = JobCompletionTrigger(**arguments)
    payload = (await anext(aiter(trigger.run()))).payload
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    lags.stop()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "lag": lags.longest,
        "own": lags.longest_without_collector,
        "collector": lags.longest_collection,
        "hold": holds.longest,
        "memory": psutil.Process().memory_info().rss - memory,
        "completed": payload["report"]["completed_sequences"],
    }


def many_waiters(count: int, rounds: int) -> tuple[Way, float, float]:
    """Measure one trigger for each job; return the way, bytes a waiter beyond an idle trigger, and seconds of p50."""
    samples, growths, latencies = [], list[float](), list[float]()
    for turn in range(1, rounds + 1):
        print(f"round {turn} of {rounds}: {count:,} waiters", file=sys.stderr, flush=True)
        idle, ours = (measure(method, count, 1_000.0) for method in (IDLE, OURS))
        if ours.failures:
            raise SystemExit(f"expected one event for each waiter, found {dict(ours.failures)}")
        growths.append((ours.memory_growth - idle.memory_growth) / count)
        latencies.append(_middle(ours.latencies))
        samples.append(_sample(ours, count, growths[-1], latencies[-1]))
    return Way(f"{count:,} triggers", samples), _middle(growths), _middle(latencies)


def _sample(measured: Measured, count: int, growth: float, latency: float) -> Sample:
    lags = {LAG: max(measured.lags), OWN_LAG: measured.own_lag, COLLECTOR: measured.collection}
    extra = {name: value * 1e3 for name, value in lags.items()} | {BYTES: growth, LATENCY: latency * 1e3}
    return Sample(count, count / 1_000.0, measured.cpu, 0.0, extra)


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _lag_limit(way: Way) -> str:
    """Say how much of the lag is the collector's, whose full passes look at all objects of Airflow as well."""
    return (
        f"{way.extra(OWN_LAG):.0f} ms of it are not of Python's collector, which stops the process for up to"
        f" {way.extra(COLLECTOR):.0f} ms in one pass over all objects that Airflow and the triggers hold"
    )


def measure_waits(short: bool) -> Workload:  # noqa: FBT001
    """Measure both forms."""
    jobs, waiters, rounds = (50_000, 1_000, 1) if short else (1_000_000, 10_000, 5)
    (one,) = measure_in_turns({"one trigger": partial(many_jobs, jobs)}, rounds)
    many, growth, latency = many_waiters(waiters, rounds)
    return Workload(
        "W5",
        "Waits: many waiters, and one for very many jobs",
        "wait",
        __doc__ or "",
        [
            Table(f"wait for {jobs:,} jobs", "ends", [one]),
            Table(f"{waiters:,} waits for a job each, 1,000 ends a second", "ends", [many]),
        ],
        [
            Goal("longest hold of the loop by one trigger, ms", one.extra(HOLD), 20.0, at_most=True),
            Goal("loop lag max of one trigger, ms", one.extra(LAG), 20.0, at_most=True, limit=_lag_limit(one)),
            Goal(f"loop lag max of {waiters:,}, ms", many.extra(LAG), 20.0, at_most=True, limit=_lag_limit(many)),
            Goal("bytes a waiter", growth, 2_048.0, at_most=True),
            Goal("p50 from the stored end to the trigger's event, ms", latency * 1e3, 1.0, at_most=True),
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trigger"]:
        print(json.dumps(asyncio.run(wait_for_many(json.loads(sys.argv[2])))))
    elif sys.argv[1:2] == ["--peers"]:
        sys.exit(measure_beside_peers(sys.argv[2:]))
    else:
        sys.exit(run_workload(measure_waits, __doc__))
