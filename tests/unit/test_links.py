"""Links of the README and of all other pages lead to files and headings that exist, as the repository shows them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import unquote

from markdown_it import MarkdownIt

from testbed.code_blocks import ROOT, pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from markdown_it.token import Token

_PARSER = MarkdownIt("gfm-like", {"linkify": False})
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")
_TEST = re.compile(r"\[`(test_\w+)`\]\(([^)#]+)")
_HTML_ID = re.compile(r'<a id="([^"]+)"></a>')


@functools.cache
def _tokens(page: Path) -> list[Token]:
    return _PARSER.parse(page.read_text(encoding="utf-8"))


def _links(page: Path) -> Iterator[str]:
    for token in _tokens(page):
        for child in token.children or ():
            if address := child.attrs.get("href") or child.attrs.get("src"):
                yield str(address)


@functools.cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those that headings get on GitHub, and those that it has as HTML."""
    found = set(_HTML_ID.findall(page.read_text(encoding="utf-8")))
    seen: Counter[str] = Counter()
    for opening, text in zip(_tokens(page), _tokens(page)[1:], strict=False):
        if opening.type == "heading_open":
            shown = "".join(child.content for child in text.children or () if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def _problem(page: Path, address: str) -> str | None:
    path, _, anchor = address.partition("#")
    target = (page.parent / unquote(path)).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return f"{address}: no such file"
    if anchor and target.suffix == ".md" and anchor not in _anchors(target):
        return f"{address}: no such heading"
    return None


def problems(page: Path) -> list[str]:
    own = (address for address in _links(page) if not _ELSEWHERE.match(address))
    return [problem for address in own if (problem := _problem(page, address))]


def test_every_link_leads_somewhere() -> None:
    found = {page: problems(ROOT / page) for page in pages()}
    assert {page: listed for page, listed in found.items() if listed} == {}
    assert sum(1 for page in pages() for _ in _links(ROOT / page)) > 500


def test_each_test_that_a_page_names_exists() -> None:
    named = [
        (page, name, ROOT.joinpath(page).parent / path)
        for page in pages()
        for name, path in _TEST.findall((ROOT / page).read_text(encoding="utf-8"))
    ]
    assert len(named) > 100
    assert [(page, name) for page, name, path in named if f"def {name}(" not in path.read_text(encoding="utf-8")] == []
