"""Applies each change of ``list.toml`` to a copy of the package, and says which of them the tests notice.

``python -m tools.mutations`` runs all of them, for hours; with names only those; with ``--quick`` only the tests of
``make test``. A change is noticed where one of its test files fails that passes without it. Its tests run one file
after the other, and end with the first failure. What is known is written to ``mutations.json`` or, with ``--quick``,
``mutations-quick.json`` in the folder of ``--results`` as it becomes known; what is there isn't run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path(__file__).parents[2]
_PACKAGE = "airflow_provider_jetstream"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__", "node_modules", "web", "docs")
# A change may make a test wait without end.
_LONGEST = 900.0
# pytest's codes for tests that failed, and for none that ran.
_FAILED, _NO_TESTS = 1, 5
_QUICK = ("-m", "not slow or smoke")


@dataclass(frozen=True)
class Mutation:
    """A change of the package.

    :param name: names it on the command line
    :param harm: what a user would see
    :param file: the module, as a path within the package
    :param old: a text that occurs once in it
    :param new: what takes its place
    :param tests: the test files that should notice it, in the order in which they are run
    """

    name: str
    harm: str
    file: str
    old: str
    new: str
    tests: Sequence[str]

    def apply(self, source: str) -> str:
        """Return the changed source; raises ValueError where the list doesn't fit the package any more."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: expected its text once in {self.file}, found it {count} times")
        return source.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    """Read the list."""
    with (Path(__file__).parent / "list.toml").open("rb") as file:
        return [Mutation(**fields) for fields in tomllib.load(file)["mutation"]]


class Copy:
    """A copy of the package and its tests, in which one change at a time is made."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self._root = folder / _ROOT.name
        self._options = options
        shutil.copytree(_ROOT, self._root, ignore=_LEFT_OUT, symlinks=True)
        # The servers and tools that were fetched, and the documents that tests read.
        for shared in (".tools", "docs", "web"):
            if (_ROOT / shared).exists() and not (self._root / shared).exists():
                (self._root / shared).symlink_to(_ROOT / shared)

    def outcome(self, mutation: Mutation) -> str:
        """Return ``noticed`` with the file that noticed it, ``survived``, or why that isn't known."""
        module = self._root / _PACKAGE / mutation.file
        source = module.read_text()
        passing: list[str] = []
        for test in mutation.tests:
            module.write_text(mutation.apply(source))
            try:
                code = self._run(test)
            finally:
                module.write_text(source)
            if code == 0:
                passing.append(test)
            elif code in (_FAILED, None) and self._run(test) == 0:
                return f"noticed by {test}" + ("" if code else f", which took more than {_LONGEST:g} s")
            elif code == _NO_TESTS:
                print(f"  {test} has none of the tests", flush=True)
            else:
                print(f"  {test} fails without the change, too", flush=True)
        return "survived" if passing else "unknown: no test file passes without it"

    def _run(self, test: str) -> int | None:
        """Run a test file, and return pytest's code; ``None`` where it took too long."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *self._options, test]
        environment = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=self._root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(_LONGEST)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its servers, too.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    """Run the changes, and return 1 where one survived."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", help="only these changes")
    parser.add_argument("--quick", action="store_true", help="only the tests of make test")
    parser.add_argument("--list", action="store_true", help="print the changes, and whether each fits the package")
    parser.add_argument("--results", type=Path, default=_ROOT / ".mutations", help="the folder of mutations.json")
    arguments = parser.parse_args()
    chosen = [each for each in mutations() if not arguments.names or each.name in arguments.names]
    if arguments.list:
        for mutation in chosen:
            mutation.apply((_ROOT / _PACKAGE / mutation.file).read_text())
            print(f"{mutation.name}: {mutation.harm} ({mutation.file})")
        return 0
    arguments.results.mkdir(exist_ok=True, parents=True)
    file = arguments.results / ("mutations-quick.json" if arguments.quick else "mutations.json")
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), _QUICK if arguments.quick else ())
        for mutation in chosen:
            if mutation.name not in known:
                began = time.monotonic()
                known[mutation.name] = copy.outcome(mutation)
                print(f"{mutation.name}: {known[mutation.name]} ({time.monotonic() - began:.0f} s)", flush=True)
                file.write_text(json.dumps(known, indent=2))
    outcomes = [known[mutation.name] for mutation in chosen]
    noticed = sum(outcome.startswith("noticed") for outcome in outcomes)
    survived = outcomes.count("survived")
    print(f"{noticed} of {len(chosen)} noticed, {survived} survived, {len(chosen) - noticed - survived} unknown")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
