"""W8: CPU time of importing this package's modules, of starting a worker, and of parsing a DAG of 100 tasks.

Each public class is imported in a fork of one process that has imported what every DAG file and triggerer has: the cost
of a class is that of its import, and Kafka's operator is imported in the same way beside it.

Fairness: each measurement is a process of its own with the same interpreter, warm file caches and compiled modules, as
pip installs them; the programs take turns. The figures are CPU seconds, which importing mostly consists of. Other load
only adds to them, so each is compared with the baseline's least, and goals with the least of the rounds.
``airflow.sdk`` imports lazily, so a second baseline imports what every DAG file needs of it anyway. The worker is
measured in this environment and in one without Airflow and Spark, beside the cost of the two libraries that it does
without. Kafka's provider is installed for the run into a folder of its own, where a registry can be reached.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.report import Goal, Sample, Table, Way, Workload, run_workload
from testbed.environments import create_bare_environment, find_uv
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
KAFKA = "airflow.providers.apache.kafka.operators.produce"
KAFKA_PACKAGES = ("apache-airflow-providers-apache-kafka", "confluent-kafka", "asgiref")

CLASSES = {
    "JetStreamPublishOperator": "operators.publish",
    "JetStreamRedriveOperator": "operators.redrive",
    "JetStreamConsumeOperator": "operators.consume",
    "JetStreamCancelOperator": "operators.cancel",
    "JetStreamProvisionOperator": "operators.provision",
    "JetStreamDeadLetterReportOperator": "operators.spark",
    "JetStreamJobsSensor": "sensors.jobs",
    "JetStreamDeadLetterSensor": "sensors.dead_letter",
    "JetStreamQueueDrainedSensor": "sensors.queue",
    "JobCompletionTrigger": "triggers.completion",
    "DeadLetterTrigger": "triggers.dead_letter",
    "JetStreamMessageTrigger": "triggers.message",
    "QueueDrainedTrigger": "triggers.queue",
    "RedriveWaveTrigger": "triggers.redrive",
    "JetStreamHook": "hooks.jetstream",
    "JetStreamNotifier": "notifications.jetstream",
    "queue_asset": "assets.stream_asset",
}
# Prints for each import in turn its CPU seconds and the modules of this package that it has loaded.
_FORKS = """
import gc, importlib, json, os, sys, time
import airflow.triggers.base
gc.collect()
gc.freeze()
for name in {modules!r}:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    begin = time.process_time()
    importlib.import_module(name)
    used = time.process_time() - begin
    loaded = sum(module.startswith("airflow_provider_jetstream") for module in sys.modules)
    os.write(1, (json.dumps([used, loaded]) + chr(10)).encode())
    os._exit(0)
"""
BARE = "pass"
_MOST: Final = 0.3
_BESIDE_KAFKA: Final = 1.5
_LIMIT: Final = "pydantic and nats-py, which are in it, stand in the tables"
WORKER_PROGRAMS = {
    "a bare interpreter": BARE,
    "peer: pydantic": "from pydantic import BaseModel",
    "peer: nats": "import nats",
    "worker": "from airflow_provider_jetstream.worker import Worker",
    "worker.command": "import airflow_provider_jetstream.worker.cli",
}
# Connects, does the one job that is stored, and ends.
_START = """
import asyncio
from airflow_provider_jetstream.jetstream import WorkQueue, connection_settings
from airflow_provider_jetstream.worker import Worker
async def main():
    worker = None
    async def handle(_):
        worker.stop()
    queue = WorkQueue(name="started", subjects=["started.jobs"], dead_letters=None,
                      consumers=[{{"name": "worker", "max_deliver": 2, "ack_wait": "30s"}}])
    worker = Worker(queue, "worker", handle, connection_settings({{"servers": ({url!r},)}}))
    await worker.run()
asyncio.run(main())
"""
_STORE = """
import asyncio
from airflow_provider_jetstream.jetstream import WorkQueue, connect, connection_settings, provision, publish
async def main():
    queue = WorkQueue(name="started", subjects=["started.jobs"], dead_letters=None,
                      consumers=[{{"name": "worker", "max_deliver": 2, "ack_wait": "30s"}}])
    async with connect(connection_settings({{"servers": ({url!r},)}})) as connection:
        await provision(connection, queue)
        await publish(connection, queue, [b"job"] * {jobs}, subject="started.jobs")
