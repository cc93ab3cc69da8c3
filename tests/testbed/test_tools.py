"""How tests are grouped, ended, ordered and chosen: each by a run of pytest with the project's own plugins."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from testbed.environments import ROOT
from tools.changed_tests import best_tests, changed_lines, found_by_imports, found_by_lines, moved
from tools.marks import paths_in_order
from tools.run_tests import add_second_tries

if TYPE_CHECKING:
    from pathlib import Path

_CONFTEST = """
import os

import pytest

pytest_plugins = ["tools.marks", "tools.processes"]

@pytest.fixture(scope="session")
def airflow():
    return os.getpid()
"""
_TESTS = """
import os

import pytest

@pytest.mark.parametrize("number", range(6))
def test_shared(airflow, number, record_property):
    record_property("process", airflow)

@pytest.mark.slow_after(2)
@pytest.mark.parametrize("number", range(6))
def test_alone(number, tmp_path, record_property):
    print(f"output of test {number}")
    (tmp_path / "file").touch()
    record_property("process", os.getpid())
"""
_BAD_TESTS = """
import os
import signal
import warnings

import pytest

@pytest.fixture(scope="module", autouse=True)
def shared(request):
    yield
    with open(request.config.rootpath / "ended", "a") as file:
        file.write("x")

@pytest.mark.parametrize("number", range(8))
def test_some(number):
    print(f"output of {number}")
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        warnings.warn("this one warns", DeprecationWarning)
    assert number != 4
"""


def run_pytest(folder: Path, *arguments: str, tests: str = _TESTS) -> str:
    """Run tests that share an Airflow, and return what pytest writes."""
    (folder / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    (folder / "test_one.py").write_text(tests, encoding="utf-8")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments]
    # Other plugins take most of the time of such a run.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_tests_with_one_fixture_share_a_process_and_its_mark_is_that_of_the_fixture(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--processes=3", "--junitxml=report.xml")
    assert "12 passed" in output, output
    report = (tmp_path / "report.xml").read_text(encoding="utf-8")
    processes = dict(re.findall(r'name="(test_\w+\[\d])".*?name="process" value="(\d+)"', report, re.DOTALL))
    assert len({process for name, process in processes.items() if "shared" in name}) == 1
    assert len({*processes.values()}) > 1
    assert "6 passed, 6 deselected" in run_pytest(tmp_path, "-m", "slow and airflow")
    assert "2 passed, 10 deselected" in run_pytest(tmp_path, "-m", "not slow")


def test_a_process_that_ends_fails_its_test_and_the_others_run_in_another(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--processes=2", tests=_BAD_TESTS)
    assert "2 failed, 6 passed, 1 warning" in output, output
    assert "the process of this test ended with -9" in output
    assert "output of 4" in output
    assert "output of 3" not in output
    assert "this one warns" in output
    # Two processes at the end; one that is killed ends no fixture.
    assert (tmp_path / "ended").read_text(encoding="utf-8") == "xx"
    assert "1 failed" in run_pytest(tmp_path, "--processes=2", "-x", "-k", "4 or 5 or 6 or 7", tests=_BAD_TESTS)


def test_no_test_starts_after_the_time_and_an_order_puts_its_paths_first(tmp_path: Path) -> None:
    assert "12 skipped" in run_pytest(tmp_path, "--start-within", "1e-6")
    order = tmp_path / "order"
    order.write_text("# why\n\ntest_one.py::test_alone  the most valuable\n", encoding="utf-8")
    output = run_pytest(tmp_path, "--order", str(order))
    assert output.index("test_alone[5]") < output.index("test_shared[0]")
    assert paths_in_order(order.read_text(encoding="utf-8")) == ["test_one.py::test_alone"]


def test_a_test_that_needs_a_second_try_again_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "second-tries"
    assert add_second_tries(["a", "b"], file) == set()
    assert add_second_tries(["b", "c"], file) == {"b"}
    assert file.read_text(encoding="utf-8") == "a\nb\nc\n"


def test_a_diff_changes_the_lines_that_it_removes_and_the_neighbours_of_what_it_adds() -> None:
    diff = "--- a/x.py\n+++ b/x.py\n@@ -3 +3 @@\n-a\n+b\n@@ -8,2 +8,0 @@\n-c\n-d\n@@ -12,0 +11,2 @@\n+e\n+f\n"
    assert changed_lines(diff) == {"x.py": {3, 8, 9, 12, 13}}


@pytest.mark.parametrize(
    ("lines", "places"),
    [({1}, {1}), ({2}, {3}), ({3}, {4}), ({1, 3}, {1, 4})],
    ids=["first", "pushed", "changed", "both"],
)
def test_lines_are_found_where_they_have_moved(lines: set[int], places: set[int]) -> None:
    assert moved(lines, ["a", "b", "c"], ["a", "new", "b", "C"]) == places


def test_tests_are_chosen_by_the_lines_that_they_ran_those_that_run_little_else_first(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "lines.sqlite")) as database:
        database.executescript(
            "create table source (hash text, text blob);"
            "create table ran (test text, file text, hash text, lines blob);"
            "create table took (test text, seconds real, lines integer);"
        )
        database.execute("insert into source values ('h', ?)", (b"a\nb\nc\n",))
        database.executemany("insert into ran values (?, 'x.py', 'h', ?)", [("broad", b"\x0e"), ("narrow", b"\x08")])
        database.executemany("insert into took values (?, ?, ?)", [("broad", 3.0, 900), ("narrow", 1.0, 10)])
        assert found_by_lines(database, "x.py", ["a", "b", "c"], {3}) == {"broad", "narrow"}
        assert found_by_lines(database, "x.py", ["a", "b", "c"], {1}) == {"broad"}
        # Nobody runs the line that a comment was.
        assert found_by_lines(database, "x.py", ["a", "b", "c", "d"], {4}) == {"broad", "narrow"}
        assert best_tests(database, {"broad", "narrow"}).targets == ["narrow", "broad"]
        chosen = best_tests(database, {"broad", "narrow"}, seconds=2)
        assert (chosen.targets, chosen.left_out) == (["narrow"], 1)


@pytest.mark.slow
def test_a_module_is_tested_by_what_imports_it() -> None:
    assert "tests/testbed/test_tools.py" in found_by_imports("tools/changed_tests.py")
