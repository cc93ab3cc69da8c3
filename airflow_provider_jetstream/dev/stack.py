"""A nats-server, example queues with their workers and an Airflow, all of them processes with files in one folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from airflow_provider_jetstream.dev.airflow_home import COMPONENTS, airflow_env, prepare_home
from airflow_provider_jetstream.dev.errors import DevStackError
from airflow_provider_jetstream.dev.example_load import DAGS, create_queues, publish_without_end, start_workers
from airflow_provider_jetstream.dev.guide import PASSWORD, USER
from airflow_provider_jetstream.dev.listening_ports import LOOPBACK, free_port
from airflow_provider_jetstream.dev.process import Process, terminate_all
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.jetstream.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_API_SERVER: Final = "airflow_provider_jetstream.dev.api_server"
# Of tasks and triggers: Airflow's own servers would listen on every address.
_LOG_SERVER: Final = "airflow.utils.serve_logs.log_server:get_app"
_LOG_PORTS: Final = ("AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT", "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT")
_HOSTNAME: Final = "airflow_provider_jetstream.dev.listening_ports.loopback"
_POLL: Final = 0.1
_WATCH: Final = 1.0
_NATS_SECONDS: Final = 30.0
_AIRFLOW_SECONDS: Final = 180.0
# Airflow's scheduler ends its tasks meanwhile.
_GRACE: Final = 5.0
_SETTINGS: Final = {
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    # The folder isn't where the user looks for logs, and is removed at the end.
    "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
}
# The machine's proxy settings don't apply to the loopback address.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class StackPorts:
    """Where the servers listen, on the loopback address.

    :param page: of Airflow's API server, which has the page
    :param nats: of the nats-server
    """

    page: int
    nats: int

    @classmethod
    def chosen(cls, page: int, nats: int) -> Self:
        """Return these ports; 0 stands for any free one.

        :raises ArgumentError: one is taken
        """
        nats = free_port(nats, "the nats-server", "--nats-port")
        return cls(free_port(page, "Airflow", "--port"), nats)

    @property
    def airflow_url(self) -> str:
        """Airflow's address."""
        return f"http://{LOOPBACK}:{self.page}"

    @property
    def nats_url(self) -> str:
        """The nats-server's address."""
        return f"nats://{LOOPBACK}:{self.nats}"


