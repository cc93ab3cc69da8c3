"""What tests of workers in JavaScript share, and the terminal of those that run the commands of pages."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from testbed.command_tests import commands_of
from testbed.console import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.nats_server import NatsServer

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


@pytest.fixture
def terminal(request: pytest.FixtureRequest, own_nats: NatsServer, tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in an empty folder, with the commands that testbed/command_tests.py has this test run."""
    folder = tmp_path / "terminal"
    folder.mkdir()
    opened = Terminal(commands_of(request.node.nodeid), folder, own_nats.url)
    assert opened.left
    try:
        yield opened
    finally:
        opened.close()
    assert not opened.left, f"left out: {[str(command) for command in opened.left]}"
