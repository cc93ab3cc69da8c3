from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from importlib import metadata

import pytest

import airflow_provider_jetstream

_PACKAGE = "airflow_provider_jetstream"
_MODULES = [module.name for module in pkgutil.walk_packages(airflow_provider_jetstream.__path__, f"{_PACKAGE}.")]

# What DAGs, workers and other providers import; renaming one breaks them.
_PUBLIC = [
    "hooks.jetstream.JetStreamHook",
    "operators.provision.JetStreamProvisionOperator",
    "operators.publish.JetStreamPublishOperator",
    "operators.redrive.JetStreamRedriveOperator",
    "operators.spark.JetStreamDeadLetterReportOperator",
    "triggers.completion.JobCompletionTrigger",
    "triggers.dead_letter.DeadLetterTrigger",
    "triggers.queue.QueueDrainedTrigger",
    "sensors.dead_letter.JetStreamDeadLetterSensor",
    "sensors.queue.JetStreamQueueDrainedSensor",
    "plugins.monitor.JetStreamMonitorPlugin",
    "reprocessing.reprocess_dag",
    "worker.Worker",
    "worker.Delivery",
    "worker.GiveUpError",
    "worker.RetryLaterError",
    "worker.command.main",
    "worker.errors.HandlerDeadlineError",
    "jetstream.connection.Connection",
    "jetstream.connection.ConnectionSettings",
    "jetstream.connection.connect",
    "jetstream.connection.connection_settings",
    "jetstream.sharing.shared_connection",
    "jetstream.queue.WorkQueue",
    "jetstream.queue.Consumer",
    "jetstream.queue.DeadLetterQueue",
    "jetstream.queue.Events",
    "jetstream.queue.Archive",
    "jetstream.queue.Audit",
    "jetstream.provisioning.plan",
    "jetstream.provisioning.apply",
    "jetstream.provisioning.provision",
    "jetstream.jobs.Job",
    "jetstream.jobs.Origin",
    "jetstream.jobs.prepare",
    "jetstream.inspection.inspect_queue",
    "jetstream.draining.check_drained",
    "jetstream.dead_letters.Selection",
    "jetstream.dead_letters.DeadLetter",
    "jetstream.dead_letters.find_dead_letters",
    "jetstream.dead_letters.summary.summarise",
    "jetstream.redrive.redrive",
    "jetstream.redrive.preview",
    "jetstream.redrive.RedriveOrder",
    "jetstream.redrive.Repair",
    "jetstream.publishing.publish",
    "jetstream.publishing.PublishReport",
    "jetstream.publishing.ranges",
    "jetstream.errors.JetStreamProviderError",
    "provider_info.get_provider_info",
]


def _modules_after(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def _loaded_after(module: str) -> set[str]:
    return {name.partition(".")[0] for name in _modules_after(module)}


@pytest.mark.parametrize("path", _PUBLIC)
def test_a_public_name_is_where_it_was(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    assert inspect.getdoc(found)


@pytest.mark.parametrize("module", _MODULES)
def test_a_module_has_a_docstring_and_every_name_that_it_exports(module: str) -> None:
    imported = importlib.import_module(module)
    assert imported.__doc__
    assert [name for name in getattr(imported, "__all__", []) if not hasattr(imported, name)] == []


def test_the_version_is_the_distributions() -> None:
    assert airflow_provider_jetstream.__version__ == metadata.version("airflow-provider-jetstream")


@pytest.mark.parametrize("module", [_PACKAGE, f"{_PACKAGE}.provider_info"])
def test_what_airflow_loads_at_every_start_is_light(module: str) -> None:
    assert _loaded_after(module) & {"airflow", "nats", "pydantic", "yaml", "pyspark"} == set()


def test_the_plugin_brings_nothing_that_only_its_page_needs() -> None:
    # Every Airflow process loads it.
    added = _modules_after(f"{_PACKAGE}.plugins.monitor") - _modules_after(
        "airflow.providers.common.compat.sdk as compat; compat.AirflowPlugin"
    )
    assert not any(name.startswith(("fastapi", "nats", "airflow.api_fastapi", "sqlalchemy")) for name in added)
    own = {name for name in added if name.startswith(f"{_PACKAGE}.")}
    assert own == {f"{_PACKAGE}.plugins", f"{_PACKAGE}.plugins.monitor"}


@pytest.mark.parametrize("module", [f"{_PACKAGE}.jetstream.queue", f"{_PACKAGE}.jetstream.errors"])
def test_declarations_and_errors_load_no_client(module: str) -> None:
    assert _loaded_after(module) & {"airflow", "nats", "pyspark"} == set()


@pytest.mark.parametrize("module", ["spark", "redrive"])
def test_a_dag_that_uses_spark_is_parsed_without_it(module: str) -> None:
    assert _loaded_after(f"{_PACKAGE}.operators.{module}") & {"pyspark", "py4j", "pyarrow", "numpy", "pandas"} == set()


@pytest.mark.parametrize("module", [f"{_PACKAGE}.worker", f"{_PACKAGE}.worker.command"])
def test_the_worker_loads_neither_the_client_nor_what_it_may_do_without(module: str) -> None:
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
    assert _loaded_after(module) & unwanted == set()


def test_the_worker_loads_nothing_of_looking_for_dead_letters_or_of_waiting() -> None:
    parts = {
        ".".join(name.split(".")[1:3]) for name in _modules_after(f"{_PACKAGE}.worker") if name.startswith(_PACKAGE)
    }
    assert {"worker.runtime", "jetstream.letter_record"} <= parts
    unwanted = {"dead_letters", "redrive", "completions", "publishing", "provisioning", "audit", "discovery"}
    assert parts & {f"jetstream.{part}" for part in unwanted} == set()
