"""The monitor's page data: the time of each view, and the memory of the API server, with one worker process and two.

A real nats-server with queues of dead letters: one holds 60 % of them, on distinct subjects, the others the rest. A
real `airflow api-server` serves the page. While viewers poll as the page does, every 3 s, one more client requests each
view in turn, with other parameters each time. Counts are compared with what was made, in each worker process, before
anything is timed. Memory is that of the largest process, compared with the same server without this plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import psutil

from airflow_provider_jetstream.jetstream import WorkQueue, provision
from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from benchmarks.report import Goal, PageWorkload, Workload
from testbed.airflow import Airflow
from testbed.airflow_settings import migrate, prepare_home
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import CONSUMER, stored_count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_PAUSE = 0.05


class ApiServer(Airflow):
    """An Airflow of which only the API server runs."""

    def start(self, *_: str, timeout: float = 300.0) -> None:
        """Create the database, start the API server and wait until it answers."""
        prepare_home(self.home)
        migrate(self.home, self.env, self.python, self.template_db)
        try:
            self._start_component("api-server", ["api-server"])
            self._wait(lambda: None if self.health() else "no health", time.monotonic() + timeout)
        except BaseException:
            self.stop(grace=0)
            raise

    def worker_pids(self) -> set[int]:
        """Return the processes that listen for requests, but for the one that started them where it has others."""
        pids = self.pids()["api-server"]
        listening = {pid for pid in pids if _listens(pid, self.port)}
        parents = {psutil.Process(pid).ppid() for pid in listening}
        return listening - parents or listening


def answers_by_worker(
    server: Airflow, pids: Collection[int], path: str, within: float = 120.0
) -> Mapping[int, dict[str, Any]]:
    """Request the same of every worker process; raise TimeoutError where one hasn't answered.

    :param pids: of the workers
    """
    answers: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + within
    while answers.keys() < set(pids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"of the workers {sorted(pids)}, only {sorted(answers)} answered within {within:g} s")
        # A connection of its own: which worker accepts it is chance.
        with httpx.Client(trust_env=False, timeout=60) as client:
            headers = {"Authorization": f"Bearer {server.token()}"}
            with client.stream("GET", f"{server.url}{path}", headers=headers) as answer:
                port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                pid = next((pid for pid in pids if _is_connected(pid, port)), None)
                answer.read()
        if pid is not None and answer.status_code == httpx.codes.OK:
            answers[pid] = answer.json()
        else:
            time.sleep(_PAUSE)
    return answers


def _listens(pid: int, port: int) -> bool:
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in _connections(pid))


def _is_connected(pid: int, client_port: int) -> bool:
    return any(each.raddr and each.raddr.port == client_port for each in _connections(pid))


def _connections(pid: int) -> list[Any]:
    try:
        return list(psutil.Process(pid).net_connections("tcp"))
    except psutil.Error:
        return []


_IN_FLIGHT = 5_000
NAK = b"-NAK"


@dataclass(frozen=True)
class ManyJob:
    """A job that is to die.

    :param job_id: its ``Job-Id``
    :param answer: what its worker answers: with :data:`NAK`, its only delivery is used up
    """

    subject: str
    body: bytes
    job_id: str
    answer: bytes = NAK


async def make_dead_queue(connection: NatsPyConnection, name: str) -> WorkQueue:
    """Provision a queue whose jobs, on ``<name>.jobs.>``, are delivered once."""
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[{"name": CONSUMER, "max_deliver": 1, "ack_wait": "30s", "max_ack_pending": -1}],
        dead_letters=f"{name}-dead",
    )
    await provision(connection, queue)
    return queue


async def let_die(connection: NatsPyConnection, queue: WorkQueue, jobs: Iterable[ManyJob]) -> int:
    """Publish jobs to a queue whose other jobs are dead, and let them die; return how many there were."""
    letters = require_dead_letters(queue).name
    remaining, count, before = iter(jobs), 0, await stored_count(connection, letters)
    while some := [job for _, job in zip(range(_IN_FLIGHT), remaining, strict=False)]:
        jetstream = connection.client.jetstream(timeout=60)
        for job in some[:-1]:
            await connection.client.publish(job.subject, job.body, headers={"Job-Id": job.job_id})
        # The acknowledgement of the last one says that those before it are stored: they are read in order.
        last = some[-1]
        await jetstream.publish(last.subject, last.body, headers={"Job-Id": last.job_id})
        await _deliver(connection, queue, some)
        count += len(some)
    while await stored_count(connection, letters) < before + count:
        # The server publishes that deliveries are used up only where somebody pulls.
        await probe_consumer(connection, queue.name, CONSUMER)
        await asyncio.sleep(0.05)
    return count


async def _deliver(connection: NatsPyConnection, queue: WorkQueue, jobs: list[ManyJob]) -> None:
    """Take each job once, and answer as it says."""
    client, inbox, taken, all_taken = connection.client, connection.new_inbox(), 0, asyncio.Event()

    async def answer(message: Msg) -> None:
        nonlocal taken
        if message.reply:
            await client.publish(message.reply, jobs[taken].answer)
            taken += 1
            if taken == len(jobs):
                all_taken.set()

    subscription = await client.subscribe(inbox, cb=answer)
    pull = json.dumps({"batch": len(jobs), "expires": 60 * 10**9}).encode()
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{queue.name}.{CONSUMER}", pull, reply=inbox)
    await all_taken.wait()
    await subscription.unsubscribe()
    await client.flush(60)


_P95_GOAL, _MEMORY_GOAL = 500.0, 100.0


@dataclass
class Measured:
    """The milliseconds of each view, and memory in MiB.

    :param name: what was measured
    """

    name: str
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    memory: float = 0.0
    all_memory: float = 0.0
    first_scan: float = 0.0

    def p95(self, view: str) -> float:
        """Return the 95th percentile of a view."""
        return _quantile(self.milliseconds[view], 0.95)

    @property
    def slowest(self) -> tuple[str, float]:
        """The view with the highest 95th percentile."""
        return max(((view, self.p95(view)) for view in self.milliseconds), key=lambda item: item[1])


@dataclass(frozen=True)
class LatencyTable:
    """Views with their times."""

    measured: Sequence[Measured]
    ways: Sequence[Any] = ()

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        names = [measured.name for measured in self.measured]
        lines = [
            f"| view: p50 / p95 ms | {' | '.join(names)} |",
            f"| --- |{' --- |' * len(names)}",
        ]
        for view in self.measured[0].milliseconds:
            cells = [
                f"{_quantile(measured.milliseconds[view], 0.5):.0f} / {measured.p95(view):.0f}"
                for measured in self.measured
            ]
            lines.append(f"| {view} | {' | '.join(cells)} |")
        return lines


def section(measured: list[Measured], options: argparse.Namespace, bare: float, share: float) -> Workload:
    """Return the section."""
    goals, load, cores = [], os.getloadavg()[1], os.cpu_count() or 1
    limit = f"the machine was shared, load {load:.0f} on {cores} cores" if load > 2 * cores else ""
    for each in measured:
        view, slowest = each.slowest
        text = f"p95 in ms of the slowest view ({view}), {each.name}"
        goals.append(Goal(text, slowest, _P95_GOAL, at_most=True, limit=limit))
    for workers in options.workers:
        largest = max(each.memory for each in measured if each.name.startswith(f"workers={workers},"))
        text = f"MiB of the largest process above the server without the plugin, workers={workers}"
        goals.append(Goal(text, largest, _MEMORY_GOAL, at_most=True))
    scans = ", ".join(
        f"{each.first_scan:.0f} s with workers={workers}"
        for workers, each in zip(options.workers, measured[::2], strict=True)
    )
    text = (
        f"A real `airflow api-server` over a real nats-server with {options.queues} queues and {options.letters:,} dead"
        f" letters, {share:.0%} of them in one queue, each on a subject of its own. Each worker process counted all of"
        f" them right, {scans} after its start: scans leave half of a core to the server. Then each view was requested"
        f" {options.turns} times over HTTP with other parameters each time, first alone and then while"
        f" {options.viewers} viewers polled as the page does. The server without the plugin has {bare:.0f} MiB; what is"
        " added is the highest growth of a process during all of that."
    )
    return PageWorkload(
        f"page {options.letters:,}",
        f"The page with {options.letters:,} letters",
        "monitor",
        text,
        [LatencyTable(measured)],  # type: ignore[list-item]
        goals,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


REFRESH = 3.0
MEBIBYTE = 2**20
LARGE = "queue-000"
SHARE = 0.6
_RANDOM = random.Random(20)  # noqa: S311
_API = "/jetstream/api"
_IN_QUEUE = f"{_API}/queues/nats_default/{LARGE}"
_REASONS = ("no such customer", "card expired", "no address", "blocked", "too heavy", "wrong currency", "shop closed")
# What hides the plugin from Airflow, so that the same server runs without it.
_WITHOUT_PLUGIN = """\
from importlib import metadata
_all = metadata.Distribution.entry_points.fget
metadata.Distribution.entry_points = property(
    lambda self: metadata.EntryPoints(
        each
        for each in _all(self)
        if each.group != "airflow.plugins" or not each.value.startswith("airflow_provider_jetstream")
    )
)
"""


@dataclass
class Views:
    """The views of the page, each requested with other parameters each time.

    :param letters: of the large queue
    :param since: when its letters began to die, in seconds since 1970
    :param until: when the last one was dead
    """

    letters: int
    since: float
    until: float

    def paths(self) -> dict[str, str]:
        """Return a path for each view."""
        number, offset = _RANDOM.randrange(1, self.letters), _RANDOM.randrange(500)
        moment = self.since + _RANDOM.random() * (self.until - self.since)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
        return {
            "all queues": f"{_API}/snapshot",
            "a queue": _IN_QUEUE,
            "groups by cause": f"{_IN_QUEUE}/groups",
            "groups by subject": f"{_IN_QUEUE}/groups?group_by=subject",
            "groups of a time": f"{_IN_QUEUE}/groups?died_from={at}",
            "first letters": f"{_IN_QUEUE}/letters?offset={offset}",
            "letters anywhere": f"{_IN_QUEUE}/letters?after={number}",
            "newest letters": f"{_IN_QUEUE}/letters?sort=-died_at&offset={offset}",
            "last letters": f"{_IN_QUEUE}/letters?sort=-sequence&offset={self.letters - 50}",
            "letters of a time, newest first": f"{_IN_QUEUE}/letters?sort=-died_at&died_from={at}",
            "letter of a job id": f"{_IN_QUEUE}/letters?job_id=order-{number}",
            "letters of a subject": f"{_IN_QUEUE}/letters?subject={LARGE}.jobs.s{number}",
            "a letter": f"{_IN_QUEUE}/letters/{number}",
            "history, 12 h": f"{_IN_QUEUE}/history?hours=12",
            "redrives": f"{_IN_QUEUE}/redrives",
            "delivered jobs": f"{_IN_QUEUE}/jobs?state=delivered",
        }

    def page(self) -> list[str]:
        """Return what a page with the newest letters polls."""
        paths = self.paths()
        return [paths[name] for name in ("all queues", "a queue", "groups by cause")] + [
            f"{_IN_QUEUE}/letters?sort=-died_at"
        ]


def main() -> int:
    """Measure and print the section."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=25, help="how often each view is requested")
    parser.add_argument("--viewers", type=int, default=5, help="who poll meanwhile, besides the one who is measured")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        began = time.monotonic()
        views = asyncio.run(fill(server.url, options.queues, options.letters))
        print(
            f"{options.letters} letters in {options.queues} queues, made in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        with api_server(Path(name) / "bare", server, 1, plugin=False) as airflow:
            for _ in range(20):
                airflow.api("GET", "version")
            bare = max(_sizes(airflow))
        print(f"without the plugin: {bare:.0f} MiB", flush=True)
        measured: list[Measured] = []
        for workers in options.workers:
            with api_server(Path(name) / f"workers-{workers}", server, workers) as airflow:
                measured += measure(airflow, views, options, workers, bare)
    workload = section(measured, options, bare, SHARE)
    print("\n".join(workload.lines()))
    return 0


@contextmanager
def api_server(home: Path, server: NatsServer, workers: int, *, plugin: bool = True) -> Iterator[ApiServer]:
    """Run an API server."""
    root = Path(__file__).resolve().parents[1]
    (home / "dags").mkdir(parents=True)
    (home / "sitecustomize.py").write_text("" if plugin else _WITHOUT_PLUGIN)
    connection = {"conn_type": "nats", "host": LOOPBACK, "port": server.port, "extra": {"timeout": 30}}
    env = {
        "AIRFLOW__API__WORKERS": str(workers),
        "AIRFLOW__JETSTREAM__MONITOR_REFRESH_SECONDS": str(REFRESH),
        "PYTHONPATH": f"{home}:{root}",
    }
    with ApiServer(
        home / "airflow",
        home / "dags",
        connections={"nats_default": json.dumps(connection)},
        env=env,
        template_db=home.parent / "databases",
    ) as airflow:
        yield airflow
    shutil.rmtree(home)


async def fill(url: str, queues: int, letters: int) -> Views:
    """Make queues whose jobs are dead letters."""
    large = int(letters * SHARE)
    async with connect(connection_settings({"servers": (url,), "timeout": 60})) as connection:
        began = time.time()
        queue = await make_dead_queue(connection, LARGE)
        jobs = (
            ManyJob(f"{LARGE}.jobs.s{n}", json.dumps({"order": n, "note": "x" * 40}).encode(), f"order-{n}", NAK)
            for n in range(1, large + 1)
        )
        await let_die(connection, queue, jobs)
        views = Views(large, began, time.time())
        for number in range(1, queues):
            name = f"queue-{number:03d}"
            count = _small_count(number, queues, letters)
            few = (
                ManyJob(f"{name}.jobs.plain", b"{}", f"job-{n}", f"+TERM {_REASONS[n % len(_REASONS)]}".encode())
                for n in range(count)
            )
            await let_die(connection, await make_dead_queue(connection, name), few)
    return views


def _small_count(number: int, queues: int, letters: int) -> int:
    rest = letters - int(letters * SHARE)
    share = rest // (queues - 1)
    return share if number < queues - 1 else rest - share * (queues - 2)


def measure(airflow: ApiServer, views: Views, options: argparse.Namespace, workers: int, bare: float) -> list[Measured]:
    """Measure the views, first with one viewer and then with several."""
    began = time.monotonic()
    pids = airflow.worker_pids()
    with Memory(airflow) as memory:
        verify(airflow, pids, options.queues, options.letters)
        scan = time.monotonic() - began
        print(f"workers={workers}: {len(pids)} processes count all letters right after {scan:.0f} s", flush=True)
        found: list[Measured] = []
        for viewers in (0, options.viewers):
            measured = Measured(f"workers={workers}, {viewers or 'no'} other viewers", first_scan=scan)
            with Viewers(airflow, views, viewers):
                _request(airflow, views, 2)
                measured.milliseconds = _request(airflow, views, options.turns)
            found.append(measured)
        for measured in found:
            measured.memory, measured.all_memory = memory.largest - bare, memory.all
    print(f"workers={workers}: {memory.largest:.0f} MiB the largest process, {memory.all:.0f} all", flush=True)
    return found


def verify(airflow: ApiServer, pids: set[int], queues: int, letters: int) -> None:
    """Wait until each worker process counts each queue's letters, and compare them with what was made."""
    expected = {f"queue-{number:03d}": _small_count(number, queues, letters) for number in range(1, queues)}
    expected[LARGE] = int(letters * SHARE)
    deadline, actual = time.monotonic() + 1800, [dict[str, int | None]()]
    while not all(each == expected for each in actual):
        if time.monotonic() > deadline:
            missing = {name: count for each in actual for name, count in each.items() if expected.get(name) != count}
            raise AssertionError(f"expected {letters} letters in {queues} queues, found others: {missing}")
        time.sleep(0.5)
        actual = []
        for answer in answers_by_worker(airflow, pids, f"{_API}/snapshot").values():
            (state,) = answer["connections"]
            actual.append({queue["queue"]: queue["dead"]["value"] for queue in state["queues"]})


def _request(airflow: ApiServer, views: Views, turns: int) -> dict[str, list[float]]:
    """Request each view in turn; return the milliseconds of each."""
    milliseconds: dict[str, list[float]] = {name: [] for name in views.paths()}
    with _client(airflow) as client:
        for _ in range(turns):
            for name, path in views.paths().items():
                started = time.perf_counter()
                client.get(path).raise_for_status()
                milliseconds[name].append(1e3 * (time.perf_counter() - started))
    return milliseconds


def _client(airflow: ApiServer) -> httpx.Client:
    headers = {"Authorization": f"Bearer {airflow.token()}"}
    return httpx.Client(base_url=airflow.url, headers=headers, trust_env=False, timeout=60)


class Viewers:
    """People who have the page open: threads that poll as it does."""

    def __init__(self, airflow: ApiServer, views: Views, count: int) -> None:
        self._airflow, self._views = airflow, views
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._view) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _view(self) -> None:
        with _client(self._airflow) as client:
            while not self._stop.wait(REFRESH * _RANDOM.uniform(0.8, 1.2)):
                for path in self._views.page():
                    client.get(path)


class Memory:
    """The highest memory of an API server's processes in MiB, sampled twice a second."""

    def __init__(self, airflow: ApiServer) -> None:
        self._airflow = airflow
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.largest = self.all = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            if sizes := _sizes(self._airflow):
                self.largest, self.all = max(self.largest, *sizes), max(self.all, sum(sizes))


def _sizes(airflow: ApiServer) -> list[float]:
    sizes = []
    for pid in airflow.pids()["api-server"]:
        try:
            sizes.append(psutil.Process(pid).memory_info().rss / MEBIBYTE)
        except psutil.NoSuchProcess:
            continue
    return sizes


if __name__ == "__main__":
    raise SystemExit(main())
