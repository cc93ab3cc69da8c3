from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from testbed.environments import ROOT

_PACKAGE = "airflow_provider_jetstream"


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("absent", ["airflow", "pyspark", "pyarrow", "pandas", "prometheus_client"])
def test_the_bare_environment_really_lacks_it(bare: Path, absent: str) -> None:
    code = f"import importlib.util; print(importlib.util.find_spec({absent!r}))"
    assert _run(bare, "-I", "-c", code).strip() == "None"


def test_the_bare_environment_imports_the_installed_package_not_the_sources(bare: Path) -> None:
    location = _run(bare, "-I", "-c", f"import {_PACKAGE}; print({_PACKAGE}.__file__)").strip()
    assert Path(location).is_relative_to(bare.parent.parent)


def test_every_module_of_the_ground_floor_and_the_worker_imports_without_airflow(bare: Path) -> None:
    code = f"""
import importlib, pkgutil
for part in ("jetstream", "worker"):
    package = importlib.import_module("{_PACKAGE}." + part)
    print(package.__name__)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        print(importlib.import_module(module.name).__name__)
"""
    imported = _run(bare, "-I", "-c", code).split()
    expected = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for part in ("jetstream", "worker")
        for file in (ROOT / _PACKAGE / part).rglob("*.py")
    ]
    assert sorted(imported) == sorted(expected)


def test_the_worker_command_explains_itself_without_airflow(bare: Path) -> None:
    command = bare.parent / "jetstream-worker"
    assert "Does the jobs of a JetStream work queue" in _run(command, "--help")
    assert "--handler" in _run(command, "run", "--help")


def test_a_skin_says_what_it_lacks(bare: Path) -> None:
    code = f"""
try:
    import {_PACKAGE}.hooks.jetstream
except ModuleNotFoundError as error:
    print(error.name.split(".")[0])
"""
    assert _run(bare, "-I", "-c", code).strip() == "airflow"
