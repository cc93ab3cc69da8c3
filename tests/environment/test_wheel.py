"""The wheel in empty environments: alone, beside an Airflow of its own day, and beside Spark without Airflow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.dev.process import Process
from demo.__main__ import run_demo
from testbed.dev_command import DevCommand
from testbed.environments import build_wheel, create_environment, installed_packages, locked
from testbed.nats_server import NatsServer
from testbed.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

# The registry's packages a month after this Airflow was released. Its own constraints are of the same time.
AIRFLOW = "apache-airflow==3.3.2"
UPLOADED_BEFORE = "2026-10-15"

_READ = """
import sys
from pyspark.sql import SparkSession
from airflow_provider_jetstream.spark import register
session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
register(session)
rows = session.read.format("jetstream").option("servers", sys.argv[1]).option("stream", "letters").load()
print(sorted(bytes(row.value) for row in rows.collect()))
"""

_FILL = """
import asyncio, sys, nats
async def main():
    client = await nats.connect(sys.argv[1])
    stream = client.jetstream()
    await stream.add_stream(name="letters", subjects=["letters"])
    for body in (b"a", b"b"):
        await stream.publish("letters", body)
    await client.close()
asyncio.run(main())
"""

_USER = """
from airflow_provider_jetstream.jetstream import Consumer, WorkQueue, publish
from airflow_provider_jetstream.spark import register
from airflow_provider_jetstream.worker import Worker

queue = WorkQueue(
    name="emails",
    subjects=["emails.>"],
    consumers=[Consumer(name="sender", filter_subject="emails.>", backoff=["5s", "30s"], max_deliver=3)],
    dead_letters="emails_dlq",
    max_bytes="256MB",
)
reveal_type(queue)
reveal_type(publish)
reveal_type(Worker)
"""


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    # Spark starts its Python workers by this name.
    env = os.environ | {"PYSPARK_PYTHON": str(command[0])}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


def test_without_its_extra_the_command_dev_says_how_to_install_it(bare: Path, tmp_path: Path) -> None:
    command = [str(bare.parent / "jetstream-queue"), "dev", "--no-browser"]
    env = {"PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "found no Apache Airflow and no psutil" in done.stderr
    assert 'run: pip install "airflow-provider-jetstream[dev]"' in done.stderr
    assert list(tmp_path.iterdir()) == []


async def test_beside_airflow_the_wheel_changes_no_other_package_and_dev_and_an_example_dag_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = create_environment(tmp_path / "venv", Path(sys.executable), [AIRFLOW], uploaded_before=UPLOADED_BEFORE)
    before = installed_packages(python)
    create_environment(tmp_path / "venv", python, [f"{build_wheel()}[airflow,dev]"], uploaded_before=UPLOADED_BEFORE)
    assert before <= installed_packages(python)
    dev = DevCommand(tmp_path, python=python)
    try:
        await dev.prints("Ctrl-C stops everything")
        assert await dev.stop(signal.SIGINT) == []
    finally:
        dev.process.kill()
    with NatsServer(tmp_path / "nats") as server:
        run_demo(server, tmp_path, python=str(python))
    more = f"{build_wheel()}[messaging,openlineage]"
    create_environment(tmp_path / "venv", python, [more], uploaded_before=UPLOADED_BEFORE)
    assert before <= installed_packages(python)
    _run(python, "-c", "import airflow.providers.common.messaging, airflow.providers.openlineage")
    shown = capsys.readouterr().out
    assert "lost                         0" in shown
    assert "run twice                    0" in shown


def test_each_extra_of_a_terminal_and_a_worker_has_what_it_is_for(nats: NatsServer, tmp_path: Path) -> None:
    python = create_environment(tmp_path / "venv", Path(sys.executable), [f"{build_wheel()}[command,metrics,patch]"])
    assert not any(package.startswith("apache-airflow") for package in installed_packages(python))
    _run(python, "-c", "import argcomplete, jsonpatch, prometheus_client, rich")
    program = str(python.with_name("jetstream-queue"))
    _run(program, "queues", "--server", nats.url)
    port = free_port()
    command = [program, "exporter", "--port", str(port), "--server", nats.url]
    exporter = Process.start(command, log_file=tmp_path / "exporter.log")
    try:
        address, deadline = f"http://127.0.0.1:{port}/metrics", time.monotonic() + 60
        while b"jetstream_exporter_up 1" not in _answer(address):
            assert exporter.alive, exporter.output()
            assert time.monotonic() < deadline, exporter.output()
            time.sleep(0.2)
    finally:
        exporter.terminate()


def _answer(address: str) -> bytes:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=10) as answer:
            return bytes(answer.read())
    except OSError:
        return b""


def test_beside_spark_without_airflow_a_read_runs(nats: NatsServer, tmp_path: Path) -> None:
    python = create_environment(tmp_path / "venv", Path(sys.executable), [f"{build_wheel()}[spark]", locked("pyspark")])
    assert not any(package.startswith("apache-airflow") for package in installed_packages(python))
    _run(python, "-c", _FILL, nats.url)
    assert _run(python, "-c", _READ, nats.url, cwd=tmp_path).split("\n")[0] == "[b'a', b'b']"


def test_a_strict_type_check_of_a_users_file_sees_the_types(tmp_path: Path) -> None:
    python = create_environment(
        tmp_path / "venv", Path(sys.executable), [str(build_wheel()), locked("mypy"), "types-PyYAML"]
    )
    (tmp_path / "user.py").write_text(_USER)
    shown = _run(python, "-m", "mypy", "--strict", "user.py", cwd=tmp_path)
    assert re.search(r'Revealed type is "airflow_provider_jetstream[\w.]*\.WorkQueue"', shown)
    assert re.search(r"def \(connection: airflow_provider_jetstream[\w.]*\.Connection", shown)
    assert re.search(r"airflow_provider_jetstream[\w.]*\.Worker", shown)
