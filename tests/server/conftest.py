"""What tests of workers in JavaScript share."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "nats@2.29.3"


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (npm := shutil.which("npm")):
        pytest.skip("npm isn't installed")
    folder = tmp_path_factory.mktemp("node")
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        pytest.skip(f"no registry gives {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return folder
