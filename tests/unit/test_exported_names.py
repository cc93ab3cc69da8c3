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
    "triggers.completion.JobCompletionTrigger",
    "triggers.dead_letter.DeadLetterTrigger",
    "sensors.dead_letter.JetStreamDeadLetterSensor",
    "plugins.monitor.JetStreamMonitorPlugin",
    "worker.Worker",
    "worker.Delivery",
    "worker.GiveUpError",
    "worker.RetryLaterError",
    "worker.command.main",
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


def _loaded_after(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sorted(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


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


@pytest.mark.parametrize("module", [f"{_PACKAGE}.jetstream.queue", f"{_PACKAGE}.jetstream.errors"])
def test_declarations_and_errors_load_no_client(module: str) -> None:
    assert _loaded_after(module) & {"airflow", "nats", "pyspark"} == set()


def test_the_worker_loads_neither_the_client_nor_what_it_may_do_without() -> None:
    unwanted = {"airflow", "pyspark", "nats", "multiprocessing", "prometheus_client", "opentelemetry"}
    assert _loaded_after(f"{_PACKAGE}.worker.command") & unwanted == set()
