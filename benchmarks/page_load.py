"""How long the page takes until its first view is there, in a browser behind a slow line.

A real Airflow with a queue for each row, and Chromium with nothing cached, whose network emulation adds `--latency` to
every request. Timed from the navigation until the table has all rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from benchmarks.report import Goal, PageWorkload
from testbed.airflow import Airflow
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import make_queue

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_LIMIT = 60_000


def main() -> int:
    """Measure and print the times."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--latency", type=float, default=400, help="milliseconds that each request takes longer")
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        asyncio.run(_fill(server.url, options.queues))
        folder = Path(name) / "dags"
        folder.mkdir()
        connection = json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": server.port})
        with (
            Airflow(Path(name) / "airflow", folder, connections={"nats_default": connection}) as airflow,
            sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            token = airflow.token()
            # The first load starts the poller of the server.
            times = [
                _load(browser, airflow.url, token, options.latency, options.queues) for _ in range(options.rounds + 1)
            ][1:]
            browser.close()
    seconds, requests = [item[0] for item in times], times[0][1]
    text = (
        f"Chromium with nothing cached, whose network emulation adds {options.latency:g} ms to each request, opens the"
        f" page of a real Airflow with {options.queues} queues. Of {options.rounds} loads the fastest took"
        f" {min(seconds):.2f} s, the slowest {max(seconds):.2f} s, with {requests} requests each."
    )
    goal = Goal(
        f"seconds until the table has all rows, {options.latency:g} ms latency",
        statistics.median(seconds),
        1.5,
        at_most=True,
    )
    workload = PageWorkload("page load", "The page's first load", "page_load", text, (), [goal])
    print("\n".join(workload.lines()))
    return 0


async def _fill(url: str, queues: int) -> None:
    async with connect(connection_settings({"servers": (url,)})) as connection:
        for number in range(queues):
            await make_queue(connection, f"queue-{number:02}")


def _load(browser: Browser, url: str, token: str, latency: float, queues: int) -> tuple[float, int]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_cookies([{"name": "_token", "value": token, "url": url}])
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.send(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": latency, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    started = time.monotonic()
    page.goto(f"{url}/jetstream/", wait_until="commit")
    page.locator("tbody tr").nth(queues - 1).wait_for(timeout=_LIMIT)
    elapsed = time.monotonic() - started
    context.close()
    return elapsed, len(requests)


if __name__ == "__main__":
    raise SystemExit(main())
