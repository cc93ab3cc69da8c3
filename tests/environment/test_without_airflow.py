from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]
_PACKAGE = "airflow_provider_jetstream"
_NEEDED = {"nats-py": "nats-py[nkeys]", "pydantic": "pydantic", "pyyaml": "PyYAML"}


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=_REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _uv() -> list[str]:
    candidates = [["uv"], [str(_REPOSITORY / ".tools" / "bin" / "uv")], [sys.executable, "-m", "uv"]]
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "--version"], capture_output=True, timeout=30, check=False).returncode == 0:
            return command
    raise FileNotFoundError("expected uv on the PATH, in .tools/bin or as a module of this Python, found none")


def _locked() -> list[str]:
    """Name what workers and executors need, at the versions that the project is tested with."""
    lock = tomllib.loads((_REPOSITORY / "uv.lock").read_text(encoding="utf-8"))
    versions = {package["name"]: package.get("version") for package in lock["package"]}
    return [f"{requirement}=={versions[name]}" for name, requirement in _NEEDED.items()]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment as worker containers and Spark executors have it, without Airflow and Spark."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    uv = _uv()
    _run(*uv, "venv", "--quiet", "--python", sys.executable, folder)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    _run(*uv, "pip", "install", "--quiet", "--python", python, *_locked())
    _run(*uv, "pip", "install", "--quiet", "--python", python, "--no-deps", _REPOSITORY)
    return python


@pytest.mark.parametrize("absent", ["airflow", "pyspark", "pyarrow", "pandas"])
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
        ".".join(file.relative_to(_REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for part in ("jetstream", "worker")
        for file in (_REPOSITORY / _PACKAGE / part).rglob("*.py")
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
