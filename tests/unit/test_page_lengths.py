"""Pages are short enough to be read: words of a page, of all pages, of a table's cell, of a decision."""

from __future__ import annotations

import re

import pytest

from testbed.code_blocks import ROOT, pages

_ALL_PAGES = 60_000
_PAGE = 2_500
_CELL = 25
_DECISION = 120
_DECISIONS = 65
# Each decision has a limit of its own.
_LONGER = {"docs/decisions.md"}
# A row of it is the whole case of one kind of attacker.
_LONG_CELLS = {"SECURITY.md"}
# A report form and a policy, which readers of the documentation don't read through.
_APART = {"SECURITY.md", "CODE_OF_CONDUCT.md"}
# Written by ``make matrix``.
_GENERATED = {"docs/reliability.md"}
_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_ADDRESS = re.compile(r"(?<=\])\([^)]*\)|<[^<>]*>")


def _words(text: str) -> int:
    return sum(1 for word in text.split() if re.search(r"\w", word))


def _by_hand() -> dict[str, str]:
    return {
        page: (ROOT / page).read_text(encoding="utf-8")
        for page in pages()
        if page not in _GENERATED and not page.startswith("docs/reference/")
    }


def _cells(text: str) -> list[str]:
    rows = [line.strip() for line in _CODE.sub("", text).splitlines() if line.lstrip().startswith("|")]
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]


@pytest.mark.parametrize("page", _by_hand())
def test_a_page_and_the_cells_of_its_tables_are_short(page: str) -> None:
    text = _by_hand()[page]
    assert page in _LONGER or _words(text) <= _PAGE
    long_cells = [cell for cell in _cells(text) if _words(_ADDRESS.sub("", cell)) > _CELL]
    assert page in _LONG_CELLS or long_cells == []


def test_all_pages_together_are_short() -> None:
    assert sum(_words(text) for page, text in _by_hand().items() if page not in _APART) <= _ALL_PAGES


def test_decisions_are_few_and_short() -> None:
    decisions = _by_hand()["docs/decisions.md"].split("\n### ")[1:]
    assert len(decisions) <= _DECISIONS
    assert [decision for decision in decisions if _words(decision) > _DECISION] == []
