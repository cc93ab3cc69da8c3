"""The services of a compose file as processes of this machine, where there is no Docker engine.

Each runs the command that the file gives it, with the environment that the file gives it and nothing else, once the
services that it depends on are healthy or done, which their own health checks say.
"""

import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compose_translation import Translation

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.dev.process import Process, terminate_all

_ONE_SHOT = "no"


class ComposeServiceError(RuntimeError):
    """A service ended or didn't become ready; the message holds the end of its output."""


class ComposeServices:
    """The services of one project.

    :param project: as ``docker compose config`` resolves it
    :param folder: holds the services' files, volumes and logs
    :param env: variables that differ from the file's, in every service
    :param left_out: services that don't run, and aren't waited for
    :param programs: the folders of the programs that images have, by the image's target in the Dockerfile; those of the
        running Python's environment are first for all other services
    """

    def __init__(
        self,
        project: Mapping[str, Any],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        left_out: Collection[str] = (),
        programs: Mapping[str, Path] | None = None,
    ) -> None:
        self._folder = folder
        self._services = {name: service for name, service in project["services"].items() if name not in left_out}
        self._env = dict(env or {})
        self.translation = Translation(project["services"], folder)
        self._processes: dict[str, list[Process]] = {}
        self._programs = dict(programs or {})
        self._server = folder / "bin" / "nats-server"
        self._server.parent.mkdir(parents=True)
        self._server.symlink_to(find_nats_server())
        for name, service in self._services.items():
            self.translation.mount(name, service.get("volumes", []))
            self._working_dir(name).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def names_with_health_check(self) -> list[str]:
        """The services that run until they are stopped."""
        return [name for name, service in self._services.items() if "healthcheck" in service]

    def start(self, timeout: float = 600.0) -> None:
        """Start every service once those that it depends on are as it needs them."""
        deadline = time.monotonic() + timeout
        ready: set[str] = set()
        while waiting := [name for name in self._services if name not in self._processes]:
            needed = {dependency for name in waiting for dependency in self._dependencies(name)}
            ready |= {name for name in needed - ready if name in self._processes and self._is_ready(name)}
            startable = [name for name in waiting if self._dependencies(name) <= ready]
            for name in startable:
                self._start(name)
            self._require_running()
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {name}\n{self.output(name)[-2000:]}" for name in needed - ready)
                raise ComposeServiceError(
                    f"expected all services within {timeout:g} s, still waiting: {waiting}\n{tails}"
                )
            if not startable:
                time.sleep(0.3)

    def stop(self, grace: float = 5.0) -> None:
        """End all services and all that they have started."""
        terminate_all([process for processes in self._processes.values() for process in processes], grace)
        self._processes.clear()

    def wait_for_end(self, name: str, timeout: float = 600.0) -> str:
        """Wait until a service that runs once has ended well, and return its output."""
        (process,) = self._processes[name]
        deadline = time.monotonic() + timeout
        while process.alive:
            self._require_running()
            if time.monotonic() > deadline:
                raise ComposeServiceError(f"{name} still runs after {timeout:g} s:\n{process.tail()}")
            time.sleep(0.2)
        if process.returncode:
            raise ComposeServiceError(f"{name} ended with {process.returncode}:\n{process.tail()}")
        return process.output()

    def run_again(self, name: str) -> str:
        """Run a service that has ended once more, as the project's next start does, and return its output."""
        self._start(name)
        return self.wait_for_end(name)

    def is_healthy(self, name: str) -> bool:
        """Run the command of a service's health check, and return whether it succeeds within its time."""
        check = self._services[name]["healthcheck"]
        kind, *command = check["test"]
        if kind != "CMD":
            raise ValueError(f"expected a health check without a shell, found {check['test']} of {name}")
        try:
            done = subprocess.run(
                self.translation.command(name, command),
                env=self.environment(name),
                cwd=self._working_dir(name),
                capture_output=True,
                timeout=float(check["timeout"].removesuffix("s")),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def environment(self, name: str) -> dict[str, str]:
        """Return the whole environment of a service's process."""
        image = self._services[name]["image"].partition("/")[2].partition(":")[0]
        programs = self._programs.get(image, Path(sys.executable).parent)
        path = os.pathsep.join([str(self._server.parent), str(programs), os.environ["PATH"]])
        own = {"PATH": path, "HOME": str(self._working_dir(name))}
        if "JAVA_HOME" in os.environ:
            own["JAVA_HOME"] = os.environ["JAVA_HOME"]
        return own | self.translation.environment(name, self._services[name].get("environment", {})) | self._env

    def output(self, name: str) -> str:
        """Return what the processes of a service have written."""
        return "".join(process.output() for process in self._processes.get(name, []))

    def _start(self, name: str) -> None:
        service = self._services[name]
        self._processes[name] = [
            Process.start(
                self.translation.command(name, service["command"]),
                env=self.environment(name),
                cwd=self._working_dir(name),
                log_file=self._folder / "logs" / f"{name}-{number}.log",
            )
            for number in range(service.get("deploy", {}).get("replicas", 1))
        ]

    def _dependencies(self, name: str) -> set[str]:
        return set(self._services[name].get("depends_on", {})) & set(self._services)

    def _is_ready(self, name: str) -> bool:
        if self._services[name]["restart"] == _ONE_SHOT:
            return all(process.returncode == 0 for process in self._processes[name])
        return self.is_healthy(name)

    def _require_running(self) -> None:
        """Raise ComposeServiceError where a service has ended that would be started again, or has failed."""
        for name, processes in self._processes.items():
            once = self._services[name]["restart"] == _ONE_SHOT
            for process in processes:
                if not process.alive and (process.returncode or not once):
                    raise ComposeServiceError(f"{name} ended with {process.returncode}:\n{process.tail()}")

    def _working_dir(self, name: str) -> Path:
        return self.translation.path(name, self._services[name].get("working_dir", "/"))
