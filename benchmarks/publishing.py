"""W1 and W7: publishing small jobs with ids, each acknowledged, beside a C program and peers as their docs use them.

Every way gets a server of its own with the default ``sync_interval`` and a process of its own; ways take turns. A round
counts only if the stream holds every job once. The rate is that of the call alone, without connecting; the jobs' bodies
exist before it. Where a peer has no window of its own, 256 calls are gathered.
"""

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.publishing.job import prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.publisher import publish, publish_prepared
from airflow_provider_jetstream.jetstream.publishing.report import Destination
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from benchmarks.c_floor import compiled, run_floor
from benchmarks.report import ROUNDS, Goal, Sample, Table, Way, Workload, measure_in_turns, run_workload, server_cpu
from testbed.nats_server import NatsServer

QUEUE, SUBJECT = "jobs", "jobs.new"
WINDOW, FLOOR_WINDOW = 256, 1024
FLOOR = "C, raw socket"
OURS, PREPARED, TASK = "`publish`", "`publish`, its sending alone", "`publish` of a task, with its manifest"
ONE_BY_ONE, GATHERED, ASYNC = "nats-py, one by one", "nats-py, gather of 256", "nats-py, `publish_async`"
FASTSTREAM, TASKIQ = "FastStream, gather of 256", "taskiq-nats, gather of 256"
# From so many jobs on, growth is measured up to a million.
_WITH_A_MILLION = 100_000
# Ways that are too slow for the whole number.
FEWER = {ONE_BY_ONE: 10, GATHERED: 2, FASTSTREAM: 4, TASKIQ: 4}
DECLARATION = {
    "name": QUEUE,
    "subjects": [SUBJECT],
    "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s", "max_ack_pending": -1}],
    "dead_letters": f"{QUEUE}-dead",
    "events": f"{QUEUE}-events",
    "archive": False,
    "audit": False,
}


def bodies_of(count: int, size: int) -> list[bytes]:
    """Return bodies of one size, each another one."""
    return [b"%0*d" % (size, number) for number in range(count)]


async def ours(url: str, count: int, size: int) -> float:
    """Publish a list of bodies."""
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        bodies, began = bodies_of(count, size), time.perf_counter()
        await publish(connection, WorkQueue(**DECLARATION), bodies, subject=SUBJECT)
        return time.perf_counter() - began


async def task(url: str, count: int, size: int) -> float:
    """Publish a list of bodies as a task does that can be tried again."""
    origin = Origin("dag", "task", "run", max_tries=2)
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        bodies, began = bodies_of(count, size), time.perf_counter()
        await publish(connection, WorkQueue(**DECLARATION), bodies, subject=SUBJECT, origin=origin)
        return time.perf_counter() - began


async def prepared(url: str, count: int, size: int) -> float:
    """Publish jobs that have their subjects, ids and headers."""
    jobs = list(prepare_jobs(bodies_of(count, size), subject=SUBJECT, origin=None, batch="b"))
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        began = time.perf_counter()
        report = await publish_prepared(connection, jobs, destination=Destination(QUEUE))
        seconds = time.perf_counter() - began
        report.raise_for_failures()
        return seconds


async def one_by_one(url: str, count: int, size: int) -> float:
    """Await each acknowledgement before the next message."""
    import nats

    async with await nats.connect(url) as client:
        jetstream, bodies, began = client.jetstream(), bodies_of(count, size), time.perf_counter()
        for number, body in enumerate(bodies):
            await jetstream.publish(SUBJECT, body, headers={"Nats-Msg-Id": str(number)})
        return time.perf_counter() - began


async def gathered(url: str, count: int, size: int) -> float:
    """Await 256 acknowledgements together."""
    import nats

    async with await nats.connect(url) as client:
        jetstream = client.jetstream(timeout=30)
        return await _in_windows(
            lambda number, body: jetstream.publish(SUBJECT, body, headers={"Nats-Msg-Id": str(number)}), count, size
        )


async def publish_async(url: str, count: int, size: int) -> float:
    """Use nats-py's own window of 4,000."""
    import nats

    async with await nats.connect(url) as client:
        jetstream, bodies, began = client.jetstream(timeout=30), bodies_of(count, size), time.perf_counter()
        for number, body in enumerate(bodies):
            await jetstream.publish_async(SUBJECT, body, headers={"Nats-Msg-Id": str(number)})
        await jetstream.publish_async_completed()
        return time.perf_counter() - began


async def faststream(url: str, count: int, size: int) -> float:
    """Publish by FastStream's broker; like the other peer, it isn't in the environment of development."""
    broker_of: Any = importlib.import_module("faststream.nats").NatsBroker
    async with broker_of(url, logger=None) as broker:
        await broker.start()
        return await _in_windows(
            lambda number, body: broker.publish(
                body, SUBJECT, headers={"Nats-Msg-Id": str(number)}, stream=QUEUE, timeout=30
            ),
            count,
            size,
        )


async def taskiq(url: str, count: int, size: int) -> float:
    """Publish by taskiq's broker, whose messages have no ids."""
    message_of: Any = importlib.import_module("taskiq").BrokerMessage
    broker: Any = importlib.import_module("taskiq_nats").PullBasedJetStreamBroker(
        servers=[url], stream_name=QUEUE, subject=SUBJECT
    )
    await broker.client.connect(servers=[url])
    broker.js = broker.client.jetstream(timeout=30)
    seconds = await _in_windows(
        lambda number, body: broker.kick(message_of(task_id=str(number), task_name="job", message=body, labels={})),
        count,
        size,
    )
    await broker.client.close()
    return seconds


