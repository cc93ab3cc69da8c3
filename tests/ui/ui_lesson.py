"""Walks a page of the documentation as its reader does: writes its files, runs its commands, clicks its labels."""

from __future__ import annotations

import re
import signal
import subprocess
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from ui_steps import wait_for

from airflow_provider_jetstream.dev.process import Process
from testbed.code_blocks import CodeBlock, sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_LABEL = re.compile(r"\*\*(.+?)\*\*")
_ADDRESS = re.compile(r"`http://127\.0\.0\.1:8080/([^`]*)`")


class Lesson:
    """The reader of a page; nothing of a section may be left out.

    :param page: such as ``docs/tutorial.md``
    :param folder: in which the reader works
    :param env: of the reader's terminals
    """

    def __init__(self, page: str, folder: Path, env: Mapping[str, str]) -> None:
        self._sections = deque(sections(page))
        self._folder = folder
        self._env = dict(env)
        self._text = ""
        self._blocks: deque[CodeBlock] = deque()
        self._labels: set[str] = set()
        self._worker: Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker:
            self._worker.terminate(10)

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Read the next section: its code blocks in their order, and its labels."""
        section = self._sections.popleft()
        assert section.title == title
        self._text, self._blocks = section.text, deque(section.blocks)
        known = set(_LABEL.findall(section.text))
        self._labels = set(known)
        yield
        assert not self._blocks, f"left out: {self._blocks[0]}"
        assert not self._labels, f"not clicked: {self._labels}"

    def skip_to(self, title: str) -> None:
        """Leave out the sections before this one."""
        while self._sections[0].title != title:
            self._sections.popleft()

    @property
    def rest(self) -> list[str]:
        """The titles of the sections that haven't been read."""
        return [section.title for section in self._sections]

    def write(self) -> None:
        """Write the next block into the file that its first line names."""
        block = self._next("yaml", "python")
        assert block.file, f"{block} names no file"
        (self._folder / block.file).write_text(block.code, encoding="utf-8")

    def run(self) -> None:
        """Run the next block's command, and compare what it prints with the block behind it."""
        done = subprocess.run(
            ["bash", "-c", self._next("console").code],
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        shown = self._next("text")
        assert shown.is_printed_in(done.stdout), f"{shown} shows:\n{shown.code}\nprinted:\n{done.stdout}"

    def start_worker(self) -> None:
        """Start the worker with the next block's command."""
        command = self._next("console").code
        log = self._folder / "worker.log"
        self._worker = Process.start(["bash", "-c", f"exec {command}"], env=self._env, log_file=log, cwd=self._folder)
        self.see_worker_print()

    def stop_worker(self) -> None:
        """Press Ctrl-C in the worker's terminal."""
        worker = self._worker
        assert worker
        worker.signal(signal.SIGINT)
        wait_for(lambda: not worker.alive)
        assert worker.returncode == 0, worker.output()
        worker.kill()
        self._worker = None

    def see_worker_print(self) -> None:
        """Wait until the worker has printed the lines of the next block, among others."""
        worker = self._worker
        assert worker
        self.see(worker.output)

    def see(self, output: Callable[[], str]) -> None:
        """Wait until the lines of the next block are in an output, among others."""
        shown = self._next("text")
        try:
            wait_for(lambda: shown.is_printed_in(output(), wholly=False))
        except TimeoutError:
            raise AssertionError(f"{shown} shows:\n{shown.code}\nprinted:\n{output()}") from None

    def label(self, name: str) -> str:
        """Return a label of Airflow's UI that the section names."""
        assert f"**{name}**" in self._text
        self._labels.discard(name)
        return name

    def value(self, text: str) -> str:
        """Return what the section has the reader type in."""
        assert f"`{text}`" in self._text
        return text

    def path(self) -> str:
        """Return the path of the address that the section has the reader open."""
        (path,) = _ADDRESS.findall(self._text)
        return str(path)

    def _next(self, *languages: str) -> CodeBlock:
        block = self._blocks.popleft()
        assert block.language in languages, f"{block} is {block.language}"
        return block
