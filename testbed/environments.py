"""Fresh virtual environments, to see what the package needs and what it works with."""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PATIENCE = 600.0

_NEEDED_BY_WORKERS = {"nats-py": "nats-py[nkeys]", "pydantic": "pydantic", "pyyaml": "PyYAML"}
_NEEDED_BY_EXECUTORS = ("numpy", "pyarrow", "pydantic", "pyyaml")


def find_uv() -> Path:
    """Return a uv that runs: on PATH, or the one that the Makefile installs."""
    for candidate in (shutil.which("uv"), ROOT / ".tools" / "bin" / "uv"):
        if candidate and _runs([str(candidate), "--version"]):
            return Path(candidate)
    raise RuntimeError("expected uv on PATH or in .tools/bin, found none: run make test, which installs it")


def lowest_python() -> Path:
    """Return the oldest interpreter this package supports, or the one that runs, where the machine lacks the oldest."""
    oldest = shutil.which("python3.11")
    if oldest and _runs([oldest, "--version"]):
        return Path(oldest)
    return Path(sys.executable)


def create_environment(folder: Path, python: Path, packages: Sequence[str], *, with_dependencies: bool = True) -> Path:
    """
    Create an environment and install packages into it.

    :param folder: where
    :param python: its interpreter
    :param packages: what, as pip takes it
    :param with_dependencies: also what they depend on
    :return: the environment's interpreter
    """
    uv = str(find_uv())
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        _run([uv, "venv", "--quiet", "--python", str(python), str(folder)])
    options = [] if with_dependencies else ["--no-deps"]
    _run([uv, "pip", "install", "--quiet", "--python", str(interpreter), *options, *packages])
    return interpreter


def create_bare_environment(folder: Path) -> Path:
    """
    Create an environment as worker containers and Spark executors have it: without Airflow and without Spark.

    :param folder: where
    :return: the environment's interpreter
    """
    versions = _locked_versions()
    needed = [f"{requirement}=={versions[name]}" for name, requirement in _NEEDED_BY_WORKERS.items()]
    python = create_environment(folder, Path(sys.executable), needed)
    return create_environment(folder, python, [str(ROOT)], with_dependencies=False)


def executor_environment(folder: Path) -> Path:
    """
    Create an environment as Spark executors have it whose applications bring this package along.

    :param folder: where
    :return: the environment's interpreter
    """
    versions = _locked_versions()
    return create_environment(
        folder, Path(sys.executable), [f"{name}=={versions[name]}" for name in _NEEDED_BY_EXECUTORS]
    )


def locked(package: str) -> str:
    """
    Name a package in the version that this project is tested with.

    :param package: its name
    """
    return f"{package}=={_locked_versions()[package]}"


def _locked_versions() -> dict[str, str | None]:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    return {package["name"]: package.get("version") for package in lock["package"]}


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0
    except OSError:
        return False


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
