"""Fresh virtual environments, for tests of what the package needs and what it works with."""

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
_TIMEOUT = 600.0

_NEEDED_BY_EXECUTORS = ("numpy", "pyarrow", "pydantic", "pyyaml")


def find_uv() -> Path:
    """Return a working uv: on PATH, or the one that the Makefile installs."""
    for candidate in (shutil.which("uv"), ROOT / ".tools" / "bin" / "uv"):
        if candidate and _runs([str(candidate), "--version"]):
            return Path(candidate)
    raise RuntimeError("expected uv on PATH or in .tools/bin, found none: run make test, which installs it")


def lowest_python() -> Path:
    """Return the oldest interpreter this package supports, or the running one where the machine lacks it."""
    oldest = shutil.which("python3.11")
    if oldest and _runs([oldest, "--version"]):
        return Path(oldest)
    return Path(sys.executable)


def create_environment(folder: Path, python: Path, packages: Sequence[str], *, uploaded_before: str = "") -> Path:
    """Create a virtual environment, install packages into it, and return its interpreter."""
    uv = str(find_uv())
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        _run([uv, "venv", "--quiet", "--python", str(python), str(folder)])
    for package in packages:
        if package.startswith("pyspark") and package[-1].isdigit():
            # It has no wheel there, and uv builds its 430 MB anew whenever the registry is asked.
            _runs([uv, "pip", "install", "--offline", "--no-deps", "--python", str(interpreter), package])
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
    """Create an environment as worker containers have it, without Airflow and Spark; return its interpreter."""
    return create_environment(folder, Path(sys.executable), [str(build_wheel())])


def executor_environment(folder: Path) -> Path:
    """Create the environment of Spark executors whose application ships this package; return its interpreter."""
    versions = _locked_versions()
    return create_environment(
        folder, Path(sys.executable), [f"{name}=={versions[name]}" for name in _NEEDED_BY_EXECUTORS]
    )


def locked(package: str) -> str:
    """Return a requirement for a package in the version that this project is tested with."""
    return f"{package}=={_locked_versions()[package]}"


def _locked_versions() -> dict[str, str | None]:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    return {package["name"]: package.get("version") for package in lock["package"]}


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT).returncode == 0
    except OSError:
        return False


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout
