"""W5: ten thousand waiting triggers, and one that waits for a million jobs whose ends are stored already.

The second is the worst case of a task that publishes very many jobs: workers end them while it still publishes, and its
trigger then has the ends of all of them to read. The other triggers of its process wait for as long as it holds the
event loop, so the lag of the loop counts as much as the time. Lag is how late a timer is, with all that other processes
of the machine do meanwhile. A hold is how long the loop's thread worked on one callback, by its own CPU time and
without the collector.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

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
from benchmarks.waiting_round import HOUR, IDLE, OURS, Measured, measure
from testbed.nats_server import NatsServer
from testbed.queues import eventually

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
    else:
        sys.exit(run_workload(measure_waits, __doc__))