asyncio.run(main())
"""
# Imports the operator, makes a task and executes it, as the process of a task does after it has parsed the DAG's file.
_EXECUTE = """
import json, os, time, uuid
from types import SimpleNamespace
os.environ["AIRFLOW_CONN_NATS_DEFAULT"] = json.dumps({{"conn_type": "nats", "host": {url!r}}})
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
task = JetStreamPublishOperator(
    task_id="send",
    work_queue={{"name": "started", "subjects": ["started.jobs"], "dead_letters": None,
                 "consumers": [{{"name": "worker", "max_deliver": 2, "ack_wait": "30s"}}]}},
    jobs=["job"],
    subject="started.jobs",
)
ti = SimpleNamespace(dag_id="dag", run_id=uuid.uuid4().hex, task_id="send", map_index=-1, try_number=1)
assert task.execute({{"ti": ti}})["published"] == 1
"""
_DAG = """
from airflow.sdk import DAG
{imported}
with DAG("many", schedule=None) as dag:
    for number in range(100):
        {task}
assert len(dag.tasks) == 100
"""
_QUEUE = '{"name": "q", "subjects": ["q.jobs"], "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s"}]}'
DAGS = {
    "`JetStreamPublishOperator`": (
        "from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator",
        f'JetStreamPublishOperator(task_id=f"t{{number}}", work_queue={_QUEUE}, jobs=["a"], subject="q.jobs")',
    ),
    "peer: `BashOperator`": (
        "from airflow.providers.standard.operators.bash import BashOperator",
        'BashOperator(task_id=f"t{number}", bash_command="true")',
    ),
}
KAFKA_DAG = (
    "from airflow.providers.apache.kafka.operators.produce import ProduceToTopicOperator",
    'ProduceToTopicOperator(task_id=f"t{number}", topic="q", producer_function="builtins.list")',
)


def workload(short: bool) -> Workload:  # noqa: FBT001
    """Measure imports, a worker's start, and the parsing of a DAG."""
    rounds = 1 if short else 7
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "compiled"
        kafka = None if short else _install_kafka(Path(folder) / "kafka")
        imports = _table("import in a DAG file", _dag_file_programs(kafka), rounds, compiled, BASELINE)
        parsing = _table("a DAG of 100 tasks", _dag_programs(kafka), rounds, compiled, f"{BASELINE}; {DAG_FILE}")
        worker = _table("in a worker", WORKER_PROGRAMS, rounds, compiled, BARE)
        classes = _classes(kafka, rounds, compiled)
        tables = [classes, imports, parsing, worker, *_start_of_worker(rounds, compiled)]
        if not short:
            bare = create_bare_environment(Path(folder) / "bare")
            tables.append(_table("in a worker without Airflow", WORKER_PROGRAMS, rounds, compiled, BARE, bare))
    compared = {f"`{module}`, seconds over `airflow.sdk`": _least_over(imports.way(module)) for module in MODULES}
    compared["`worker`, seconds over Python"] = _least_over(worker.way("worker"))
    goals = [Goal(text, value, _MOST, at_most=True, limit=_LIMIT) for text, value in compared.items()]
    if kafka:
        theirs = classes.way(_KAFKA_OPERATOR).extra(_CPU)
        for name in CLASSES:
            text = f"importing `{name}`, CPU beside Kafka's `{_KAFKA_OPERATOR}`"
            ratio = classes.way(f"`{name}`").extra(_CPU) / theirs
            goals.append(Goal(text, ratio, _BESIDE_KAFKA, at_most=True, limit="a task's arguments are checked"))
        ours, theirs = (_least_cpu(parsing.way(name)) for name in ("`JetStreamPublishOperator`", _KAFKA_DAG))
        text = "parsing 100 tasks, CPU of the process beside Kafka's provider"
        goals.append(Goal(text, ours / theirs, 1, at_most=True, limit=_LIMIT))
    return Workload("W8", "Imports, starts and parsing", "imports", " ".join((__doc__ or "").split()), tables, goals)


_OVER: Final = "CPU ms over the baseline"
_CPU: Final = "CPU ms"
_KAFKA_OPERATOR: Final = "ProduceToTopicOperator"
_KAFKA_DAG: Final = "peer: Kafka's `ProduceToTopicOperator`"


def _least_cpu(way: Way) -> float:
    """Return the CPU seconds of the round that other load on the machine slowed down least."""
    return min(sample.client_cpu for sample in way.samples)


def _least_over(way: Way) -> float:
    return min(sample.extra[_OVER] for sample in way.samples) / 1e3


