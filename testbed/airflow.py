"""A real Airflow in one folder, with each component as a process."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from airflow_provider_jetstream.dev.airflow_home import COMPONENTS
from airflow_provider_jetstream.dev.process import Process, terminate_all
from testbed.airflow_client import AirflowApiError, AirflowClient
from testbed.airflow_settings import airflow_env, migrate, prepare_home
from testbed.ports import LOOPBACK, free_port

__all__ = ["Airflow", "AirflowApiError", "AirflowNotReadyError"]

_TRIGGERER = COMPONENTS["triggerer"]
_TOO_OLD = "ArgumentError: expected Airflow "
_REPORTING = ["scheduler", "triggerer", "dag_processor"]


class AirflowNotReadyError(RuntimeError):
    """A component of Airflow ended or didn't become ready; the message holds the end of its log."""


class Airflow(AirflowClient):
    """One Airflow with the LocalExecutor, on sqlite where ``env`` names no database; as a client it is ``admin``.

    :param home: its ``AIRFLOW_HOME``
    :param connections: connection ids and the connections in JSON form
    :param env: further environment variables, which override the testbed's own
    :param parallelism: how many tasks run at once
    :param python: the interpreter that has Airflow
    :param template_db: a folder that keeps a migrated database, which saves the next Airflow the migration
    :param path: of its ``base_url``, such as ``/team``
    """

    def __init__(
        self,
        home: Path,
        dags_folder: Path,
        *,
        connections: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        parallelism: int = 4,
        python: str = sys.executable,
        template_db: Path | None = None,
        path: str = "",
    ) -> None:
        self.home = home
        self.dags_folder = dags_folder
        self.python = python
        self.template_db = template_db
        self.port = free_port()
        super().__init__(f"http://{LOOPBACK}:{self.port}{path}")
        self._env = airflow_env(
            home=home,
            dags_folder=dags_folder,
            port=self.port,
            connections=connections or {},
            extra=env or {},
            parallelism=parallelism,
            path=path,
        )
        self._components: dict[str, Process] = {}

    @property
    def env(self) -> dict[str, str]:
        """The whole environment with which the ``airflow`` command works on this Airflow."""
        return dict(self._env)

    @property
    def component_logs(self) -> Path:
        """The folder of the components' output."""
        return self.home / "logs-of-components"

    def pids(self) -> dict[str, list[int]]:
        """Return the ids of all processes of each component."""
        return {name: process.pids() for name, process in self._components.items()}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *dag_ids: str, timeout: float = 300.0) -> None:
        """Create the database, start all components and wait until they are healthy and the DAGs can run."""
        deadline = time.monotonic() + timeout
        prepare_home(self.home)
        migrate(self.home, self._env, self.python, self.template_db)
        try:
            for name, args in COMPONENTS.items():
                self._start_component(name, args)
            started = datetime.now(UTC)
            self._wait(lambda: self._unhealthy(started), deadline)
            self.wait_for_dags(*dag_ids, timeout=deadline - time.monotonic())
        except BaseException:
            self.stop(grace=0)
            raise

    def stop(self, grace: float = 4.0) -> None:
        """End all components and everything they have started; they are killed after ``grace`` seconds."""
        self.close()
        terminate_all(list(self._components.values()), grace)
        self._components.clear()

    def start_triggerer(
        self,
        name: str = "triggerer",
        timeout: float = 180.0,
        *,
        team: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start a triggerer and wait until the database has its job; the name is also that of its log file.

        :param team: whose triggers alone it runs; where absent, those of no team
        :param env: further environment variables, of this triggerer only
        """
        known = {job["id"] for job in self._triggerer_jobs()}
        self._start_component(name, [*_TRIGGERER, *(["--team-name", team] if team else [])], env)

        def unreported() -> str | None:
            return None if {job["id"] for job in self._triggerer_jobs()} - known else f"{name}: no job"

        self._wait(unreported, time.monotonic() + timeout)

    def stop_triggerer(self, name: str = "triggerer", grace: float = 20.0) -> None:
        """Terminate a triggerer; it is killed after ``grace`` seconds."""
        self._components.pop(name).terminate(grace)

    def kill_triggerer(self, name: str = "triggerer") -> None:
        """Kill a triggerer with SIGKILL, its runner process included."""
        self._components.pop(name).kill()

    def restart_scheduler(self) -> None:
        """Kill the scheduler with SIGKILL and start another."""
        self._components.pop("scheduler").kill()
        self._start_component("scheduler", COMPONENTS["scheduler"])

    def restart_ended(self) -> list[str]:
        """Start the components again that have ended, as their supervisor does, and return their names."""
        ended = [name for name, process in self._components.items() if not process.alive]
        for name in ended:
            self._components.pop(name)
            self._start_component(name, COMPONENTS.get(name, _TRIGGERER))
        return ended

    def wait_for_dags(self, *dag_ids: str, timeout: float = 180.0) -> None:
        """Wait until DAGs are parsed, and unpause them."""

        def missing() -> str | None:
            for dag_id in dag_ids:
                dag = self.dag(dag_id)
                if dag is None:
                    # An example for newer versions of Airflow says so.
                    if errors := [error for error in self.import_errors() if _TOO_OLD not in error["stack_trace"]]:
                        first = errors[0]
                        raise AirflowNotReadyError(f"{first['filename']} can't be imported:\n{first['stack_trace']}")
                    return f"dag-processor: no DAG {dag_id}"
                if dag["is_paused"]:
                    self.unpause(dag_id)
            return None

        self._wait(missing, time.monotonic() + timeout)

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
        """Return a task instance's log files, JSON lines, the trigger's part included."""
        folder = self.home / "logs" / f"dag_id={dag_id}" / f"run_id={run_id}" / f"task_id={task_id}"
        if map_index >= 0:
            folder /= f"map_index={map_index}"
        files = sorted(folder.glob(f"attempt={try_number}.log*"))
        if not files:
            raise FileNotFoundError(f"no log of {dag_id} {run_id} {task_id}[{map_index}] try {try_number}")
        return "".join(file.read_text(errors="replace") for file in files)

    def component_log(self, name: str) -> str:
        """Return a component's output, such as that of ``scheduler``."""
        return (self.component_logs / f"{name}.log").read_text(errors="replace")

    def cli(self, *args: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run the ``airflow`` command on this Airflow."""
        command = [self.python, "-m", "airflow", *args]
        return subprocess.run(
            command,
            env=self._env,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def _start_component(self, name: str, args: list[str], env: Mapping[str, str] | None = None) -> None:
        if name in self._components:
            raise RuntimeError(f"{name} already runs")
        self._components[name] = Process.start(
            [self.python, "-m", "airflow", *args],
            env={**self._env, **(env or {})},
            log_file=self.component_logs / f"{name}.log",
            cwd=self.home,
        )

    def _triggerer_jobs(self) -> list[dict[str, object]]:
        jobs: list[dict[str, object]] = self.api("GET", "jobs?job_type=TriggererJob&limit=100")["jobs"]
        return jobs

    def _unhealthy(self, since: datetime) -> str | None:
        health = self.health()
        missing = []
        for name in _REPORTING:
            status = health[name]
            beat = status[f"latest_{name}_heartbeat"]
            # A component that was killed before a second start counts as healthy for another half minute.
            if status["status"] != "healthy" or datetime.fromisoformat(beat) < since:
                missing.append(name)
        return f"not healthy: {', '.join(missing)}" if missing else None

    def _wait(self, check: Callable[[], str | None], deadline: float) -> None:
        problem: str | None = "no answer from the api-server"
        while time.monotonic() < deadline:
            for name, process in self._components.items():
                if not process.alive:
                    raise AirflowNotReadyError(f"{name} ended with {process.returncode}:\n{process.tail()}")
            with contextlib.suppress(httpx.TransportError):
                problem = check()
                if problem is None:
                    return
            time.sleep(0.2)
        tails = "\n".join(f"--- {name}\n{process.tail(15)}" for name, process in self._components.items())
        raise AirflowNotReadyError(f"Airflow isn't ready at {datetime.now(UTC):%H:%M:%S}: {problem}\n{tails}")
