"""The testbed runs real servers, and leaves nothing behind."""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import psutil
import pytest
from nats.aio.client import Client

from airflow_provider_jetstream.dev.process import Process
from testbed.airflow import Airflow, AirflowNotReadyError
from testbed.airflow_client import AirflowApiError, AirflowClient
from testbed.certificates import make_tls
from testbed.nats_server import (
    NatsServer,
    NatsServerError,
    debian_nats_server,
    find_nats_server,
    nats_server_version,
)
from testbed.ports import free_ports

pytestmark = pytest.mark.xdist_group("Airflow of the testbed's own tests")

DAGS = """
from datetime import timedelta

from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from airflow.sdk import BaseOperator, dag, task


class Wait(BaseOperator):
    def execute(self, context):
        self.defer(
            trigger=TimeDeltaTrigger(timedelta(seconds=8)),
            method_name="resume",
            timeout=timedelta(seconds=90),
        )

    def resume(self, context, event=None):
        return "resumed"


@dag(schedule=None)
def trivial():
    @task
    def double(dag_run=None):
        print("doubling")
        return dag_run.conf["number"] * 2

    double()


@dag(schedule=None, is_paused_upon_creation=True)
def waits():
    Wait(task_id="wait")


trivial()
waits()
"""


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def connect(server: NatsServer, **options: object) -> Client:
    # One attempt: by default the client would retry a refused login for minutes.
    fixed = {"allow_reconnect": False, "max_reconnect_attempts": 1, "connect_timeout": 2}
    return await nats.connect(server.url, **(fixed | options))


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(50))) == 50


def test_find_nats_server_prefers_the_named_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "server"
    shutil.copy(find_nats_server(), binary)
    monkeypatch.setenv("NATS_SERVER_BIN", str(binary))
    assert find_nats_server() == binary
    monkeypatch.setenv("NATS_SERVER_BIN", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="NATS_SERVER_BIN names"):
        find_nats_server()


def test_a_stream_survives_kill_and_restart(tmp_path: Path) -> None:
    async def publish() -> None:
        client = await connect(server)
        await client.jetstream().add_stream(name="JOBS", subjects=["jobs.>"])
        await client.jetstream().publish("jobs.one", b"1")
        await client.close()

    async def stored() -> int:
        client = await connect(server)
        info = await client.jetstream().stream_info("JOBS")
        await client.close()
        return int(info.state.messages)

    with NatsServer(tmp_path) as server:
        asyncio.run(publish())
        url, first = server.url, server.pid
        server.kill()
        assert not server.alive
        server.start()
        assert (server.url, asyncio.run(stored())) == (url, 1)
        server.restart()
        assert (server.url, asyncio.run(stored())) == (url, 1)
        assert server.pid != first
        last = server.pid
        assert server.monitor("jsz")["streams"] == 1
    assert last is not None
    assert not is_running(last)


def test_jetstream_can_be_off() -> None:
    async def use() -> None:
        client = await connect(server)
        try:
            await client.jetstream().account_info()
        finally:
            await client.close()

    with NatsServer(jetstream=False) as server, pytest.raises(nats.js.errors.ServiceUnavailableError):
        asyncio.run(use())


@pytest.mark.parametrize(
    ("server_options", "right", "wrong"),
    [
        (
            {"user": "ann", "password": 'se"cret'},
            {"user": "ann", "password": 'se"cret'},
            {"user": "ann", "password": "no"},
        ),
        ({"token": "123e4"}, {"token": "123e4"}, {"token": "124"}),
    ],
)
def test_a_wrong_secret_is_refused(
    server_options: dict[str, str], right: dict[str, str], wrong: dict[str, str]
) -> None:
    async def use(options: dict[str, str]) -> None:
        client = await connect(server, **options)
        await client.flush()
        await client.close()

    with NatsServer(**server_options) as server:  # type: ignore[arg-type]
        asyncio.run(use(right))
        with pytest.raises(nats.errors.Error, match="Authorization"):
            asyncio.run(use(wrong))
        assert server_options.get("password", server_options.get("token", "")) not in server.url


