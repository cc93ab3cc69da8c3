"""The services of docker-compose.yml, by the file's own commands and environments: queues, workers, DAGs, Spark."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from compose_services import ComposeServices

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    WorkQueue,
    connect,
    connection_settings,
    plan,
    publish,
)
from testbed.airflow_client import AirflowClient
from testbed.compose import compose_config
from testbed.compose_images import create_image_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.group("services of the compose file"), pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
QUEUES = ROOT / "example_dags" / "queues"
USER, PASSWORD = "airflow", "local-trial"
# Messages or dead letters start them.
WATCHING = ("orders_by_event", "orders_payload", "dead_letter_watch")
TRIGGERED: dict[str, dict[str, object]] = {
    "invoices": {},
    "partitioned_tasks": {"tasks": 12},
    "priority_jobs": {"jobs": 6, "publishers": 1},
}
# Triggered once the others have ended: sqlite, which stands for PostgreSQL, lets one process write at a time.
LATER = ("delayed_jobs", "mapped_jobs", "publish_here", "redrive_in_waves")


def compose_services(folder: Path, programs: dict[str, Path] | None = None) -> ComposeServices:
    """The project, with what stands for PostgreSQL, and a JVM that starts quickly."""
    env = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder}/airflow.db",
        # Tasks that start at once would otherwise wait for each other: see testbed/airflow_settings.py.
        "AIRFLOW__DATABASE__SQL_ALCHEMY_POOL_ENABLED": "False",
        "AIRFLOW__API__HOST": "127.0.0.1",
        # Parsing all files again each half minute takes a third of a core.
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    project = compose_config(ROOT / "docker-compose.yml")
    return ComposeServices(project, folder, env=env, left_out=["postgres"], programs=programs)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeServices]:
    folder = tmp_path_factory.mktemp("compose")
    # Airflow is that of the tests, with the same versions: its environment takes half a minute to compile.
    programs = {
        "worker": create_image_environment("worker", folder / "image-worker", compiled=True),
        "spark": create_image_environment("spark", folder / "image-spark"),
    }
    with compose_services(folder, programs) as started:
        started.start()
        yield started


@pytest.fixture(scope="module")
def airflow(services: ComposeServices) -> AirflowClient:
    port = services.translation.port("airflow-apiserver", 8080)
    return AirflowClient(f"http://127.0.0.1:{port}", "admin", PASSWORD)


@pytest.fixture(scope="module")
def settings(services: ComposeServices) -> ConnectionSettings:
    url = f"nats://127.0.0.1:{services.translation.port('nats', 4222)}"
    return connection_settings({"servers": (url,), "user": USER, "password": PASSWORD})


def wait_for(check: Callable[[], Any], what: str, timeout: float = 600.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := check()):
        assert time.monotonic() < deadline, f"expected {what}, found none"
        time.sleep(0.3)
    return found


def states_of_success(airflow: AirflowClient, dag_id: str, run_id: str | None = None) -> dict[str, str]:
    """Return the states of a run's tasks once it has succeeded; by default of the first run that something starts."""
    run_id = run_id or str(wait_for(lambda: airflow.runs(dag_id), f"a run of {dag_id}")[0]["dag_run_id"])
    run = airflow.wait_for_run(dag_id, run_id, 600)
    states = {task["task_id"]: task["state"] for task in airflow.task_instances(dag_id, run_id)}
    assert run["state"] == "success", (dag_id, states)
    return states


async def test_the_queue_of_each_example_dag_is_provisioned(
    services: ComposeServices, settings: ConnectionSettings
) -> None:
    services.wait_for_end("provision")
    named = {
        file
        for dag in (ROOT / "example_dags").glob("*.py")
        for file in re.findall(r'"queues" / "(\w+\.yaml)"', dag.read_text())
    }
    assert len(named) == 12
    async with connect(settings) as connection:
        for file in named:
            assert not (await plan(connection, WorkQueue.load(QUEUES / file))).changes, file


async def test_the_dags_of_each_queue_succeed(
    services: ComposeServices, settings: ConnectionSettings, airflow: AirflowClient
) -> None:
    async with connect(settings) as connection:
        for file, subject in (("orders_by_event", "event_orders.new"), ("orders_payload", "payload.orders.new")):
            await publish(connection, WorkQueue.load(QUEUES / f"{file}.yaml"), [{"order": 1}], subject=subject)
    images = str(services.translation.path("provision", "/tmp/images/input"))
    triggered = TRIGGERED | {"image_conversion": {"input": images}}
    wait_for(lambda: all(map(airflow.dag, [*triggered, *WATCHING])), "the DAGs")
    for dag_id in WATCHING:
        airflow.unpause(dag_id)
        # Airflow starts a watcher when it parses the file of a DAG that isn't paused any more.
        airflow.reparse(dag_id)
    runs = {}
    for dag_id, conf in triggered.items():
        airflow.unpause(dag_id)
        runs[dag_id] = airflow.trigger(dag_id, conf)
    output = services.wait_for_end("first-run")
    counts = re.search(
        r"^orders: (\d+) published, (\d+) completed, (\d+) dead, (\d+) redriven, (\d+) ", output, re.MULTILINE
    )
    assert counts, output
    published, completed, dead, redriven, completed_after = map(int, counts.groups())
    assert (published, completed + completed_after) == (20, 20)
    assert dead == redriven == completed_after > 0
    assert "dead_letter_pipeline: 100 dead letters of 3 causes, 90 redriven, 90 completed after that" in output
    for dag_id, run_id in [*runs.items(), *((dag_id, None) for dag_id in WATCHING)]:
        states = states_of_success(airflow, dag_id, run_id)
        # A run whose sensor has found nothing succeeds as well.
        assert set(states.values()) == {"success"}, (dag_id, states)
    later = {dag_id: airflow.trigger(dag_id) for dag_id in LATER}
    # One of these triggers it.
    for dag_id, run_id in [*later.items(), ("wait_there", None)]:
        assert set(states_of_success(airflow, dag_id, run_id).values()) == {"success"}, dag_id
    # The other DAG has left only what nobody can process.
    assert states_of_success(airflow, "dead_letter_reprocess")["park_poison"] == "success"
    assert not airflow.import_errors()


def test_the_nightly_dag_ran_on_the_spark_cluster(services: ComposeServices) -> None:
    services.wait_for_end("first-run")
    port = services.translation.port("spark-master", 8081)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/", timeout=10) as answer:
        cluster = json.load(answer)
    assert len(cluster["workers"]) == 1
    applications = {application["name"].partition(" ")[0] for application in cluster["completedapps"]}
    assert applications == {"dead_letter_pipeline.report", "dead_letter_pipeline.redrive"}
    assert {application["state"] for application in cluster["completedapps"]} == {"FINISHED"}


def test_the_next_start_runs_no_dag_again(services: ComposeServices, airflow: AirflowClient) -> None:
    services.wait_for_end("first-run")
    assert services.run_again("first-run") == "The examples ran at an earlier start.\n"
    assert len(airflow.runs("orders")) == 1


def test_every_health_check_succeeds_while_the_services_run(services: ComposeServices) -> None:
    for name in services.names_with_health_check:
        # As an engine does, which lets some checks fail.
        wait_for(partial(services.is_healthy, name), f"that {name} is healthy")


def test_no_health_check_succeeds_where_nothing_runs(tmp_path: Path) -> None:
    services = compose_services(tmp_path)
    # The checks of these two need a database.
    checked = set(services.names_with_health_check) - {"airflow-dag-processor", "airflow-triggerer"}
    assert [name for name in checked if services.is_healthy(name)] == []