async def _in_windows(send: Callable[[int, bytes], Awaitable[object]], count: int, size: int) -> float:
    bodies, began = bodies_of(count, size), time.perf_counter()
    for start in range(0, count, WINDOW):
        await asyncio.gather(*(send(start + place, body) for place, body in enumerate(bodies[start : start + WINDOW])))
    return time.perf_counter() - began


WAYS: dict[str, Callable[[str, int, int], Awaitable[float]]] = {
    OURS: ours,
    PREPARED: prepared,
    TASK: task,
    ASYNC: publish_async,
    GATHERED: gathered,
    ONE_BY_ONE: one_by_one,
    FASTSTREAM: faststream,
    TASKIQ: taskiq,
}


def measured(name: str, count: int, size: int, server: NatsServer) -> Sample:
    """Measure one way on a fresh server, and check that every job is stored once."""
    asyncio.run(_provision(server.url))
    if name == FLOOR:
        program = compiled("publish")
        if program is None:
            raise SystemExit("expected a C compiler, found none")
        sample = run_floor(program, server, SUBJECT, count, size, FLOOR_WINDOW)
    else:
        before = server_cpu(server)
        command = [sys.executable, "-m", "benchmarks.publishing", "--measure", name, server.url, str(count), str(size)]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        sample = Sample(count, figures["seconds"], figures["cpu"], server_cpu(server) - before)
    details = server.monitor("jsz?streams=true")["account_details"][0]["stream_detail"]
    stored = next(stream["state"]["messages"] for stream in details if stream["name"] == QUEUE)
    if stored != count:
        raise SystemExit(f"{name}: expected {count} jobs stored, found {stored}")
    return sample


async def _provision(url: str) -> None:
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        await provision(connection, WorkQueue(**DECLARATION))


def table(title: str, count: int, size: int, rounds: int) -> Table:
    """Measure all ways that can be measured here."""
    missing = {name for name, module in ((FASTSTREAM, "faststream"), (TASKIQ, "taskiq_nats")) if not find_spec(module)}
    floor = [FLOOR] if compiled("publish") else []
    names = [name for name in (*floor, *WAYS) if name not in missing]
    ways = {name: partial(measured, name, count // FEWER.get(name, 1), size) for name in names}
    return Table(title, "jobs", measure_in_turns(ways, rounds), FLOOR if FLOOR in names else "")


def goals(measurement: Table, size: str) -> list[Goal]:
    """Compare the figures of one size with the goals of W1."""
    compared: list[tuple[str, str, str, float]] = [
        (OURS, FLOOR, "of the C floor", 0.75),
        (PREPARED, FLOOR, "of the C floor", 0.75),
        (TASK, FLOOR, "of the C floor", 0.6),
        (OURS, ASYNC, f"times {ASYNC}", 4.0),
        (OURS, FASTSTREAM, f"times {FASTSTREAM}", 6.0),
        (OURS, TASKIQ, f"times {TASKIQ}", 6.0),
    ]
    names = {way.name for way in measurement.ways}
    limit = "identity, checks and headers of each job are computed in Python, see the client's µs"
    return [
        Goal(f"{way}, {size}, {text}", measurement.share(way, other), goal, limit=limit)
        for way, other, text, goal in compared
        if {way, other} <= names
    ]


def growth(counts: Sequence[int], rounds: int) -> Table:
    """Measure the CPU per job of ever more jobs; of the largest number once."""
    ways: list[Way] = []
    for count in counts:
        turns = 1 if count == max(counts) else rounds
        (way,) = measure_in_turns({OURS: partial(measured, OURS, count, 200)}, turns)
        ways.append(Way(f"{count:,} jobs", way.samples))
    return Table("growth of `publish`, 200 B", "jobs", ways)


def workload(short: bool, jobs: int = 100_000) -> Workload:  # noqa: FBT001
    """Measure everything."""
    count, rounds = (10_000, 1) if short else (jobs, ROUNDS)
    small, large = table("200 B", count, 200, rounds), table("1 KiB", count, 1024, rounds)
    most = (1_000, 10_000) if short else (1_000, 10_000, 100_000, *([1_000_000] if jobs >= _WITH_A_MILLION else []))
    grown = growth(most, 1 if short else 3)
    flat = [way.client_microseconds for way in grown.ways[1:]]
    text = (
        f"Publishing {count:,} jobs with message ids, each acknowledged by the server; fewer by the slowest ways."
        " *Client µs* is CPU for each job, with that of connecting and of making the bodies, which dominates where jobs"
        " are few; *server µs* is the server's. Every stream was checked to hold each job once. The largest number of"
        " the last table was measured once."
    )
    return Workload(
        "W1",
        "Publishing",
        "publishing",
        text,
        [small, large, grown],
        [
            *goals(small, "200 B"),
            *goals(large, "1 KiB"),
            Goal("W7: CPU per job, largest to smallest from 10,000 jobs on", max(flat) / min(flat), 1.2, at_most=True),
        ],
    )


def main() -> int:
    """Measure one way in this process, or all in processes of their own."""
    if "--measure" not in sys.argv:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--jobs", type=int, default=100_000)
        options, sys.argv[1:] = parser.parse_known_args()
        return run_workload(partial(workload, jobs=options.jobs), __doc__)
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", nargs=4)
    name, url, count, size = parser.parse_args().measure
    before = time.process_time()
    seconds = asyncio.run(_measured_apart(WAYS[name], url, int(count), int(size)))
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - before}))
    return 0


async def _measured_apart(way: Callable[[str, int, int], Awaitable[float]], url: str, count: int, size: int) -> float:
    return await way(url, count, size)


if __name__ == "__main__":
    sys.exit(main())
