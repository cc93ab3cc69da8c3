"""W1: publishing small jobs with ids, each acknowledged, beside a C program and peers as their docs use them.

Every way gets a server of its own with the default ``sync_interval`` and a process of its own; ways take turns. A round
counts only if the stream holds every job once. The rate is that of the call alone, without connecting; the jobs' bodies
exist before it. Where a peer has no window of its own, 256 calls are gathered.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.wire import PublishAckForm
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.publication import publish
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from benchmarks.report import ROUNDS, Goal, Sample, Table, Way, Workload, measure_in_turns, run_workload, server_cpu

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from airflow_provider_jetstream.jetstream.publishing.batch import Batch
    from testbed.nats_server import NatsServer

_SOURCES = Path(__file__).resolve().parent / "floor"


@functools.cache
def compiled(name: str) -> Path | None:
    """Compile a program and return its path; ``None`` where the machine has no compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    program = Path(tempfile.mkdtemp(prefix="c-floor-")) / name
    subprocess.run([compiler, "-O2", "-o", program, _SOURCES / f"{name}.c"], check=True)
    return program


def run_floor(program: Path, server: NatsServer, *arguments: object) -> Sample:
    """Run a compiled program, which gets the server's port and more arguments."""
    before = server_cpu(server)
    ended = subprocess.run(
        [program, str(server.port), *map(str, arguments)], check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(ended.stdout)
    return Sample(int(figures["count"]), figures["seconds"], figures["cpu"], server_cpu(server) - before)


_PREFIX = b"_INBOX.abcdefghijklmnopqrstuv."
# As much as the event loop reads at once.
_READ = 1 << 16
_ROUNDS = 5


class _Stages:
    """Measures stages of publishing some bodies.

    :ivar measured: by the name of a stage, its rounds
    """

    def __init__(self, count: int, size: int) -> None:
        self.measured: dict[str, list[Sample]] = {}
        self._count = count
        self._bodies = [b"%0*d" % (size, number) for number in range(count)]
        data = b"".join(_answer(number) for number in range(count))
        self._answers = [data[start : start + _READ] for start in range(0, len(data), _READ)]

    def _note(self, name: str, stage: Callable[[], object]) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        stage()
        sample = Sample(self._count, time.perf_counter() - began, time.process_time() - cpu)
        self.measured.setdefault(name, []).append(sample)

    def measure(self, origin: Origin | None) -> None:
        """Measure all stages once."""
        prepared = PreparedJobs(self._bodies, subject="jobs.new", origin=origin, batch="b", by_key=True)
        batches: list[Batch] = []
        what = "a task's jobs" if origin else "jobs"

        def prepare() -> None:
            batches.extend(prepared.batches())

        self._note(f"check {what}", prepare)
        if origin:
            self._note("make rows for a task's manifest", lambda: [batch.row_columns() for batch in batches])
        self._note(f"encode {what}", lambda: [batch.encode(_PREFIX, 0) for batch in batches])
        if origin:
            return
        sequences = array("Q", bytes(8 * self._count))
        self._note("match PubAcks", lambda: self._take(sequences))
        if 0 in sequences:
            raise SystemExit("expected a sequence for each job")

    def _take(self, known: array[int]) -> None:
        def record(indexes: Sequence[int], sequences: Sequence[int]) -> None:
            for index, sequence in zip(indexes, sequences, strict=True):
                known[index] = sequence

        acks = PublishAckForm(_PREFIX, "jobs", "", record)
        acks.bind(1)
        rest = b""
        for data in self._answers:
            rest += data
            rest = rest[acks.take(rest, 0)[0] :]


def _answer(number: int) -> bytes:
    body = b'{"stream":"jobs","seq":%d}' % (number + 1)
    return b"MSG %b%d 1 %d\r\n%b\r\n" % (_PREFIX, number, len(body), body)


def stages(count: int, size: int) -> Table:
    """Measure the stages of a call, and those of a task with its manifest."""
    measuring = _Stages(count, size)
    for _ in range(_ROUNDS):
        measuring.measure(None)
        measuring.measure(Origin("dag", "run", "task"))
    return Table(f"stages, {size} B", "jobs", [Way(name, samples) for name, samples in measuring.measured.items()])


QUEUE, SUBJECT = "jobs", "jobs.new"
WINDOW, FLOOR_WINDOW = 256, 1024
FLOOR = "C, raw socket"
FLOOR_OF_TASK = "C, raw socket, with a task's header"
OURS, WITH_IDS, TASK = "`publish`", "`publish`, ids given by the author", "`publish` of a task, with its manifest"
OPERATOR, WAITING = "`JetStreamPublishOperator`", "the same, before it waits for the jobs"
ONE_BY_ONE, GATHERED, ASYNC = "nats-py, one by one", "nats-py, gather of 256", "nats-py, `publish_async`"
FASTSTREAM, TASKIQ = "FastStream, gather of 256", "taskiq-nats, gather of 256"
# What each job of a task holds besides.
TASK_HEADER = f"Airflow-Task: {'x' * 32}\r\n"
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


def _operator(url: str, count: int, size: int, **arguments: Any) -> float:
    """Execute the operator as Airflow's task runner does, without an Airflow around it: it connects by itself."""
    address = urlsplit(url)
    connection = {"conn_type": "nats", "host": address.hostname, "port": address.port}
    os.environ["AIRFLOW_CONN_NATS_DEFAULT"] = json.dumps(connection)
    with TemporaryDirectory() as home:
        os.environ["AIRFLOW_HOME"] = home
        from airflow.sdk.exceptions import TaskDeferred

        from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
        from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

        jobs = bodies_of(count, size)
        instance = SimpleNamespace(dag_id="dag", run_id="run", task_id="task", map_index=-1, max_tries=2, try_number=1)
        operator = JetStreamPublishOperator(
            task_id="task", work_queue=DECLARATION, subject=SUBJECT, jobs=jobs, **arguments
        )
        # Importing the client isn't in the time of any other way.
        JetStreamHook().test_connection()
        began = time.perf_counter()
        # Nobody does the jobs of the task that waits.
        with suppress(TaskDeferred):
            operator.execute({"ti": instance})  # type: ignore[typeddict-item]
        return time.perf_counter() - began


async def operator(url: str, count: int, size: int) -> float:
    """Let a task publish that doesn't wait."""
    return await asyncio.to_thread(_operator, url, count, size)


async def waiting_operator(url: str, count: int, size: int) -> float:
    """Let a task publish that waits for its jobs; it defers at once."""
    return await asyncio.to_thread(
        partial(_operator, url, count, size, wait_for_completion=True, deferrable=True, defer_after=0)
    )


async def with_ids(url: str, count: int, size: int) -> float:
    """Publish jobs with ids of their own."""
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        jobs = [Job(body, id=f"job-{number}") for number, body in enumerate(bodies_of(count, size))]
        began = time.perf_counter()
        await publish(connection, WorkQueue(**DECLARATION), jobs, subject=SUBJECT)
        return time.perf_counter() - began


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
    WITH_IDS: with_ids,
    TASK: task,
    OPERATOR: operator,
    WAITING: waiting_operator,
    ASYNC: publish_async,
    GATHERED: gathered,
    ONE_BY_ONE: one_by_one,
    FASTSTREAM: faststream,
    TASKIQ: taskiq,
}


