"""docker-compose.yml as Docker Compose reads it, and the files beside it as their own programs read them."""

import base64
import importlib
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.tasks.spark import executor_credentials, spark_settings
from testbed.compose import compose_config

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
AIRFLOW = {"airflow-apiserver", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"}
# Each consumer of the example DAGs' queues that a worker does, by the worker.
WORKERS = {
    "worker-exports": ("exports.yaml", {"exporter"}),
    "worker-images": ("images.yaml", {"BW"}),
    "worker-invoices": ("invoices.yaml", {"printer"}),
    "worker-jobs-high": ("jobs.yaml", {"high", "low"}),
    "worker-jobs-low": ("jobs.yaml", {"low"}),
    "worker-orders": ("orders.yaml", {"processor"}),
    "worker-payments": ("payments.yaml", {"bank"}),
    "worker-readings": ("readings.yaml", {"averager"}),
    "worker-store": ("store.yaml", {"till"}),
    "worker-surveys": ("surveys.yaml", {"sender"}),
    "worker-tasks-0": ("tasks.yaml", {"worker-0"}),
    "worker-tasks-1": ("tasks.yaml", {"worker-1"}),
    "worker-tasks-2": ("tasks.yaml", {"worker-2"}),
}
Service = dict[str, Any]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return compose_config(COMPOSE_FILE)


@pytest.fixture
def services(project: dict[str, Any]) -> dict[str, Service]:
    declared: dict[str, Service] = project["services"]
    return declared


def bind_mounts(service: Service) -> dict[str, Any]:
    return {mount["target"]: mount for mount in service.get("volumes", []) if mount["type"] == "bind"}


def named_volumes(service: Service) -> dict[str, str]:
    mounts = service.get("volumes", [])
    return {mount["target"]: mount["source"] for mount in mounts if mount["type"] == "volume"}


def test_ports_are_open_to_this_machine_only(services: dict[str, Service]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["target"] for port in published} == {4222, 8222, 8080, 8081}
    assert {port.get("host_ip") for port in published} == {"127.0.0.1"}
    assert not any("network_mode" in service for service in services.values())


def test_one_service_builds_each_image_of_this_project_and_no_service_pulls_it(services: dict[str, Service]) -> None:
    builders: dict[str, list[str]] = {}
    for name, service in services.items():
        image = service["image"]
        if image.startswith("airflow-provider-jetstream/"):
            builders.setdefault(image, [])
            if "build" in service:
                builders[image].append(name)
            assert service["pull_policy"] == ("build" if "build" in service else "never"), name
        else:
            assert "build" not in service
    assert sorted(builders.values()) == [["airflow-init"], ["provision"], ["spark-master"]]


def test_mounted_files_exist_and_are_read_only(services: dict[str, Service]) -> None:
    for service in services.values():
        for mount in bind_mounts(service).values():
            # Docker creates an empty folder in place of a missing source, and the error appears much later.
            assert Path(mount["source"]).exists(), mount["source"]
            assert mount["read_only"] is True
    for name in AIRFLOW:
        assert Path(bind_mounts(services[name])["/opt/airflow/dags"]["source"]) == ROOT / "example_dags"


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_worker_has_its_queue_and_its_handler(name: str, services: dict[str, Service]) -> None:
    worker = services[name]
    command = worker["command"]
    assert command[:2] == ["jetstream-worker", "run"]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    file, consumers = WORKERS[name]
    assert options["--queue"] == f"queues/{file}"
    assert {options["--consumer"], options.get("--fallback", options["--consumer"])} == consumers
    module, _, function = options["--handler"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    mounts = bind_mounts(worker)
    assert worker["working_dir"] == worker["environment"]["PYTHONPATH"] == "/opt/worker"
    assert (Path(mounts["/opt/worker/queues"]["source"]) / file).is_file()
    assert Path(mounts["/opt/worker/example_workers"]["source"]) == ROOT / "example_workers"


def test_all_components_share_their_keys(services: dict[str, Service]) -> None:
    environments = [services[name]["environment"] for name in {"airflow-init", *AIRFLOW}]
    for key in ("CORE__FERNET_KEY", "API__SECRET_KEY", "API_AUTH__JWT_SECRET", "DATABASE__SQL_ALCHEMY_CONN"):
        assert len({environment[f"AIRFLOW__{key}"] for environment in environments}) == 1
    # The key sizes of Fernet and HS512.
    assert len(base64.urlsafe_b64decode(environments[0]["AIRFLOW__CORE__FERNET_KEY"])) == 32
    assert len(environments[0]["AIRFLOW__API_AUTH__JWT_SECRET"]) >= 64


@pytest.mark.parametrize("password", ["local-trial", "chosen-0ne", "12345678"])
def test_one_password_reaches_the_server_airflow_and_the_workers(password: str, tmp_path: Path) -> None:
    variables = {} if password == "local-trial" else {"NATS_USER": "someone", "NATS_PASSWORD": password}
    services = compose_config(COMPOSE_FILE, variables)["services"]
    user = variables.get("NATS_USER", "airflow")
    connection = json.loads(services["airflow-triggerer"]["environment"]["AIRFLOW_CONN_NATS_DEFAULT"])
    assert connection == {
        "conn_type": "nats",
        "host": "nats",
        "port": 4222,
        "login": user,
        "password": password,
    }
    for name in [*WORKERS, "provision", "first-run"]:
        worker = services[name]["environment"]
        assert (worker["NATS_URL"], worker["NATS_USER"], worker["NATS_PASSWORD"]) == (
            "nats://nats:4222",
            user,
            password,
        )
    executors = services["spark-worker"]["environment"]
    assert executors == {
        "NATS_TRIAL_URL": "nats://nats:4222",
        "NATS_TRIAL_USER": user,
        "NATS_TRIAL_PASSWORD": password,
        "SPARK_WORKER_WEBUI_PORT": "8081",
    }
    server = services["nats"]["environment"]
    assert (server["NATS_USER"], server["NATS_PASSWORD"]) == (f'"{user}"', f'"{password}"')
    config = bind_mounts(services["nats"])["/etc/nats/nats-server.conf"]["source"]
    check = subprocess.run(
        [find_nats_server(), "-t", "--config", config],
        env=server,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.since_airflow("3.2", "lookups of connections outside a task's process")
def test_a_task_is_the_driver_of_the_cluster_and_shares_its_storage(
    services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = services["airflow-scheduler"]["environment"]
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", environment["AIRFLOW_CONN_SPARK_DEFAULT"])
    spark = spark_settings("spark_default")
    assert spark.master == "spark://spark-master:7077"
    nats = ConnectionSettings(servers=("nats",), user="u", password="p")
    # Executors read NATS_TRIAL_URL, NATS_TRIAL_USER and NATS_TRIAL_PASSWORD.
    assert executor_credentials(nats, spark).options == {"connection": "trial"}
    master = services["spark-master"]["command"]
    assert master[-4:] == ["--host", "spark-master", "--port", "7077"]
    assert services["spark-worker"]["command"][-1] == spark.master
    shared = Path(environment["DEAD_LETTER_REPORTS"]).parent.as_posix()
    for name in ("airflow-scheduler", "spark-worker"):
        assert named_volumes(services[name])[shared] == "spark-data"
    assert (ROOT / "example_dags" / "dead_letter_pipeline.py").read_text().count("DEAD_LETTER_REPORTS") == 1