def _classes(kafka: Path | None, rounds: int, compiled: Path) -> Table:
    """Measure the import of each public class, in turns."""
    modules = {f"`{name}`": f"airflow_provider_jetstream.{module}" for name, module in CLASSES.items()}
    before = f"{BASELINE}; {DAG_FILE}"
    if kafka:
        modules = {_KAFKA_OPERATOR: KAFKA, **modules}
        before = f"{_with(kafka)}; {before}"
    program = f"{before}\n{_FORKS.format(modules=list(modules.values()))}"
    samples: dict[str, list[Sample]] = {name: [] for name in modules}
    # The first run compiles what it imports.
    for _ in range(rounds + 1):
        lines = _run(Path(sys.executable), program, compiled).splitlines()
        for name, line in zip(modules, (line for line in lines if line.startswith("[")), strict=True):
            used, loaded = json.loads(line)
            samples[name].append(Sample(1, used, used, 0.0, {_CPU: used * 1e3, "modules": loaded}))
    return Table("import of a class", "imports", [Way(name, found[1:]) for name, found in samples.items()])


def _dag_file_programs(kafka: Path | None) -> dict[str, str]:
    programs = {"`airflow.sdk` with `DAG` and operators": f"{BASELINE}; {DAG_FILE}"}
    programs |= {module: f"{BASELINE}; import {module}" for module in [*MODULES, PEER]}
    if kafka:
        programs[KAFKA] = f"{_with(kafka)}; {BASELINE}; import {KAFKA}"
    return programs


def _dag_programs(kafka: Path | None) -> dict[str, str]:
    programs = {name: _DAG.format(imported=imported, task=task) for name, (imported, task) in DAGS.items()}
    if kafka:
        programs[_KAFKA_DAG] = f"{_with(kafka)}\n{_DAG.format(imported=KAFKA_DAG[0], task=KAFKA_DAG[1])}"
    return programs


def _with(folder: Path) -> str:
    """Return a line that makes packages of another folder importable, those of namespaces too."""
    return (
        f"import sys; sys.path.append({str(folder)!r}); import airflow.providers as providers;"
        f" providers.__path__.append({str(folder / 'airflow' / 'providers')!r})"
    )


def _install_kafka(folder: Path) -> Path | None:
    command = [str(find_uv()), "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *KAFKA_PACKAGES]
    with suppress(subprocess.CalledProcessError):
        subprocess.run(command, check=True, capture_output=True)
        return folder
    return None


def _start_of_worker(rounds: int, compiled: Path) -> list[Table]:
    """Measure a worker that does one job, and a task that publishes one."""
    python = Path(sys.executable)
    with NatsServer() as server:
        measure(python, _STORE.format(url=server.url, jobs=rounds + 1), compiled)
        start = {"start, connect, do one job, end": _START.format(url=server.url)}
        task = {"import, execute": f"{BASELINE}; {DAG_FILE}\n{_EXECUTE.format(url=server.url)}"}
        return [
            _table("a worker's start", start, rounds, compiled, BARE),
            _table("a task that publishes a job", task, rounds, compiled, f"{BASELINE}; {DAG_FILE}"),
        ]


def _table(
    title: str, programs: Mapping[str, str], rounds: int, compiled: Path, baseline: str, python: Path | None = None
) -> Table:
    """Measure programs in turns, after a first run that compiles what they import."""
    all_programs = {f"baseline: `{baseline}`": baseline, **programs}
    samples = _samples(
        {name: (python or Path(sys.executable), each) for name, each in all_programs.items()}, rounds, compiled
    )
    base = min(samples[f"baseline: `{baseline}`"])
    ways = [
        Way(name, [Sample(1, used, used, 0.0, {_OVER: (used - base) * 1e3}) for used in measured])
        for name, measured in samples.items()
    ]
    return Table(title, "runs", ways)


def _samples(programs: Mapping[str, tuple[Path, str]], rounds: int, compiled: Path) -> dict[str, Sequence[float]]:
    for python, program in programs.values():
        measure(python, program, compiled)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (python, program) in programs.items():
            seconds[name].append(measure(python, program, compiled))
    return dict(seconds)


def measure(python: Path, program: str, compiled: Path) -> float:
    """Run a program in a fresh interpreter, and return the CPU seconds of the whole process."""
    before = _used_by_children()
    _run(python, program, compiled)
    return _used_by_children() - before


def _run(python: Path, program: str, compiled: Path) -> str:
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(compiled),
        "PYTHONPYCACHEPREFIX": str(compiled),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    # Not in the repository's folder, where the sources would shadow the installed package.
    command: list[str | Path] = [python, "-c", program]
    done = subprocess.run(command, cwd=compiled.parent, env=environment, check=True, capture_output=True, text=True)
    return str(done.stdout)


def _used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measure all programs."""
    return run_workload(workload, __doc__)


if __name__ == "__main__":
    sys.exit(main())
