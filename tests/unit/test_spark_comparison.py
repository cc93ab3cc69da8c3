"""Every row of the comparison of Spark sources names tests that exist."""

from __future__ import annotations

import ast
import re

from testbed.code_blocks import ROOT

_PAGE = ROOT / "docs" / "spark.md"
_TEST = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")


def _rows() -> list[str]:
    section = _PAGE.read_text(encoding="utf-8").partition("\n## Beside other sources\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][2:]


def _tests_of(path: str) -> set[str]:
    tree = ast.parse((_PAGE.parent / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_tests_that_exist() -> None:
    rows = _rows()
    assert rows
    for row in rows:
        *_, cell = row.strip("| ").split(" | ")
        named = _TEST.findall(cell)
        # Nothing but tests, so that a name with a mistake in its form doesn't go unnoticed.
        assert ", ".join(f"[`{name}`]({path})" for name, path in named) == cell, row
        assert [name for name, path in named if name not in _tests_of(path)] == [], row
