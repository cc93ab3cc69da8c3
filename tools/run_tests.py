"""``python -m tools.run_tests NAME [argument of pytest…]``: the tests, and once more those that fail beside others.

Tests share two cores with other tests, which outlast many a time limit. What fails runs once more by itself; both
outcomes are printed. A test that passes then is written to ``.cache/second-tries``; a test that is there already has
failed twice this way and fails the command. Who has mended the test removes its line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tools.line_record import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SECOND_TRIES = ROOT / ".cache" / "second-tries"


def main(name: str, arguments: list[str]) -> int:
    """Run the tests and return the exit code of pytest, or 1 where a test needed a second try again."""
    cache = ROOT / ".cache" / "pytest" / name
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    first = subprocess.run(command, check=False, cwd=ROOT).returncode
    if first != 1:
        return first
    failed = [*json.loads((cache / "v/cache/lastfailed").read_text(encoding="utf-8"))]
    print("once more by themselves: the tests that failed beside others", flush=True)
    # The order and the time of the first run are none of the second's.
    again = [*command, "--processes=1", "-rA", "--last-failed", "--last-failed-no-failures", "none"]
    if second := subprocess.run(again, check=False, cwd=ROOT).returncode:
        return second
    repeated = add_second_tries(failed)
    for test in failed:
        print(f"needed a second try{' again' if test in repeated else ''}: {test}", flush=True)
    return 1 if repeated else 0


def add_second_tries(tests: list[str], file: Path = SECOND_TRIES) -> set[str]:
    """Add tests to the file of those that needed a second try, and return which of them it had already."""
    known = set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set()
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{test}\n" for test in sorted(known.union(tests))), encoding="utf-8")
    return known.intersection(tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