class DevStack:
    """Everything that ``jetstream-queue dev`` starts; as a context it removes all of it at its end.

    :param nats_binary: path of the nats-server
    :param dags: the folder of the user's own DAGs, which take the place of the example's DAGs, queues and workers
    """

    def __init__(self, ports: StackPorts, nats_binary: Path, dags: Path | None = None) -> None:
        self.ports = ports
        self._dags = dags
        self.folder = Path(tempfile.mkdtemp(prefix="jetstream-dev-"))
        self._nats_binary = nats_binary
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The servers of workers and tasks end last.
        nats = self._processes.pop("nats-server", None)
        terminate_all(list(self._processes.values()), _GRACE)
        if nats:
            nats.terminate(_GRACE)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def run(self, ready: Callable[[], None]) -> None:
        """Start everything and keep it running until this is cancelled.

        :param ready: called once the page answers
        :raises DevStackError: a process ended or didn't become ready
        """
        self._start("nats-server", [self._nats_binary, "-c", self._nats_configuration()], cwd=self.folder)
        # Airflow's database takes seconds; the queues are filled meanwhile.
        airflow = asyncio.ensure_future(self._start_airflow())
        try:
            async with connect(await self._reached_settings()) as connection:
                publishing = await self._start_load(connection)
                try:
                    await airflow
                    ready()
                    await self._watch(publishing)
                finally:
                    publishing.cancel()
        finally:
            airflow.cancel()
            with suppress(asyncio.CancelledError, DevStackError):
                await airflow

    async def _start_load(self, connection: NatsPyConnection) -> asyncio.Future[None]:
        """Begin to publish to the example queues, where they are wanted; the future ends with an error only."""
        if self._dags:
            return asyncio.get_running_loop().create_future()
        await create_queues(connection)
        for worker in start_workers(self.ports.nats_url, self.folder / "workers"):
            self._processes[worker.log_file.stem] = worker
        return asyncio.ensure_future(publish_without_end(connection))

    async def _start_airflow(self) -> None:
        """Start Airflow; its page answers at the end."""
        home = self.folder / "airflow"
        nats = {"conn_type": "nats", "host": LOOPBACK, "port": self.ports.nats}
        env = airflow_env(
            home=home,
            dags_folder=self._dags or DAGS,
            port=self.ports.page,
            users={USER: PASSWORD},
            connections={"nats_default": json.dumps(nats)},
            extra=_SETTINGS,
            parallelism=4,
        )
        # The user's own connections, but not what configures another Airflow.
        env |= {name: value for name, value in os.environ.items() if name.startswith("AIRFLOW_CONN_")} | env
        logs = str(free_port(0, "the logs", ""))
        env |= {"AIRFLOW__CORE__HOSTNAME_CALLABLE": _HOSTNAME} | dict.fromkeys(_LOG_PORTS, logs)
        prepare_home(home, {USER: PASSWORD})
        self._start("api-server", [sys.executable, "-m", _API_SERVER], env=env, cwd=home)
        await self._wait_for_page()
        # They would take the processor from the API server, which people wait for.
        serving = ["uvicorn", "--factory", _LOG_SERVER, "--host", LOOPBACK, "--port", logs, "--log-level", "warning"]
        self._start("log-server", [sys.executable, "-m", *serving], env=env, cwd=home)
        for name in COMPONENTS:
            if name != "api-server":
                self._start(name, [sys.executable, "-m", "airflow", *COMPONENTS[name]], env=env, cwd=home)

    def _start(self, name: str, command: list[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path) -> None:
        self._processes[name] = Process.start(command, env=env, log_file=self.folder / "logs" / f"{name}.log", cwd=cwd)

    def _nats_configuration(self) -> Path:
        file = self.folder / "nats-server.conf"
        store = json.dumps(str(self.folder / "store"))
        file.write_text(f'listen: "{LOOPBACK}:{self.ports.nats}"\njetstream {{ store_dir: {store} }}\n')
        return file

    async def _reached_settings(self) -> ConnectionSettings:
        """Return the settings of connections once the nats-server answers."""
        settings = ConnectionSettings(servers=(self.ports.nats_url,), name="jetstream-queue dev")
        deadline = asyncio.get_running_loop().time() + _NATS_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            self._require_running()
            with suppress(UnreachableError):
                async with connect(settings):
                    return settings
            await asyncio.sleep(_POLL)
        raise _unready("the nats-server", _NATS_SECONDS, self._processes["nats-server"])

    async def _wait_for_page(self) -> None:
        deadline = asyncio.get_running_loop().time() + _AIRFLOW_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            self._require_running()
            if await asyncio.to_thread(_answers, f"{self.ports.airflow_url}/api/v2/monitor/health"):
                return
            await asyncio.sleep(_POLL)
        raise _unready("Airflow's page", _AIRFLOW_SECONDS, self._processes["api-server"])

    async def _watch(self, publishing: asyncio.Future[None]) -> None:
        while not publishing.done():
            self._require_running()
            await asyncio.sleep(_WATCH)
        publishing.result()

    def _require_running(self) -> None:
        for name, process in self._processes.items():
            if not process.alive and process.returncode is not None:
                raise _ended(name, process)


def _ended(name: str, process: Process) -> DevStackError:
    return DevStackError(
        f"expected {name} to run until Ctrl-C, found that it ended with {process.returncode}; its last lines:"
        f"\n{process.tail()}"
    )


def _unready(what: str, seconds: float, process: Process) -> DevStackError:
    return DevStackError(
        f"expected {what} to answer within {seconds:g} s, found no answer; the last lines of its log:\n{process.tail()}"
    )


def _answers(url: str) -> bool:
    try:
        with _direct.open(url, timeout=10) as answer:
            return bool(answer.status == 200)  # noqa: PLR2004
    except (OSError, HTTPException):
        return False