def measured(name: str, count: int, size: int, server: NatsServer) -> Sample:
    """Measure one way on a fresh server, and check that every job is stored once."""
    asyncio.run(_provision(server.url))
    if name in (FLOOR, FLOOR_OF_TASK):
        program = compiled("publish")
        if program is None:
            raise SystemExit("expected a C compiler, found none")
        headers = TASK_HEADER if name == FLOOR_OF_TASK else ""
        sample = run_floor(program, server, SUBJECT, count, size, FLOOR_WINDOW, headers)
    else:
        before = server_cpu(server)
        command = [sys.executable, "-m", "benchmarks.publishing", "--measure", name, server.url, str(count), str(size)]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(ended.stdout.splitlines()[-1])
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
    floor = [FLOOR, FLOOR_OF_TASK] if compiled("publish") else []
    names = [name for name in (*floor, *WAYS) if name not in missing]
    ways = {name: partial(measured, name, count // FEWER.get(name, 1), size) for name in names}
    return Table(title, "jobs", measure_in_turns(ways, rounds), FLOOR if FLOOR in names else "")


def goals(measurement: Table, size: str) -> list[Goal]:
    """Compare the figures of one size with the goals of W1."""
    compared: list[tuple[str, str, str, float]] = [
        (OURS, FLOOR, "of the C floor", 0.75),
        (TASK, FLOOR_OF_TASK, "of the C floor with the same headers", 0.6),
        (OPERATOR, FLOOR_OF_TASK, "of the C floor with the same headers", 0.6),
        (OURS, ASYNC, f"times {ASYNC}", 4.0),
        (OURS, FASTSTREAM, f"times {FASTSTREAM}", 6.0),
        (OURS, TASKIQ, f"times {TASKIQ}", 6.0),
    ]
    names = {way.name for way in measurement.ways}
    return [
        Goal(f"{way}, {size}, {text}", measurement.share(way, other), goal, limit=_limit(measurement, way, other))
        for way, other, text, goal in compared
        if {way, other} <= names
    ]


def _limit(measurement: Table, way: str, other: str) -> str:
    if way != OURS or not measurement.floor:
        return _LIMITS.get(way, "")
    if other != FLOOR:
        return f"the C program of the same run reaches {measurement.share(FLOOR, other):.2f}"
    ours, cores = measurement.way(way), os.cpu_count() or 1
    used = (ours.client_microseconds + ours.server_microseconds) * ours.rate / 1e6 / cores
    return f"{_LIMITS[way]}: {used:.0%} of {cores} cores are in use"


_LIMITS = {
    OURS: "a list is checked before its first job is sent; then client and server, whose CPU a job stands in the table,"
    " share the machine",
    TASK: "two SHA-256 of each job, of which its message id consists, and its row in the manifest: see the stages",
    OPERATOR: "as of the call before, and connecting, the handle on its jobs and closing, which are in its time",
}


def workload(short: bool, jobs: int = 100_000) -> Workload:  # noqa: FBT001
    """Measure everything."""
    count, rounds = (10_000, 1) if short else (jobs, ROUNDS)
    small, large = table("200 B", count, 200, rounds), table("1 KiB", count, 1024, rounds)
    text = (
        f"Publishing {count:,} jobs with message ids, each acknowledged by the server; fewer by the slowest ways."
        " *Client µs* is CPU for each job, with that of connecting and of making the bodies, which dominates where jobs"
        " are few; *server µs* is the server's. No way has the import of its client in its time; only the operators"
        " have connecting and closing. Every stream was checked to hold each job once. The stages are measured"
        " by themselves, without a server."
    )
    parts = stages(count, 200)
    return Workload(
        "W1", "Publishing", "publishing", text, [small, large, parts], [*goals(small, "200 B"), *goals(large, "1 KiB")]
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
