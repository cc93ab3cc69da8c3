"""A pytest plugin: which lines of the package each test runs, and which other files of the project it opens.

``sys.monitoring`` reports a line once a test, so that the record costs next to nothing. Lines that other processes run
aren't recorded. ``python -m tools.changed_tests`` chooses tests by the record.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / ".cache" / "lines.sqlite"
_PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("airflow_provider_jetstream", "example_workers"))
# Folders in which there is nothing of the project.
_FOREIGN = tuple(f"{ROOT / name}{os.sep}" for name in (".venv", ".git", ".cache", ".tools", "web/node_modules"))
_ROOT = f"{ROOT}{os.sep}"
_TABLES = """
create table if not exists source (hash text primary key, text blob) without rowid;
create table if not exists ran (test text, file text, hash text, lines blob, primary key (test, file)) without rowid;
create index if not exists ran_file on ran (file);
create table if not exists took (test text primary key, seconds real, lines integer) without rowid;
"""
# Python 3.11 has none.
_MONITORING: Any = getattr(sys, "monitoring", None)
_TOOL = 3
_PATH_LENGTH = 400


class LineRecord:
    """The lines and files of the tests of one process."""

    def __init__(self) -> None:
        self._lines: dict[str, set[int]] = defaultdict(set)
        self._opened: set[str] = set()
        self._tests: dict[str, tuple[dict[str, set[int]], set[str]]] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def start(self) -> bool:
        """Begin to record; return whether this Python can, and nobody else uses the tool's number."""
        if _MONITORING is None or _MONITORING.get_tool(_TOOL) is not None:
            return False
        _MONITORING.use_tool_id(_TOOL, "line record")
        events = _MONITORING.events
        _MONITORING.register_callback(_TOOL, events.PY_START, self._started)
        _MONITORING.register_callback(_TOOL, events.LINE, self._ran)
        _MONITORING.set_events(_TOOL, events.PY_START)
        sys.addaudithook(self._audited)
        return True

    def stop(self) -> None:
        """End recording."""
        _MONITORING.set_events(_TOOL, _MONITORING.events.NO_EVENTS)
        _MONITORING.free_tool_id(_TOOL)

    def begin(self) -> None:
        """Forget what ran before this test."""
        self._lines = defaultdict(set)
        self._opened = set()
        _MONITORING.restart_events()

    def end(self, test: str) -> None:
        """Keep what ran since the test began."""
        self._tests[test] = (self._lines, self._opened)

    def add_seconds(self, test: str, seconds: float) -> None:
        """Add to the time that a test took."""
        self._seconds[test] += seconds

    def store(self) -> None:
        """Add what was recorded to the file, which other processes write too."""
        RECORD.parent.mkdir(exist_ok=True)
        with closing(sqlite3.connect(RECORD, timeout=60)) as database, database:
            database.executescript(_TABLES)
            hashes = {file: _store_source(database, file) for file in self._files()}
            database.executemany("delete from ran where test = ?", [(test,) for test in self._tests])
            database.executemany(
                "insert or replace into ran values (?, ?, ?, ?)",
                [
                    (test, file.removeprefix(_ROOT), hashes[file], _packed(lines.get(file, set())))
                    for test, (lines, opened) in self._tests.items()
                    for file in lines.keys() | opened
                    if file in hashes
                ],
            )
            database.executemany(
                "insert or replace into took values (?, ?, ?)",
                [
                    (test, self._seconds[test], sum(len(found) for found in lines.values()))
                    for test, (lines, _) in self._tests.items()
                ],
            )

    def _files(self) -> list[str]:
        files = {file for lines, opened in self._tests.values() for file in lines.keys() | opened}
        return [file for file in files if Path(file).is_file()]

    def _started(self, code: CodeType, _offset: int) -> Any:
        if code.co_filename.startswith(_PACKAGES):
            _MONITORING.set_local_events(_TOOL, code, _MONITORING.events.LINE)
        return _MONITORING.DISABLE

    def _ran(self, code: CodeType, line: int) -> Any:
        self._lines[code.co_filename].add(line)
        return _MONITORING.DISABLE

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(path := arguments[0], str) and not path.endswith((".py", ".pyc")):
            absolute = path if path.startswith("/") else f"{_ROOT}{path}"
            # A text that is tried as a path may be too long to be one.
            if absolute.startswith(_ROOT) and len(absolute) < _PATH_LENGTH and not absolute.startswith(_FOREIGN):
                self._opened.add(absolute)


def pytest_configure(config: pytest.Config) -> None:
    """Record; each forked process goes on with it."""
    record = LineRecord()
    if record.start():
        config.pluginmanager.register(_Recorder(record))


class _Recorder:
    def __init__(self, record: LineRecord) -> None:
        self._record = record
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._record.begin()
        try:
            return (yield)
        finally:
            # One that failed has not run all of its lines.
            if item.nodeid not in self._failed:
                self._record.end(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "call":
            self._record.add_seconds(report.nodeid, report.duration)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._record.stop()
        self._record.store()


def _store_source(database: sqlite3.Connection, file: str) -> str:
    """Keep the text of a file as it is now, and return its digest: later its lines have other numbers."""
    text = Path(file).read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    database.execute("insert or ignore into source values (?, ?)", (digest, text))
    return digest


def _packed(lines: set[int]) -> bytes:
    """Return the numbers as the bits that are set."""
    bits = sum(1 << line for line in lines)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def lines_of(packed: bytes) -> set[int]:
    """Return the numbers that were packed."""
    bits = int.from_bytes(packed, "little")
    return {line for line in range(bits.bit_length()) if bits >> line & 1}
