"""docs/source-documents.md names tests that exist, for each line of its tables, and files that exist."""

from __future__ import annotations

import ast
import re

from testbed.code_blocks import ROOT

PAGE = ROOT / "docs" / "source-documents.md"
_LINK = re.compile(r"\[`(?P<name>[^`]+)`\]\((?P<path>[^)#]+)(?:#[^)]*)?\)")
_BOTH = "both"


def _rows() -> list[list[str]]:
    """Return the cells of the tables of the documents, without their heads."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("document", "---"):
            rows.append(cells)
    return rows


def test_each_line_names_a_test() -> None:
    rows = _rows()
    assert len(rows) > 60
    without = [cells[0] for cells in rows if cells[2] != _BOTH and not _LINK.search(cells[2])]
    assert without == []


def test_each_named_test_and_file_exists() -> None:
    missing = []
    tests = {}
    for found in _LINK.finditer(PAGE.read_text(encoding="utf-8")):
        path = (PAGE.parent / found["path"]).resolve()
        if not path.is_file():
            missing.append(f"{found['path']}: no such file")
        elif found["name"].startswith("test_") and not found["name"].endswith(".py"):
            if path not in tests:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                nodes = (ast.FunctionDef, ast.AsyncFunctionDef)
                tests[path] = {node.name for node in ast.walk(tree) if isinstance(node, nodes)}
            if found["name"] not in tests[path]:
                missing.append(f"{found['name']}: no such test in {found['path']}")
    assert missing == []
    assert len(tests) > 10


def test_what_is_done_otherwise_has_a_reason() -> None:
    without = [
        cells[0] for cells in _rows() if cells[1].startswith("differs") and len(cells[1]) < len("differs: ") + 20
    ]
    assert without == []
