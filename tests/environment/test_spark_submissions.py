"""The blocks about a cluster and Spark Connect run there, with the package sent along as a zip."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.code_blocks import code_blocks
from testbed.command_tests import commands_of
from testbed.console import Terminal
from testbed.environments import build_wheel, executor_environment
from testbed.nats_server import NatsServer
from testbed.spark_cluster import SparkCluster
from testbed.spark_connect import SparkConnectServer, connect_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNT = 3
_ZIP = "airflow_provider_jetstream.zip"


def _block(language: str, part: str) -> str:
    (code,) = [block.code for block in code_blocks(language) if block.page == "docs/spark.md" and part in block.code]
    return code


async def _publish_orders(server: NatsServer) -> None:
    async with connect(connection_settings({"servers": (server.url,)})) as connection:
        await connection.api("STREAM.CREATE.orders", {"name": "orders", "subjects": ["orders.>"]})
        for number in range(_COUNT):
            await connection.request("orders.created", json.dumps({"number": number}).encode())


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[NatsServer]:
    """A server with a stream of three messages, and the wheel as a zip in the test's folder."""
    shutil.copy(build_wheel(), tmp_path / _ZIP)
    with NatsServer(tmp_path / "nats") as server:
        asyncio.run(_publish_orders(server))
        yield server


def submit(request: pytest.FixtureRequest, orders: NatsServer, tmp_path: Path, program: str) -> None:
    """Run the commands of a page, whose last one submits a program to a cluster; the program is that of docs/spark.md.

    :param program: the file that the command names
    """
    executor_python = executor_environment(tmp_path / "executor")
    code = _block("python", 'appName("nightly")')
    code = code.replace("nats://localhost:4222", orders.url).replace('"/data/', f'"{tmp_path}/')
    (tmp_path / program).write_text(code)
    properties = {
        "spark.pyspark.python": executor_python,
        "spark.pyspark.driver.python": sys.executable,
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in properties.items()))
    terminal = Terminal(commands_of(request.node.nodeid), tmp_path, orders.url)
    terminal.env["SPARK_CONF_DIR"] = str(tmp_path)
    # Executors are to have the package from the zip alone.
    terminal.env.pop("PYTHONPATH", None)
    # No registry has the package yet.
    terminal.add_program("pip", f'cp "{build_wheel()}" .')
    # The page starts a server by Docker; here one runs already.
    terminal.add_program("docker", f'[ "$1" = run ] && [ "{orders.pid}" ]')
    with SparkCluster(tmp_path / "cluster", {"PATH": os.environ["PATH"]}) as cluster:
        terminal.replace("spark://spark-master:7077", cluster.url)
        while terminal.left:
            terminal.run()
    assert pq.read_table(tmp_path / "nightly").column("seq").to_pylist() == list(range(1, _COUNT + 1))


def test_the_block_about_a_cluster_runs_where_executors_lack_the_package(
    request: pytest.FixtureRequest, orders: NatsServer, tmp_path: Path
) -> None:
    (tmp_path / _ZIP).unlink()
    submit(request, orders, tmp_path, "nightly.py")


def test_the_block_about_jobs_of_your_own_runs_where_executors_lack_the_package(
    request: pytest.FixtureRequest, orders: NatsServer, tmp_path: Path
) -> None:
    (tmp_path / _ZIP).unlink()
    submit(request, orders, tmp_path, "job.py")


def test_the_block_about_spark_connect_runs_where_the_server_lacks_the_package(
    orders: NatsServer, tmp_path: Path
) -> None:
    python = connect_environment(tmp_path / "connect", Path(sys.executable), version("pyspark"))
    program = _block("python", "SparkSession.builder.remote").replace("nats://localhost:4222", orders.url)
    with SparkConnectServer(python, tmp_path / "server") as server:
        (tmp_path / "remote.py").write_text(program.replace("sc://spark-connect:15002", server.address))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, "remote.py"],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": _ZIP},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        log = server.log()
    assert done.returncode == 0, done.stderr[-4000:] + log
    assert done.stdout.count("orders.created") == _COUNT
