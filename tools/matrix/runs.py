"""The three axes of the matrix: servers, Airflow with Python, and dependencies."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from airflow_provider_jetstream.dev.nats_binary import find_nats_server, nats_server_version
from testbed.environments import create_environment, find_uv, installed_packages
from testbed.interpreters import NoSuchPythonError, python_of
from testbed.nats_binaries import NoSuchServerError, nats_server_of
from tools.matrix.cases import AIRFLOW_CASES, DEPENDENCY_CASES, SERVER_CASES, Case, files_of
from tools.matrix.outcomes import ROOT, Outcome, SeenTest, outcome_of
from tools.matrix.pytest_runs import PytestError, run_tests
from tools.matrix.versions import (
    AIRFLOWS,
    DEPENDENCIES,
    LOWEST,
    LOWEST_NEEDS,
    PYTHONS,
    SERVERS,
    TEST_PACKAGES,
    UNSUPPORTED,
)

SERVER, AIRFLOW, DEPENDENCY = "server", "airflow", "dependencies"
_LOGS = ROOT / ".cache" / "matrix"
_SHOWN_PACKAGES = ("nats-py", "pydantic", "PyYAML", "apache-airflow", "pyspark", "pyarrow", "prometheus-client")


def environments(axis: str) -> list[str]:
    """Return the names of an axis's environments."""
    if axis == SERVER:
        return [f"nats-server {version}" for version in SERVERS]
    if axis == AIRFLOW:
        return [f"Airflow {airflow}, Python {python}" for airflow in AIRFLOWS for python in PYTHONS]
    return [f"{resolution}, Python {python}" for resolution, python in DEPENDENCIES]


def cases_of(axis: str) -> tuple[Case, ...]:
    """Return the cases that are run in each environment of an axis."""
    return {SERVER: SERVER_CASES, AIRFLOW: AIRFLOW_CASES, DEPENDENCY: DEPENDENCY_CASES}[axis]


def run_environment(axis: str, environment: str, cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run cases in one environment; what can't be had is an outcome, too."""
    date = datetime.now(UTC).date().isoformat()
    with tempfile.TemporaryDirectory(prefix="matrix-environment-") as folder:
        try:
            setting = _settings(axis, environment, Path(folder))
        except (NoSuchServerError, NoSuchPythonError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            yield from (Outcome(axis, environment, case.name, "", date, missing=reason) for case in cases)
            return
        # All tests of Airflow share one, which takes a minute to start.
        for together in [cases] if axis == AIRFLOW else [[case] for case in cases]:
            yield from setting.run(axis, environment, together, date)


@dataclass(frozen=True)
class _Setting:
    """An interpreter, a server and how many processes run the tests."""

    python: Path
    env: dict[str, str]
    processes: int
    versions: str

    def run(self, axis: str, environment: str, cases: Sequence[Case], date: str) -> list[Outcome]:
        """Run the tests of cases; those that fail run once more, alone."""
        log = _LOGS / f"{environment}, {cases[0].name}.log".replace(" ", "-")
        again: list[SeenTest] = []
        try:
            tests = run_tests(files_of(cases), python=self.python, env=self.env, processes=self.processes, log=log)
            if failed := [f"{test.file}::{test.name}" for test in tests if test.state == "failed"]:
                log = log.with_name(f"{log.stem}-again.log")
                again = run_tests(failed, python=self.python, env=self.env, processes=1, log=log)
        except (PytestError, subprocess.TimeoutExpired) as error:
            failure = f"no result: {str(error).strip().splitlines()[-1]}"
            return [Outcome(axis, environment, case.name, self.versions, date, failed=(failure,)) for case in cases]
        return [
            outcome_of(axis, environment, case, versions=self.versions, date=date, tests=tests, again=again)
            for case in cases
        ]


def _settings(axis: str, environment: str, folder: Path) -> _Setting:
    if axis == SERVER:
        version = environment.removeprefix("nats-server ")
        env = {"NATS_SERVER_BIN": str(nats_server_of(version))}
        # The newest lacks nothing: there a refusal for its version is a failure.
        if version != SERVERS[-1]:
            env["OLDER_SERVER"] = version
        return _Setting(Path(sys.executable), env, 6, f"nats-server {version}")
    server = find_nats_server()
    env = {"NATS_SERVER_BIN": str(server)}
    shown = f"nats-server {nats_server_version(server)}"
    first, _, number = environment.partition(", Python ")
    airflow = first.removeprefix("Airflow ")
    if axis == AIRFLOW and (reason := UNSUPPORTED.get((airflow, number))):
        raise RuntimeError(reason)
    python = python_of(number)
    if axis == AIRFLOW:
        packages = [f"apache-airflow=={airflow}", *AIRFLOWS[airflow], f"{ROOT}[airflow,metrics]", *TEST_PACKAGES]
        interpreter = create_environment(folder / "venv", python, packages)
        return _Setting(interpreter, env, 1, f"{_versions_in(interpreter)}, {shown}")
    interpreter = _resolved_environment(folder, python, first)
    return _Setting(interpreter, env, 2, f"{_versions_in(interpreter)}, {shown}")


def _resolved_environment(folder: Path, python: Path, resolution: str) -> Path:
    """Create an environment whose versions uv resolves from pyproject.toml, not from the lock."""
    uv, requirements = str(find_uv()), folder / "requirements.txt"
    extras = [part for extra in ("airflow", "spark", "metrics") for part in ("--extra", extra)]
    compile_ = [uv, "pip", "compile", "--quiet", "--python", str(python), "--resolution", resolution, *extras]
    needs = folder / "constraints.txt"
    needs.write_text("\n".join(LOWEST_NEEDS if resolution == LOWEST else ()), encoding="utf-8")
    done = subprocess.run(
        [*compile_, "--constraint", str(needs), "--output-file", str(requirements), str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{resolution} doesn't resolve for {python.name}: {done.stderr.strip()[-300:]}")
    create_environment(folder / "venv", python, ["-r", str(requirements)])
    create_environment(folder / "venv", python, ["--no-deps", str(ROOT)])
    # The tests' packages never bring a newer version of what has been resolved.
    return create_environment(folder / "venv", python, ["--constraint", str(requirements), *TEST_PACKAGES])


def _versions_in(interpreter: Path) -> str:
    python = subprocess.run(
        [interpreter, "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    installed = {line.partition("==")[0].lower(): line for line in installed_packages(interpreter)}
    shown = [installed[name.lower()].replace("==", " ") for name in _SHOWN_PACKAGES if name.lower() in installed]
    return ", ".join([f"Python {python}", *shown])
