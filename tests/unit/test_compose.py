"""docker-compose.yml as Docker Compose reads it, and the files beside it as their own programs read them."""

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.tasks.spark_connection import spark_settings
from airflow_provider_jetstream.tasks.spark_credentials import executor_credentials
from testbed.compose import ComposeError, compose_command, compose_config

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "docker" / "Dockerfile"
ONE_SHOT = {"airflow-init"}
AIRFLOW = {"airflow-apiserver", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"}
SPARK = {"spark-master", "spark-worker"}
PINNED = re.compile(r"[\w./-]+:\d+\.\d+[\w.-]*")
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


def test_the_file_is_checked_by_docker_compose_which_refuses_a_broken_one(tmp_path: Path) -> None:
    version = subprocess.run([*compose_command(), "version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("Docker Compose version")
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(
        COMPOSE_FILE.read_text().replace("      nats:\n        condition", "      natz:\n        condition")
    )
    with pytest.raises(ComposeError, match="depends on undefined service"):
        compose_config(broken)


def test_all_services_are_declared(services: dict[str, Service]) -> None:
    assert set(services) == AIRFLOW | ONE_SHOT | SPARK | {"nats", "postgres", "worker"}
    assert services["worker"]["deploy"]["replicas"] == 2
    commands = {name: services[name]["command"] for name in AIRFLOW}
    assert all(command == [name.removeprefix("airflow-")] for name, command in commands.items() if "api" not in name)
    assert commands["airflow-apiserver"] == ["api-server"]


def test_images_are_pinned(services: dict[str, Service]) -> None:
    base_images = re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    for image in [service["image"] for service in services.values()] + base_images:
        assert PINNED.fullmatch(image), image
    assert "apache/airflow:3.3.2-python3.12" in base_images
    assert services["nats"]["image"] == "nats:2.15.0-alpine"


def test_built_images_never_come_from_a_registry(services: dict[str, Service]) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE.read_text(), re.MULTILINE))
    built = {name: service for name, service in services.items() if "build" in service}
    assert set(built) == AIRFLOW | ONE_SHOT | SPARK | {"worker"}
    for service in built.values():
        assert service["build"]["target"] in targets
        assert Path(service["build"]["context"]) == ROOT
        assert ROOT / service["build"]["dockerfile"] == DOCKERFILE
        assert service["pull_policy"] == "build"


def test_long_running_services_have_a_health_check_and_are_restarted(services: dict[str, Service]) -> None:
    for name in set(services) - ONE_SHOT:
        check = services[name]["healthcheck"]
        assert check["test"][0] == "CMD", name
        assert {"interval", "timeout", "retries", "start_period"} <= set(check), name
        assert services[name]["restart"] == "unless-stopped", name
    assert services["airflow-init"]["restart"] == "no"
    assert "http://127.0.0.1:8222/healthz" in services["nats"]["healthcheck"]["test"]


def test_services_start_after_those_they_depend_on(services: dict[str, Service]) -> None:
    for service in services.values():
        for name, dependency in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if name in ONE_SHOT else "service_healthy"
            assert dependency["condition"] == expected
    dependencies = {name: set(service.get("depends_on", {})) for name, service in services.items()}
    assert dependencies["airflow-init"] == {"postgres"}
    assert dependencies["worker"] == {"nats"}
    assert dependencies["spark-worker"] == {"nats", "spark-master"}
    assert dependencies["airflow-scheduler"] == {"airflow-apiserver"}
    others = AIRFLOW - {"airflow-scheduler"}
    assert all(dependencies[name] == {"postgres", "nats", "airflow-init"} for name in others)


def test_ports_are_open_to_this_machine_only(services: dict[str, Service]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["target"] for port in published} == {4222, 8222, 8080, 8081}
    assert {port.get("host_ip") for port in published} == {"127.0.0.1"}
    assert not any("network_mode" in service for service in services.values())


def test_state_is_stored_in_named_volumes(project: dict[str, Any], services: dict[str, Service]) -> None:
    used = {source for service in services.values() for source in named_volumes(service).values()}
    assert used == set(project["volumes"])
    assert named_volumes(services["nats"]) == {"/data": "nats-data"}
    assert 'store_dir: "/data"' in (ROOT / "docker" / "nats-server.conf").read_text()
    assert named_volumes(services["postgres"]) == {"/var/lib/postgresql/data": "postgres-data"}
    assert all("/opt/airflow/logs" in named_volumes(services[name]) for name in AIRFLOW)


def test_mounted_files_exist_and_are_read_only(services: dict[str, Service]) -> None:
    for service in services.values():
        for mount in bind_mounts(service).values():
            # Docker creates an empty folder in place of a missing source, and the error appears much later.
            assert Path(mount["source"]).exists(), mount["source"]
            assert mount["read_only"] is True
    for name in AIRFLOW:
        assert Path(bind_mounts(services[name])["/opt/airflow/dags"]["source"]) == ROOT / "example_dags"


def test_the_workers_have_their_queue_and_their_handler(services: dict[str, Service]) -> None:
    worker = services["worker"]
    command = worker["command"]
    assert command[:2] == ["jetstream-worker", "run"]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert options == {
        "--queue": "queues/orders.yaml",
        "--consumer": "processor",
        "--handler": "example_workers.orders:process",
    }
    mounts = bind_mounts(worker)
    assert worker["environment"]["PYTHONPATH"] == "/opt/worker"
    assert (Path(mounts["/opt/worker/queues"]["source"]) / "orders.yaml").is_file()
    assert (Path(mounts["/opt/worker/example_workers"]["source"]) / "orders.py").is_file()


def test_all_components_share_their_keys(services: dict[str, Service]) -> None:
    environments = [services[name]["environment"] for name in AIRFLOW | ONE_SHOT]
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
    worker = services["worker"]["environment"]
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
    dockerfile = DOCKERFILE.read_text()
    assert dockerfile.count(f"pyspark=={metadata.version('pyspark')} ") == 2
    assert (ROOT / "example_dags" / "dead_letter_pipeline.py").read_text().count("DEAD_LETTER_REPORTS") == 1


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    sources = {source for line in copies for source in line.split()}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_the_worker_image_has_the_packages_dependencies() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\s=<>!~;]", line)[0].lower() for line in requirements if line and line[0] != "#"}

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    installed = (ROOT / "docker" / "worker-requirements.txt").read_text().splitlines()
    assert names(installed) == names(declared)


