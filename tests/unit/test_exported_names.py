"""What users import: the three faces, Airflow's classes, and how little is loaded with them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import airflow_provider_jetstream

_PACKAGE = "airflow_provider_jetstream"
_FACES = ("jetstream", "worker", "spark")

# What DAGs and deployments import or name; renaming one breaks them.
_AIRFLOW_NAMES = [
    "assets.stream_asset.dead_letter_asset",
    "assets.stream_asset.queue_asset",
    "hooks.jetstream.JetStreamHook",
    "notifications.jetstream.JetStreamNotifier",
    "operators.cancel.JetStreamCancelOperator",
    "operators.consume.JetStreamConsumeOperator",
    "operators.consume.jetstream_consume_task",
    "operators.provision.JetStreamProvisionOperator",
    "operators.publish.JetStreamPublishOperator",
    "operators.redrive.JetStreamRedriveOperator",
    "operators.spark.JetStreamDeadLetterReportOperator",
    "plugins.monitor.JetStreamMonitorPlugin",
    "provider_info.get_provider_info",
    "queues.jetstream.JetStreamMessageQueueProvider",
    "reprocessing.reprocess_dag",
    "sensors.dead_letter.JetStreamDeadLetterSensor",
    "sensors.jobs.JetStreamJobsSensor",
    "sensors.queue.JetStreamQueueDrainedSensor",
    "triggers.completion.JobCompletionTrigger",
    "triggers.dead_letter.DeadLetterTrigger",
    "triggers.message.JetStreamMessageTrigger",
    "triggers.queue.QueueDrainedTrigger",
    "command.program.main",
    "worker.cli.main",
]

# What workers, scripts and notebooks import. A face may export more; what it doesn't export is private.
_FACE_NAMES = {
    "jetstream": """
        Archive Audit Connection ConnectionSettings Consumer Cursor DeadLetter DeadLetterQueue Events Job Origin
        PublishReport RedriveReport RedriveRequest Repair Selection WaitPolicy WaitReport WorkQueue
        JetStreamProviderError TerminalError TransientError
        apply cancel check_drained connect connection_settings diagnose_dead_letters discover_queue find_dead_letters
        inspect_queue plan permissions preview provision publish redrive_dead_letters shared_connection take_cursor wait
    """,
    "worker": "Delivery GiveUpError HandlerDeadlineError RetryLaterError Worker",
    "spark": """
        preview_letters read_letters read_snapshot redrive_letters register repair snapshot triage write_report
    """,
}


def _modules_after(statement: str, *, beyond: str = "") -> set[str]:
    """Return the modules that a statement loads in a new process, without those of another before it."""
    code = f"import sys\n{beyond}\nbefore = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def _distributions(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def _imported_for_type_checkers(face: str) -> set[str]:
    tree = ast.parse(Path(str(importlib.import_module(f"{_PACKAGE}.{face}").__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {
        alias.name for block in blocks for node in ast.walk(block) if isinstance(node, ast.alias) for alias in [node]
    }


@pytest.mark.parametrize("face", _FACES)
def test_a_face_exports_what_it_lists(face: str) -> None:
    module = importlib.import_module(f"{_PACKAGE}.{face}")
    exported = [*module.__all__]
    assert sorted(exported) == sorted(set(exported))
    assert set(_FACE_NAMES[face].split()) <= set(exported)
    # Type checkers and the interpreter get the same names.
    assert _imported_for_type_checkers(face) == set(exported)
    undocumented = [name for name in exported if not inspect.getdoc(getattr(module, name))]
    assert undocumented == []
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("folder", ["example_dags", "example_workers"])
def test_examples_import_what_users_may_import(folder: str) -> None:
    public = {f"{_PACKAGE}.{face}" for face in _FACES} | {
        f"{_PACKAGE}.{name.rpartition('.')[0]}" for name in _AIRFLOW_NAMES
    }
    files = sorted((Path(__file__).parents[2] / folder).glob("*.py"))
    imported = {
        node.module
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_PACKAGE)
    }
    assert imported
    assert imported - public == set()


def test_a_name_has_one_definition_on_its_face_and_in_its_module() -> None:
    for face in _FACES:
        module = importlib.import_module(f"{_PACKAGE}.{face}")
        for name in module.__all__:
            exported = getattr(module, name)
            home = getattr(exported, "__module__", "")
            if home.startswith(_PACKAGE):
                assert getattr(importlib.import_module(home), name) is exported


def test_airflow_names_are_where_they_were() -> None:
    for path in _AIRFLOW_NAMES:
        module, _, name = path.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)), path


def test_every_module_imports_and_has_what_it_lists() -> None:
    for info in pkgutil.walk_packages(airflow_provider_jetstream.__path__, f"{_PACKAGE}."):
        if not info.name.endswith("__main__"):
            module = importlib.import_module(info.name)
            missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
            assert missing == [], info.name


def test_the_version_is_the_distributions() -> None:
    assert airflow_provider_jetstream.__version__ == metadata.version("airflow-provider-jetstream")


def test_what_airflow_loads_at_every_start_is_light() -> None:
    loaded = _distributions(_modules_after(f"import {_PACKAGE}.provider_info"))
    assert loaded & {"airflow", "nats", "pydantic", "yaml", "pyspark"} == set()


def test_faces_are_light_until_a_name_is_used() -> None:
    loaded = _modules_after(f"from {_PACKAGE} import jetstream, worker, spark")
    assert _distributions(loaded) & {"airflow", "nats", "pydantic", "yaml", "pyspark", "numpy"} == set()
    own = {name.removeprefix(_PACKAGE).strip(".") for name in loaded if name.startswith(_PACKAGE)}
    assert own == {"", "lazy_exports", *_FACES}


@pytest.mark.slow
@pytest.mark.since_airflow("3.2", "the module of plugins in its SDK")
def test_the_plugin_brings_nothing_that_only_its_page_needs() -> None:
    # Every Airflow process loads it.
    loaded = _modules_after(
        f"import {_PACKAGE}.plugins.monitor",
        beyond="from airflow.sdk.plugins_manager import AirflowPlugin",
    )
    assert not any(name.startswith(("fastapi", "nats", "airflow.api_fastapi", "sqlalchemy")) for name in loaded)
    own = {name.removeprefix(f"{_PACKAGE}.") for name in loaded if name.startswith(f"{_PACKAGE}.")}
    # The last two hold the names of the classes that pass an XCom, which each process that runs tasks needs.
    assert own == {
        *("airflow_compat", "airflow_version", "plugins", "plugins.monitor"),
        *("tasks", "tasks.xcom_classes"),
    }


def test_declarations_and_errors_load_no_client() -> None:
    loaded = _modules_after(f"from {_PACKAGE}.jetstream import Consumer, JetStreamProviderError, WorkQueue")
    assert _distributions(loaded) & {"airflow", "nats", "pyspark"} == set()


@pytest.mark.slow
def test_a_dag_that_uses_spark_is_parsed_without_it() -> None:
    loaded = _modules_after(f"import {_PACKAGE}.operators.spark, {_PACKAGE}.operators.redrive")
    assert _distributions(loaded) & {"pyspark", "py4j", "pyarrow", "numpy", "pandas"} == set()


def test_the_worker_loads_neither_the_client_nor_what_it_may_do_without() -> None:
    loaded = _modules_after(f"import {_PACKAGE}.worker.cli; from {_PACKAGE}.worker import Worker")
    unwanted = {
        "airflow",
        "pyspark",
        "nats",
        "aiohttp",
        "yaml",
        "multiprocessing",
        "prometheus_client",
        "opentelemetry",
    }
    assert _distributions(loaded) & unwanted == set()
    own = {name.removeprefix(f"{_PACKAGE}.") for name in loaded if name.startswith(f"{_PACKAGE}.")}
    assert "worker.worker" in own
    # It stores dead letters and cancels jobs with their schedules; it neither scans, waits, publishes nor provisions.
    unwanted_rooms = {"redrive", "waiting", "provisioning", "audit", "inspection"}
    assert {name.split(".")[1] for name in own if name.startswith("jetstream.")} & unwanted_rooms == set()
    assert {name for name in own if name.startswith("jetstream.dead_letters.")} <= {
        "jetstream.dead_letters.death",
        "jetstream.dead_letters.record",
    }
    assert own & {"jetstream.publication", "jetstream.publishing.outbox", "jetstream.queue.discovery"} == set()
