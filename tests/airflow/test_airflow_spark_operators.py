"""The operators that use Spark, in this process, with Spark in another one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
from airflow_steps import own_statsd, process_jobs, provisioned, wait_for
from dags.redrives import queue as queue_of

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import connect, list_redrives, read_redrive, resume_redrive
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.triggers.redrive import RedriveWaveTrigger
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.deferral import TaskDeferred
from testbed.queues import eventually
from testbed.shop import shop_with_letters

if TYPE_CHECKING:
    from airflow.sdk import Context
    from pyspark.sql import DataFrame
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

WITHIN = 120.0

pytestmark = pytest.mark.usefixtures("own_connections")


@pytest.fixture
async def queue(settings: ConnectionSettings, name: str) -> WorkQueue:
    queue = await provisioned(settings, queue_of(name))
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
    return {message.sequence: message.data for message in await stream_messages(connection, queue.name)}


def add_hundred(body: bytes) -> bytes:
    return json.dumps({"number": json.loads(body)["number"] + 100}).encode()


def repair(letters: DataFrame) -> DataFrame:
    """A DAG author's repair, with a function of the same file that executors need too."""
    from pyspark.sql import functions as f

    repaired = f.udf(add_hundred, "binary")
    return letters.where("sequence > 1").withColumn("body", repaired("body"))


def test_the_reports_link_is_its_page_under_the_served_address(
    queue: WorkQueue, tmp_path: Path, mocker: MockerFixture
) -> None:
    def finish(_self: object, _context: Context, _operator: object, _command: str, arguments: Any) -> dict[str, Any]:
        return {"letters": 0, "page": arguments["page"]}

    mocker.patch(seams.SPARK_APPLICATION_RUN_FOR, finish)
    report = JetStreamDeadLetterReportOperator(
        task_id="report", work_queue=queue, directory=str(tmp_path), served_at="https://reports.example.org/"
    )
    page = Path(report.execute(context())["page"])
    link = report.operator_extra_links[1].get_link(report, ti_key=cast("Any", None))
    assert link == f"https://reports.example.org/{page.relative_to(tmp_path)}"


@pytest.mark.jvm
async def test_letters_are_repaired_and_redriven(
    connection: Connection, queue: WorkQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    redrive = JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=queue,
        engine="spark",
        select={"reasons": ["max_deliveries"]},
        repair=repair,
        why="numbers were too small",
    )
    with own_statsd() as gauges:
        result = await asyncio.to_thread(redrive.execute, context())
        assert (result["redriven"], result["failed"], result["from_sequences"]) == (3, 0, [[2, 4]])
        # Its application sends none: the task does.
        of_redrive = f"jetstream_redrive_letters.{queue.name}"
        await eventually(lambda: len(gauges.of(of_redrive)) == 8)
        assert gauges.of("redriven") == {f"airflow.{of_redrive}.redriven": [3]}
        assert gauges.of("failed") == {f"airflow.{of_redrive}.failed": [0]}
    remaining = await jobs(connection, queue)
    assert {json.loads(body)["number"] for body in remaining.values()} == {0, 101, 102, 103}
    output = capsys.readouterr().out
    assert "Redriving took" in output
    assert "3 dead letters redriven (0 by earlier tries), 0 parked, 0 failed" in output


def spark_processes() -> set[psutil.Process]:
    """Return the processes of Spark that this one has started; one is that of other tests."""
    started = psutil.Process().children(recursive=True)
    return {process for process in started if "SparkSubmit" in command_line(process)}


def command_line(process: psutil.Process) -> str:
    """Return the words of a process, or an empty text where it is gone."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.jvm
async def test_waves_on_spark_hold_no_application_while_jobs_and_people_are_awaited(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue, others = await provisioned(settings, queue_of(name)), spark_processes()

    def redrive(**arguments: Any) -> JetStreamRedriveOperator:
        fields = {"waves": [2, "rest"], "wait_timeout": WITHIN, "why": "ticket 4711", **arguments}
        return JetStreamRedriveOperator(task_id="redrive", work_queue=queue, engine="spark", **fields)

    async with shop_with_letters(connection, settings, queue, 6) as shop:
        shop.is_open.clear()
        with own_statsd() as gauges:
            with pytest.raises(TaskDeferred) as deferred:
                await asyncio.to_thread(redrive(deferrable=True).execute, context())
            assert isinstance(deferred.value.trigger, RedriveWaveTrigger)
            assert spark_processes() <= others
            begun = (await list_redrives(connection, queue))[0]
            assert (begun.engine, begun.redriven, begun.waves[0].state) == ("spark", 2, "awaiting")
            shop.is_open.set()
            # Another process, as after the trigger has fired.
            running = asyncio.create_task(asyncio.to_thread(redrive(deferrable=False).execute, context()))

            async def at_gate() -> bool:
                return (await read_redrive(connection, queue, begun.id)).state == "at_gate"

            await eventually(at_gate, WITHIN)
            assert spark_processes() <= others
            shop.fails = lambda _: ""
            await resume_redrive(connection, queue, begun.id, who="Ann Lee", why="mended")
            result = await asyncio.wait_for(running, WITHIN)
            of_redrive = f"airflow.jetstream_redrive_letters.{name}"
            await eventually(lambda: gauges.of(f"{of_redrive}.completed").get(f"{of_redrive}.completed") == [0, 6])
            assert gauges.of(f"{of_redrive}.redriven") == {f"{of_redrive}.redriven": [2, 8]}
        assert (result["state"], result["redrive"], result["redriven"], result["resumed"]) == (
            *("finished", begun.id, 8, 2),
        )
        assert [(wave["redriven"], wave["outcomes"]["completed"]) for wave in result["waves"]] == [(2, 0), (6, 6)]
        assert Counter(shop.done.values()) == {1: 6}
        # A task that has succeeded, and is cleared, finds nothing left.
        assert (await read_redrive(connection, queue, begun.id)).state == "finished"


_DRIVER = """
import logging
import sys

from airflow_provider_jetstream.tasks.spark import SparkApplication
from airflow_provider_jetstream.tasks.spark import SparkSettings
from airflow_provider_jetstream.tasks.spark import ExecutorCredentials

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
options = {"connection": "slow", "connectionProvider": "dags.slow_provider:find"}
spark = SparkSettings("local[1]", {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"})
queue = {"name": "q", "subjects": ["q.>"], "consumers": [{"name": "c", "max_deliver": 1, "ack_wait": "1s"}]}
arguments = {"queue": queue | {"dead_letters": "d"}, "select": {}, "directory": "x", "page": "x", "airflow_url": None}
application = SparkApplication(logging.getLogger("task"))
application.run(spark, ExecutorCredentials(options, {}), sys.argv[1], "report", arguments)
"""


@pytest.mark.jvm
def test_the_application_of_a_killed_process_ends(name: str, tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "AIRFLOW_HOME": str(tmp_path)}
    driver = Process.start([sys.executable, "-c", _DRIVER, name], env=env, log_file=tmp_path / "log", cwd=tmp_path)

    def running() -> list[psutil.Process]:
        processes = psutil.Process(driver.pid).children(recursive=True)
        return processes if "runs as local-" in driver.output() else []

    try:
        application = wait_for(running, "a running application", 300)
        assert any("SparkSubmit" in command_line(process) for process in application)
        driver.signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(application, timeout=20)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        driver.kill()
