"""The monitor's page data: response times, load of viewers on the NATS server, and growth of the API server's memory.

A real nats-server with queues and dead letters, a real Airflow whose API server serves the page, and viewers that send
HTTP requests with a session, each as often as the page does. One queue holds most of the letters. The first rows are
measured while the first scan of that queue runs. The page's counts are checked before anything is timed. Then rounds
alternate between one viewer, twenty on the same views, and twenty that page through letters at random. The number of
requests to the server is its own count (``in_msgs``). Medians of the rounds are printed.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.airflow import Airflow
from testbed.dead_letters import make_terminated_letters
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.text_table import text_table

REFRESH = 3.0
MEBIBYTE = 2**20
LARGE = "queue-000"
_RANDOM = random.SystemRandom()
IN_QUEUE = f"api/queues/nats_default/{LARGE}"
Paths = dict[str, Callable[[], str]]
SAME_VIEWS: Paths = {
    "snapshot": lambda: "api/snapshot",
    "queue": lambda: IN_QUEUE,
    "groups": lambda: f"{IN_QUEUE}/groups",
    "first page of letters": lambda: f"{IN_QUEUE}/letters",
    "Airflow's own version": lambda: "../api/v2/version",
}


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        asyncio.run(fill(server.url, options.queues, options.letters))
        connection = json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": server.port})
        folder = Path(name) / "dags"
        folder.mkdir()
        with (
            Airflow(
                Path(name) / "airflow",
                folder,
                connections={"nats_default": connection},
                env={"AIRFLOW__JETSTREAM__MONITOR_REFRESH_SECONDS": str(REFRESH)},
            ) as airflow,
            Memory(airflow) as memory,
        ):
            started = time.monotonic()
            rows = list(_rows("first scan", [Viewers(airflow, SAME_VIEWS).run(1, lambda: _scanned(airflow))]))
            scan = time.monotonic() - started
            verify(airflow, options.queues, options.letters)
            print(f"{options.letters} letters in {options.queues} queues, counted right; first scan {scan:.0f} s")
            rows += measure(airflow, server, options.letters, options.rounds, options.seconds)
            print(text_table(("answers", "n", "p50 ms", "p95 ms", "max ms"), rows))
            print(f"API server: {memory.first / MEBIBYTE:.0f} MiB before, at most {memory.maximum / MEBIBYTE:.0f} MiB")
    return 0


async def fill(url: str, queues: int, letters: int) -> None:
    """Make queues whose jobs are dead letters; the first queue holds the rest of the letters."""
    per_queue = max(1, letters // (10 * queues))
    async with connect(connection_settings({"servers": (url,), "timeout": 60})) as connection:
        for number in range(queues):
            name = f"queue-{number:03d}"
            declaration: dict[str, Any] = {
                "name": name,
                "subjects": [f"{name}.jobs.>"],
                "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "30s", "max_ack_pending": -1}],
                "dead_letters": f"{name}-dead",
            }
            queue = WorkQueue(**declaration)
            await provision(connection, queue)
            count = per_queue if number else letters - per_queue * (queues - 1)
            for start in range(0, count, 1_000):
                bodies = [json.dumps({"number": start + offset}) for offset in range(min(1_000, count - start))]
                await make_terminated_letters(connection, queue, bodies, reason=f"no such customer {start % 7_000}")


class Viewers:
    """Viewers that request the page's paths in turn."""

    def __init__(self, airflow: Airflow, paths: Paths) -> None:
        self._url = airflow.url
        self._token = airflow.token()
        self._paths = paths
        self._stop = threading.Event()
        self._seconds: dict[str, list[float]] = {name: [] for name in paths}

    def run(self, count: int, until: Callable[[], bool]) -> dict[str, list[float]]:
        """Run ``count`` viewers until a condition holds, and return the seconds of each answer by name of the path."""
        threads = [threading.Thread(target=self._view) for _ in range(count)]
        for thread in threads:
            thread.start()
        while not until():
            time.sleep(0.5)
        self._stop.set()
        for thread in threads:
            thread.join()
        return self._seconds

    def _view(self) -> None:
        with httpx.Client(
            base_url=f"{self._url}/jetstream/",
            headers={"Authorization": f"Bearer {self._token}"},
            trust_env=False,
            timeout=60,
        ) as client:
            while not self._stop.is_set():
                for name, path in self._paths.items():
                    started = time.monotonic()
                    client.get(path()).raise_for_status()
                    self._seconds[name].append(time.monotonic() - started)
                self._stop.wait(REFRESH * _RANDOM.uniform(0.8, 1.2))


