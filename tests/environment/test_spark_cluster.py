"""A task is the driver of a standalone cluster whose executors have no Airflow and get this package as a zip."""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from testbed.dead_letters import stream_messages
from testbed.environments import executor_environment
from testbed.nats_server import NatsServer
from testbed.queues import make_dead_letters, make_queue
from testbed.spark_cluster import SparkCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from airflow.providers.common.compat.sdk import Context
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.nightly

LETTERS = 6


@pytest.fixture(scope="module")
def executor_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return executor_environment(tmp_path_factory.mktemp("executor") / "venv")


@pytest.fixture
def secret() -> str:
    return f"pl4nted-{uuid4().hex}"


@pytest.fixture
def nats(secret: str) -> Iterator[NatsServer]:
    with NatsServer(user="u", password=secret) as server:
        yield server


def describe_environment(_: bytes) -> bytes:
    import importlib.util
    import sys

    import airflow_provider_jetstream

    installed = [name for name in ("airflow", "nats") if importlib.util.find_spec(name)]
    description = {"installed": installed, "python": sys.executable, "package": airflow_provider_jetstream.__file__}
    return json.dumps(description).encode()


def replace_bodies(letters: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return letters.withColumn("body", f.udf(describe_environment, "binary")("body"))


async def test_executors_need_neither_airflow_nor_an_installation(
    executor_python: Path, nats: NatsServer, secret: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = connection_settings({"servers": (nats.url,), "user": "u", "password": secret})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name)
        await make_dead_letters(connection, queue, map(str, range(LETTERS)))
    events = tmp_path / "events"
    events.mkdir()
    on_executors = {
        "PATH": os.environ["PATH"],
        "NATS_CLUSTER_URL": nats.url,
        "NATS_CLUSTER_USER": "u",
        "NATS_CLUSTER_PASSWORD": secret,
    }
    nats_conn = {"conn_type": "nats", "host": nats.url, "login": "u", "password": secret}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(nats_conn))
    with SparkCluster(tmp_path / "cluster", on_executors) as cluster:
        conf = {
            "spark.jetstream.connection": "cluster",
            "spark.pyspark.python": str(executor_python),
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
        }
        spark_conn = {"conn_type": "spark", "host": cluster.url, "extra": {"conf": conf}}
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(spark_conn))
        task = JetStreamRedriveOperator(
            task_id="redrive",
            work_queue=queue,
            engine="spark",
            repair=replace_bodies,
            directory=str(tmp_path / "shared"),
        )
        instance = SimpleNamespace(dag_id="dag", run_id="run", task_id="redrive", map_index=-1, try_number=1)
        result = await asyncio.to_thread(task.execute, cast("Context", {"ti": instance}))
        output = cluster.output()
    assert (result["redriven"], result["failed"]) == (LETTERS, 0)
    async with connect(settings) as connection:
        bodies: list[dict[str, Any]] = [
            json.loads(message.data) for message in await stream_messages(connection, queue.name)
        ]
    assert len(bodies) == LETTERS
    assert {tuple(body["installed"]) for body in bodies} == {()}
    assert {body["python"] for body in bodies} == {str(executor_python)}
    assert all("airflow_provider_jetstream.zip" in body["package"] for body in bodies)
    event_log = "".join(file.read_text(errors="replace") for file in events.rglob("*") if file.is_file())
    assert "dag.redrive run" in event_log
    assert secret not in event_log
    assert secret not in output
