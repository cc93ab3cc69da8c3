"""The Spark provider together with this package: its pyspark-client writes into pyspark's own folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from demo.output import failure_text
from testbed.airflow import Airflow
from testbed.console import commands
from testbed.environments import ROOT, create_environment, locked
from testbed.nats_server import NatsServer
from testbed.queues import make_dead_letters, make_queue

pytestmark = pytest.mark.nightly

# What docs/spark-airflow.md has its reader install. Not the locked one: pyspark-client lags behind pyspark.
(INSTALL,) = [command.text for command in commands() if "pyspark-client==" in command.text]
((SPARK, CLIENT),) = re.findall(r"pyspark==(\S+) pyspark-client==(\S+)", INSTALL)
OTHER = "4.1.1"
LETTERS = 5


@pytest.fixture(scope="module")
def beside_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requirements = [
        locked("apache-airflow"),
        "apache-airflow-providers-apache-spark",
        f"pyspark=={SPARK}",
        f"pyspark-client=={CLIENT}",
        f"{ROOT}[spark]",
    ]
    return create_environment(tmp_path_factory.mktemp("beside") / "venv", Path(sys.executable), requirements)


def check_pyspark(python: Path) -> subprocess.CompletedProcess[str]:
    program = "from airflow_provider_jetstream.spark.application.messages import require_pyspark as r; print(r())"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)


@pytest.fixture
def package(beside_python: Path, tmp_path: Path) -> Path:
    file = tmp_path / "package.zip"
    command = [str(beside_python), "-m", "airflow_provider_jetstream.spark.application.package_zip", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return file


async def test_operators_of_both_work_in_one_dag(beside_python: Path, package: Path, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as nats:
        async with connect(connection_settings({"servers": (nats.url,)})) as connection:
            queue = await make_queue(connection, "beside")
            await make_dead_letters(connection, queue, map(str, range(LETTERS)))
        airflow = Airflow(
            tmp_path / "airflow",
            ROOT / "tests" / "environment" / "spark_provider_dags",
            connections={
                "nats_default": json.dumps({"conn_type": "nats", "host": "127.0.0.1", "port": nats.port}),
                "spark_default": json.dumps({"conn_type": "spark", "host": "local[1]"}),
            },
            env={
                "BESIDE_STREAM": queue.name,
                "BESIDE_FOLDER": str(tmp_path),
                "NATS_BESIDE_URL": nats.url,
                "PYSPARK_PYTHON": str(beside_python),
                "PATH": f"{beside_python.parent}{os.pathsep}{os.environ['PATH']}",
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            python=str(beside_python),
        )
        try:
            airflow.start("beside")
            run_id = airflow.trigger("beside")
            run = airflow.wait_for_run("beside", run_id, 300)
            assert run["state"] == "success", failure_text(airflow, "beside", run_id)
            counts = json.loads((tmp_path / "counted").read_text())
            assert counts["messages"] == LETTERS
            assert package.name in counts["package"]
            assert airflow.xcom("beside", run_id, "count") == {"messages": LETTERS, "spark": SPARK}
            assert airflow.xcom("beside", run_id, "report")["letters"] == LETTERS
        finally:
            airflow.stop()


def test_a_mixture_of_versions_is_refused(beside_python: Path) -> None:
    assert check_pyspark(beside_python).stdout.strip() == SPARK
    create_environment(beside_python.parents[1], beside_python, [f"pyspark-client=={OTHER}"])
    refused = check_pyspark(beside_python)
    assert f"expected pyspark-client of the version of pyspark, {SPARK}, found {OTHER}" in refused.stderr
