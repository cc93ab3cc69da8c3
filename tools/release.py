"""Builds a release and checks what users get: ``make release``. It publishes nothing."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from testbed.environments import ROOT, create_environment, find_uv

PACKAGE = "airflow_provider_jetstream"
# The address that pyproject.toml has until the repository has one.
_EXAMPLE = "example.org"
_TIMEOUT = 600.0
_CHECK = ("run", "--quiet", "--isolated", "--locked", "--only-group", "release", "twine", "check", "--strict")
_WHEEL_HAS = ("py.typed", "provider_info.py", "plugins/monitor/static/icon.svg")
_SDIST_HAS = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"{PACKAGE}/py.typed")
# Markdown's links and pictures: what is in brackets, and no address of the web nor a heading of the same page.
_RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")

_IMPORTS = f"""
import importlib, sys
from importlib import metadata

assert metadata.version("airflow-provider-jetstream") == sys.argv[1], metadata.version("airflow-provider-jetstream")
for face in ("jetstream", "worker"):
    module = importlib.import_module("{PACKAGE}." + face)
    assert all(getattr(module, name) for name in module.__all__)
for point in metadata.distribution("airflow-provider-jetstream").entry_points:
    if point.group != "airflow.plugins":
        assert callable(point.load()), point
print(len(sys.modules))
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it; return both."""
    _run(find_uv(), "build", "--quiet", "--out-dir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_metadata(*files: Path) -> None:
    """Let twine check the metadata, and how a registry renders the README.

    :raises RuntimeError: twine has found something
    """
    _run(find_uv(), *_CHECK, *files)


def content_problems(sdist: Path, wheel: Path) -> list[str]:
    """Return what the files lack or have too much, and links of the README that lead nowhere on a registry."""
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = opened.namelist()
        (path,) = (name for name in in_wheel if name.endswith(".dist-info/METADATA"))
        description = str(email.message_from_bytes(opened.read(path)).get_payload())
    with tarfile.open(sdist) as archive:
        in_sdist = [name.partition("/")[2] for name in archive.getnames()]
    found = [f"the wheel has no {name}" for name in _WHEEL_HAS if f"{PACKAGE}/{name}" not in in_wheel]
    found += [f"the sdist has no {name}" for name in _SDIST_HAS if name not in in_sdist]
    tops = {name.partition("/")[0] for name in in_wheel if ".dist-info/" not in name}
    found += [f"the wheel has {top}" for top in sorted(tops - {PACKAGE})]
    code = {name for name in in_wheel if name.startswith(f"{PACKAGE}/")}
    found += [f"only one of the two has {name}" for name in sorted(code ^ _code_of(in_sdist))]
    return found + [f"the README links to {link}" for link in _RELATIVE.findall(description)]


def check_installed(file: Path, folder: Path, version: str) -> None:
    """Install a file into an empty environment, import every name, and start the programs.

    :raises RuntimeError: one of these fails
    """
    python = create_environment(folder, Path(sys.executable), [str(file)])
    _run(python, "-c", _IMPORTS, version)
    _run(python.with_name("jetstream-queue"), "--version")
    _run(python.with_name("jetstream-worker"), "--help")


def project_version() -> str:
    """Return the version that is built."""
    return str(_project()["version"])


def open_points() -> list[str]:
    """Return what a person has to do before the files are published."""
    version = project_version()
    found = []
    if _EXAMPLE in _project()["urls"]["Repository"]:
        found.append("set the repository's address in pyproject.toml: it is an example's")
    if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        found.append(f"give the unreleased changes in CHANGELOG.md the heading [{version}] and a date")
    return found


def _code_of(in_sdist: list[str]) -> set[str]:
    # A folder of an archive has an entry of its own.
    return {name for name in in_sdist if name.startswith(f"{PACKAGE}/") and "." in name.rpartition("/")[2]}


def _project() -> dict[str, dict[str, str]]:
    project: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}".strip())


def main() -> int:
    """Build into ``dist``, check, and say what is left to do."""
    folder = ROOT / "dist"
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
        old.unlink()
    files = build(folder)
    check_metadata(*files)
    if problems := content_problems(*files):
        sys.stderr.write("".join(f"{problem}\n" for problem in problems))
        return 1
    with tempfile.TemporaryDirectory() as environments:
        for file in files:
            check_installed(file, Path(environments) / file.suffix, project_version())
            sys.stdout.write(f"{file.relative_to(ROOT)} is checked\n")
    sys.stdout.write("".join(f"before it is published: {point}\n" for point in open_points()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
