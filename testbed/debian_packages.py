"""Packages of other distributions of Debian than the machine's, unpacked without installing them."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def unpack_packages(distribution: str, packages: Sequence[str], folder: Path) -> Path:
    """Download packages into an empty folder, and return the folder in it into which they are unpacked.

    :raises OSError: this machine has no apt-get, or no keys of Debian's
    :raises RuntimeError: the packages can't be had
    """
    if shutil.which("apt-get") is None or not _KEYRING.exists():
        raise FileNotFoundError("Debian's packages need apt-get and Debian's keys, and this machine lacks them")
    for package in _download(distribution, packages, folder):
        run_command(["dpkg", "-x", str(package), str(folder / "root")], folder)
    return folder / "root"


def _download(distribution: str, packages: Sequence[str], folder: Path) -> list[Path]:
    mirrors = run_command(["apt-get", "indextargets", "--format", "$(REPO_URI)"], folder).split()
    mirror = next((mirror for mirror in mirrors if mirror.rstrip("/").endswith("/debian")), None)
    if mirror is None:
        raise FileNotFoundError("this machine's apt-get knows no mirror of Debian")
    source = f"deb [arch=amd64 signed-by={_KEYRING}] {mirror} {distribution} main\n"
    (folder / "sources.list").write_text(source, encoding="utf-8")
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    options = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": folder / "state",
        "Dir::Cache": folder / "cache",
        # Otherwise apt downloads as an unprivileged user that can't write here.
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-q", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    run_command([*apt, "update"], folder)
    run_command([*apt, "download", *packages], folder)
    return sorted(folder.glob("*.deb"))


def run_command(command: Sequence[str], folder: Path) -> str:
    """Run a command in a folder, and return what it prints.

    :raises RuntimeError: it fails
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout
