"""Markdown from docstrings: cells, tables, and the roles of reStructuredText that docstrings use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ROLE = re.compile(r":(?P<role>class|meth|func|mod|data|attr|exc):`(?P<target>[^`]+)`")
_LITERAL = re.compile(r"``(?P<code>.+?)``", re.DOTALL)
_HIGHEST_LEVEL = 6


def code(text: object) -> str:
    """Return text as code."""
    return f"`{text}`"


def heading(level: int, text: str) -> str:
    """Return a heading; below the sixth level there is none."""
    return f"{'#' * min(level, _HIGHEST_LEVEL)} {text}"


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def plain(text: str, links: Mapping[str, str], page: str = "") -> str:
    """Return a docstring's text as Markdown.

    :param links: where names are described, as ``page.md#anchor``
    :param page: the page of the text, whose links to itself are anchors only
    """

    def role(found: re.Match[str]) -> str:
        target = found["target"].removeprefix("~")
        shown = target.rpartition(".")[2] if found["target"].startswith(("~", ".")) else target.strip(".")
        label = code(f"{shown}()" if found["role"] in ("meth", "func") else shown)
        address = links.get(target.rpartition(".")[2], "")
        return f"[{label}]({address.removeprefix(page)})" if address else label

    return _LITERAL.sub(lambda found: code(found["code"]), _ROLE.sub(role, text))


def cell(text: str) -> str:
    """Return text as a table's cell: on one line, without bars that end it."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(item) for item in line)} |" for line in lines)


def join(parts: Iterable[str]) -> str:
    """Return blocks with an empty line between them; empty blocks are left out."""
    return "\n\n".join(part for part in parts if part)
