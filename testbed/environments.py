"""Fresh virtual environments, to see what the package needs and what it works with."""

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PATIENCE = 600.0

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


def create_environment(folder: Path, python: Path, packages: Sequence[str], *, uploaded_before: str = "") -> Path:
    """
    Create an environment and install packages and their dependencies into it.

    :param folder: the environment's folder; packages are added to one that exists
    :param python: its interpreter
    :param packages: requirements, as pip takes them
    :param uploaded_before: a date; only versions that the registry had on that day are installed
    :return: the environment's interpreter
    """
    uv = str(find_uv())
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        _run([uv, "venv", "--quiet", "--python", str(python), str(folder)])
    options = ["--exclude-newer", uploaded_before] if uploaded_before else []
    _run([uv, "pip", "install", "--quiet", "--python", str(interpreter), *options, *packages])
    return interpreter


def installed_packages(interpreter: Path) -> set[str]:
    """Return what an environment holds, as ``name==version``."""
    listed = _run([str(find_uv()), "pip", "freeze", "--python", str(interpreter)])
    return {line for line in listed.splitlines() if "==" in line}


@functools.cache
def build_wheel() -> Path:
    """Build this project's wheel, once a process, into a folder that is removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="jetstream-wheel-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _run([str(find_uv()), "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def create_bare_environment(folder: Path) -> Path:
    """
    Create an environment as worker containers have it: this project's wheel, without Airflow and without Spark.

    :param folder: the environment's folder
    :return: the environment's interpreter
    """
    return create_environment(folder, Path(sys.executable), [str(build_wheel())])


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


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
