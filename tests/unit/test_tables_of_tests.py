"""Every row of the tables that prove what they say names tests that exist."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from testbed.code_blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_DRAWN = re.compile(r'<text class="state"[^>]*>([^<]+)<')
_TEST = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")


def _rows(page: Path, title: str) -> list[str]:
    section = page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][2:]


def _tests_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("README.md", "Beside other queues"),
        ("docs/spark.md", "Beside other sources"),
        ("docs/lifecycle.md", "States"),
        ("docs/guarantees.md", "What holds, and until when"),
        ("docs/guarantees.md", "Why advisories aren't truth"),
    ],
)
def test_every_row_names_tests_that_exist(page: str, title: str) -> None:
    rows = _rows(ROOT / page, title)
    assert rows
    for row in rows:
        *_, cell = row.strip("| ").split(" | ")
        named = _TEST.findall(cell)
        # Nothing but tests, so that a name with a mistake in its form doesn't go unnoticed.
        assert ", ".join(f"[`{name}`]({path})" for name, path in named) == cell, row
        folder = (ROOT / page).parent
        assert [name for name, path in named if name not in _tests_of(folder / path)] == [], row


def test_the_picture_of_a_job_has_the_states_of_its_table() -> None:
    drawn = _DRAWN.findall((ROOT / "docs" / "pictures" / "job-states.svg").read_text(encoding="utf-8"))
    listed = [row.split(" | ")[0].strip("| ") for row in _rows(ROOT / "docs" / "lifecycle.md", "States")]
    assert sorted(drawn) == sorted(listed)
