"""The core and the worker in an environment without Airflow and Spark."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from testbed.environments import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.nats_server import NatsServer

pytestmark = pytest.mark.group("environment without Airflow")

_PACKAGE = "airflow_provider_jetstream"


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _fails(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done
    return done.stderr


def test_every_module_of_the_core_and_the_worker_imports_without_airflow(bare: Path) -> None:
    code = f"""
import importlib, pkgutil
for room in ("jetstream", "worker", "command"):
    package = importlib.import_module("{_PACKAGE}." + room)
    print(package.__name__)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        print(importlib.import_module(module.name).__name__)
"""
    imported = _run(bare, "-I", "-c", code).split()
    expected = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in ("jetstream", "worker", "command")
        for file in (ROOT / _PACKAGE / room).rglob("*.py")
    ]
    assert sorted(imported) == sorted(expected)


def test_the_worker_command_explains_itself_without_airflow(bare: Path) -> None:
    command = bare.parent / "jetstream-worker"
    assert "Runs the jobs of a JetStream work queue" in _run(command, "--help")
    assert "--handler" in _run(command, "run", "--help")


def test_the_queue_command_works_without_airflow_and_without_its_extras(bare: Path, nats: NatsServer) -> None:
    command = bare.parent / "jetstream-queue"
    absent = (
        "import importlib.util; print([name for name in ('argcomplete', 'rich') if importlib.util.find_spec(name)])"
    )
    assert _run(bare, "-I", "-c", absent).strip() == "[]"
    assert "jetstream-queue " in _run(command, "--version")
    assert "QUEUE" in _run(command, "queues", "--server", nats.url)
    assert "prometheus-client" in _fails(command, "exporter", "--server", nats.url)


def test_a_skin_names_the_missing_airflow(bare: Path) -> None:
    code = f"""
try:
    import {_PACKAGE}.hooks.jetstream
except ModuleNotFoundError as error:
    print(error.name.split(".")[0])
"""
    assert _run(bare, "-I", "-c", code).strip() == "airflow"
