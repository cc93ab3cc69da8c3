"""The monitor's page data: how soon it comes, what viewers cost the NATS server, and how large the API server grows.

A real nats-server with queues and dead letters, a real Airflow whose API server serves the page, and viewers that ask
over HTTP with a session, each as often as the page does. One queue holds most of the letters. The first rows are taken
while the first scan of that queue runs. What the server is asked is its own count (``in_msgs``) per look.
"""

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from airflow_provider_jetstream.jetstream.connection import connect, connection_settings
from airflow_provider_jetstream.jetstream.provisioning import provision
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from testbed.airflow import Airflow
from testbed.letters import let_terminate
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.table import table

REFRESH = 3.0
MEBIBYTE = 2**20
LARGE = "queue-000"
_DICE = random.SystemRandom()
IN_QUEUE = f"api/queues/nats_default/{LARGE}"


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        asyncio.run(fill(server.url, options.queues, options.letters))
        connection = json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": server.port})
        folder = Path(name) / "dags"
        folder.mkdir()
        with Airflow(
            Path(name) / "airflow",
            folder,
            connections={"nats_default": connection},
            env={"AIRFLOW__JETSTREAM__MONITOR_REFRESH_SECONDS": str(REFRESH)},
        ) as airflow:
            print(measure(airflow, server, options.letters, options.seconds))
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
                await let_terminate(connection, queue, bodies, reason=f"no such customer {start % 7_000}")


class Viewers:
    """
    Viewers that ask for what the page shows.

    :param airflow: whose page
    :param paths: what each asks for in turn
    """

    def __init__(self, airflow: Airflow, paths: dict[str, Callable[[], str]]) -> None:
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


def measure(airflow: Airflow, server: NatsServer, letters: int, seconds: float) -> str:
    """
    Have the page viewed during the first scan, by one viewer and by twenty.

    :param airflow: whose page
    :param server: its NATS server
    :param letters: how many dead letters there are
    :param seconds: how long each round lasts
    :return: a table
    """
    paths: dict[str, Callable[[], str]] = {
        "snapshot": lambda: "api/snapshot",
        "queue": lambda: IN_QUEUE,
        "groups": lambda: f"{IN_QUEUE}/groups",
        "letters": lambda: f"{IN_QUEUE}/letters?after={_DICE.randrange(letters // 2)}",
        "Airflow's own": lambda: "../api/v2/version",
    }
    after_scan = paths | {"letter": lambda: f"{IN_QUEUE}/letters/{_DICE.randrange(1, letters // 2)}"}
    began, memory = time.monotonic(), _memory(airflow)
    rows = _rows("first scan", Viewers(airflow, paths).run(1, lambda: _scanned(airflow)))
    print(f"{letters} letters scanned in {time.monotonic() - began:.0f} s")
    for count in (1, 20):
        before, start = server.monitor("varz")["in_msgs"], time.monotonic()
        answers = Viewers(airflow, after_scan).run(count, _after(seconds))
        asked = server.monitor("varz")["in_msgs"] - before
        rows += _rows(f"{count} viewers", answers)
        print(f"{count} viewers: the server was asked {asked / (time.monotonic() - start):.0f} times a second")
    print(f"API server: {memory / MEBIBYTE:.0f} MiB before, {_memory(airflow) / MEBIBYTE:.0f} MiB after")
    return table(("answers", "n", "p50 ms", "p95 ms", "max ms"), rows)


def _after(seconds: float) -> Callable[[], bool]:
    start = time.monotonic()
    return lambda: time.monotonic() - start > seconds


def _rows(when: str, answers: dict[str, list[float]]) -> list[tuple[str, ...]]:
    return [
        (f"{when}: {name}", str(len(found)), *(f"{1000 * _at(found, share):.0f}" for share in (0.5, 0.95, 1.0)))
        for name, found in answers.items()
    ]


def _at(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def _scanned(airflow: Airflow) -> bool:
    answer = airflow.request("GET", f"/jetstream/{IN_QUEUE}/groups")
    return answer.status_code == httpx.codes.OK and answer.json()["scan"]["state"] == "ready"


def _memory(airflow: Airflow) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in airflow.pids()["api-server"] if psutil.pid_exists(pid))


if __name__ == "__main__":
    raise SystemExit(main())
