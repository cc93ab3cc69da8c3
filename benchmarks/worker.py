"""W2 and W6: a worker whose jobs do nothing, beside a loop of nats-py and a C program, and its latency.

Every way gets a fresh server with the jobs already stored, and a process of its own. A round counts only if the queue
is empty afterwards and each job has one completion.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from benchmarks.dead_queue import open_connection
from benchmarks.report import ROUNDS, Goal, Sample, Table, Way, Workload, measure_in_turns, run_workload, server_cpu
from benchmarks.worker_ways import BATCH, CONSUMER, SLEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from testbed.nats_server import NatsServer

QUEUE = "bench"
BODY = b"x" * 200
_IN_FLIGHT = 1_000
_VERIFY_TRIES, _VERIFY_PAUSE = 300, 0.1
_TEN_CALLS = "worker, batches of 100, ten calls"
_BOUNDED = "C floor, at most 200 jobs at a time"
_FLOOR = Path(__file__).parent / "floor" / "worker.c"
_TEXT = """Jobs of 200 bytes with ids, stored before; the handlers are async and do nothing, unless the way says else.
A completion is stored for each job, and its acknowledgement is confirmed after that; the plain ways acknowledge only
(the worker's and nats-py's acknowledgements are confirmed, the floor's aren't). The floor is a C program that keeps two
pull requests of 1,000 open and checks nothing, however many jobs aren't settled yet. A worker has at most twice as many
unsettled jobs as its handlers have: 200 with 100 slots or one call of 100 jobs, 2,000 with ten calls; a second run of
the C program has at most 200 requested or unsettled. The loop of nats-py fetches as many jobs as it has slots, and
gathers what it does for each. Beside the worker's jobs of 5 ms stand as many tasks that only sleep. CPU is that of the
process and of the server for one job. Logging is off."""


def main() -> int:
    """Measure the workload."""
    return run_workload(measure, __doc__)


def measure(short: bool) -> Workload:  # noqa: FBT001
    """Measure all ways."""
    rounds, part = (1, 10) if short else (ROUNDS, 1)
    with tempfile.TemporaryDirectory() as folder:
        floor = _compile(Path(folder) / "floor")
        confirmed = {
            **_floor("C floor", floor, 20_000 // part, "confirmed"),
            **_floor(_BOUNDED, floor, 20_000 // part, "confirmed", str(2 * BATCH)),
            "worker, 100 slots": _apart("worker", 100, 20_000 // part),
            "worker, 10 slots": _apart("worker", 10, 10_000 // part),
            "worker, 1 slot": _apart("worker", 1, 5_000 // part),
            "worker, 100 slots, plain functions": _apart("threads", 100, 10_000 // part),
            "worker, batches of 100": _apart("batch", BATCH, 20_000 // part),
            _TEN_CALLS: _apart("batch", 10 * BATCH, 20_000 // part),
            "nats-py, 100 at a time": _apart("nats-py", 100, 10_000 // part),
            "nats-py, one after another": _apart("docs", 100, 5_000 // part),
            "worker, 100 slots, jobs of 5 ms": _apart("sleep", 100, 40_000 // part),
            "asyncio alone, 100 tasks that sleep 5 ms": _apart("sleep alone", 100, 40_000 // part, jobs_are_done=False),
            "worker, 10 slots, light load": _apart("light", 10, 300, publish=False),
            "trigger, light load": _apart("ends", 10, 100, publish=False),
        }
        plain = {
            **_floor("C floor", floor, 20_000 // part, "plain"),
            "worker, 100 slots": _apart("worker", 100, 20_000 // part, events=False),
            "worker, batches of 100": _apart("batch", BATCH, 20_000 // part, events=False),
            _TEN_CALLS: _apart("batch", 10 * BATCH, 20_000 // part, events=False),
            "nats-py, 100 at a time": _apart("nats-py", 100, 10_000 // part, events=False),
        }
        ways = measure_in_turns(confirmed, rounds)
        plain_ways = measure_in_turns(plain, rounds)
    name = "C floor" if floor else ""
    apart = {way.name: way for way in ways}
    light, sleeping = apart["worker, 10 slots, light load"], apart["worker, 100 slots, jobs of 5 ms"]
    sleeps = apart["asyncio alone, 100 tasks that sleep 5 ms"]
    ends = apart["trigger, light load"]
    with_work = [way for way in ways if way not in (light, sleeping, sleeps, ends)]
    tables = [
        Table("completion and confirmed acknowledgement", "jobs", with_work, name),
        Table("plain acknowledgement", "jobs", plain_ways, name),
        Table("with time", "jobs", [sleeps, sleeping], sleeps.name),
        Table("from publishing to the handler (W6)", "jobs", [light]),
        Table("from the handler's end to the trigger's event (W6)", "jobs", [ends]),
    ]
    return Workload("W2", "Workers", "worker", _TEXT, tables, _goals(tables[0], tables[2], light, ends))


def _goals(table: Table, with_time: Table, light: Way, ends: Way) -> list[Goal]:
    sleeps, sleeping = with_time.ways
    at_hundred, batches, loop = "worker, 100 slots", "worker, batches of 100", "nats-py, 100 at a time"
    slots_limit, batches_limit, calls_limit = (_core(table, name) for name in (at_hundred, batches, _TEN_CALLS))
    of_floor = (
        ("100 slots", at_hundred, table.floor, 0.3, slots_limit),
        ("100 slots", at_hundred, _BOUNDED, 0.3, slots_limit),
        ("batches of 100, ten calls at a time", _TEN_CALLS, table.floor, 0.5, calls_limit),
        ("batches of 100, one call at a time", batches, table.floor, 0.5, batches_limit),
        ("batches of 100, one call at a time", batches, _BOUNDED, 0.5, batches_limit),
    )
    return [
        *(
            Goal(f"{text}, of the {floor}", table.share(name, floor), goal, limit=limit)
            for text, name, floor, goal, limit in of_floor
            if table.floor
        ),
        Goal("100 slots, of the loop of nats-py", table.share(at_hundred, loop), 2.5, limit=slots_limit),
        Goal("1 slot, jobs a second", table.way("worker, 1 slot").rate, 2_000),
        Goal(
            "jobs of 5 ms, of what 100 slots could do",
            sleeping.rate * SLEEP / 100,
            0.9,
            limit=f"a sleep of 5 ms takes longer in asyncio, whose selector counts in milliseconds: 100 tasks that do"
            f" nothing else reach {sleeps.rate * SLEEP / 100:.2f}",
        ),
        Goal("jobs of 5 ms, of what 100 tasks do that only sleep", with_time.share(sleeping.name), 0.9),
        Goal("from publishing to the handler at light load, p50 in ms", light.extra("p50 ms"), 2.0, at_most=True),
        Goal("from the handler's end to the trigger's event, p50 in ms", ends.extra("p50 ms"), 4.0, at_most=True),
    ]


def _core(table: Table, name: str) -> str:
    """Say how much of the machine a way uses, and what it could reach if it never waited."""
    way, cores = table.way(name), os.cpu_count() or 1
    ours, servers = way.client_microseconds, way.server_microseconds
    most = 1e6 / max(ours, (ours + servers) / cores)
    bound = (
        f": at most {most:,.0f} a second, {most / table.way(table.floor).rate:.2f} of the floor" if table.floor else ""
    )
    return (
        f"{ours:.0f} µs of the worker's CPU a job and {servers:.0f} of the server's, which confirms each"
        f" acknowledgement, on {cores} cores{bound}, if neither waited for the other. The worker has"
        f" {ours * way.rate / 1e6:.0%} of a core: fed without a server, a third of it is the message with its headers,"
        " a quarter or more the handler's start, an eighth the completion with its id, and the rest both confirmations."
        " In the rest it waits for the server, which has at most twice as many of its jobs as there are slots"
    )


def _compile(target: Path) -> Path | None:
    """Compile the floor, where a compiler is."""
    if (compiler := shutil.which("cc")) is None:
        return None
    subprocess.run([compiler, "-O2", "-o", str(target), str(_FLOOR)], check=True)
    return target


def _floor(name: str, program: Path | None, jobs: int, *options: str) -> dict[str, Callable[[NatsServer], Sample]]:
    return {name: partial(_run_floor, program, jobs, options)} if program else {}


def _run_floor(program: Path, jobs: int, options: Sequence[str], server: NatsServer) -> Sample:
    queue = asyncio.run(_prepare(server.url, jobs, events="confirmed" in options, publish=True))
    before = server_cpu(server)
    command = [str(program), str(server.port), queue.name, CONSUMER, str(jobs), *options]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, cpu = map(float, ended.stdout.split())
    used = server_cpu(server) - before
    asyncio.run(_verify(server.url, queue, jobs))
    return Sample(jobs, seconds, cpu, used)


def _apart(
    kind: str, slots: int, jobs: int, *, events: bool = True, publish: bool = True, jobs_are_done: bool = True
) -> Callable[[NatsServer], Sample]:
    """Return a way that runs in a process of its own."""

    def run(server: NatsServer) -> Sample:
        queue = asyncio.run(_prepare(server.url, jobs, events=events, publish=publish and jobs_are_done))
        declaration = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
        command = [sys.executable, "-m", "benchmarks.worker_ways", server.url, kind, str(slots), str(jobs), declaration]
        before = server_cpu(server)
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        used = server_cpu(server) - before
        figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
        if jobs_are_done:
            asyncio.run(_verify(server.url, queue, jobs))
        return Sample(jobs, figures.pop("seconds"), figures.pop("cpu"), used, figures)

    return run


async def _prepare(url: str, jobs: int, *, events: bool, publish: bool) -> WorkQueue:
    declaration: dict[str, Any] = {
        "name": QUEUE,
        "subjects": [f"{QUEUE}.jobs"],
        "consumers": [
            {"name": CONSUMER, "ack_wait": "30s", "max_ack_pending": -1, "max_deliver": 3, "sample_freq": "0"}
        ],
        "dead_letters": f"{QUEUE}-dead",
        "events": f"{QUEUE}-events" if events else None,
        "archive": False,
        "audit": False,
    }
    queue = WorkQueue(**declaration)
    async with open_connection(url) as connection:
        await provision(connection, queue)
        jetstream = connection.client.jetstream(timeout=60)
        for start in range(0, jobs if publish else 0, _IN_FLIGHT):
            numbers = range(start, min(jobs, start + _IN_FLIGHT))
            await asyncio.gather(
                *(jetstream.publish(f"{QUEUE}.jobs", BODY, headers={"Nats-Msg-Id": f"job-{n}"}) for n in numbers)
            )
    return queue


async def _verify(url: str, queue: WorkQueue, jobs: int) -> None:
    async with open_connection(url) as connection:
        # The server handles acknowledgements that it doesn't confirm some time after it has received them.
        for _ in range(_VERIFY_TRIES):
            left = (await stream_info(connection, queue.name))["state"]["messages"]
            if not left:
                break
            await asyncio.sleep(_VERIFY_PAUSE)
        done = (await stream_info(connection, queue.events.name))["state"]["messages"] if queue.events else jobs
    if (left, done) != (0, jobs):
        raise SystemExit(f"expected {jobs} jobs completed and none left, found {done} completed and {left} left")


if __name__ == "__main__":
    sys.exit(main())