def test_the_first_start_migrates_and_sets_the_admin_password(tmp_path: Path, services: dict[str, Service]) -> None:
    environment = services["airflow-init"]["environment"]
    key = "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"
    assert Path(environment[key]).parent.as_posix() in named_volumes(services["airflow-apiserver"])
    stand_in = tmp_path / "airflow"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    passwords = tmp_path / "passwords.json"
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    script = bind_mounts(services["airflow-init"])[services["airflow-init"]["command"][1]]["source"]
    done = subprocess.run(
        ["bash", script],
        env={"PATH": path, key: str(passwords), "AIRFLOW_ADMIN_PASSWORD": 'a"b'},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "db migrate\n"
    assert json.loads(passwords.read_text()) == {"admin": 'a"b'}
    assert passwords.stat().st_mode & 0o077 == 0


@contextmanager
def monitoring(clients: list[str], status: int = 200) -> Iterator[str]:
    """Serve /connz in pages, like a nats-server that these addresses are connected to."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            limit, offset = (int(number) for number in re.findall(r"=(\d+)", self.path))
            page = [{"ip": client} for client in clients[offset : offset + limit]]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"total": len(clients), "connections": page}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def worker_health() -> ModuleType:
    spec = importlib.util.spec_from_file_location("worker_health", ROOT / "docker" / "worker_health.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("clients", "status", "code"),
    [
        (["127.0.0.1"], 200, 0),
        (["10.0.0.1"] * 1500 + ["127.0.0.1"], 200, 0),
        (["10.0.0.1"] * 1500, 200, 1),
        ([], 200, 1),
        (["127.0.0.1"], 500, 1),
    ],
)
def test_a_worker_is_healthy_while_it_is_connected(
    worker_health: ModuleType, monkeypatch: pytest.MonkeyPatch, clients: list[str], status: int, code: int
) -> None:
    with monitoring(clients, status) as url:
        monkeypatch.setenv("NATS_MONITOR_URL", url)
        assert worker_health.main() == code


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no-url"])
def test_a_worker_without_a_server_is_unhealthy(
    worker_health: ModuleType, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("NATS_MONITOR_URL", url)
    assert worker_health.main() == 1
