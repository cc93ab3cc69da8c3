"""What the operators do with Spark; each in this process, with Spark in one of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
from airflow_steps import process_jobs, provisioned, wait_for
from dags.redrives import queue as one_chance

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from testbed.processes import Process

if TYPE_CHECKING:
    from airflow.sdk import Context
    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

pytestmark = pytest.mark.usefixtures("own_connections")


@pytest.fixture
async def queue(settings: ConnectionSettings, name: str) -> WorkQueue:
    queue = await provisioned(settings, one_chance(name))
    async with connect(settings) as connection:
        for number in range(4):
            await connection.client.jetstream().publish(f"{name}.one", json.dumps({"number": number}).encode())
    await process_jobs(settings, queue, 4, fail=True)
    return queue


def context(try_number: int = 1) -> Context:
    instance = SimpleNamespace(
        dag_id="dag", run_id="a run. of today", task_id="task", map_index=-1, try_number=try_number
    )
    return cast("Context", {"ti": instance})


async def jobs(connection: Connection, queue: WorkQueue) -> dict[int, bytes]:
    return {message.sequence: message.data async for message in read_range(connection, queue.name, ">")}


def add_hundred(body: bytes) -> bytes:
    found = json.loads(body)
    return json.dumps({"number": found["number"] + 100}).encode()


def mend(letters: DataFrame) -> DataFrame:
    """As a DAG's author writes it: with a function of the same file that executors need too."""
    from pyspark.sql import functions as f

    mended = f.udf(add_hundred, "binary")
    return letters.where("sequence > 1").withColumn("body", mended("body"))


async def test_letters_are_kept_reported_on_repaired_and_redriven(
    connection: Connection, queue: WorkQueue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = JetStreamDeadLetterReportOperator(
        task_id="report",
        work_queue=queue,
        directory=str(tmp_path / "reports"),
        served_at="https://reports.example.org/",
    )
    told = await asyncio.to_thread(report.execute, context())
    assert (told["letters"], told["reasons"]) == (4, {"max_deliveries": 4})
    assert "max_deliveries" in await asyncio.to_thread(Path(told["page"]).read_text, encoding="utf-8")
    link = report.operator_extra_links[1].get_link(report, ti_key=cast("Any", None))
    assert link == f"https://reports.example.org/{Path(told['page']).relative_to(tmp_path / 'reports')}"
    redrive = JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=queue,
        engine="spark",
        letters=told["kept"],
        select={"reasons": ["max_deliveries"]},
        repair=mend,
        why="numbers were too small",
    )
    done = await asyncio.to_thread(redrive.execute, context())
    assert (done["redriven"], done["failed"], done["from_sequences"]) == (3, 0, [[2, 4]])
    left = await jobs(connection, queue)
    assert {json.loads(body)["number"] for body in left.values()} == {0, 101, 102, 103}
    printed = capsys.readouterr().out
    assert "Redriving took" in printed
    assert "3 dead letters redriven (0 by earlier tries), 0 parked, 0 failed" in printed


_DRIVER = """
import logging
import sys

from airflow_provider_jetstream.tasks.spark_process import SparkApplication
from airflow_provider_jetstream.tasks.spark_connection import SparkSettings
from airflow_provider_jetstream.tasks.spark_credentials import HandOver

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
options = {"connection": "slow", "connectionProvider": "dags.slow_provider:find"}
spark = SparkSettings("local[1]", {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"})
queue = {"name": "q", "subjects": ["q.>"], "consumers": [{"name": "c", "max_deliver": 1, "ack_wait": "1s"}]}
orders = {"queue": queue | {"dead_letters": "d"}, "select": {}, "directory": "x", "page": "x", "airflow_url": None}
SparkApplication(spark, HandOver(options, {}), logging.getLogger("task")).run(sys.argv[1], "report", orders)
"""


def test_a_process_that_is_killed_outright_takes_its_application_with_it(name: str, tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "AIRFLOW_HOME": str(tmp_path)}
    driver = Process.start([sys.executable, "-c", _DRIVER, name], env=env, log_file=tmp_path / "log", cwd=tmp_path)

    def started() -> list[psutil.Process]:
        found = psutil.Process(driver.pid).children(recursive=True)
        return found if "runs as local-" in driver.output() else []

    try:
        application = wait_for(started, "an application that works", 300)
        assert any("SparkSubmit" in " ".join(process.cmdline()) for process in application)
        driver.signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(application, timeout=20)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        driver.kill()