def verify(airflow: Airflow, queues: int, letters: int) -> None:
    """Wait for the scans of the small queues, and check the page's counts."""
    deadline, actual = time.monotonic() + 300, (0, 0)
    while actual != (queues, letters):
        if time.monotonic() > deadline:
            raise AssertionError(f"expected {queues} queues and {letters} letters on the page, found {actual}")
        (state,) = airflow.api("GET", "/jetstream/api/snapshot")["connections"]
        actual = (
            len(state["queues"]),
            sum((view["letters"] or {}).get("certain", 0) for view in state["queues"]),
        )
        time.sleep(0.5)


def measure(airflow: Airflow, server: NatsServer, letters: int, rounds: int, seconds: float) -> list[tuple[str, ...]]:
    """Measure one viewer, twenty, and twenty at random pages, for ``seconds`` each; return rows of a table."""
    random_pages: Paths = {
        "any page of letters": lambda: f"{IN_QUEUE}/letters?after={_RANDOM.randrange(letters // 2)}",
        "any letter": lambda: f"{IN_QUEUE}/letters/{_RANDOM.randrange(1, letters // 2)}",
    }
    scenarios: dict[str, tuple[int, Paths]] = {
        "1 viewer": (1, SAME_VIEWS),
        "20 viewers": (20, SAME_VIEWS),
        "20 at random pages": (20, random_pages),
    }
    answers: dict[str, list[dict[str, list[float]]]] = {name: [] for name in scenarios}
    request_rates: dict[str, list[float]] = {name: [] for name in scenarios}
    for _ in range(rounds):
        for name, (count, paths) in scenarios.items():
            before, start = server.monitor("varz")["in_msgs"], time.monotonic()
            answers[name].append(Viewers(airflow, paths).run(count, _after(seconds)))
            request_rates[name].append((server.monitor("varz")["in_msgs"] - before) / (time.monotonic() - start))
    for name, rates in request_rates.items():
        print(f"{name}: the NATS server got {statistics.median(rates):.0f} requests a second")
    return [row for name, measured in answers.items() for row in _rows(name, measured)]


class Memory:
    """The memory of an API server's processes, sampled twice a second."""

    def __init__(self, airflow: Airflow) -> None:
        self._airflow = airflow
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.first = self.maximum = _memory(airflow)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self.maximum = max(self.maximum, _memory(self._airflow))


def _after(seconds: float) -> Callable[[], bool]:
    start = time.monotonic()
    return lambda: time.monotonic() - start > seconds


def _rows(when: str, rounds: Sequence[dict[str, list[float]]]) -> list[tuple[str, ...]]:
    return [
        (
            f"{when}: {name}",
            str(sum(len(answers[name]) for answers in rounds)),
            *(
                f"{1000 * statistics.median(_quantile(answers[name], share) for answers in rounds):.0f}"
                for share in (0.5, 0.95, 1.0)
            ),
        )
        for name in rounds[0]
    ]


def _quantile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def _scanned(airflow: Airflow) -> bool:
    answer = airflow.request("GET", f"/jetstream/{IN_QUEUE}/groups")
    return answer.status_code == httpx.codes.OK and answer.json()["scan"]["state"] == "ready"


def _memory(airflow: Airflow) -> int:
    actual = 0
    for pid in airflow.pids()["api-server"]:
        with suppress(psutil.NoSuchProcess):
            actual += psutil.Process(pid).memory_info().rss
    return actual


if __name__ == "__main__":
    raise SystemExit(main())
