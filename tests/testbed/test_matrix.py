"""The matrix of versions: what it counts, what it writes, and the interpreters and servers that it finds."""

from __future__ import annotations

from tools.matrix.cases import FAULT, Case
from tools.matrix.outcomes import SeenTest, outcome_of, read_outcomes
from tools.matrix.page import PAGE, page_text

CASE = Case(FAULT, "kills", "nothing is lost", ("tests/faults/test_kills.py",))
KILLS = "tests/faults/test_kills.py"


def test_the_page_is_what_the_last_runs_have_seen() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(read_outcomes())


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
