"""The services of docker-compose.yml, by the file's own commands and environments: queues, workers, DAGs, Spark.

There is no Docker engine here: each service is a process with the command and nothing but the environment of the file,
in a folder that holds what its container mounts. Its ports are free ones, and its host names the loopback address.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.dev.process import Process, terminate_all
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
from testbed.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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


# Both of Spark's services have a page on this port; every other port is one service's.
SPARK_PAGE = 8081
PORTS = re.compile(rf"\b(?:4222|8222|8080|8974|7077|{SPARK_PAGE})\b")
HOSTS = re.compile(r'(?<=://)(?:nats|airflow-apiserver|spark-master)(?=:|"|$)|(?<="host": ")nats(?=")|^spark-master$')
# The folders that a container has for its own; programs and devices stay where they are.
FOLDERS = re.compile(r"(?<![\w./])/(?=(?:data|etc/nats|opt|tmp)\b)")


class Services:
    """The services as processes; the database is sqlite in place of PostgreSQL.

    :param programs: the folders of the programs that images have; all others have those of the running Python
    """

    def __init__(self, folder: Path, programs: Mapping[str, Path] | None = None) -> None:
        self._folder, self._programs = folder, programs or {}
        self._services = compose_config(ROOT / "docker-compose.yml")["services"]
        del self._services["postgres"]
        self._ports: dict[object, int] = defaultdict(free_port)
        self._processes: dict[str, list[Process]] = {}
        server = folder / "bin" / "nats-server"
        server.parent.mkdir(parents=True)
        server.symlink_to(find_nats_server())
        for name, service in self._services.items():
            # A folder comes before what is mounted below it.
            for mount in sorted(service.get("volumes", []), key=lambda mount: str(mount["target"])):
                self._mount(name, mount)
            self._working_dir(name).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        terminate_all([process for processes in self._processes.values() for process in processes])

    @property
    def names_with_health_check(self) -> list[str]:
        return [name for name, service in self._services.items() if "healthcheck" in service]

    def port(self, number: int, name: str = "") -> int:
        return self._ports[name if number == SPARK_PAGE else "", number]

    def path(self, name: str, path: str) -> Path:
        return self._folder / name / path.lstrip("/")

    def start(self) -> None:
        """Start each service once those that it depends on are healthy or done."""
        needed = {name: set(service.get("depends_on", {})) - {"postgres"} for name, service in self._services.items()}
        for name in TopologicalSorter(needed).static_order():
            for other in needed[name]:
                wait_for(partial(self._is_ready, other), f"that {other} is ready for {name}")
            self._start(name)

    def wait_for_end(self, name: str) -> str:
        """Wait until a service that runs once has ended well, and return its output."""
        wait_for(partial(self._is_ready, name), f"the end of {name}")
        return self._processes[name][0].output()

    def run_again(self, name: str) -> str:
        """Run a service that has ended once more, as the project's next start does, and return its output."""
        self._start(name)
        return self.wait_for_end(name)

    def is_healthy(self, name: str) -> bool:
        """Return whether the command of a service's health check succeeds within its time."""
        check = self._services[name]["healthcheck"]
        assert check["test"][0] == "CMD"
        try:
            done = subprocess.run(
                self._command(name, check["test"][1:]),
                env=self._environment(name),
                cwd=self._working_dir(name),
                capture_output=True,
                timeout=float(check["timeout"].removesuffix("s")),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _is_ready(self, name: str) -> bool:
        for other, processes in self._processes.items():
            for process in processes:
                if not process.alive:
                    ended_well = process.returncode == 0 and self._services[other]["restart"] == "no"
                    assert ended_well, f"{other} ended with {process.returncode}:\n{process.tail()}"
        if self._services[name]["restart"] == "no":
            return not any(process.alive for process in self._processes[name])
        return self.is_healthy(name)

    def _start(self, name: str) -> None:
        service = self._services[name]
        self._processes[name] = [
            Process.start(
                self._command(name, service["command"]),
                env=self._environment(name),
                cwd=self._working_dir(name),
                log_file=self._folder / "logs" / f"{name}-{number}.log",
            )
            for number in range(service.get("deploy", {}).get("replicas", 1))
        ]

    def _environment(self, name: str) -> dict[str, str]:
        image = self._services[name]["image"].partition("/")[2].partition(":")[0]
        programs = self._programs.get(image, Path(sys.executable).parent)
        own = {
            "PATH": os.pathsep.join([str(self._folder / "bin"), str(programs), os.environ["PATH"]]),
            "HOME": str(self._working_dir(name)),
            **({"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {}),
        }
        declared = self._services[name].get("environment", {})
        return own | {key: self._text(name, value) for key, value in declared.items()} | self._differing()

    def _differing(self) -> dict[str, str]:
        return {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self._folder}/airflow.db",
            # Tasks that start at once would otherwise wait for each other: see testbed/airflow_settings.py.
            "AIRFLOW__DATABASE__SQL_ALCHEMY_POOL_ENABLED": "False",
            "AIRFLOW__API__HOST": LOOPBACK,
            # Parsing all files again each half minute takes a third of a core.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
            # A JVM that starts quickly.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1",
            "SPARK_LOCAL_IP": LOOPBACK,
        }

    def _command(self, name: str, command: Sequence[str]) -> list[str]:
        return [self._text(name, argument) for argument in command]

    def _text(self, name: str, text: str) -> str:
        text = PORTS.sub(lambda found: str(self.port(int(found[0]), name)), HOSTS.sub(LOOPBACK, text))
        return FOLDERS.sub(f"{self._folder / name}/", text)

    def _mount(self, name: str, mount: Mapping[str, str]) -> None:
        target, source = self.path(name, mount["target"]), Path(mount["source"])
        target.parent.mkdir(parents=True, exist_ok=True)
        if mount["type"] == "volume":
            source = self._folder / "volumes" / source
            source.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".conf":
            target.write_text(self._text(name, source.read_text()))
        else:
            target.symlink_to(source)

    def _working_dir(self, name: str) -> Path:
        return self.path(name, self._services[name].get("working_dir", "/"))


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("compose")
    # Airflow is that of the tests, with the same versions: its environment takes half a minute to compile.
    programs = {
        "worker": create_image_environment("worker", folder / "image-worker", compiled=True),
        "spark": create_image_environment("spark", folder / "image-spark"),
    }
    with Services(folder, programs) as started:
        started.start()
        yield started


@pytest.fixture(scope="module")
def airflow(services: Services) -> AirflowClient:
    return AirflowClient(f"http://127.0.0.1:{services.port(8080)}", "admin", PASSWORD)


@pytest.fixture(scope="module")
def settings(services: Services) -> ConnectionSettings:
    url = f"nats://127.0.0.1:{services.port(4222)}"
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


async def test_the_queue_of_each_example_dag_is_provisioned(services: Services, settings: ConnectionSettings) -> None:
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
    services: Services, settings: ConnectionSettings, airflow: AirflowClient
) -> None:
    async with connect(settings) as connection:
        for file, subject in (("orders_by_event", "event_orders.new"), ("orders_payload", "payload.orders.new")):
            await publish(connection, WorkQueue.load(QUEUES / f"{file}.yaml"), [{"order": 1}], subject=subject)
    images = str(services.path("provision", "/tmp/images/input"))
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


def test_the_nightly_dag_ran_on_the_spark_cluster(services: Services) -> None:
    services.wait_for_end("first-run")
    page = services.port(SPARK_PAGE, "spark-master")
    with urllib.request.urlopen(f"http://127.0.0.1:{page}/json/", timeout=10) as answer:
        cluster = json.load(answer)
    assert len(cluster["workers"]) == 1
    applications = {application["name"].partition(" ")[0] for application in cluster["completedapps"]}
    assert applications == {"dead_letter_pipeline.report", "dead_letter_pipeline.redrive"}
    assert {application["state"] for application in cluster["completedapps"]} == {"FINISHED"}


def test_the_next_start_runs_no_dag_again(services: Services, airflow: AirflowClient) -> None:
    services.wait_for_end("first-run")
    assert services.run_again("first-run") == "The examples ran at an earlier start.\n"
    assert len(airflow.runs("orders")) == 1


def test_every_health_check_succeeds_while_the_services_run(services: Services) -> None:
    for name in services.names_with_health_check:
        # As an engine does, which lets some checks fail.
        wait_for(partial(services.is_healthy, name), f"that {name} is healthy")


def test_no_health_check_succeeds_where_nothing_runs(tmp_path: Path) -> None:
    services = Services(tmp_path)
    # The checks of these two need a database.
    checked = set(services.names_with_health_check) - {"airflow-dag-processor", "airflow-triggerer"}
    assert [name for name in checked if services.is_healthy(name)] == []
