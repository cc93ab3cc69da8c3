"""What the oldest supported Python lacks and no linter finds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Classes that can be subscripted in an annotation, which nothing evaluates, and not at run time before Python 3.12.
_NOT_GENERIC = {"array"}


def subscripted_at_run_time(source: str) -> list[int]:
    """Return the lines that subscript a class that the oldest Python has without parameters."""
    tree = ast.parse(source)
    hints = [getattr(node, field, None) for node in ast.walk(tree) for field in ("annotation", "returns")]
    unevaluated = {id(part) for hint in hints if hint is not None for part in ast.walk(hint)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and id(node) not in unevaluated
        if node.value.id in _NOT_GENERIC
    ]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["airflow_provider_jetstream", "example_dags", "example_workers"])
def test_nothing_is_subscripted_that_python_3_11_cannot_subscript(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file): lines for file in files if (lines := subscripted_at_run_time(file.read_text("utf-8")))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["airflow_provider_jetstream"])
def test_no_pattern_has_a_possessive_repeat_which_goes_wrong_before_python_3_11_5(folder: str) -> None:
    patterns = {
        f"{file}:{node.lineno}": node.args[0]
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile"
    }
    assert patterns
    # A class in brackets may hold these characters.
    texts = {where: re.sub(r"\\.|\[[^\]]*\]", "", ast.unparse(pattern)) for where, pattern in patterns.items()}
    assert [where for where, text in texts.items() if re.search(r"[*+?}]\+", text)] == []
