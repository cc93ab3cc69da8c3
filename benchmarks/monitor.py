"""The monitor's page data: how soon it comes, what viewers cost the NATS server, and how large the API server grows.

A real nats-server with queues and dead letters, a real Airflow whose API server serves the page, and viewers that ask
over HTTP with a session, each as often as the page does. One queue holds most of the letters. The first rows are taken
while the first scan of that queue runs. What is told is checked against what was made before anything is timed. Then
rounds alternate between one viewer, twenty who look at the same views, and twenty who leaf through letters, each
somewhere else. What the server is asked is its own count (``in_msgs``). Medians of the rounds are printed.
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
_DICE = random.SystemRandom()
IN_QUEUE = f"api/queues/nats_default/{LARGE}"
Paths = dict[str, Callable[[], str]]
THE_SAME: Paths = {
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
            began = time.monotonic()
            rows = list(_rows("first scan", [Viewers(airflow, THE_SAME).run(1, lambda: _scanned(airflow))]))
            scan = time.monotonic() - began
            verify(airflow, options.queues, options.letters)
            print(f"{options.letters} letters in {options.queues} queues, counted right; first scan {scan:.0f} s")
            rows += measure(airflow, server, options.letters, options.rounds, options.seconds)
            print(text_table(("answers", "n", "p50 ms", "p95 ms", "max ms"), rows))
            print(f"API server: {memory.first / MEBIBYTE:.0f} MiB before, at most {memory.most / MEBIBYTE:.0f} MiB")
    return 0


async def fill(url: str, queues: int, letters: int) -> None:
    """
    Make queues whose jobs are dead.

    :param url: the server
    :param queues: how many; the first one holds what the others leave
    :param letters: how many dead letters in all
    """
    each = max(1, letters // (10 * queues))
    async with connect(connection_settings({"servers": (url,), "timeout": 60})) as connection:
        for number in range(queues):
            name = f"queue-{number:03d}"
            declared: dict[str, Any] = {
                "name": name,
                "subjects": [f"{name}.jobs.>"],
                "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "30s", "max_ack_pending": -1}],
                "dead_letters": f"{name}-dead",
            }
            queue = WorkQueue(**declared)
            await provision(connection, queue)
            wanted = each if number else letters - each * (queues - 1)
            for start in range(0, wanted, 1_000):
                bodies = [json.dumps({"number": start + place}) for place in range(min(1_000, wanted - start))]
                await make_terminated_letters(connection, queue, bodies, reason=f"no such customer {start % 7_000}")


class Viewers:
    """
    Viewers that ask for what the page shows.

    :param airflow: whose page
    :param paths: what each asks for in turn
    """

    def __init__(self, airflow: Airflow, paths: Paths) -> None:
        self._url = airflow.url
        self._token = airflow.token()
        self._paths = paths
        self._stop = threading.Event()
        self._seconds: dict[str, list[float]] = {name: [] for name in paths}

    def run(self, count: int, until: Callable[[], bool]) -> dict[str, list[float]]:
        """
        View until something is so.

        :param count: how many viewers
        :param until: looked at twice a second
        :return: the seconds of each answer by name of what was asked
        """
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
                    began = time.monotonic()
                    client.get(path()).raise_for_status()
                    self._seconds[name].append(time.monotonic() - began)
                self._stop.wait(REFRESH * _DICE.uniform(0.8, 1.2))


def verify(airflow: Airflow, queues: int, letters: int) -> None:
    """
    See to it that the page tells what was made; wait for the scans of the small queues.

    :param airflow: whose page
    :param queues: how many queues there are
    :param letters: how many dead letters
    :raises AssertionError: it tells something else
    """
    deadline, found = time.monotonic() + 300, (0, 0)
    while found != (queues, letters):
        if time.monotonic() > deadline:
            raise AssertionError(f"expected {queues} queues and {letters} letters on the page, found {found}")
        (state,) = airflow.api("GET", "/jetstream/api/snapshot")["connections"]
        found = (len(state["queues"]), sum((each["letters"] or {}).get("certain", 0) for each in state["queues"]))
        time.sleep(0.5)


def measure(airflow: Airflow, server: NatsServer, letters: int, rounds: int, seconds: float) -> list[tuple[str, ...]]:
    """
    Have the page viewed by one viewer, by twenty, and by twenty who leaf.

    :param airflow: whose page
    :param server: its NATS server
    :param letters: how many dead letters there are
    :param rounds: how often each
    :param seconds: how long each takes
    :return: rows of a table
    """
    leafing: Paths = {
        "any page of letters": lambda: f"{IN_QUEUE}/letters?after={_DICE.randrange(letters // 2)}",
        "any letter": lambda: f"{IN_QUEUE}/letters/{_DICE.randrange(1, letters // 2)}",
    }
    ways: dict[str, tuple[int, Paths]] = {
        "1 viewer": (1, THE_SAME),
        "20 viewers": (20, THE_SAME),
        "20 who leaf": (20, leafing),
    }
    answers: dict[str, list[dict[str, list[float]]]] = {name: [] for name in ways}
    asked: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (count, paths) in ways.items():
            before, start = server.monitor("varz")["in_msgs"], time.monotonic()
            answers[name].append(Viewers(airflow, paths).run(count, _after(seconds)))
            asked[name].append((server.monitor("varz")["in_msgs"] - before) / (time.monotonic() - start))
    for name, each in asked.items():
        print(f"{name}: the NATS server was asked {statistics.median(each):.0f} times a second")
    return [row for name, each in answers.items() for row in _rows(name, each)]


class Memory:
    """
    The memory of an API server's processes, looked at all the time.

    :param airflow: whose API server
    """

    def __init__(self, airflow: Airflow) -> None:
        self._airflow = airflow
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.first = self.most = _memory(airflow)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self.most = max(self.most, _memory(self._airflow))


def _after(seconds: float) -> Callable[[], bool]:
    start = time.monotonic()
    return lambda: time.monotonic() - start > seconds


def _rows(when: str, rounds: Sequence[dict[str, list[float]]]) -> list[tuple[str, ...]]:
    return [
        (
            f"{when}: {name}",
            str(sum(len(each[name]) for each in rounds)),
            *(
                f"{1000 * statistics.median(_at(each[name], share) for each in rounds):.0f}"
                for share in (0.5, 0.95, 1.0)
            ),
        )
        for name in rounds[0]
    ]


def _at(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def _scanned(airflow: Airflow) -> bool:
    answer = airflow.request("GET", f"/jetstream/{IN_QUEUE}/groups")
    return answer.status_code == httpx.codes.OK and answer.json()["scan"]["state"] == "ready"


def _memory(airflow: Airflow) -> int:
    found = 0
    for pid in airflow.pids()["api-server"]:
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(pid).memory_info().rss
    return found


if __name__ == "__main__":
    raise SystemExit(main())
