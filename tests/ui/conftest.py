"""A real Airflow with the monitor, real NATS servers, and Debian's Chromium."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Playwright, expect, sync_playwright
from ui_browsing import Browsing
from ui_steps import ROOT, STORE, blocking, wait_for_letters

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue, connection_settings
from testbed.airflow import Airflow
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = f"{Path(__file__).parent}/"
_ORDERS = 9
# Airflow's own pages are slow on two cores.
expect.set_options(timeout=30_000)


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    """The server of these tests instead of the one of all other tests: the example DAGs' streams have fixed names."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def settings(nats: NatsServer) -> ConnectionSettings:
    return connection_settings({"servers": (nats.url,), "timeout": 5})


@pytest.fixture(scope="session")
def fragile_nats() -> Iterator[NatsServer]:
    """A server that tests stop and start."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def airflow(nats: NatsServer, fragile_nats: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    folder = tmp_path_factory.mktemp("airflow")
    # Without the scheduled DAG, which would redrive the store's letters.
    shutil.copytree(ROOT / "example_dags" / "queues", folder / "dags" / "example_dags" / "queues")
    for example in ("jetstream_redrive.py", "dead_letter_watch.py"):
        shutil.copy(ROOT / "example_dags" / example, folder / "dags" / "example_dags")
    shutil.copytree(Path(__file__).parent / "dags", folder / "dags" / "ui")
    connections = {
        name: json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": server.port})
        for name, server in {"nats_default": nats, "nats_fragile": fragile_nats}.items()
    }
    instance = Airflow(
        folder / "home",
        folder / "dags",
        connections=connections,
        env={
            "AIRFLOW__JETSTREAM__MONITOR_CONNECTIONS": ", ".join(connections),
            "AIRFLOW__JETSTREAM__MONITOR_REFRESH_SECONDS": "1",
            # Files don't change, and parsing them again every few seconds takes a core.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
            # A deferred task resumes only after this time.
            "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.3",
        },
        # Under such a path only relative addresses work.
        path="/team",
    )
    instance.start("shop", "jetstream_redrive", timeout=300)
    yield instance
    instance.stop()


@pytest.fixture(scope="session")
def shop(airflow: Airflow, settings: ConnectionSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The run of the DAG that published the store's orders; all of them are dead letters."""
    run_id = airflow.trigger("shop")
    run = airflow.wait_for_run("shop", run_id, timeout=300)
    assert run["state"] == "success", airflow.task_instances("shop", run_id)
    worker = start_worker(
        "till",
        queue=STORE,
        consumer="till",
        handler="example_workers.store:process",
        env={**os.environ, "NATS_URL": settings.servers[0], "PYTHONPATH": str(ROOT)},
        logs=tmp_path_factory.mktemp("workers"),
        concurrency=4,
    )
    try:
        blocking(wait_for_letters(settings, WorkQueue.load(STORE), _ORDERS))
        yield run_id
    finally:
        worker.terminate(10)


# While playwright is open, its event loop runs in this thread, so that no asynchronous test can: it ends with the
# module, before the process gets a test that isn't the page's.
@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    binary = shutil.which("chromium")
    if binary is None:
        raise pytest.UsageError("expected Chromium, found none: run 'make chromium', or install the package chromium")
    # Tests run as root in containers, where Chromium has no sandbox of its own.
    launched = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
    yield launched
    launched.close()


@pytest.fixture
def browsing(browser: Browser, airflow: Airflow) -> Iterator[Browsing]:
    """Opens pages; the test fails if the browser reports an error."""
    opened = Browsing(browser, airflow.url)
    yield opened
    opened.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(_FOLDER):
            item.add_marker("browser")
