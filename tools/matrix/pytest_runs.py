"""Runs tests with some interpreter and server, and reads how each ended."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from tools.matrix.outcomes import ROOT, SeenTest

_TIMEOUT = 5400.0
_REASON_CHARACTERS = 120
# How tests/conftest.py begins a reason, and how the package's errors name the server that they need.
_OWN_VERSION = re.compile(r"^nats-server [\d.]+: ")
_NEEDED = re.compile(r"(?:expected|needs) nats-server (2\.\d+)")


class PytestError(RuntimeError):
    """pytest didn't run the tests; the message holds the end of its output."""


def run_tests(
    targets: Sequence[str],
    *,
    python: Path = Path(sys.executable),
    env: Mapping[str, str] | None = None,
    processes: int = 2,
    log: Path | None = None,
) -> list[SeenTest]:
    """Run test files, or single tests, and return how each ended."""
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            f"--processes={processes}",
            f"--junitxml={report}",
            *targets,
        ]
        paths = {"PYTHONPATH": str(ROOT), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **paths, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(done.stdout, encoding="utf-8")
        if done.returncode not in (0, 1) or not report.exists():
            raise PytestError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return read_report(report)


def read_report(report: Path) -> list[SeenTest]:
    """Read pytest's report in JUnit's form."""
    tests: dict[tuple[str, str], SeenTest] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest's own file
        file, name = _file_of(case.get("classname", "")), case.get("name", "")
        state, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                state = "failed"
            elif child.tag == "skipped" and state == "passed":
                state, reason = "skipped", _without_names(child.get("message") or "")
        # A test whose fixture fails at its end is reported twice.
        if (file, name) not in tests or state == "failed":
            tests[file, name] = SeenTest(file, name, state, reason)
    return list(tests.values())


def _file_of(class_name: str) -> str:
    return f"{class_name.replace('.', '/')}.py"


def _without_names(reason: str) -> str:
    """Return why a test was skipped without what is another in each run, or no one needs: names and versions found."""
    if needed := _NEEDED.search(reason):
        return f"what nats-server {needed[1]} has"
    reason = _OWN_VERSION.sub("", " ".join(reason.split()))
    return re.sub(r"\bq[0-9a-f]{12}\b", "…", reason)[:_REASON_CHARACTERS]
