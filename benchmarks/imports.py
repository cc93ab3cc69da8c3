"""CPU time of importing this package's modules: a DAG file over Airflow's SDK, and a worker over a bare interpreter.

Fairness: each measurement is a process of its own with the same interpreter, warm file caches and compiled modules, as
pip installs them; the programs take turns, and the figures are medians. They are CPU seconds, which importing mostly
consists of, so that other load on the machine matters little. ``airflow.sdk`` imports lazily, so a second baseline
imports what every DAG file needs of it anyway. The worker is measured in this environment and in one without Airflow
and Spark, beside the cost of the two libraries that it does without.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from testbed.environments import create_bare_environment
from testbed.text_table import text_table

BASELINE = "import airflow.sdk"
DAG_FILE = "from airflow.sdk import DAG, BaseOperator, BaseSensorOperator, task"
MODULES = [
    "airflow_provider_jetstream.hooks.jetstream",
    "airflow_provider_jetstream.operators.provision",
    "airflow_provider_jetstream.operators.publish",
    "airflow_provider_jetstream.operators.redrive",
    "airflow_provider_jetstream.sensors.dead_letter",
    "airflow_provider_jetstream.triggers.completion",
    "airflow_provider_jetstream.plugins.monitor",
]
PEER = "airflow.providers.standard.operators.bash"

BARE = "pass"
WORKER_PROGRAMS = {
    "a bare interpreter": BARE,
    "peer: pydantic": "from pydantic import BaseModel",
    "peer: nats": "import nats",
    "worker": "import airflow_provider_jetstream.worker",
    "worker.command": "import airflow_provider_jetstream.worker.cli",
}


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("dag-files", "worker"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "compiled"
        if options.only != "worker":
            print(_dag_files(options.rounds, compiled))
        if options.only != "dag-files":
            print(_worker(options.rounds, compiled, create_bare_environment(Path(folder) / "bare")))
    return 0


def _dag_files(rounds: int, compiled: Path) -> str:
    programs = {
        "airflow.sdk": BASELINE,
        "airflow.sdk with DAG and operators": f"{BASELINE}; {DAG_FILE}",
        **{module: f"{BASELINE}; import {module}" for module in [*MODULES, PEER]},
    }
    python = Path(sys.executable)
    medians = _medians({name: (python, program) for name, program in programs.items()}, rounds, compiled)
    base, dag_file = medians["airflow.sdk"], medians["airflow.sdk with DAG and operators"]
    rows = [
        (name, f"{median:.2f}", f"{median - base:+.2f}", f"{median - dag_file:+.2f}")
        for name, median in medians.items()
    ]
    return text_table(("import", "seconds", "over airflow.sdk", "over a DAG file's"), rows)


def _worker(rounds: int, compiled: Path, bare: Path) -> str:
    pythons = {"with Airflow": Path(sys.executable), "without": bare}
    medians = _medians(
        {
            f"{name}, {environment_name}": (python, program)
            for name, program in WORKER_PROGRAMS.items()
            for environment_name, python in pythons.items()
        },
        rounds,
        compiled,
    )
    rows = [
        (
            name,
            *(
                f"{medians[f'{name}, {environment_name}'] - medians[f'a bare interpreter, {environment_name}']:.3f}"
                for environment_name in pythons
            ),
        )
        for name, program in WORKER_PROGRAMS.items()
        if program != BARE
    ]
    return text_table(("seconds over a bare interpreter", *pythons), rows)


def _medians(programs: Mapping[str, tuple[Path, str]], rounds: int, compiled: Path) -> dict[str, float]:
    for python, program in programs.values():
        measure(python, program, compiled)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (python, program) in programs.items():
            seconds[name].append(measure(python, program, compiled))
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(python: Path, program: str, compiled: Path) -> float:
    """Run a program in a fresh interpreter, and return the CPU seconds of the whole process."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(compiled), "PYTHONDONTWRITEBYTECODE": ""}
    before = _used_by_children()
    # Not in the repository's folder, where the sources would shadow the installed package.
    subprocess.run([python, "-c", program], cwd=compiled.parent, env=environment, check=True, capture_output=True)
    return _used_by_children() - before


def _used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
