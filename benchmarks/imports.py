"""What importing this package's modules costs a DAG file, over importing Airflow's SDK alone.

Fairness: each measurement is a process of its own with the same interpreter and warm file caches; the module and the
baseline take turns, and the figures are medians. ``airflow.sdk`` imports lazily, so a second baseline imports what
every DAG file needs of it anyway.
"""

import argparse
import statistics
import subprocess
import sys
import time

from testbed.table import table

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


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    programs = {
        "airflow.sdk": BASELINE,
        "airflow.sdk with DAG and operators": f"{BASELINE}; {DAG_FILE}",
        **{module: f"{BASELINE}; import {module}" for module in [*MODULES, PEER]},
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        measure(program)
    for _ in range(rounds):
        for name, program in programs.items():
            seconds[name].append(measure(program))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base, dag_file = medians["airflow.sdk"], medians["airflow.sdk with DAG and operators"]
    rows = [
        (name, f"{median:.2f}", f"{median - base:+.2f}", f"{median - dag_file:+.2f}")
        for name, median in medians.items()
    ]
    print(table(("import", "seconds", "over airflow.sdk", "over a DAG file's"), rows))
    return 0


def measure(program: str) -> float:
    """
    Run a program in a fresh interpreter.

    :param program: its source
    :return: wall-clock seconds of the whole process
    """
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