def test_tls_with_client_certificate(tmp_path: Path) -> None:
    import ssl

    files = make_tls(tmp_path / "tls")
    context = ssl.create_default_context(cafile=str(files.ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT

    async def use() -> None:
        client = await connect(server, tls=context)
        await client.flush()
        await client.close()

    with NatsServer(tmp_path / "server", tls=files, tls_verify=True) as server:
        assert server.url.startswith("tls://")
        with pytest.raises((nats.errors.Error, ssl.SSLError, OSError)):
            asyncio.run(use())
        context.load_cert_chain(files.client_cert, files.client_key)
        asyncio.run(use())


def test_an_invalid_configuration_raises() -> None:
    server = NatsServer(config="nonsense {")
    with pytest.raises(NatsServerError, match="Parse error"), server:
        pass
    assert not server.folder.exists()


def test_a_taken_port_makes_the_first_start_choose_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer() as first:
        offers = iter([[first.port, free_ports(1)[0]], free_ports(2)])
        monkeypatch.setattr("testbed.nats_server.free_ports", lambda _: next(offers))
        with NatsServer() as second:
            assert second.alive
            assert second.port != first.port


def test_debian_has_an_old_server() -> None:
    binary = debian_nats_server()
    assert nats_server_version(binary) == "2.9.10"
    with NatsServer(binary=binary) as server:
        assert server.version == "2.9.10"


# Its child leads a session of its own, as the bash of Airflow's BashOperator does.
FORKING = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_terminate_leaves_no_child(tmp_path: Path) -> None:
    process = Process.start([sys.executable, "-c", FORKING], log_file=tmp_path / "log")
    assert wait_until(lambda: process.tail().strip().isdigit())
    child = int(process.tail())
    assert process.pids() == sorted([process.pid, child])
    process.terminate(grace=0.2)
    assert process.returncode == -signal.SIGKILL
    assert not process.alive
    assert not is_running(child)


@pytest.mark.slow
def test_a_killed_python_leaves_no_server(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from testbed.nats_server import NatsServer\n"
        "server = NatsServer(pathlib.Path(sys.argv[1])); server.start()\n"
        "print(server.pid, flush=True); time.sleep(600)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    ) as python:
        assert python.stdout is not None
        server = int(python.stdout.readline())
        assert is_running(server)
        python.kill()
    assert wait_until(lambda: not is_running(server))


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory, migrated_databases: Path) -> Iterator[Airflow]:
    folder = tmp_path_factory.mktemp("airflow")
    dags = folder / "dags"
    dags.mkdir()
    (dags / "testbed_dags.py").write_text(DAGS)
    # Airflow notices a dead triggerer within seconds.
    settings = {"JOB_HEARTBEAT_SEC": "1", "TRIGGERER_HEALTH_CHECK_THRESHOLD": "4"}
    instance = Airflow(
        folder / "home",
        dags,
        connections={"nats_test": '{"conn_type": "generic", "host": "127.0.0.1", "port": 4222}'},
        # A deferred task whose event comes before its process is done would fail; by default that takes 5 seconds.
        env={f"AIRFLOW__TRIGGERER__{name}": value for name, value in settings.items()}
        | {"AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1"},
        template_db=migrated_databases,
    )
    instance.start("trivial", "waits")
    yield instance
    pids = [pid for pids in instance.pids().values() for pid in pids]
    # The four components, the workers and the triggerer's runner.
    assert len(pids) >= 9
    instance.stop()
    assert [pid for pid in pids if is_running(pid)] == []
    assert instance.pids() == {}


@pytest.mark.slow
def test_airflow_runs_a_dag(airflow: Airflow) -> None:
    seen: list[str] = []
    run_id = airflow.trigger("trivial", {"number": 21})
    run = airflow.wait_for_run("trivial", run_id, on_poll=lambda run: seen.append(run["state"]))
    assert run["state"] == "success"
    assert seen[-1] == "success"
    assert [task["state"] for task in airflow.task_instances("trivial", run_id)] == ["success"]
    assert airflow.xcom("trivial", run_id, "double") == 42
    assert "doubling" in airflow.task_log("trivial", run_id, "double")


def test_airflow_has_a_viewer(airflow: Airflow) -> None:
    viewer = AirflowClient(airflow.url, "viewer", "viewer")
    assert viewer.dag("trivial") is not None
    with pytest.raises(AirflowApiError) as refused:
        viewer.trigger("trivial")
    viewer.close()
    assert refused.value.status == 403
    assert airflow.request("GET", "dags", anonymous=True).status_code == 401


@pytest.mark.slow
def test_a_deferred_task_survives_its_triggerer(airflow: Airflow) -> None:
    run_id = airflow.trigger("waits")

    def deferred() -> bool:
        return [task["state"] for task in airflow.task_instances("waits", run_id)] == ["deferred"]

    assert wait_until(deferred, 30)
    killed = airflow.pids()["triggerer"]
    assert len(killed) >= 2
    airflow.kill_triggerer()
    assert [pid for pid in killed if is_running(pid)] == []
    airflow.start_triggerer("second")
    assert "triggerer" not in airflow.pids()
    assert airflow.wait_for_run("waits", run_id, timeout=60)["state"] == "success"
    assert airflow.xcom("waits", run_id, "wait") == "resumed"


@pytest.mark.slow
def test_the_airflow_command_works_on_it(airflow: Airflow) -> None:
    done = airflow.cli("connections", "get", "nats_test", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert '"nats_test"' in done.stdout


def test_a_broken_dag_raises(airflow: Airflow) -> None:
    broken = airflow.dags_folder / "broken.py"
    broken.write_text("from airflow.sdk import dag\nraise ValueError('as expected')\n")
    with pytest.raises(AirflowNotReadyError, match=r"(?s)broken\.py.*as expected"):
        airflow.wait_for_dags("broken")
    broken.unlink()


@pytest.mark.slow
def test_a_start_that_fails_leaves_nothing_behind(airflow: Airflow, tmp_path: Path, migrated_databases: Path) -> None:
    # Beside the other one: the two share nothing but the template of the database.
    (tmp_path / "dags").mkdir()
    other = Airflow(tmp_path / "home", tmp_path / "dags", template_db=migrated_databases)
    assert other.port != airflow.port
    with pytest.raises(AirflowNotReadyError, match="Airflow isn't ready"):
        other.start("absent", timeout=1)
    assert sorted(log.stem for log in other.component_logs.iterdir()) == [
        "api-server",
        "dag-processor",
        "scheduler",
        "triggerer",
    ]
    assert other.pids() == {}
    folders = {process.pid: process.info["cwd"] for process in psutil.process_iter(["cwd"])}
    assert str(other.home) not in folders.values()
