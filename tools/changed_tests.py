"""``python -m tools.changed_tests [COMMIT]``: the tests that run the lines changed since a commit, HEAD by default.

Which these are is in the record of :mod:`tools.line_record`. Those that run the least else come first; what doesn't fit
the time is counted. For a file of which there is no record, tests are chosen by their imports.
"""

from __future__ import annotations

import ast
import difflib
import re
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tools.line_record import RECORD, ROOT, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# Test-seconds for two processes: a change is known right or wrong within a minute.
_SECONDS = 80.0
_START_WITHIN = 50
_FILES_BY_IMPORT = 12
_UNKNOWN_SECONDS = 1.0
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_CODE = ("airflow_provider_jetstream", "example_workers", "testbed", "tools", "tests")


@dataclass
class Choice:
    """The tests to run, best first, and what else runs these lines."""

    targets: list[str] = field(default_factory=list)
    left_out: int = 0


def changed_lines(diff: str) -> dict[str, set[int]]:
    """Return the lines of the old files that a diff without context changes; beside an insertion, its neighbours."""
    lines: dict[str, set[int]] = {}
    file, old = "", ""
    for line in diff.splitlines():
        if line.startswith("--- "):
            old = line.removeprefix("--- ").removeprefix("a/")
        elif line.startswith("+++ "):
            new = line.removeprefix("+++ ").removeprefix("b/")
            file = old if new == "/dev/null" else new
            lines.setdefault(file, set())
        elif hunk := _HUNK.match(line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines[file] |= set(range(first, first + count)) if count else {first, first + 1}
    return lines


def moved(lines: Iterable[int], old: list[str], new: list[str]) -> set[int]:
    """Return where lines of one text are in another; a line that isn't there is where its neighbours are."""
    places: dict[int, set[int]] = {}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for place in range(i1, i2):
            places[place + 1] = {j1 + place - i1 + 1} if tag == "equal" else set(range(j1 + 1, j2 + 1)) or {j1, j1 + 1}
    return {there for line in lines for there in places.get(line, ())}


def found_by_lines(database: sqlite3.Connection, file: str, text: list[str], lines: set[int]) -> set[str]:
    """Return the tests that ran a line of a file; those that ran any of it, where no test runs these lines."""
    ran, touched = set(), set()
    by_hash: dict[str, set[int]] = {}
    for test, digest, packed in database.execute("select test, hash, lines from ran where file = ?", (file,)):
        if digest not in by_hash:
            (source,) = database.execute("select text from source where hash = ?", (digest,)).fetchone()
            recorded = source.decode(errors="replace").splitlines()
            by_hash[digest] = lines if recorded == text else moved(lines, text, recorded)
        touched.add(test)
        if by_hash[digest] & lines_of(packed):
            ran.add(test)
    return ran or touched


def best_tests(database: sqlite3.Connection, tests: Iterable[str], seconds: float = _SECONDS) -> Choice:
    """Choose tests that fit the time, those first that run the least else."""
    known = {test: (lines, took) for test, took, lines in database.execute("select test, seconds, lines from took")}
    choice, left = Choice(), seconds
    for test in sorted(tests, key=lambda test: known.get(test, (0, 0.0))):
        left -= known.get(test, (0, _UNKNOWN_SECONDS))[1]
        if left >= 0:
            choice.targets.append(test)
        else:
            choice.left_out += 1
    return choice


def found_by_imports(file: str) -> list[str]:
    """Return the test files that import a module, by way of as few others as possible."""
    imported_by: dict[str, set[str]] = defaultdict(set)
    modules = dict(_modules())
    faces = {name: _names_from(tree) for name, tree in modules.items()}
    for name, tree in modules.items():
        for imported in _imports(tree, modules, faces):
            imported_by[imported].add(name)
    seen = edge = {_module_name(file)}
    found: list[str] = []
    while edge and len(found) < _FILES_BY_IMPORT:
        edge = set().union(*(imported_by[name] for name in edge)) - seen
        seen = seen | edge
        files = sorted(f"{name.replace('.', '/')}.py" for name in edge)
        found += [file for file in files if file.rpartition("/")[2].startswith("test_")]
    return found[:_FILES_BY_IMPORT]


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in _CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield _module_name(str(path.relative_to(ROOT))), ast.parse(path.read_text(encoding="utf-8"))


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _names_from(tree: ast.Module) -> dict[str, str]:
    """Return the modules from which a module's own imports take names: what a face takes lazily, it names for types."""
    return {
        name.asname or name.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }


def _imports(
    tree: ast.Module, modules: Mapping[str, ast.Module], faces: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    # Modules of a test's own folder are imported by bare names.
    bare = {name.rpartition(".")[2]: name for name in modules if name.startswith("tests.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield bare.get(node.module, node.module)
            for name in node.names:
                yield f"{node.module}.{name.name}"
                yield faces.get(node.module, {}).get(name.name, node.module)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def choose(since: str) -> Choice:
    """Choose tests for what the working tree changes since a commit."""
    changed = changed_lines(_git("diff", "--unified=0", "--no-renames", since))
    changed |= {file: set() for file in _git("ls-files", "--others", "--exclude-standard").splitlines()}
    own = [file for file in changed if re.search(r"^tests/.*/test_\w+\.py$", file) and (ROOT / file).exists()]
    tests: set[str] = set()
    if not RECORD.exists():
        by_import = [found for file in changed if file.endswith(".py") for found in found_by_imports(file)]
        return Choice([*dict.fromkeys(own + by_import)])
    by_import = []
    with closing(sqlite3.connect(RECORD)) as database:
        for file, lines in changed.items():
            text = _git("show", f"{since}:{file}").splitlines() if lines else []
            found = found_by_lines(database, file, text, lines)
            tests |= found
            if not found and file.endswith(".py") and file not in own:
                by_import += found_by_imports(file)
        files = [*dict.fromkeys(own + by_import)]
        choice = best_tests(database, {test for test in tests if test.partition("::")[0] not in files})
    return Choice(files + [test for test in choice.targets if _exists(test)], choice.left_out)


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.exists() and f"def {name.partition('[')[0].rpartition('::')[2]}(" in path.read_text(encoding="utf-8")


def main(since: str = "HEAD") -> int:
    """Run the tests, and return pytest's exit code."""
    choice = choose(since)
    if not choice.targets:
        print("no test runs what has changed, as far as is recorded: make test records the lines of its tests")
        return 0
    print(
        f"{len(choice.targets)} tests and files of tests; {choice.left_out} more run these lines: make test", flush=True
    )
    return int(
        pytest.main([*choice.targets, "-q", "--processes=2", "-m", "not nightly", f"--start-within={_START_WITHIN}"])
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
