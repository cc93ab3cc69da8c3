"""The commands of the pages' console blocks: a terminal that runs them as they stand, in their order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.dev.process import Process
from testbed.code_blocks import ROOT, code_blocks
from testbed.terminal import terminal_env

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from testbed.code_blocks import CodeBlock

_PROMPT = "$ "
# The pages name natscli, which the project doesn't install: a program of the testbed stands in for it.
_NATS = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m testbed.nats_program "$@"'
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Command:
    """A command of a page.

    :param text: as it stands, continued lines included
    :param shown: what the page shows as its output, if it shows any
    """

    page: str
    line: int
    text: str
    shown: str = ""

    def __str__(self) -> str:
        """Say where the command stands."""
        return f"{self.page}:{self.line}: {self.text}"


def commands() -> list[Command]:
    """Return the commands of all pages' console blocks."""
    return [command for block in code_blocks("console") for command in _commands_of(block)]


def _commands_of(block: CodeBlock) -> Iterator[Command]:
    prompted = any(line.startswith(_PROMPT) for line in block.code.splitlines())
    lines = deque(enumerate(block.code.splitlines(), block.line + 1))
    while lines:
        number, text = lines.popleft()
        while text.endswith("\\"):
            text += f"\n{lines.popleft()[1]}"
        shown = []
        while prompted and lines and not lines[0][1].startswith(_PROMPT):
            shown.append(lines.popleft()[1])
        yield Command(block.page, number, text.removeprefix(_PROMPT), "\n".join(shown))


class Terminal:
    """A bash whose user types the commands of a page in their order; none may be left out.

    :param wanted: the commands
    :param folder: the working directory
    :param url: of the nats-server that the environment names
    """

    def __init__(self, wanted: Iterable[Command], folder: Path, url: str) -> None:
        self._commands = deque(wanted)
        self._replaced: dict[str, str] = {}
        self._last: Command | None = None
        self._processes: list[Process] = []
        self._logs = folder
        self._programs = folder / ".programs"
        self._programs.mkdir()
        self.add_program("nats", _NATS)
        self.folder = folder
        self.env = terminal_env(url) | {"COLUMNS": "200"}
        self.env["PATH"] = f"{self._programs}{os.pathsep}{self.env['PATH']}"

    @property
    def left(self) -> list[Command]:
        """The commands that weren't typed yet."""
        return list(self._commands)

    def replace(self, named: str, actual: str) -> None:
        """Type an actual address, port or folder where the page names one."""
        self._replaced[named] = actual

    def add_program(self, name: str, script: str) -> None:
        """Put a shell script on the PATH, before all other programs of that name."""
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def next(self) -> Command:
        """Take the next command, with what is replaced."""
        command = self._commands.popleft()
        self._last = command
        text = command.text
        for named, actual in self._replaced.items():
            text = text.replace(named, actual)
        return Command(command.page, command.line, text, command.shown)

    def put_back(self) -> None:
        """Have the command that was taken last be the next one again."""
        if self._last is None:
            raise RuntimeError("expected that a command was taken, found none")
        self._commands.appendleft(self._last)

    def run(self, *, code: int = 0, count: int = 1, after: str = "") -> str:
        """Run the next command, and return what it prints to the standard output.

        :param code: the expected exit code
        :param count: how many commands the same shell runs
        :param after: what the test has that shell run then
        """
        typed = [self.next() for _ in range(count)]
        done = subprocess.run(
            ["bash", "-c", "\n".join([*(command.text for command in typed), after])],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode != code or "Traceback" in done.stderr:
            raise AssertionError(f"{typed[0]}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self) -> Process:
        """Start the next command, which runs until it is interrupted; ``close`` ends it."""
        command = self.next()
        log = self._logs / f"command-{command.line}.log"
        # As the shell's own process, so that a signal reaches it.
        process = Process.start(["bash", "-c", f"exec env {command.text}"], env=self.env, log_file=log, cwd=self.folder)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.terminate(10)
