"""The same queries on each supported PySpark and Python, classic and by Spark Connect: make test-spark-versions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from spark_queries import BATCHES, PARTS, STREAMING

from testbed.environments import build_wheel, create_environment, locked
from testbed.interpreters import NoSuchPythonError, python_of
from testbed.spark_connect import SparkConnectServer, connect_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.nats_server import NatsServer

pytestmark = pytest.mark.nightly

_PROGRAM: Final = Path(__file__).with_name("spark_queries.py")
_ZIP: Final = "airflow_provider_jetstream.zip"
_TIMEOUT: Final = 900.0
# Each Python that is supported, and the newest patch of each PySpark that the registry has.
_VERSIONS: Final = (("4.1", "3.11"), ("4.2", "3.12"), ("4.3", "3.13"))


@dataclass(frozen=True)
class Run:
    """One start of the program.

    :param part: which queries
    :param connect: whether through Spark Connect; the server has this package for streaming queries only
    """

    spark: str
    python: str
    part: str = "all"
    connect: bool = False

    def __str__(self) -> str:
        through = f"connect-{self.part}" if self.connect else "classic"
        return f"pyspark-{self.spark}-python-{self.python}-{through}"


@dataclass
class Outcome:
    """What a run has printed.

    :param problems: by the names of the queries
    """

    versions: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str | None] = field(default_factory=dict)


# The order in which an environment serves: first without this package, then with it.
_RUNS: Final = [
    Run(spark, python, part, connect)
    for spark, python in _VERSIONS
    for part, connect in (("batches", True), ("all", False), ("streaming", True))
]


class Outcomes:
    """Runs the program where a test needs what it has printed, in one environment for each PySpark."""

    def __init__(self, folder: Path, nats: NatsServer) -> None:
        self._folder, self._nats = folder, nats
        self._found: dict[Run, Outcome | str] = {}

    def of(self, run: Run) -> Outcome:
        """Return what a run has printed, from the first request on."""
        if run not in self._found:
            try:
                self._found[run] = self._outcome(run)
            except (RuntimeError, subprocess.SubprocessError) as error:
                self._found[run] = str(error)
        found = self._found[run]
        assert isinstance(found, Outcome), found
        return found

    def _outcome(self, run: Run) -> Outcome:
        interpreter, here = python_of(run.python), self._folder / str(run)
        here.mkdir()
        environment, package = self._folder / f"pyspark-{run.spark}", self._folder / _ZIP
        # An install of PySpark takes a gigabyte and most of a minute, hence one for all.
        python = connect_environment(environment, interpreter, f"{run.spark}.*", [locked("nats-py")])
        if run.connect and run.part == "batches":
            with SparkConnectServer(python, here / "server") as server:
                remote = ("--remote", server.address, "--package", str(package))
                return _run(python, here, self._nats, run, *remote, env={"PYTHONPATH": str(package)})
        create_environment(environment, interpreter, [f"{build_wheel()}[spark]"])
        if not run.connect:
            return _run(python, here, self._nats, run)
        with SparkConnectServer(python, here / "server") as server:
            return _run(python, here, self._nats, run, "--remote", server.address)


@pytest.fixture(scope="module")
def outcomes(nats: NatsServer) -> Iterator[Outcomes]:
    """All runs, in a folder that is removed at once: the environments are large."""
    with tempfile.TemporaryDirectory(prefix="spark-versions-", ignore_cleanup_errors=True) as path:
        shutil.copy(build_wheel(), Path(path) / _ZIP)
        yield Outcomes(Path(path), nats)


def _run(
    python: Path, folder: Path, nats: NatsServer, run: Run, *arguments: str, env: dict[str, str] | None = None
) -> Outcome:
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    (folder / "queries").mkdir()
    done = subprocess.run(
        [python, _PROGRAM, nats.url, folder / "queries", "--part", run.part, *arguments],
        env={**environment, **(env or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    versions, *problems = map(json.loads, done.stdout.splitlines())
    print(f"PySpark {versions['spark']}, Python {versions['python']}")
    return Outcome(versions, {line["query"]: line["problem"] for line in problems})


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("run", "query"), [(run, query) for run in _RUNS for query in PARTS[run.part]], ids=_name)
def test_the_query_has_its_exact_result(outcomes: Outcomes, run: Run, query: Callable[..., None]) -> None:
    try:
        problem = outcomes.of(run).problems[query.__name__]
    except NoSuchPythonError as error:
        pytest.skip(str(error))
    assert problem is None, problem


def test_every_query_runs_everywhere() -> None:
    assert {(run.spark, run.connect) for run in _RUNS} == {
        (spark, way) for spark, _ in _VERSIONS for way in (False, True)
    }
    assert len({query.__name__ for query in (*BATCHES, *STREAMING)}) == len(PARTS["all"])
