"""Servers of other versions, the packages of workers in JavaScript, and the terminal of pages' commands."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from testbed.command_tests import commands_of
from testbed.console import Terminal
from testbed.nats_binaries import NoSuchServerError, nats_server_of
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = "nats@2.29.3"


@pytest.fixture(params=["newest", "2.12.8", "2.10.27"])
def any_nats(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server of each generation: they create and pause consumers, and remove messages, in their own ways."""
    try:
        binary = None if request.param == "newest" else nats_server_of(request.param)
    except NoSuchServerError as error:
        pytest.skip(str(error))
    with NatsServer(binary=binary) as server:
        yield server


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
