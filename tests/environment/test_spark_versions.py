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

_PROGRAM: Final = Path(__file__).with_name("spark_queries.py")
_ZIP: Final = "airflow_provider_jetstream.zip"
_TIMEOUT: Final = 900.0
# Each Python that is supported, and the newest patch of each PySpark that the registry has.
_VERSIONS: Final = (("4.1", "3.11"), ("4.2", "3.12"), ("4.3", "3.13"))


@dataclass(frozen=True)
class Run:
    """One start of the program.

    :param part: which queries
    :param connect: whether through Spark Connect, whose server has this package only for streaming queries
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


_RUNS: Final = [Run(spark, python) for spark, python in _VERSIONS] + [
    Run(spark, python, part, connect=True) for spark, python in _VERSIONS for part in ("batches", "streaming")
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that is removed at once: the environments are large."""
    with tempfile.TemporaryDirectory(prefix="spark-versions-", ignore_cleanup_errors=True) as path:
        shutil.copy(build_wheel(), Path(path) / _ZIP)
        yield Path(path)


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, folder: Path, nats: NatsServer) -> Outcome:
    """What all queries of a run came to; pytest makes it once for the tests of the run."""
    run: Run = request.param
    try:
        interpreter = python_of(run.python)
    except NoSuchPythonError as error:
        pytest.skip(str(error))
    here = folder / str(run)
    here.mkdir()
    if not run.connect:
        python = create_environment(here / "venv", interpreter, [f"{build_wheel()}[spark]", f"pyspark=={run.spark}.*"])
        return _run(python, here, nats, "--part", run.part)
    python = connect_environment(folder / f"connect-{run.spark}", interpreter, f"{run.spark}.*", [locked("nats-py")])
    package = folder / _ZIP
    installed = {"PYTHONPATH": str(package)} if run.part == "streaming" else {}
    with SparkConnectServer(python, here / "server", variables=installed) as server:
        remote = ("--part", run.part, "--remote", server.address, "--package", str(package))
        return _run(python, here, nats, *remote, env={"PYTHONPATH": str(package)})


def _run(python: Path, folder: Path, nats: NatsServer, *arguments: str, env: dict[str, str] | None = None) -> Outcome:
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    (folder / "queries").mkdir()
    done = subprocess.run(
        [python, _PROGRAM, nats.url, folder / "queries", *arguments],
        env={**environment, **(env or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    versions, *problems = map(json.loads, done.stdout.splitlines())
    print(f"PySpark {versions['spark']}, Python {versions['python']}")
    return Outcome(versions, {line["query"]: line["problem"] for line in problems})


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    ("outcome", "query"),
    [(run, query) for run in _RUNS for query in PARTS[run.part]],
    indirect=["outcome"],
    ids=_name,
)
def test_the_query_has_its_exact_result(outcome: Outcome, query: Callable[..., None]) -> None:
    assert outcome.problems[query.__name__] is None, outcome.problems[query.__name__]


def test_every_query_runs_everywhere() -> None:
    assert {(run.spark, run.connect) for run in _RUNS} == {
        (spark, way) for spark, _ in _VERSIONS for way in (False, True)
    }
    assert len({query.__name__ for query in (*BATCHES, *STREAMING)}) == len(PARTS["all"])
